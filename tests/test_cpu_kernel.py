"""The C++ kernels on every instruction set of this CPU: against float64, mutants, layouts, threads, special values."""

# T tokens, D d_model, F d_ff
from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fanfold import Spec, Weights, activations, reference
from fanfold.kernels import cpu
from fanfold.kernels import torch as torch_backend
from fanfold.numerics import UNIT_ROUNDOFF, compare, mutants, output_mutants, random_weights, relative_error, ulp_error

if cpu._missing is not None:
    pytest.fail(cpu._missing, pytrace=False)

ISAS = cpu.isas()
DTYPES = (torch.float32, torch.bfloat16)
GATED = {"gated": True, "activation": "silu"}
ALL_BIASES = {"up_bias": True, "gate_bias": True, "down_bias": True}

# Largest error in units in the last place over RANGE, where the result is a normal float32 (|y| >= 1e-35). On a grid of
# eight million points from -14 to 14 gelu_erf comes to 5.4, gelu_sigmoid to 4.2, mish to 4.6; the test takes 70,000.
# xielu crosses zero at x < 0, where no unit of y makes sense: its bound counts units of the larger of |x| and |y|.
RANGE = (-88.0, 88.0)
MAX_ULP = {
    "relu": 0.5,
    "relu2": 1.0,
    "gelu_erf": 5.5,
    "gelu_tanh": 4.0,
    "gelu_sigmoid": 4.5,
    "silu": 4.0,
    "sigmoid": 3.0,
    "tanh": 3.0,
    "identity": 0.5,
    "softplus": 3.0,
    "elu": 2.0,
    "mish": 5.0,
    "leaky_relu": 1.5,
    "xielu": 3.0,
}


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


def make(spec: Spec, dtype: torch.dtype = torch.float32, seed: int = 0) -> Weights:
    return random_weights(spec, seed, lambda a: torch.from_numpy(a).to(dtype))


def tokens(n: int, d: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed)).to(dtype)


def transposed(weights: Weights) -> Weights:
    """The same matrices as GPT-2's Conv1D holds them: [in, out] memory, seen through .t()."""
    return weights.replace(**{k: v.t().contiguous().t() for k, v in weights.items() if v.dim() == 2})


def in_calls_of(T: int, x: Tensor, weights: Weights) -> Tensor:
    return torch.cat([cpu.forward(part, weights) for part in x.split(T)])


def held(y: Tensor, x: Tensor, weights: Weights, truth: np.ndarray | None = None):
    """The comparison with float64 and with PyTorch in x's dtype.

    A token of one or three numbers has no root mean square to speak of: the largest of hundreds of single errors is
    luck, so narrow outputs count as one token.
    """
    same = weights.replace(**{k: v.to(x.dtype) for k, v in weights.items()})
    torch_y = torch_backend.forward(x, same)
    truth = reference.forward(x, weights) if truth is None else truth
    if y.shape[-1] <= 3:
        return compare(y.reshape(1, -1), truth.reshape(1, -1), torch_y.reshape(1, -1))
    return compare(y, truth, torch_y)


# --- right results -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("w_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", [True, False])
def test_shapes_and_token_counts(isa, gated, x_dtype, w_dtype):
    torch.set_num_threads(1)  # thousands of tiny calls; other tests show that the thread count changes no bit
    for d, f in ((1, 1), (3, 17), (17, 3), (64, 64), (97, 130), (130, 97)):
        spec = Spec(d_model=d, d_ff=f, activation="silu", gated=gated, up_bias=True, down_bias=True)
        for weights in (make(spec, w_dtype), transposed(make(spec, w_dtype))):
            x = tokens(300, d, x_dtype)
            truth = reference.forward(x, weights)
            for T in (1, 2, 7, 8, 9, 33, 130, 300):
                n = min(300, 40 * T)
                y = in_calls_of(T, x[:n], weights)
                assert y.dtype == x_dtype
                assert y.is_contiguous()
                found = held(y, x[:n], weights, truth[:n])
                assert found, (d, f, T, weights.up.stride(), found)
            assert cpu.forward(x[:0], weights).shape == (0, d)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_real_width(isa, dtype):
    weights = make(Spec(d_model=576, d_ff=1536, **GATED), dtype)
    x = tokens(33, 576, dtype)
    truth = reference.forward(x, weights)
    for T in (1, 8, 9, 33):
        for w in (weights, transposed(weights)):
            assert held(in_calls_of(T, x, w), x, w, truth), T


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", activations.ACTIVATIONS)
def test_activations(isa, name, gated):
    torch.set_num_threads(1)
    for dtype in DTYPES:
        weights = make(Spec(d_model=97, d_ff=130, activation=name, gated=gated, up_bias=True), dtype)
        x = tokens(64, 97, dtype)
        for T in (4, 64):
            assert held(in_calls_of(T, x, weights), x, weights), (T, dtype)


