"""What an FFN is in numbers: parameters, FLOPs, activations, and the width at which another one costs the same.

T tokens, D d_model, F d_ff.
"""

from __future__ import annotations

from collections.abc import Collection

from ..spec import Spec
from .formats import get

CLASSIC_RATIO = 4  # d_ff / d_model of the original Transformer: Vaswani 2017, arXiv:1706.03762
SAVES = ("all", "preact", "input", "tiles")
KEEPERS = ("autograd", *SAVES)  # and PyTorch's own ops, to compare with
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

# What has a gradient: x, and what Weights holds.
TRAINED = ("x", "up", "down", "gate", "up_bias", "gate_bias", "down_bias")

# Activations with act(act(x)) == act(x): the coefficients tell value and slope, so no pre-activation is needed.
_IDEMPOTENT = ("relu", "identity")

# What autograd keeps for backward of an activation's PyTorch form beside its output, in [T, F] tensors: its input,
# or something between (relu2: relu's output; silu with a beta and gelu_sigmoid: also the sigmoid). The output itself
# is kept by what reads it: the product with up, or down.
_KEEPS = {"relu": 0, "sigmoid": 0, "tanh": 0, "identity": 0, "gelu_sigmoid": 2, "xielu": 3}
_KEEPS_OTHERS = 1
_MASKS = {"xielu": 1}  # and [T, F] tensors of bools, one byte each


def n_matrices(spec: Spec) -> int:
    """3 with a gate, 2 without."""
    return 3 if spec.gated else 2


def flops_per_token(spec: Spec) -> int:
    """FLOPs of the matrix products for one token, one multiply-add = 2: 6 D F gated, 4 D F ungated.

    Activation and biases are left out: they are O(F + D). The backward pass costs twice this: one product for the
    gradient of each matrix, one for the gradient of its input.
    """
    return 2 * n_matrices(spec) * spec.d_model * spec.d_ff


def recompute_flops_per_token(spec: Spec, save: str) -> int:
    """FLOPs that backward repeats because `save` did not keep gate and up: 4 D F gated, 2 D F ungated; else 0."""
    _check_save(save)
    return 2 * (n_matrices(spec) - 1) * spec.d_model * spec.d_ff if save in ("input", "tiles") else 0


def kept(spec: Spec, save: str, trained: Collection[str] = TRAINED, dropping: bool | None = None) -> tuple[str, ...]:
    """What `fanfold.nn.FeedForward(save=…)` keeps from forward to backward, in training.

    "all"     x, gate, up and the coefficients: no matrix product is repeated. Coefficients alone serve ungated relu and
              identity; with dropout its mask is kept too.
    "preact"  x, gate and up.      "input", "tiles"  x.
    trained   the parts of TRAINED that need a gradient. What serves none of them is not kept: x only for gate and up;
              coefficients alone, under "preact" too, where only down needs one; nothing for down_bias.
    dropping  whether dropout is active; by default where the spec has it.
    -> some of "x" [T, D]; "gate", "up", "coefficients" [T, F]; "mask" [T, F] of bools, in this order. Other masks are
    drawn again, from a copy of the generator's state (a few KB, not counted). Raises ValueError on an unknown `save`.
    """
    _check_save(save)
    to_gate = spec.gated and not {"x", "gate", "gate_bias"}.isdisjoint(trained)
    to_up = not {"x", "up", "up_bias"}.isdisjoint(trained)
    inward, down, all_ = to_gate or to_up, "down" in trained, save == "all"
    if save in ("input", "tiles"):
        return ("x",) if inward or down else ()
    dropout = spec.dropout > 0 if dropping is None else dropping
    alone = all_ and down and not spec.gated and not dropout and spec.activation in _IDEMPOTENT
    wanted = {
        "x": "up" in trained or (spec.gated and "gate" in trained),
        "gate": spec.gated and inward,
        "up": inward and not alone and (not spec.gated or to_gate or spec.up_limit is not None or (down and not all_)),
        "coefficients": down and (all_ or not inward),
        "mask": all_ and inward and dropout,
    }
    return tuple(name for name, keep in wanted.items() if keep)


