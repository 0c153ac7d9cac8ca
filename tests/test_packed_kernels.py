"""The C++ kernels on packed matrices: every format on every instruction set, against float64, mutants, extremes."""

# T tokens, N outputs, K inputs; D d_model, F d_ff
from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fanfold import Spec, Weights, activations, formats
from fanfold.count import formats as stored
from fanfold.kernels import cpu, packed, packed_op
from fanfold.kernels import torch as torch_ops
from fanfold.kernels.packed import PackedMatrix
from fanfold.numerics import UNIT_ROUNDOFF, compare, output_mutants, random_weights

if cpu._missing is not None:
    pytest.fail(cpu._missing, pytrace=False)

ISAS = cpu.isas()
INTEGER = formats.INTEGER
MODES = [(f, a) for f in packed.FORMATS for a in (("int8", "float") if f in INTEGER else ("float",))]
SHAPES = ((1, 1), (48, 33), (33, 648), (64, 64), (50, 300))  # 48: three columns, without a line that is cut
TOKENS = (1, 3, 12, 17, 33, 150)


@pytest.fixture(params=ISAS)
def isa(request, monkeypatch) -> str:
    monkeypatch.setenv("FANFOLD_ISA", request.param)
    return request.param


@pytest.fixture(autouse=True)
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def random_codes(format: str, n: int, k: int, seed: int = 0) -> formats.Quantized:
    """Codes over their whole range; every group's scale and minimum its own."""
    rng = np.random.default_rng(seed)
    f, groups = stored.get(format), formats.n_groups(format, k)
    low, high = (-128, 128) if f.code_bits == 8 else (0, 16)
    codes = rng.integers(low, high, (n, k)).astype(formats.code_dtype(format))
    step = k**-0.5 / (60 if f.code_bits == 8 else 4)
    scale = (step * rng.uniform(0.5, 2, (n, groups))).astype(np.float16 if f.group else np.float32)
    minimum = (-8 * step * rng.uniform(0.5, 2, (n, groups))).astype(np.float16) if formats.has_minimum(format) else None
    return formats.Quantized(format=format, codes=codes, scale=scale, minimum=minimum)


def matrix(format: str, n: int, k: int, activations: str | None = None, seed: int = 0) -> PackedMatrix:
    if format in INTEGER:
        return PackedMatrix.pack(random_codes(format, n, k, seed), activations=activations)
    generator = torch.Generator().manual_seed(seed)
    return PackedMatrix.pack(torch.randn(n, k, generator=generator) / k**0.5, format)


def exact(m: PackedMatrix) -> np.ndarray:
    """The weights in float64, without a rounding."""
    return m.quantized().dequantize(np.float64) if m.format in INTEGER else m.dequantize().double().numpy()


def met(x: np.ndarray, m: PackedMatrix, arithmetic: str) -> np.ndarray:
    """What the matrix multiplies instead of x [T, K], in float64: x, or x as its int8 codes say."""
    if arithmetic != "int8":
        return x.astype(np.float64)
    codes, scale = formats.quantize_activations(x.astype(np.float32), m.format)
    return codes * np.repeat(scale.astype(np.float64), formats.activation_group(m.format), axis=1)[:, : x.shape[1]]


def held(y: Tensor, x: Tensor, m: PackedMatrix, bias: Tensor | None = None, weights: np.ndarray | None = None):
    """The comparison of one product with float64 and with PyTorch's product in the arithmetic that was used."""
    arithmetic = packed.arithmetic(x.dtype, m, x.shape[0])
    w = exact(m) if weights is None else weights
    inputs = met(x.float().numpy(), m, arithmetic)
    b = np.zeros(m.shape[0]) if bias is None else bias.double().numpy()
    ours, theirs_w = torch.from_numpy(inputs), torch.from_numpy(w)
    if arithmetic == "bf16":  # operands rounded; the result only where x is bfloat16 itself
        ours, theirs_w = ours.bfloat16(), theirs_w.bfloat16()
    theirs = ours.to(x.dtype) @ theirs_w.to(x.dtype).T + torch.from_numpy(b).to(x.dtype)
    truth = inputs @ w.T + b
    if truth.shape[1] < 32:  # single errors are luck: such outputs count as one token
        return compare(y.reshape(1, -1), truth.reshape(1, -1), theirs.reshape(1, -1))
    return compare(y, truth, theirs)