@pytest.mark.parametrize("biases", [{"up_bias": True}, {"gate_bias": True}, {"down_bias": True}, ALL_BIASES], ids=str)
def test_each_bias(isa, biases):
    for dtype in DTYPES:
        weights = make(Spec(d_model=40, d_ff=67, **GATED, **biases), dtype)
        x = tokens(40, 40, dtype)
        for T in (5, 40):
            assert held(in_calls_of(T, x, weights), x, weights), (T, dtype)


@pytest.mark.parametrize("T", [5, 40])
def test_mutants_fail(isa, T):
    for fields in (GATED, {"activation": "gelu_erf", "gated": True}, {"activation": "elu"}):
        extra = ALL_BIASES if fields.get("gated") else {"up_bias": True, "down_bias": True}
        weights = make(Spec(d_model=40, d_ff=67, **fields, **extra))
        x = tokens(40, 40)
        truth = reference.forward(x, weights)
        y = in_calls_of(T, x, weights)
        assert held(y, x, weights, truth)
        for name, mutant in mutants(weights):
            assert not held(in_calls_of(T, x, mutant), x, weights, truth), name
        for name, wrong in output_mutants(y):
            assert not held(torch.from_numpy(wrong), x, weights, truth), name


@pytest.mark.parametrize("T", [3, 24])
def test_clamps_and_offset(isa, T):
    spec = Spec.parse("swiglu_oai", d_model=40, d_ff=64, **ALL_BIASES)
    weights = make(spec)
    x = 8 * tokens(48, 40)  # large enough for both clamps to act
    truth = reference.forward(x, weights)
    assert held(in_calls_of(T, x, weights), x, weights, truth)
    names = [name for name, _ in mutants(weights)]
    assert {"gate_limit forgotten", "up_limit forgotten", "up_offset forgotten"} <= set(names)
    for name, mutant in mutants(weights):
        assert not held(in_calls_of(T, x, mutant), x, weights, truth), name


def test_linear(isa):
    for dtype in DTYPES:
        for n_in, n_out in ((1, 5), (97, 40), (640, 33)):
            weight, bias = tokens(n_out, n_in, dtype, 1), tokens(1, n_out, dtype, 2)[0]
            x = tokens(66, n_in, dtype)
            truth = reference._dense(x.double().numpy(), weight.double().numpy(), bias.double().numpy())
            torch_y = torch.nn.functional.linear(x, weight, bias)
            for w in (weight, weight.t().contiguous().t()):
                for T in (1, 6, 66):
                    y = torch.cat([cpu.linear(part, w, bias) for part in x.split(T)])
                    assert compare(y, truth, torch_y), (n_in, n_out, T, dtype)
                    assert not compare(torch.cat([cpu.linear(p, w) for p in x.split(T)]), truth, torch_y)
            assert cpu.linear(x.reshape(2, 33, n_in), weight).shape == (2, 33, n_out)