def saved_tensors(spec: Spec, save: str, trained: Collection[str] = TRAINED) -> tuple[int, int, int]:
    """How many [T, D], [T, F] and boolean [T, F] tensors are kept from forward to backward under `save`: see `kept`.

    save  one of KEEPERS; "autograd": what PyTorch's own ops keep without a Function of ours, everything trained and
          no dropout (the table of activations above; clamps keep their input).
    Parameters are not counted. Raises ValueError on an unknown `save`.
    """
    if save == "autograd":
        return _autograd_tensors(spec)
    names = kept(spec, save, trained)
    return int("x" in names), len(set(names) & {"gate", "up", "coefficients"}), int("mask" in names)


def _autograd_tensors(spec: Spec) -> tuple[int, int, int]:
    wide = 1 + _KEEPS.get(spec.activation, _KEEPS_OTHERS)  # down's input
    if spec.activation == "silu" and spec.beta != 1.0:
        wide += 1
    if spec.gated:  # the product keeps the activation's output and up; a clamp keeps what it clamps
        wide += 2 + (spec.gate_limit is not None) + (spec.up_limit is not None)
    return 1, wide, _MASKS.get(spec.activation, 0)


def _check_save(save: str) -> None:
    if save not in SAVES:
        raise ValueError(f"save={save!r} is not known; known: {', '.join(SAVES)}")


def saved_bytes(spec: Spec, tokens: int, save: str, dtype: str = "bf16", trained: Collection[str] = TRAINED) -> int:
    """Bytes of activations kept from forward to backward for T tokens.

    T * ((n_D * D + n_F * F) * width of dtype + n_mask * F), the counts being those of `saved_tensors`.
    """
    n_d, n_f, n_mask = saved_tensors(spec, save, trained)
    wide = (n_d * spec.d_model + n_f * spec.d_ff) * activation_width(dtype)
    return tokens * (wide + n_mask * spec.d_ff)


def inference_bytes(spec: Spec, tokens: int, dtype: str = "bf16", fused: bool = True) -> int:
    """Bytes of activations alive at the widest moment of a forward pass.

    fused    x and y: T * 2 D * width. The [T, F] tensors stay in cache, a block of tokens at a time.
    unfused  x with gate, up and their product: T * (D + 3 F) * width; ungated T * (D + 2 F) * width.
    """
    width = activation_width(dtype)
    if fused:
        return tokens * 2 * spec.d_model * width
    return tokens * (spec.d_model + n_matrices(spec) * spec.d_ff) * width


def activation_width(dtype: str) -> int:
    """Bytes of one activation. Raises ValueError on an unknown dtype."""
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"activation dtype {dtype!r} is not known; known: {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def equal_budget_width(spec: Spec, *, gated: bool | None = None) -> float:
    """The d_ff at which an FFN of the other kind has as many matrix weights as `spec`, not rounded.

    gated  the kind wanted; default: the one that `spec` is not. gated from ungated is 2/3 of d_ff, the reverse 3/2.
    """
    wanted = (not spec.gated) if gated is None else gated
    return spec.d_ff * n_matrices(spec) / (3 if wanted else 2)


def classic_width(spec: Spec) -> float:
    """The d_ff at which an FFN of `spec`'s own kind has the classic budget, 2 matrices of d_model x 4 d_model.

    4 d_model ungated; 8/3 d_model gated (Shazeer 2020, arXiv:2002.05202): 10922.67 for d_model=4096.
    """
    return CLASSIC_RATIO * spec.d_model * 2 / n_matrices(spec)


def width_for_params(spec: Spec, params: float) -> float:
    """The d_ff, not rounded, at which an FFN like `spec` has so many weights and biases."""
    per_channel = n_matrices(spec) * spec.d_model + spec.gate_bias + spec.up_bias
    return (params - spec.d_model * spec.down_bias) / per_channel


def width_for_flops(spec: Spec, flops_per_token: float) -> float:
    """The d_ff, not rounded, at which a token of an FFN like `spec` costs so many FLOPs forward."""
    return flops_per_token / (2 * n_matrices(spec) * spec.d_model)


def width_for_bytes(spec: Spec, n_bytes: float, format: str, group: int | None = None) -> float:
    """The d_ff, not rounded, at which an FFN like `spec` weighs so many bytes in `format` (whole groups assumed)."""
    form = get(format, group)
    inward = (n_matrices(spec) - 1) * form.matrix_bytes(1, spec.d_model)
    bias = (spec.gate_bias + spec.up_bias) * form.bias_bytes
    fixed = spec.d_model * (form.row_bytes + spec.down_bias * form.bias_bytes)
    return (n_bytes - fixed) / (inward + bias + spec.d_model * form.bits_per_weight / 8)