def tokens(t: int, k: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(t, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


# --- one product -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("format", "mode"), MODES)
def test_products(isa, format, mode, x_dtype):
    for n, k in SHAPES:
        m, bias = matrix(format, n, k, mode), torch.randn(n, generator=torch.Generator().manual_seed(2))
        for t in TOKENS:
            x = tokens(t, k, x_dtype)
            y = packed.linear(x, m, bias)
            assert y.shape == (t, n)
            assert y.dtype == x_dtype
            found = held(y, x, m, bias)
            assert found, (n, k, t, found)
            if t > 1 and n > 3 and k > 1:
                for what, wrong in output_mutants(y):
                    assert not held(torch.from_numpy(wrong), x, m, bias), what
        assert packed.linear(tokens(0, k, x_dtype), m).shape == (0, n)


@pytest.mark.parametrize("format", ["int8", "int8_g64", "int4_g128"])
def test_products_go_on_after_the_longest_step(isa, format):
    m = matrix(format, 33, 1100, "int8")
    for t in (17, 40):
        x = tokens(t, 1100)
        assert held(packed.linear(x, m), x, m)
        cut = x.clone()
        cut[:, 1024:] = 0
        assert not held(packed.linear(cut, m), x, m)


def wrong_readings(m: PackedMatrix) -> Iterator[tuple[str, np.ndarray]]:
    """Weights as other readings of the same bytes would give them."""
    q = m.quantized()
    f = stored.get(q.format)

    def made(**changes):
        values = {"codes": q.codes, "scale": q.scale, "minimum": q.minimum} | changes
        return formats.Quantized(format=q.format, **values).dequantize(np.float64)

    pairs = q.codes.reshape(q.codes.shape[0], -1, 8)
    yield "halves of a byte exchanged", made(codes=np.roll(pairs, 4, axis=2).reshape(q.codes.shape))
    yield "neighbouring inputs exchanged", made(codes=pairs[:, :, [1, 0, 2, 3, 4, 5, 6, 7]].reshape(q.codes.shape))
    yield "codes one off", exact(m) + np.repeat(q.scale.astype(np.float64), f.group or q.shape[1], 1)[:, : q.shape[1]]
    if f.group:
        yield "scales of the next group", made(scale=np.roll(q.scale, 1, axis=1))
    if q.minimum is not None:
        yield "minimum forgotten", made(minimum=np.zeros_like(q.minimum))
        yield "scale and minimum exchanged", made(scale=-q.minimum, minimum=-q.scale)
    yield "rows one off", np.roll(exact(m), 1, axis=0)


@pytest.mark.parametrize("t", [1, 5, 64])
@pytest.mark.parametrize("format", INTEGER)
def test_other_readings_of_the_bytes_fail(isa, format, t):
    m, x = matrix(format, 32, 256), tokens(t, 256)
    y = packed.linear(x, m)
    assert held(y, x, m)
    for what, weights in wrong_readings(m):
        assert not held(y, x, m, weights=weights), what


@pytest.mark.parametrize("t", [2, 7, 40])  # codes read as they lie, and unpacked for many tokens
@pytest.mark.parametrize("format", INTEGER)
def test_integer_sums_are_exact(isa, format, t):
    """Largest codes and activations: every number on the way is an integer below 2^24, so nothing may be off by one."""
    if format in ("int8", "q8_0") or format.startswith("int8"):
        extremes = (-128, 127)
    else:
        extremes = (0, 15)
    k = 512
    rng = np.random.default_rng(3)
    codes = rng.choice(np.array(extremes, formats.code_dtype(format)), (32, k))
    codes[0], codes[1] = extremes[1], extremes[0]
    groups = formats.n_groups(format, k)
    scale = np.ones((32, groups), np.float16 if stored.get(format).group else np.float32)
    minimum = -np.ones((32, groups), np.float16) if formats.has_minimum(format) else None
    q = formats.Quantized(format=format, codes=codes, scale=scale, minimum=minimum)
    x = torch.from_numpy(rng.choice([-127.0, 127.0], (t, k)).astype(np.float32))
    x[0], x[1] = 127.0, -127.0
    y = packed.linear(x, PackedMatrix.pack(q))
    assert np.array_equal(y.numpy(), x.numpy() @ q.dequantize(np.float64).T)


@pytest.mark.parametrize("format", INTEGER)
def test_codes_that_meet_bfloat16_are_the_nearest_numbers(isa, format):
    """One input at a time shows each weight, rounded once (or at 2^-13 of a scale: codes are moved into fractions)."""
    k = 300
    m, x = matrix(format, 33, k, "float"), torch.eye(k, dtype=torch.bfloat16)
    weights, q = exact(m).T, m.quantized()
    shown = packed.linear(x, m).double().numpy()  # as bfloat16 itself
    allowed = UNIT_ROUNDOFF["bfloat16"] * np.abs(weights) + 2.0**-13 * np.abs(q.scale.astype(np.float64)).max()
    assert (np.abs(shown - weights) <= allowed).all()
    for what, wrong in (("the next input's", np.roll(shown, 1, axis=0)), ("cut, not rounded", shown * (1 - 2.0**-7))):
        assert not (np.abs(wrong - weights) <= allowed).all(), what


@pytest.mark.parametrize("t", [1, 20, 40])
@pytest.mark.parametrize("format", [f for f in INTEGER if stored.get(f).group])
def test_a_scale_that_is_no_number_gives_none(isa, format, t):
    """Whatever its other bits: as bfloat16 it must not round to a number. The other rows are what they were."""
    q = random_codes(format, 33, 160)
    good = packed.linear(tokens(t, 160), PackedMatrix.pack(q))
    for bits in (0x7FFF, 0xFFFF, 0x7E00):
        bad = q.scale.copy()
        bad.view(np.uint16)[5, 1 if bad.shape[1] > 1 else 0] = bits
        y = packed.linear(tokens(t, 160), PackedMatrix.pack(dataclasses.replace(q, scale=bad)))
        assert y[:, 5].isnan().all()
        rest = [i for i in range(33) if i != 5]
        assert torch.equal(y[:, rest], good[:, rest])


def test_the_products_of_all_instruction_sets_are_the_same_integers(monkeypatch):
    """int8, one scale a row: what differs between instruction sets is the rounding of the last float sums only."""
    m, x = matrix("int8", 48, 256, seed=4), tokens(9, 256, seed=5)
    results = []
    for name in ISAS:
        monkeypatch.setenv("FANFOLD_ISA", name)
        results.append(packed.linear(x, m))
    for name, y in zip(ISAS, results):
        assert torch.equal(y, results[0]), name  # one group of 256 inputs: one integer, two float factors


@pytest.mark.parametrize(("format", "mode"), MODES)
def test_strides_threads_and_repetition(isa, format, mode):
    m = matrix(format, 160, 192, mode)
    wide = tokens(90, 3 * 192)
    views = {
        "rows apart": wide[:, 192:384],
        "every other": wide.view(90, 192, 3)[..., 1],
        "turned": wide[:, :90].t()[:, :],
    }
    for what, x in views.items():
        x = x if x.shape[1] == 192 else tokens(192, 70).t()
        assert torch.equal(packed.linear(x, m), packed.linear(x.contiguous(), m)), what
    x = wide[:70, :192].contiguous()
    first = packed.linear(x, m)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(packed.linear(x, m), first)
    assert torch.equal(packed.linear(x.view(7, 10, 192), m), first.view(7, 10, 160))


@pytest.mark.parametrize(("format", "mode"), MODES)
def test_infinities_and_nan_come_through(isa, format, mode):
    m = matrix(format, 20, 96, mode)
    w = exact(m)
    for t in (1, 5, 60):
        x = tokens(t, 96)
        x[0, 3], x[t // 2, 7] = float("inf"), float("nan")
        with np.errstate(invalid="ignore"):
            truth = x.double().numpy() @ w.T
        y = packed.linear(x, m).double().numpy()
        assert np.array_equal(np.isnan(y), np.isnan(truth))
        assert np.array_equal(np.isposinf(y), np.isposinf(truth))
        assert np.array_equal(np.isneginf(y), np.isneginf(truth))


@settings(max_examples=60, deadline=None, derandomize=True)  # the rule compares two random errors
@given(
    n=st.integers(16, 70), k=st.integers(1, 300), t=st.integers(0, 70), mode=st.sampled_from(MODES),
    isa=st.sampled_from(ISAS), power=st.integers(-100, 100), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_any_size_and_magnitude(n, k, t, mode, isa, power, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FANFOLD_ISA", isa)
        m = matrix(mode[0], n, k, mode[1], seed)
        x = tokens(t, k, seed=seed) * 2.0**power
        y = packed.linear(x, m)
        if t == 0:
            assert y.shape == (0, n)
            return
        found = held(y.reshape(t, n), x, m)
        assert found, found


@settings(max_examples=100, deadline=None)
@given(n=st.integers(1, 70), k=st.integers(1, 300), format=st.sampled_from(packed.FORMATS), seed=st.integers(0, 999))
def test_packing_loses_nothing(n, k, format, seed):
    if format in INTEGER:
        q = random_codes(format, n, k, seed)
        back = PackedMatrix.pack(q).quantized()
        assert np.array_equal(back.codes, q.codes)
        assert np.array_equal(back.scale, q.scale)
        assert (back.minimum is None and q.minimum is None) or np.array_equal(back.minimum, q.minimum)
    else:
        w = torch.randn(n, k).to(packed._FLOATS[format])
        assert torch.equal(PackedMatrix.pack(w, format).dequantize(), w)


# --- the FFN ---


def pack_ffn(spec: Spec, format: str, mode: str | None = None, seed: int = 0) -> Weights:
    whole = random_weights(spec, seed)
    parts = {}
    for name, value in whole.items():
        if name.endswith("bias"):
            parts[name] = torch.from_numpy(value).float()
        elif format in INTEGER:
            parts[name] = PackedMatrix.pack(formats.quantize_matrix(value.astype(np.float32), format), activations=mode)
        else:
            parts[name] = PackedMatrix.pack(torch.from_numpy(value), format)
    return Weights(spec, **parts)


def ffn_truth(x: Tensor, weights: Weights) -> np.ndarray:
    """The FFN of the dequantized weights in float64."""
    spec = weights.spec

    def product(x: np.ndarray, name: str) -> np.ndarray:
        bias = getattr(weights, f"{name}_bias")
        return x @ exact(getattr(weights, name)).T + (0.0 if bias is None else bias.double().numpy())

    inputs, act = x.double().numpy(), activations.get(spec.activation).numpy
    up = product(inputs, "up")
    if not spec.gated:
        return product(act(up, spec.params), "down")
    gate = product(inputs, "gate")
    if spec.gate_limit is not None:
        gate = np.minimum(gate, spec.gate_limit)
    if spec.up_limit is not None:
        up = np.clip(up, -spec.up_limit, spec.up_limit)
    return product(act(gate, spec.params) * (up + spec.up_offset), "down")


def ffn_in_torch(x: Tensor, weights: Weights, t: int) -> Tensor:
    """The same in float32, with what meets each matrix rounded as calls of `t` tokens round it; in x's dtype."""
    spec, dtype, x = weights.spec, x.dtype, x.float()

    def product(x: Tensor, name: str) -> Tensor:
        m = getattr(weights, name)
        arithmetic, w = packed.arithmetic(dtype, m, t), torch.from_numpy(exact(m)).float()
        if arithmetic == "bf16":
            x, w = x.bfloat16().float(), w.bfloat16().float()
        else:
            x = torch.from_numpy(met(x.numpy(), m, arithmetic)).float()
        return torch.nn.functional.linear(x, w, getattr(weights, f"{name}_bias"))

    up = product(x, "up")
    gate = product(x, "gate") if spec.gated else None
    return product(torch_ops.coefficients(spec, up, gate), "down").to(dtype)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("format", "mode"), MODES)
def test_ffn(isa, format, mode, gated):
    """The kernel's error against float64 is at most twice PyTorch's with the same roundings of what meets a matrix."""
    for d, f in ((64, 64), (33, 300)):
        name = "silu" if gated else "gelu_tanh"
        spec = Spec(d_model=d, d_ff=f, activation=name, gated=gated, up_bias=True, gate_bias=gated, down_bias=True)
        weights = pack_ffn(spec, format, mode)
        for dtype, calls in ((torch.float32, (1, 4, 16, 70)), (torch.bfloat16, (1, 70))):
            x = tokens(70, d, dtype)
            truth = ffn_truth(x, weights)
            for t in calls:
                y = torch.cat([packed.forward(part, weights) for part in x.split(t)])
                theirs = ffn_in_torch(x, weights, t)
                found = compare(y, truth, theirs)
                assert found, (d, f, dtype, t, found)
                wrong = {"gate": weights.up, "up": weights.gate} if gated else {"up_bias": torch.zeros(f)}
                assert not compare(packed.forward(x, weights.replace(**wrong)), truth, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_clamps_and_an_offset(isa, dtype):
    biases = {"gate_bias": True, "up_bias": True, "down_bias": True}
    spec = Spec.parse("swiglu_oai", d_model=40, d_ff=64, **biases)
    for format in ("fp32", "bf16", "int8", "int4_g64"):
        weights = pack_ffn(spec, format)
        x = 4 * tokens(40, 40, dtype)
        truth = ffn_truth(x, weights)
        for t in (1, 40):
            y = torch.cat([packed.forward(part, weights) for part in x.split(t)])
            theirs = ffn_in_torch(x, weights, t)
            assert compare(y, truth, theirs), (format, t)
        for forgotten in ({"gate_limit": None}, {"up_limit": None}, {"up_offset": 0.0}):
            wrong = weights.replace(spec=dataclasses.replace(spec, **forgotten))
            assert not compare(packed.forward(x, wrong), truth, theirs), (format, forgotten)


@pytest.mark.parametrize("format", ["fp32", "bf16", "int8", "q4_0"])
def test_one_block_of_tokens_after_another(isa, format):
    """While one thread still multiplies a block's coefficients, the other may begin with the next block's inputs."""
    weights = pack_ffn(Spec(d_model=96, d_ff=300, activation="silu", gated=True), format)
    x = tokens(600, 96)
    y = packed.forward(x, weights)
    truth, theirs = ffn_truth(x, weights), ffn_in_torch(x, weights, 600)
    found = compare(y, truth, theirs)
    assert found, found
    late = torch.cat([y[:128], y[:-128]])  # as if a block's inputs came too late for it
    assert not compare(late, truth, theirs)
    for _ in range(30):
        assert torch.equal(packed.forward(x, weights), y)


@pytest.mark.parametrize("name", ["sigmoid", "softplus", "relu2", "identity"])
def test_channels_that_pad_a_column_write_nothing(isa, name):
    """act(0) is not 0 for some: the channels beyond d_ff must not reach down's padding, whatever lies there."""
    spec = Spec(d_model=20, d_ff=37, activation=name, gated=False)
    for dtype, format in itertools.product((torch.float32, torch.bfloat16), ("fp32", "bf16", "int8", "int4_g32")):
        weights = pack_ffn(spec, format, "float" if format in INTEGER else None)
        x = tokens(64, 20, dtype)
        for t in (1, 20, 64):
            y = torch.cat([packed.forward(part, weights) for part in x.split(t)])
            assert compare(y, ffn_truth(x, weights), ffn_in_torch(x, weights, t)), (dtype, format, t)


@pytest.mark.parametrize("name", ["relu", "relu2"])
@pytest.mark.parametrize("format", ["fp32", "bf16", "fp16", "int8"])
def test_channels_with_coefficient_zero_are_skipped_without_a_trace(isa, format, name):
    for d, f in ((48, 333), (33, 1024)):
        spec = Spec(d_model=d, d_ff=f, activation=name, gated=False, up_bias=True, down_bias=True)
        weights = pack_ffn(spec, format)
        x = tokens(20, d)
        for share in (0.0, 0.5, 0.95, 1.0):  # of the channels that are off
            off = torch.rand(f, generator=torch.Generator().manual_seed(3)) < share
            some = weights.replace(up_bias=torch.where(off, -100.0, 0.5))
            y = torch.cat([packed.forward(part, some) for part in x.split(1)])
            found = compare(y, ffn_truth(x, some), ffn_in_torch(x, some, 1))
            assert found, (d, f, share, found)


def test_two_threads_share_the_weights(isa):
    spec = Spec(d_model=64, d_ff=200, activation="silu", gated=True)
    weights = pack_ffn(spec, "int8")
    inputs = [tokens(t, 64, seed=t) for t in (1, 3, 20, 70)]
    expected = [packed.forward(x, weights) for x in inputs]
    wrong: list[int] = []

    def work() -> None:
        for _ in range(30):
            for x, y in zip(inputs, expected):
                if not torch.equal(packed.forward(x, weights), y):
                    wrong.append(x.shape[0])

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_worker_computes():
    """As a DataLoader's worker does: fork after use, one thread in the child."""
    code = """
import os, torch
from fanfold.kernels import packed
m = packed.PackedMatrix.pack(torch.randn(64, 256), "fp32")
x = torch.randn(70, 256)
y = packed.linear(x, m)
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    os._exit(0 if torch.equal(packed.linear(x, m), y) else 3)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# --- what is refused ---


def test_bad_matrices_are_refused():
    m = matrix("q4_0", 16, 64)
    with pytest.raises(ValueError, match=r"expected torch\.uint8"):
        PackedMatrix("q4_0", (16, 64), m.data[:-1])
    with pytest.raises(ValueError, match="cannot be packed; known"):
        PackedMatrix("int3", (16, 64), m.data)
    with pytest.raises(ValueError, match="expected 'float'"):
        PackedMatrix.pack(torch.zeros(4, 4), "fp32", activations="int8")
    with pytest.raises(ValueError, match="has no codes"):
        matrix("bf16", 4, 4).quantized()
    with pytest.raises(ValueError, match=r"x has shape \(2, 63\), expected \(…, 64\)"):
        packed.linear(torch.zeros(2, 63), m)
    with pytest.raises(ValueError, match="float64"):
        packed.linear(torch.zeros(2, 64, dtype=torch.float64), m)


def test_packed_bytes_are_what_the_cost_view_counts():
    for format in packed.FORMATS:
        # a last, partly filled group holds no codes that are not there; its header fills a 64-byte line of each column
        assert packed.packed_bytes(format, 1536, 576) <= stored.get(format).matrix_bytes(1536, 576) + 64 * 1536 // 16
        assert packed.packed_bytes(format, 4096, 11008) == stored.get(format).matrix_bytes(4096, 11008), format


@pytest.mark.parametrize(
    "change", ["bias", "bias gone", "bias of another dtype", "data", "x", "x strided", "isa", "dtype"]
)
def test_an_operator_called_again_sees_what_has_changed(change, monkeypatch):
    """A call like one before it is made without a second look at its description; any other is not."""
    generator = torch.Generator().manual_seed(3)
    if "FANFOLD_ISA" in os.environ:
        monkeypatch.delenv("FANFOLD_ISA")
    q = [formats.quantize_matrix(torch.randn(20, 48, generator=generator).numpy(), "int8") for _ in range(2)]
    first, second = map(PackedMatrix.pack, q)
    first.data.copy_(first.data.clone())
    x = torch.randn(3, 48, generator=generator)
    bias = torch.randn(20, generator=generator)
    text = packed_op.describe(first)

    def call(x=x, data=first.data, bias=bias):
        return torch.ops.fanfold.packed_linear(x, data, bias, text)

    packed_op._ready.clear()
    before = call()
    assert len(packed_op._ready) == 1
    assert torch.equal(call(), before)
    if change == "bias":
        assert torch.equal(call(bias=bias + 1), packed.linear(x, first, bias + 1))
    elif change == "bias gone":
        assert torch.equal(call(bias=None), packed.linear(x, first))
    elif change == "bias of another dtype":
        bias.data = bias.view(torch.int32)
        with pytest.raises(ValueError, match="bias is torch\\.int32"):
            call()
    elif change == "data":
        assert torch.equal(call(data=second.data), packed.linear(x, second, bias))
        first.data.copy_(second.data)  # in place: bound kernels read what is there
        assert torch.equal(call(), packed.linear(x, second, bias))
        assert not torch.equal(call(), before)
    elif change == "x":
        assert torch.equal(call(x=x[:2]), before[:2])
        assert call(x=x[None]).shape == (1, 3, 20)
        assert call(x=x[:0]).shape == (0, 20)
        with pytest.raises(ValueError, match="shape"):
            call(x=x[:, :40].contiguous())
    elif change == "x strided":
        wide = torch.randn(3, 96, generator=generator)
        assert torch.equal(call(x=wide[:, ::2]), packed.linear(wide[:, ::2].contiguous(), first, bias))
    elif change == "isa":
        monkeypatch.setenv("FANFOLD_ISA", "scalar")
        assert torch.equal(call(), packed.linear(x, first, bias))
        monkeypatch.setattr(cpu._cpu, "bind_packed_linear", None)  # the call for this set is bound, and not in _ready
        assert torch.equal(call(), call())
    else:
        assert call(x=x.bfloat16()).dtype == torch.bfloat16
        assert torch.equal(call(x=x.bfloat16()), packed.linear(x.bfloat16(), first, bias))
    assert len(packed_op._ready) <= 2


def test_an_ffn_operator_called_again_sees_what_has_changed(monkeypatch):
    monkeypatch.delenv("FANFOLD_ISA", raising=False)
    generator = torch.Generator().manual_seed(4)

    def made(n, k):
        return PackedMatrix.pack(formats.quantize_matrix(torch.randn(n, k, generator=generator).numpy(), "int8"))

    spec = Spec.parse("swiglu", d_model=48, d_ff=32, gate_bias=True, up_bias=True, down_bias=True)
    biases = {
        f"{name}_bias": torch.randn(n, generator=generator) for name, n in (("gate", 32), ("up", 32), ("down", 48))
    }
    w = Weights(spec, gate=made(32, 48), up=made(32, 48), down=made(48, 32), **biases)
    text = packed_op.describe_ffn(w)
    x = torch.randn(3, 48, generator=generator)
    expected = packed.forward(x, w)
    packed_op._ready.clear()
    for _ in range(3):
        assert torch.equal(packed_op.call_ffn(x, w, text), expected)
    assert len(packed_op._ready) == 1
    for name, other in (("up", made(32, 48)), ("down", made(48, 32)), ("up_bias", torch.ones(32))):
        changed = Weights(spec, **{**dict(w.items()), name: other})
        y = packed_op.call_ffn(x, changed, text)
        assert torch.equal(y, packed.forward(x, changed)), name
        assert not torch.equal(y, expected), name