def test_ulp_table(isa):
    assert cpu._cpu.activation_names() == list(activations.ACTIVATIONS) == list(MAX_ULP)
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [rng.uniform(-8, 8, 30000), rng.uniform(*RANGE, 30000), rng.normal(size=9999) * 10 ** rng.uniform(-20, 0, 9999)]
    ).astype(np.float32)
    for name, act in activations.ACTIVATIONS.items():
        for params in [dict(act.params), *([{"beta": 1.702}] if name == "silu" else [])]:
            y = activation(isa, x, name, params)
            truth = act.numpy(x.astype(np.float64), params)
            ulp = ulp_error(y, truth)
            if name == "xielu":
                ulp = np.abs(y - truth) / np.spacing(np.maximum(np.abs(x), np.abs(truth)).astype(np.float32))
            normal = (np.abs(truth) >= 1e-35) | (np.abs(x) < 1e-30)
            assert ulp[normal].max() <= MAX_ULP[name], (name, params, x[normal][ulp[normal].argmax()])
            assert np.abs(y - truth)[~normal].max(initial=0) < 1e-37 * 100, name


def activation(isa: str, x: np.ndarray, name: str, params: dict[str, float]) -> np.ndarray:
    y = np.empty_like(x)
    values = tuple(params.values()) + (0.0,) * (4 - len(params))
    cpu._cpu.activation(cpu._ISA_IDS[isa], x.ctypes.data, y.ctypes.data, x.size, cpu._ACTS[name], values)
    return y


def test_an_activation_gives_the_same_bits_side_by_side_and_alone(isa):
    rng = np.random.default_rng(1)  # how many channels a call has together depends on the number of threads
    x = np.concatenate([rng.normal(size=64) * 3, rng.uniform(*RANGE, 64)]).astype(np.float32)
    for name, act in activations.ACTIVATIONS.items():
        for params in [dict(act.params), *([{"beta": 1.702}] if name == "silu" else [])]:
            alone = np.concatenate([activation(isa, x[i : i + 1].copy(), name, params) for i in range(x.size)])
            assert np.array_equal(activation(isa, x, name, params).view(np.int32), alone.view(np.int32)), (name, params)


def test_activation_tails_and_special_values(isa):
    special = np.array([1e4, -1e4, np.inf, -np.inf, np.nan, 0.0], np.float32)
    for name, act in activations.ACTIVATIONS.items():
        y = activation(isa, special, name, dict(act.params))
        assert np.isfinite(y[:2]).all(), name
        assert np.isnan(y[4]), name
        with np.errstate(all="ignore"):
            truth = act.numpy(special.astype(np.float64), act.params)
        assert np.array_equal(np.isnan(y), np.isnan(truth)), (name, y, truth)
        assert np.array_equal(y[2:4], truth[2:4], equal_nan=True), (name, y, truth)
    for name in ("gelu_erf", "gelu_tanh", "gelu_sigmoid", "silu", "mish"):
        assert activation(isa, np.array([-6.0], np.float32), name, dict(activations.get(name).params))[0] < 0, name


