"""The count floor: parameters, FLOPs, bytes of every format, activations, widths of the same budget."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import fanfold as ff
from fanfold import Spec, numerics
from fanfold.count import ffn, formats
from fanfold.kernels import torch as torch_ops

LLAMA = Spec.parse("swiglu", d_model=4096, d_ff=11008)
CLASSIC = Spec(d_model=768, d_ff=3072, activation="gelu", up_bias=True, down_bias=True)

specs = st.builds(
    lambda d, f, act, gated, bias: Spec(
        d_model=d, d_ff=f, activation=act, gated=gated, up_bias=bias, down_bias=bias, gate_bias=bias and gated
    ),
    st.integers(1, 300),
    st.integers(1, 700),
    st.sampled_from(["relu", "silu", "gelu", "relu2"]),
    st.booleans(),
    st.booleans(),
)


def at(spec: Spec, **changes) -> Spec:
    return Spec.from_dict({**spec.to_dict(), **changes})


# --- parameters and FLOPs ---


def test_llama():
    """4096 x 11008 gated: 135,266,304 parameters, 270,532,608 FLOPs a token (180,355,072 would count two matrices)."""
    assert LLAMA.n_params == 135_266_304
    assert ffn.flops_per_token(LLAMA) == 270_532_608
    assert ffn.flops_per_token(Spec(d_model=4096, d_ff=11008, activation="gelu")) == 180_355_072


def test_biases_are_counted():
    assert CLASSIC.n_params == 2 * 768 * 3072 + 3072 + 768
    assert formats.n_biases(CLASSIC) == 3840
    gated = Spec(d_model=4, d_ff=3, activation="silu", gated=True, up_bias=True, gate_bias=True)
    assert formats.n_biases(gated) == 6  # one per branch, not one row for both


@pytest.mark.parametrize("variant", ["relu", "gelu", "swiglu", "geglu", "glu", "reglu", "bilinear"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("tokens", "d_model", "d_ff"), [(1, 8, 24), (5, 24, 8), (16, 16, 16)])
def test_flops_are_those_that_pytorch_counts(variant, bias, tokens, d_model, d_ff):
    """Every variant, forward and backward, on our own module: exact. Kills "gated counts two matrices"."""
    spec = Spec.parse(variant, d_model=d_model, d_ff=d_ff, up_bias=bias, down_bias=bias)
    module = ff.nn.FeedForward(spec, backend="torch")
    x = torch.randn(tokens, d_model, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        y = module(x)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    assert forward.get_total_flops() == tokens * ffn.flops_per_token(spec)
    assert backward.get_total_flops() == 2 * tokens * ffn.flops_per_token(spec)


def test_recompute():
    for save in ("all", "preact"):
        assert ffn.recompute_flops_per_token(LLAMA, save) == 0
    for save in ("input", "tiles"):
        assert ffn.recompute_flops_per_token(LLAMA, save) == 4 * 4096 * 11008
        assert ffn.recompute_flops_per_token(CLASSIC, save) == 2 * 768 * 3072


# --- bytes ---


@pytest.mark.parametrize(
    ("format", "bits"),
    [
        ("fp32", 32), ("bf16", 16), ("fp16", 16), ("fp8", 8), ("int8", 8), ("int8_g32", 8.5), ("int8_g64", 8.25),
        ("int8_g128", 8.125), ("int4_g32", 5), ("int4_g64", 4.5), ("int4_g128", 4.25), ("int4", 5), ("q8_0", 8.5),
        ("q4_1", 5), ("q4_0", 4.5),
    ],
)  # fmt: skip
def test_bits_and_bytes(format, bits):
    form = formats.get(format)
    assert form.bits_per_weight == bits
    rows = 2 * 11008 + 4096
    assert formats.ffn_bytes(LLAMA, format) == LLAMA.n_params * bits / 8 + rows * form.row_bytes


def test_block_layouts_are_those_of_ggml():
    """34, 18 and 20 bytes per 32 weights, by GGUF's own table."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    for name, n_bytes in (("q8_0", 34), ("q4_0", 18), ("q4_1", 20)):
        assert GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]] == (32, n_bytes)
        assert formats.get(name).matrix_bytes(1, 32) == n_bytes
        assert formats.get(name).matrix_bytes(3, 64) == 6 * n_bytes


