"""What an FFN costs: bytes of its weights, FLOPs of a token, and the width at which another kind costs the same."""

from __future__ import annotations

from ..spec import Spec

# Bits per weight as stored, block scales included: Q8_0 holds 32 weights in 34 bytes, Q4_1 in 20, Q4_0 in 18.
# Source: ggml's block structs (ggml-common.h).
_BITS = {"fp32": 32.0, "bf16": 16.0, "fp16": 16.0, "q8_0": 8.5, "q4_1": 5.0, "q4_0": 4.5}
_BLOCK = 32  # weights that share one scale in the q formats
CLASSIC_RATIO = 4  # d_ff / d_model of the original Transformer: Vaswani 2017, arXiv:1706.03762


def formats() -> list[str]:
    """The formats whose size is known."""
    return list(_BITS)


def bits_per_weight(format: str) -> float:
    """Bits that one weight of a matrix takes in `format`, block scales included.

    Raises ValueError, listing the known formats, when there is no such format.
    """
    if format not in _BITS:
        raise ValueError(f"format {format!r} is not known; known: {', '.join(_BITS)}")
    return _BITS[format]


def ffn_bytes(spec: Spec, format: str) -> int:
    """Bytes of one FFN's matrices in `format`, biases in fp32 (GGUF keeps one-dimensional tensors so).

    Rows are cut into blocks of 32 in the q formats, so that a last, partly filled block counts whole.
    For fp32, bf16 and fp16 biases take the format's own width.
    """
    bits = bits_per_weight(format)
    blocked = format.startswith("q")
    n_biases = spec.d_ff * (spec.up_bias + spec.gate_bias) + spec.d_model * spec.down_bias
    # gate and up: d_ff rows of d_model; down: d_model rows of d_ff
    rows = [(spec.d_ff, spec.d_model)] * (2 if spec.gated else 1) + [(spec.d_model, spec.d_ff)]
    weights = sum(n * (-(-length // _BLOCK) * _BLOCK if blocked else length) for n, length in rows)
    return round((weights * bits + n_biases * (32.0 if blocked else bits)) / 8)


def flops_per_token(spec: Spec) -> int:
    """FLOPs of the matrix products for one token, one multiply-add = 2: 6 d_model d_ff gated, 4 d_model d_ff ungated.

    Activation and biases are left out: they are O(d_ff + d_model). The backward pass costs twice this.
    """
    return (6 if spec.gated else 4) * spec.d_model * spec.d_ff


def equal_budget_width(spec: Spec, *, gated: bool | None = None) -> float:
    """The d_ff at which an FFN of the other kind has as many matrix weights as `spec`, not rounded.

    gated  the kind wanted; default: the one that `spec` is not. gated from ungated is 2/3 of d_ff, the reverse 3/2.
    """
    wanted = (not spec.gated) if gated is None else gated
    return spec.d_ff * (3 if spec.gated else 2) / (3 if wanted else 2)


def classic_width(spec: Spec) -> float:
    """The d_ff at which an FFN of `spec`'s own kind has the classic budget, 2 matrices of d_model x 4 d_model.

    4 d_model ungated; 8/3 d_model gated (Shazeer 2020, arXiv:2002.05202): 10922.67 for d_model=4096.
    """
    return CLASSIC_RATIO * spec.d_model * (2 / 3 if spec.gated else 1)