# --- layouts of memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [4, 20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_misaligned_and_broadcast_x(isa, T, dtype):
    weights = make(Spec(d_model=33, d_ff=50, **GATED), dtype)
    x = tokens(T, 33, dtype)
    want = cpu.forward(x, weights)
    wide = torch.zeros(T, 80, dtype=dtype)
    wide[:, 5:38] = x
    flat = torch.zeros(T * 33 + 1, dtype=dtype)
    flat[1:] = x.reshape(-1)
    column = x.t().contiguous().t()
    for same in (wide[:, 5:38], flat[1:].view(T, 33), column, torch.stack([x, x], -1)[..., 0]):
        assert torch.equal(cpu.forward(same, weights), want)
    assert torch.equal(cpu.forward(x.reshape(2, T // 2, 33), weights), want.reshape(2, T // 2, 33))
    row = x[:1].expand(T, 33)
    assert torch.equal(cpu.forward(row, weights), cpu.forward(row.contiguous(), weights))
    many = x[:, None].expand(T, 3, 33)
    assert torch.equal(cpu.forward(many, weights), cpu.forward(many.contiguous(), weights))
    assert cpu.forward(x[0], weights).shape == (33,)


@pytest.mark.parametrize("T", [4, 20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_interleaved_and_misaligned_weights_are_read_in_place(isa, T, dtype):
    weights = make(Spec(d_model=48, d_ff=70, **GATED, **ALL_BIASES), dtype)
    x = tokens(T, 48, dtype)
    want = cpu.forward(x, weights)
    fused = torch.cat([weights.gate, weights.up])
    woven = torch.stack([weights.gate, weights.up], 1).reshape(140, 48)
    odd = torch.zeros(70 * 48 + 1, dtype=dtype)
    odd[1:] = weights.up.reshape(-1)
    for same in (
        weights.replace(gate=fused[:70], up=fused[70:]),
        weights.replace(gate=woven[::2], up=woven[1::2]),
        weights.replace(up=odd[1:].view(70, 48)),
    ):
        assert cpu.why_not(x, same) is None
        assert torch.equal(cpu.forward(x, same), want)
    both = fused.t().contiguous().t()  # Conv1D of width 2F: columns side by side
    halves = weights.replace(gate=both[:70], up=both[70:])
    assert held(cpu.forward(x, halves), x, weights)


@pytest.mark.parametrize("T", [4, 20])
def test_square_matrices_keep_their_orientation(isa, T):
    weights = make(Spec(d_model=64, d_ff=64, **GATED))
    x = tokens(40, 64)
    truth = reference.forward(x, weights)
    turned = weights.replace(up=weights.up.t(), gate=weights.gate.t(), down=weights.down.t())
    for w in (weights, transposed(weights)):
        assert held(in_calls_of(T, x, w), x, weights, truth)
    assert not held(in_calls_of(T, x, turned), x, weights, truth)
    assert held(in_calls_of(T, x, turned), x, turned)


@pytest.mark.parametrize("T", [1, 7, 16, 64])
@pytest.mark.parametrize("turn", [False, True], ids=["as it is", "transposed"])
def test_long_sums_are_cut_into_short_chains(isa, turn, T):
    """Of 4096 positive numbers one chain of additions errs by 4 to 7 roundings, chains of 64 and their sums by less."""
    weights = make(Spec(d_model=8, d_ff=4096, activation="relu", gated=False))
    weights = weights.replace(up=torch.full((4096, 8), 0.125), down=weights.down.abs())
    x = tokens(T, 8).abs() + 1
    truth = reference.forward(x, weights)
    y = cpu.forward(x, transposed(weights) if turn else weights)
    assert relative_error(y, truth) < 2 * UNIT_ROUNDOFF["float32"]


@pytest.mark.parametrize("T", [4, 20])
def test_permuting_channels_and_scaling_down(isa, T):
    weights = make(Spec(d_model=48, d_ff=70, **GATED, **{**ALL_BIASES, "down_bias": False}))
    x = tokens(40, 48)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(1))
    names = ("gate", "up", "gate_bias", "up_bias")
    permuted = weights.replace(down=weights.down[:, order], **{n: getattr(weights, n)[order] for n in names})
    assert held(in_calls_of(T, x, permuted), x, weights)
    y = in_calls_of(T, x, weights)
    assert torch.equal(in_calls_of(T, x, weights.replace(down=4 * weights.down)), 4 * y)  # a power of two is exact


# --- threads, determinism, writes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [1, 8, 70])
def test_bit_equal_on_repeat_and_across_thread_counts(isa, T):
    for dtype in DTYPES:
        for weights in (make(Spec(d_model=97, d_ff=300, **GATED), dtype),):
            for w in (weights, transposed(weights)):
                x = tokens(T, 97, dtype)
                want = cpu.forward(x, w)
                for threads in (1, 2, 3, 5):
                    torch.set_num_threads(threads)
                    assert torch.equal(cpu.forward(x, w), want), threads


def test_every_element_of_y_is_written_and_nothing_else(isa):
    spec = Spec(d_model=37, d_ff=50, **GATED)
    weights = make(spec)
    for T in (1, 3, 8, 9, 40):
        for dtype in DTYPES:
            x = tokens(T, 37, dtype)
            _, args = cpu._plan(x, weights)
            y = torch.full((T + 2, 45), torch.nan, dtype=dtype)
            code = cpu._DTYPES[dtype]
            inner = y[1:-1, 4:41]
            bound = cpu._cpu.bind_ffn(cpu._ISA_IDS[isa], code, code, *args)
            bound.run(2, x.data_ptr(), 37, inner.data_ptr(), 45, T)
            assert torch.equal(inner, cpu.forward(x, weights))
            assert y.isnan().sum() == y.numel() - inner.numel()


@pytest.mark.parametrize("T", [4, 20])
def test_nan_and_inf_propagate(isa, T):
    spec = Spec.parse("swiglu_oai", d_model=40, d_ff=64)
    for dtype in DTYPES:
        weights = make(spec, dtype)
        x = tokens(T, 40, dtype)
        clean = cpu.forward(x, weights)
        for value in (torch.nan, torch.inf):
            bad = x.clone()
            bad[1, 7] = value
            y, torch_y = cpu.forward(bad, weights), torch_backend.forward(bad, weights)
            assert torch.equal(y.isnan(), torch_y.isnan()), value
            keep = torch.arange(T) != 1
            assert torch.equal(y[keep], clean[keep])
        broken = weights.down.clone()
        broken[5, 9] = torch.nan
        y = cpu.forward(x, weights.replace(down=broken))
        assert y[:, 5].isnan().all()
        assert y.isnan().sum() == T


def test_python_threads_at_once(isa):
    jobs = []
    for seed, (T, d, f) in enumerate(((1, 64, 200), (40, 97, 130), (8, 200, 64), (100, 64, 64))):
        weights, x = make(Spec(d_model=d, d_ff=f, **GATED), seed=seed), tokens(T, d, seed=seed)
        jobs.append((x, weights, cpu.forward(x, weights)))
    wrong: list[int] = []

    def work(i: int) -> None:
        x, weights, want = jobs[i]
        if not all(torch.equal(cpu.forward(x, weights), want) for _ in range(30)):
            wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
def test_one_openmp_runtime():
    code = (
        "import torch\nfrom fanfold import Spec\nfrom fanfold.kernels import cpu\nfrom fanfold.numerics import "
        "random_weights\nw = random_weights(Spec(d_model=64, d_ff=64, activation='relu'), 0, "
        "lambda a: torch.from_numpy(a).float())\ntorch.set_num_threads(2)\ncpu.forward(torch.randn(64, 64), w)\n"
        "torch.randn(512, 512) @ torch.randn(512, 512)\nprint(open('/proc/self/maps').read())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = set(re.findall(r"\S*lib(?:g|i)?omp\S*", done.stdout))
    assert len(found) == 1, found


def test_works_in_inference_and_grad_modes(isa):
    weights = make(Spec(d_model=24, d_ff=32, **GATED))
    weights = weights.replace(**{k: torch.nn.Parameter(v) for k, v in weights.items()})
    x = tokens(3, 24).requires_grad_()
    want = cpu.forward(x, weights)
    assert not want.requires_grad
    with torch.inference_mode():
        assert torch.equal(cpu.forward(x, weights), want)
    with torch.no_grad():
        assert torch.equal(cpu.forward(x, weights), want)


# --- refusals ------------------------------------------------------------------------------------------------------


class Subclass(torch.Tensor):
    pass


def test_reasons():
    weights = make(Spec(d_model=24, d_ff=32, **GATED, **ALL_BIASES))
    x = tokens(3, 24)
    assert cpu.why_not(x, weights) is None
    assert cpu.available() is None
    strange = torch.zeros(32, 48)[:, ::2]
    for given, changes, words in (
        (x.numpy(), {}, "x is ndarray, not a torch tensor"),
        (x.double(), {}, "x is torch.float64"),
        (x.to("meta"), {}, "x is on meta"),
        (x[:, :5], {}, "(3, 5), expected (…, 24)"),
        (torch.tensor(1.0), {}, "x has shape ()"),
        (x.as_subclass(Subclass), {}, "Subclass, not a plain torch tensor"),
        (x, {"up": weights.up.numpy()}, "up is ndarray"),
        (x, {"down": weights.down.half()}, "down is torch.float16"),
        (x, {"down": weights.down.bfloat16()}, "one dtype for all weights"),
        (x, {"up_bias": weights.up_bias.bfloat16()}, "one dtype for all weights"),
        (x, {"up_bias": torch.zeros(64)[::2]}, "contiguous bias"),
        (x, {"up": strange}, "up has strides (48, 2)"),
        (x, {"gate": strange}, "gate has strides (48, 2)"),
        (x, {"down": strange.t()}, "down has strides (2, 48)"),
        (x, {"up": weights.up.t().contiguous().t()}, "expected the same for both"),
    ):
        changed = weights.replace(**changes)
        reason = cpu.why_not(given, changed)
        assert reason is not None
        assert words in reason
        with pytest.raises(ValueError, match=re.escape(words)):
            cpu.forward(given, changed)
    weight = weights.up
    for args, words in (
        ((x, weight[0]), "expected [n_out, n_in]"),
        ((x, weight, torch.zeros(5)), "bias has shape (5,)"),
        ((x, strange), "weight has strides"),
        ((x, weight, torch.zeros(32).bfloat16()), "expected one dtype"),
        ((x[:, :5], weight), "expected (…, 24)"),
    ):
        assert words in str(cpu.linear_why_not(*args))
        with pytest.raises(ValueError, match=re.escape(words)):
            cpu.linear(*args)


def test_forced_isa(monkeypatch):
    monkeypatch.delenv("FANFOLD_ISA", raising=False)
    assert cpu.isa() == ISAS[-1]
    for name in ISAS:
        monkeypatch.setenv("FANFOLD_ISA", name)
        assert cpu.isa() == name
    monkeypatch.setenv("FANFOLD_ISA", "sse9")
    with pytest.raises(ValueError, match=r"FANFOLD_ISA='sse9' is not available; available here: scalar"):
        cpu.isa()
    weights = make(Spec(d_model=24, d_ff=32, **GATED))
    assert "sse9" in str(cpu.why_not(tokens(3, 24), weights))
    assert "sse9" in str(cpu.available())
    with pytest.raises(ValueError, match="sse9"):
        cpu.forward(tokens(3, 24), weights)


def test_the_core_checks_its_codes():
    with pytest.raises(ValueError, match="isas"):
        cpu._cpu.activation(99, 0, 0, 0, 0, (0.0, 0.0, 0.0, 0.0))
    with pytest.raises(ValueError, match="activation_names"):
        cpu._cpu.activation(0, 0, 0, 0, 99, (0.0, 0.0, 0.0, 0.0))


@pytest.mark.parametrize(
    ("best", "tiles", "pairs", "limit"),
    [
        ("amx", True, True, 6),
        ("avx512bf16", False, True, 16),
        ("avx512vnni", False, True, 1 << 62),  # the CPU has the unit, and the core ranks it below float32's
        ("avx512vnni", True, True, 6),  # tiles that the system does not grant us
        ("avx2", False, False, 1 << 62),
    ],
)
def test_up_to_how_many_tokens_torch_has_no_faster_bfloat16_unit(monkeypatch, best, tiles, pairs, limit):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: pairs)
    monkeypatch.setattr(cpu, "_ISAS", ("scalar", best))
    assert cpu._torch_bfloat16_limit.__wrapped__() == limit


def test_where_bfloat16_products_rank():
    """Above float32's only where they are faster, on this CPU or not: Intel's, without a matrix unit, are not."""
    assert list(ISAS) == sorted(ISAS, key=cpu._ISA_IDS.__getitem__)
    if {"avx512bf16", "avx512vnni"} <= set(ISAS):
        intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text()
        assert (ISAS.index("avx512bf16") < ISAS.index("avx512vnni")) == intel


def test_where_torch_is_faster(monkeypatch):
    monkeypatch.setattr(cpu, "_torch_bfloat16_limit", lambda: 6)
    for dtype in DTYPES:
        weights = make(Spec(d_model=24, d_ff=32, **GATED), dtype)
        up, across = weights.up, transposed(weights).up
        half = dtype == torch.bfloat16
        assert cpu.slower_than_torch(tokens(6, 24, dtype), up) is None
        assert ("bfloat16" in str(cpu.slower_than_torch(tokens(7, 24, dtype), up))) == half
        assert cpu.slower_than_torch(tokens(7, 24, torch.float32), up) is None
        assert half or cpu.slower_than_torch(tokens(16, 24, dtype), across) is None
        assert half or "transposed" in str(cpu.slower_than_torch(tokens(17, 24, dtype), across))