def test_bytes_of_partly_filled_groups_and_biases():
    spec = Spec(d_model=4, d_ff=33, activation="relu", up_bias=True, down_bias=True)
    assert formats.ffn_bytes(spec, "bf16") == 2 * spec.n_params
    # up: 33 rows of one block; down: 4 rows of two; 34 bytes each; 37 biases in fp32
    assert formats.ffn_bytes(spec, "q8_0") == (33 + 8) * 34 + 37 * 4
    assert formats.ffn_bytes(spec, "int8") == 2 * 4 * 33 + (33 + 4) * 4 + 37 * 4  # a scale per row
    assert formats.ffn_bytes(spec, "int4", group=128) == (33 + 4) * (64 + 4) + 37 * 4


@pytest.mark.parametrize("format", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("spec", [at(LLAMA, d_model=24, d_ff=56), at(CLASSIC, d_model=40, d_ff=17)])
def test_bytes_are_those_of_tensors(format, spec):
    """The parameters of a module in that format, to the byte, biases too."""
    weights = ff.nn.FeedForward(spec).weights()
    module = ff.nn.FeedForward.from_weights(weights, format=format)
    assert formats.ffn_bytes(spec, format) == sum(p.nbytes for p in module.parameters())


@pytest.mark.parametrize("format", [name for name in formats.FORMATS if name != "fp8"])
def test_bytes_are_those_of_a_packed_swap(format):
    """What a swap packs, to the byte, where rows and groups are whole: matrices; biases are kept in float32."""
    spec = Spec(d_model=256, d_ff=512, activation="gelu", up_bias=True, down_bias=True)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))
    report = ff.swap(model, format=format)
    assert report.n_swapped == 1
    expected = sum(formats.get(format).matrix_bytes(*shape) for shape in formats.matrices(spec).values())
    assert sum(row.bytes_after for row in report.rows) == expected
    ff.unswap(model)


def test_unknown_format_or_group_lists_the_known():
    with pytest.raises(ValueError, match=r"format 'int3' is not known; known: fp32, bf16, fp16, fp8, int8, int8_g32"):
        formats.get("int3")
    with pytest.raises(ValueError, match=r"group=48 is not known; known: 32, 64, 128"):
        formats.get("int4", 48)
    with pytest.raises(ValueError, match=r"format 'bf16' has no choice of group"):
        formats.get("bf16", 32)


# --- activations ---


