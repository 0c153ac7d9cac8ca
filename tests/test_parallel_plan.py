"""Plans and cut weights: ranges, bytes, refusals; parts that add up to the whole and go together bit by bit."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fanfold as ff
from fanfold import formats, numerics
from fanfold.count import formats as stored
from fanfold.count.hardware import Link, Links
from fanfold.kernels.packed import PackedMatrix
from fanfold.layout import FUSED, GATE_UP, GATE_UP_INTERLEAVED, Layout
from fanfold.parallel import pad, plan, shard, unshard
from fanfold.parallel.slices import cut, join

FORMATS = tuple(stored.FORMATS)
specs = st.builds(
    ff.Spec,
    d_model=st.integers(1, 70),
    d_ff=st.integers(1, 300),
    activation=st.sampled_from(["silu", "gelu_erf", "sigmoid"]),
    gated=st.just(True),
    up_bias=st.booleans(),
    gate_bias=st.booleans(),
    down_bias=st.booleans(),
)


def divided(spec, tp, format):
    """The plan, or None where there are fewer groups than ranks."""
    group = max(stored.get(format).group, 1)
    if -(-spec.d_ff // group) < tp:
        with pytest.raises(ValueError, match=rf"d_ff={spec.d_ff} cannot be split over {tp} ranks"):
            plan(spec, tp, format)
        return None
    return plan(spec, tp, format)


@settings(max_examples=200, deadline=None)
@given(specs, st.integers(1, 9), st.sampled_from(FORMATS))
def test_ranges_partition_and_bytes_add_up(spec, tp, format):
    p = divided(spec, tp, format)
    if p is None:
        return
    assert [r.start for r in p.ranks] == [0, *[r.stop for r in p.ranks[:-1]]]
    assert p.ranks[-1].stop == spec.d_ff
    group = max(stored.get(format).group, 1)
    groups = -(-spec.d_ff // group)
    assert all(r.stop % group == 0 for r in p.ranks[:-1])
    widths = [-(-r.channels // group) for r in p.ranks]
    assert min(widths) >= 1
    assert max(widths) == -(-groups // tp)  # none is wider than it must be
    # bytes by hand, from what the format says of a row
    form = stored.get(format)
    for r in p.ranks:
        assert r.bytes == (
            2 * form.matrix_bytes(r.channels, spec.d_model)
            + form.matrix_bytes(spec.d_model, r.channels)
            + form.bias_bytes * r.channels * (spec.up_bias + spec.gate_bias)
            + form.bias_bytes * spec.d_model * (spec.down_bias and r.rank == 0)
        )
    assert sum(r.bytes for r in p.ranks) == p.whole_bytes + (tp - 1) * p.replicated_bytes
    assert p.whole_bytes == stored.ffn_bytes(spec, format)


@settings(max_examples=100, deadline=None)
@given(specs, st.integers(1, 6), st.sampled_from(FUSED), st.booleans())
def test_cuts_of_fused_tensors_give_what_separate_ones_give(spec, tp, order, transposed):
    """A rank that cuts the fused tensor and splits its part has the rows of gate and of up that it owns."""
    spec = dataclasses.replace(spec, gate_bias=spec.up_bias)
    if spec.d_ff < tp:
        return
    layout = Layout(order=order, transposed=transposed)
    p = plan(spec, tp, layout=layout)
    f, d = spec.d_ff, spec.d_model
    fused = np.arange(2 * f * d).reshape(2 * f, d)
    gate, up = Layout(order=order).split(fused)
    lying = fused.T if transposed else fused
    for r in p.ranks:
        c = r.cuts["gate_up.weight"]
        part = np.concatenate([np.take(lying, range(a, b), axis=c.dim) for a, b in c.ranges], axis=c.dim)
        assert part.shape == r.shapes["gate_up.weight"]
        own_gate, own_up = layout.split(part)
        turn = (lambda m: m.T) if transposed else (lambda m: m)
        assert np.array_equal(turn(own_gate), gate[r.start : r.stop])
        assert np.array_equal(turn(own_up), up[r.start : r.stop])
        if spec.up_bias:
            b = r.cuts["gate_up.bias"]
            flat = np.concatenate([np.arange(2 * f)[x:y] for x, y in b.ranges])
            for half, own in zip(Layout(order=order).split(np.arange(2 * f)), Layout(order=order).split(flat)):
                assert np.array_equal(own, half[r.start : r.stop])
        assert ("down.bias" in r.cuts) == (spec.down_bias and r.rank == 0)


def test_half_wise_is_not_the_same_as_chunks():
    """The mutant: cutting the fused matrix like any other gives rank 0 nothing but gate."""
    p = plan(ff.Spec.parse("swiglu", d_model=4, d_ff=6), 2, layout=Layout(order=GATE_UP))
    assert p.ranks[0].cuts["gate_up.weight"].ranges == ((0, 3), (6, 9))
    pairs = plan(ff.Spec.parse("swiglu", d_model=4, d_ff=7), 2, layout=Layout(order=GATE_UP_INTERLEAVED))
    assert [r.cuts["gate_up.weight"].ranges for r in pairs.ranks] == [((0, 8),), ((8, 14),)]


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        (
            {"tp": 3, "format": "int4", "even": True},
            "d_ff=11008 cannot be split over 3 equal ranks in groups of 32: 11008/3 is not whole. Use tp in {1, 2, 4, "
            "8, 43, 86, 172, 344}, leave out even=True for uneven ranks, or pad with zero channels to 11040 (adds 0.29",
        ),
        ({"tp": 400, "format": "int4"}, "400 ranks in groups of 32: it has 344 groups. Use tp from 1 to 344, or pad"),
        ({"tp": 16, "format": "int4", "even": True}, "11008/16 = 688 is 21.5 groups"),
        ({"tp": 12000}, "it has 11008 channels. Use tp from 1 to 11008, or pad with zero channels to 12000 (adds 9.01"),
        ({"tp": 2, "format": "int4", "channels": [40, 10968]}, "ends? at channel 40, which cuts a group of 32"),
        ({"tp": 2, "channels": [5, 5]}, r"add up to 10, expected d_ff=11008"),
        ({"tp": 3, "channels": [1, 2]}, "expected 3 positive ints"),
        ({"tp": 0}, "tp=0: expected a positive int"),
        ({"tp": True}, "tp=True"),
        ({"tp": 2, "format": "int5"}, "format 'int5' is not known; known: fp32"),
    ],
)
def test_refusals_say_the_numbers_and_the_ways_out(kwargs, said):
    spec = ff.Spec.parse("swiglu", d_model=4096, d_ff=11008)
    with pytest.raises(ValueError) as error:
        plan(spec, **kwargs)
    text = str(error.value)
    assert all(word in text for word in said.replace("ends?", "end").replace("\\", "").split("…")), text


def test_padding_is_offered_with_its_condition():
    spec = ff.Spec(d_model=4, d_ff=3, activation="sigmoid")
    with pytest.raises(ValueError, match=r"pad with zero channels to 4 \(adds 33\.33 %; exact only while the padded"):
        plan(spec, 4)
    with pytest.raises(ValueError, match=r"to 4 \(adds 33\.33 %\)\.$"):
        plan(dataclasses.replace(spec, activation="relu"), 4)


def test_ungated_layout_and_given_channels():
    spec = ff.Spec(d_model=4, d_ff=100, activation="relu")
    with pytest.raises(ValueError, match=r"holds a gate, but the FFN has none"):
        plan(spec, 2, layout=Layout(order=GATE_UP))
    assert plan(spec, 2, "q4_0", channels=[64, 36]).ranges == ((0, 64), (64, 100))
    assert plan(spec, 3).ranges == ((0, 34), (34, 68), (68, 100))  # torch.chunk's
    assert plan(dataclasses.replace(spec, d_ff=5), 4).ranges == ((0, 2), (2, 3), (3, 4), (4, 5))  # none is empty


def test_collective_of_llama():
    p = plan(ff.Spec.parse("swiglu", d_model=8192, d_ff=28672), 8)
    one = p.collective(16)
    assert (one.n_bytes, one.intra_bytes) == (16 * 8192 * 2, 2 * 7 / 8 * 16 * 8192 * 2)
    link = Link(bytes_per_s=1e9, step_s=1e-6)
    links = Links(devices_per_node=8, intra=link, inter=link, base_s=0.0, source="")
    assert p.collective(16, "fp32", links).seconds == pytest.approx(14e-6 + 2 * 7 / 8 * 16 * 8192 * 4 / 1e9)
    assert p.to_dict()["ranks"][3]["channels"] == [10752, 14336]


def test_planning_needs_no_torch():
    code = (
        "import sys, fanfold as ff; ff.parallel.plan(ff.Spec.parse('swiglu', d_model=8, d_ff=97), tp=2)"
        "; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


# ---- cutting weights ----


def packed(weights, format):
    """`weights` as PackedMatrix in `format`; biases float32."""
    out = {}
    for name, value in weights.items():
        if name.endswith("bias"):
            out[name] = torch.tensor(value, dtype=torch.float32)
        elif format in formats.INTEGER:
            out[name] = PackedMatrix.pack(formats.quantize_matrix(value.astype(np.float32), format))
        else:
            out[name] = PackedMatrix.pack(torch.tensor(value), format)
    return ff.Weights(weights.spec, **out)


def same(a, b):
    """Whether two Weights are equal bit by bit, of the same kinds."""
    if a.spec != b.spec or [n for n, _ in a.items()] != [n for n, _ in b.items()]:
        return False
    for (_, x), (_, y) in zip(a.items(), b.items()):
        if type(x) is not type(y) or x.dtype != y.dtype:
            return False
        pair = (x.data, y.data) if isinstance(x, PackedMatrix) else (torch.as_tensor(x), torch.as_tensor(y))
        if not torch.equal(*pair) or getattr(x, "activations", 0) != getattr(y, "activations", 0):
            return False
    return True


BIASED = {"up_bias": True, "gate_bias": True, "down_bias": True}
KINDS = [
    "numpy",
    "torch",
    "bfloat16",
    "fp32",
    "bf16",
    "int8",
    "int8_g64",
    "int4_g32",
    "int4_g128",
    "q8_0",
    "q4_0",
    "q4_1",
]
SHAPES = [(24, 290), (64, 64), (33, 257)]


def made(kind, d_model, d_ff, seed=3):
    spec = ff.Spec.parse("swiglu", d_model=d_model, d_ff=d_ff, **BIASED)
    weights = numerics.random_weights(spec, seed=seed)
    if kind == "numpy":
        return weights
    if kind in ("torch", "bfloat16"):
        dtype = torch.float64 if kind == "torch" else torch.bfloat16
        return ff.Weights(spec, **{n: torch.tensor(v).to(dtype).requires_grad_() for n, v in weights.items()})
    return packed(weights, kind)


def close(y, truth):
    """Whether two float64 results differ by the order of their sums alone: by a few roundings."""
    return numerics.relative_error(y, truth) < 64 * numerics.UNIT_ROUNDOFF["float64"]


def dequantized(weights):
    return ff.Weights(
        weights.spec,
        **{n: v.quantized().dequantize(np.float64) if getattr(v, "format", "") in formats.INTEGER
           else v.dequantize() if isinstance(v, PackedMatrix) else v for n, v in weights.items()},
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("d_model", "d_ff"), SHAPES)
def test_parts_add_up_to_the_whole_and_go_together(kind, d_model, d_ff):
    whole = made(kind, d_model, d_ff)
    format = kind if kind in stored.FORMATS else "bf16"
    x = np.random.default_rng(0).normal(size=(5, d_model))
    truth = ff.reference.forward(x, dequantized(whole))
    for tp in (1, 2, 3, 4):
        p = divided(whole.spec, tp, format)
        if p is None:
            continue
        parts = [shard(whole, p, r) for r in range(tp)]
        assert [part.spec.down_bias for part in parts] == [True] + [False] * (tp - 1)
        back = unshard(parts)
        if kind == "torch":
            assert not parts[0].up.requires_grad
        assert same(back, ff.Weights(whole.spec, **{n: _plain(v) for n, v in whole.items()}))
        total = sum(ff.reference.forward(x, dequantized(part)) for part in parts)
        assert close(total, truth)
        if tp > 1:
            for name, wrong in mutated(parts, dequantized):
                assert not close(wrong(x), truth), name


def _plain(v):
    return v.detach() if isinstance(v, torch.Tensor) else v


def mutated(parts, plain):
    """Wrong ways to add parts up."""
    w = [plain(part) for part in parts]
    yield "a rank missing", lambda x: sum(ff.reference.forward(x, p) for p in w[:-1])
    bias = numerics.to_float64(w[0].down_bias)
    yield (
        "down's bias on every rank",
        lambda x: sum(ff.reference.forward(x, p) for p in w) + (len(w) - 1) * bias,
    )
    last = w[-1]
    if last.spec.d_ff > 1:
        rolled = last.replace(gate=_roll(last.gate))
        yield (
            "gate off by one",
            lambda x: sum(ff.reference.forward(x, p) for p in w[:-1]) + ff.reference.forward(x, rolled),
        )


def _roll(v):
    return torch.roll(v.detach(), 1, 0) if isinstance(v, torch.Tensor) else np.roll(v, 1, 0)


def test_parts_are_copies():
    whole = made("numpy", 8, 12)
    part = shard(whole, plan(whole.spec, 2), 1)
    whole.up[:] = 0
    whole.down_bias[:] = 0
    assert part.up.any()
    assert part.up.base is None


def test_cutting_refuses_what_cannot_be():
    whole = made("int4_g32", 32, 96)
    with pytest.raises(
        ValueError, match=r"inputs 0 to 48 of 96 cut a group of 32 \(int4_g32\): plan with format='int4"
    ):
        shard(whole, plan(whole.spec, 2, "bf16"), 0)
    other = plan(dataclasses.replace(whole.spec, d_ff=64), 2)
    with pytest.raises(ValueError, match=r"the plan is of gated silu 32->64 .*, the weights are of gated silu 32->96"):
        shard(whole, other, 0)
    with pytest.raises(ValueError, match=r"rank=2: expected 0 to 1"):
        shard(whole, plan(whole.spec, 2, "int4"), 2)
    parts = [shard(whole, plan(whole.spec, 2, "int4"), r) for r in range(2)]
    with pytest.raises(ValueError, match=r"part 1 is .* in order of rank"):
        unshard(parts[::-1])
    with pytest.raises(ValueError, match=r"no parts"):
        unshard([])
    eight = [formats.quantize_matrix(np.float32(np.random.default_rng(i).normal(size=(4, 6))), "int8") for i in (0, 1)]
    with pytest.raises(ValueError, match=r"other scales of the same rows"):
        join(eight, 1)
    assert join([cut(eight[0], 1, 0, 4), cut(eight[0], 1, 4, 6)], 1).codes.shape == (4, 6)


@pytest.mark.parametrize("kind", ["numpy", "bfloat16", "int8", "q4_0", "int4_g32"])
@pytest.mark.parametrize("activation", ["swiglu", "sigmoid"])
def test_padding_changes_nothing(kind, activation):
    spec = ff.Spec.parse(activation, d_model=32, d_ff=64)
    whole = numerics.random_weights(spec, seed=1)
    if kind == "bfloat16":
        whole = ff.Weights(spec, **{n: torch.tensor(v).bfloat16() for n, v in whole.items()})
    elif kind != "numpy":
        whole = packed(whole, kind)
    bigger = pad(whole, 128)
    x = np.random.default_rng(0).normal(size=(3, 32))
    truth = ff.reference.forward(x, dequantized(whole))
    assert close(ff.reference.forward(x, dequantized(bigger)), truth)
    assert len(plan(bigger.spec, 4, kind if kind in stored.FORMATS else "bf16").ranks) == 4


def test_padding_into_a_group_with_a_minimum():
    """A zero that the group cannot hold: exact with a gate (up is 0), refused where act(0) is not 0."""
    gated = packed(numerics.random_weights(ff.Spec.parse("swiglu", d_model=32, d_ff=40)), "int4_g32")
    bigger = pad(gated, 64)
    assert bigger.down.dequantize()[:, 40:].any()  # not zeros
    x = np.random.default_rng(0).normal(size=(3, 32))
    truth = ff.reference.forward(x, dequantized(gated))
    assert close(ff.reference.forward(x, dequantized(bigger)), truth)
    plain = packed(numerics.random_weights(ff.Spec(d_model=32, d_ff=40, activation="sigmoid")), "int4_g32")
    with pytest.raises(ValueError, match=r"a zero cannot be stored, and sigmoid of a padded channel is not 0"):
        pad(plain, 64)
    with pytest.raises(ValueError, match=r"d_ff=32 is smaller than the 40"):
        pad(plain, 32)