def _kept_bytes(spec: Spec, tokens: int, dtype: torch.dtype) -> int:
    """What autograd really keeps of PyTorch's ops, parameters left out, each storage once."""
    weights = numerics.random_weights(spec, 0, lambda a: torch.tensor(a, dtype=dtype).requires_grad_())
    own = {p.untyped_storage().data_ptr() for _, p in weights.items()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x = torch.randn(tokens, spec.d_model, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = torch_ops.forward(x, weights)
    assert y.requires_grad
    return sum(t.untyped_storage().nbytes() for t in kept.values())


@pytest.mark.parametrize("activation", list(ff.activations.ACTIVATIONS))
@pytest.mark.parametrize("gated", [False, True])
def test_saved_bytes_are_what_autograd_keeps(activation, gated):
    """Every activation, gated and not, in fp32 and bf16, exactly; and save="all" never keeps more."""
    spec = Spec(d_model=24, d_ff=40, activation=activation, gated=gated)
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        kept = _kept_bytes(spec, 16, dtype)
        assert ffn.saved_bytes(spec, 16, "autograd", name) == kept
        ungated_values = not gated and activation in ("sigmoid", "tanh")
        assert ffn.saved_bytes(spec, 16, "all", name) <= kept or ungated_values


@pytest.mark.parametrize(
    "spec",
    [
        Spec.parse("swiglu_oai", d_model=24, d_ff=40, up_bias=True, gate_bias=True, down_bias=True),
        Spec(d_model=24, d_ff=40, activation="silu", beta=1.7, gated=True),
        Spec(d_model=24, d_ff=40, activation="silu", beta=1.7),
        Spec(d_model=24, d_ff=40, activation="relu", gated=True, up_limit=2.0, up_offset=1.0),
    ],
)
def test_saved_bytes_of_clamps_and_slopes(spec):
    assert ffn.saved_bytes(spec, 16, "autograd", "fp32") == _kept_bytes(spec, 16, torch.float32)


def test_saved_bytes_of_each_save():
    d, f, t = 4096, 11008, 100
    assert ffn.saved_bytes(LLAMA, t, "autograd") == t * (d + 4 * f) * 2
    assert ffn.saved_bytes(LLAMA, t, "all") == t * (d + 3 * f) * 2
    assert ffn.saved_bytes(LLAMA, t, "preact") == t * (d + 2 * f) * 2
    assert ffn.saved_bytes(LLAMA, t, "input") == ffn.saved_bytes(LLAMA, t, "tiles") == t * d * 2
    assert ffn.saved_bytes(CLASSIC, t, "preact") == t * (768 + 3072) * 2
    with pytest.raises(ValueError, match=r"save='none' is not known; known: all, preact, input, tiles"):
        ffn.saved_bytes(LLAMA, t, "none")


def test_inference_activations_are_sized_by_d_ff():
    """Decode's widest tensors are [1, d_ff]; a tool that sizes them by d_model is 2.7 times too small."""
    assert ffn.inference_bytes(LLAMA, 1, "bf16", fused=False) == (4096 + 3 * 11008) * 2
    assert ffn.inference_bytes(LLAMA, 1, "bf16") == 2 * 4096 * 2
    with pytest.raises(ValueError, match=r"activation dtype 'int8' is not known; known: fp32, bf16, fp16"):
        ffn.inference_bytes(LLAMA, 1, "int8")


# --- widths of the same budget ---


def test_equal_budget_widths():
    assert f"{ffn.classic_width(LLAMA):.2f}" == "10922.67"
    assert ffn.classic_width(Spec(d_model=768, d_ff=3072, activation="gelu")) == 3072
    assert ffn.equal_budget_width(LLAMA) == 16512
    ungated = Spec(d_model=768, d_ff=3072, activation="gelu")
    assert ffn.equal_budget_width(ungated) == 2048  # and 3 x 768 x 2048 = 2 x 768 x 3072 = 4,718,592 weights
    assert Spec.parse("geglu", d_model=768, d_ff=2048).n_params == ungated.n_params == 4_718_592
    assert ffn.equal_budget_width(LLAMA, gated=True) == 11008


@given(specs)
def test_inverse_of_the_counts(spec):
    """The width for as many parameters, FLOPs or bytes is the width itself (bytes: whole groups assumed)."""
    assert ffn.width_for_params(spec, spec.n_params) == pytest.approx(spec.d_ff, rel=1e-12)
    assert ffn.width_for_flops(spec, ffn.flops_per_token(spec)) == pytest.approx(spec.d_ff, rel=1e-12)
    for name, form in formats.FORMATS.items():
        found = ffn.width_for_bytes(spec, formats.ffn_bytes(spec, name), name)
        group = max(form.group, 1)
        assert spec.d_ff - 1e-6 <= found < spec.d_ff + group  # a part of a group costs as much as a whole one


@given(specs, st.integers(1, 64), st.sampled_from(list(formats.FORMATS)))
def test_counts_grow_with_the_widths(spec, more, format):
    for wider in (at(spec, d_ff=spec.d_ff + more), at(spec, d_model=spec.d_model + more)):
        assert wider.n_params > spec.n_params
        assert ffn.flops_per_token(wider) > ffn.flops_per_token(spec)
        assert formats.ffn_bytes(wider, format) >= formats.ffn_bytes(spec, format)
        for save in ffn.SAVES:
            assert ffn.saved_bytes(wider, 3, save) >= ffn.saved_bytes(spec, 3, save)


@given(specs, st.integers(2, 5))
def test_counts_scale(spec, k):
    """Both widths times k: k^2 the weights and FLOPs; tokens times k: k the activations."""
    wider = at(spec, d_model=k * spec.d_model, d_ff=k * spec.d_ff)
    assert wider.n_params - formats.n_biases(wider) == k * k * (spec.n_params - formats.n_biases(spec))
    assert ffn.flops_per_token(wider) == k * k * ffn.flops_per_token(spec)
    assert ffn.saved_bytes(spec, 7 * k, "all") == k * ffn.saved_bytes(spec, 7, "all")
