"""The elementwise half of training: the compiled pass on every instruction set, against float64 and PyTorch."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fanfold import Spec, activations, numerics
from fanfold.kernels import cpu, slopes
from fanfold.kernels import torch as torch_ops

NAMES = tuple(activations.ACTIVATIONS)
OAI = Spec.parse("swiglu_oai", d_model=8, d_ff=45)
DTYPES = (torch.float32, torch.bfloat16)
OUT = ("m", "gate", "up")


@pytest.fixture(params=cpu.isas())
def isa(request, monkeypatch):
    monkeypatch.setenv("FANFOLD_ISA", request.param)
    return request.param


def spec_of(name: str, gated: bool = True, d_ff: int = 45, **fields) -> Spec:
    return Spec(d_model=8, d_ff=d_ff, activation=name, gated=gated, **fields)


def pre_activations(spec: Spec, dtype, tokens: int = 29, scale: float = 2.0) -> list[torch.Tensor]:
    """gate, up and a gradient [T, F], every row of its own size."""
    generator = torch.Generator().manual_seed(tokens)
    size = torch.linspace(0.3, 1.7, tokens)[:, None]
    made = [torch.randn(tokens, spec.d_ff, generator=generator) * size * scale for _ in range(3)]
    return [t.to(dtype) for t in made]


def by_autograd(spec: Spec, gate, up, grad, dtype, mask=None) -> dict[str, torch.Tensor]:
    """What PyTorch's own derivative of the formula gives in `dtype`."""
    g, u = (t.to(dtype).requires_grad_() for t in (gate, up))
    m = torch_ops.coefficients(spec, u, g if spec.gated else None)
    if mask is not None:
        m = m * mask / (1 - spec.dropout)
    wanted = {"gate": g, "up": u} if spec.gated else {"up": u}
    found = torch.autograd.grad(m, list(wanted.values()), grad.to(dtype))
    return {"m": m.detach(), **dict(zip(wanted, found))}


def compiled(spec: Spec, gate, up, grad, mask=None) -> dict[str, torch.Tensor]:
    """What the kernel gives, each result in memory of its own; it must run."""
    out = {name: torch.full_like(up, math.nan) for name in OUT}
    gate_in, gate_out = (gate, out["gate"]) if spec.gated else (None, None)
    assert slopes._compiled(spec, gate_in, up, grad, gate_out, out["up"], out["m"], mask)
    return out if spec.gated else {name: out[name] for name in ("m", "up")}


def verdicts(found, spec: Spec, gate, up, grad, mask=None) -> dict[str, bool]:
    dtype = up.dtype
    truth, eager = (by_autograd(spec, gate, up, grad, d, mask) for d in (torch.float64, dtype))
    return {name: bool(numerics.compare(found[name], truth[name], eager[name])) for name in truth}


@pytest.mark.parametrize("name", NAMES)
def test_coefficients_and_gradients_by_the_rule(isa, name):
    """Every activation, gated and not, both dtypes, a width that no vector divides; another activation's must fail."""
    for dtype in DTYPES:
        for gated in (True, False):
            spec = spec_of(name, gated)
            gate, up, grad = pre_activations(spec, dtype)
            found = compiled(spec, gate, up, grad)
            assert all(verdicts(found, spec, gate, up, grad).values()), (dtype, gated)
    spec = spec_of(name)  # in bfloat16 the rule does not tell relu from leaky_relu
    gate, up, grad = pre_activations(spec, torch.float32)
    found = compiled(spec, gate, up, grad)
    for other in NAMES:
        assert other == name or not all(verdicts(found, spec_of(other), gate, up, grad).values()), other


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_within_a_rounding_everywhere(isa, name):
    """Over a fine grid, sharper than the rule, which compares with PyTorch: most is 0.96 (scalar, AVX2). A slope that
    holds 1 - s, which cancels, was 1.7 (silu) to 8.1 (gelu_tanh) roundings off."""
    for reach in (1.0, 6.0):
        gate = torch.linspace(-reach, reach, 1 << 16)[None]
        spec, ones = spec_of(name, d_ff=gate.shape[1]), torch.ones_like(gate)
        found = compiled(spec, gate, ones, ones)
        truth = by_autograd(spec, gate.double(), ones, ones, torch.float64)
        for part in truth:
            error = numerics.relative_error(found[part], truth[part])
            assert error <= 1.2 * numerics.UNIT_ROUNDOFF["float32"], (reach, part, error)


def test_clamps_offset_and_dropout(isa):
    spec = Spec.parse("swiglu_oai", d_model=8, d_ff=45, dropout=0.3)
    for dtype in DTYPES:
        gate, up, grad = pre_activations(spec, dtype, scale=9.0)
        mask = torch.rand(up.shape, generator=torch.Generator().manual_seed(1)) > 0.3
        for m in (None, mask):
            found = compiled(spec, gate, up, grad, m)
            assert all(verdicts(found, spec, gate, up, grad, m).values()), (dtype, m is None)
            assert not found["gate"][gate > spec.gate_limit].any()
            assert not found["up"][up.abs() > spec.up_limit].any()
        assert not any(found[name][~mask].any() for name in found)
        no_clamp = spec_of("silu", activation_params=spec.activation_params, up_offset=spec.up_offset, dropout=0.3)
        no_offset = spec_of("silu", activation_params=spec.activation_params, gate_limit=7.0, up_limit=7.0, dropout=0.3)
        for wrong in (no_clamp, no_offset):
            assert not all(verdicts(found, wrong, gate, up, grad, mask).values())


@pytest.mark.parametrize("width", [1, 3, 16, 17, 64])
def test_places(isa, width):
    """Results over their inputs as `blocks` places them, halves of wider rows, any number of threads: the same bits."""
    spec = spec_of("gelu_tanh", d_ff=width)
    for dtype in DTYPES:
        gate, up, grad = pre_activations(spec, dtype, tokens=11)
        expected = compiled(spec, gate, up, grad)
        both = torch.full((11, 2 * width + 3), math.nan, dtype=dtype)
        g, d, u = both[:, :width], both[:, width : 2 * width], up.clone()
        g.copy_(gate)
        d.copy_(grad)
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            slopes.gradients(spec, g, u, d, g, True, u, None)
        finally:
            torch.set_num_threads(threads)
        for name, place in (("gate", g), ("up", d), ("m", u)):
            assert torch.equal(place, expected[name]), (dtype, name)
        assert both[:, 2 * width :].isnan().all()
        slopes.coefficients(spec, gate, up, gate, None)
        assert torch.equal(gate, expected["m"])


@pytest.mark.parametrize("name", NAMES)
def test_special_values(isa, name):
    """NaN comes through, and where else PyTorch's own derivative is a finite number, ours is that number."""
    values = [math.nan, 0.0, -0.0, 1e-42, -1e-42, 1e-3, -1e-3, 88.0, -88.0, 300.0, -300.0, 1e19, -1e19, 1e38, -1e38,
              math.inf, -math.inf]  # fmt: skip
    spec = spec_of(name, d_ff=len(values))
    for dtype in DTYPES:
        gate = torch.tensor([values], dtype=dtype)
        for factor in (1.0, -0.5):
            up, grad = torch.full_like(gate, factor), torch.full_like(gate, 0.75)
            found = compiled(spec, gate, up, grad)
            eager = by_autograd(spec, gate, up, grad, torch.float32)
            assert found["m"][0, 0].isnan()
            for part in found:
                right = eager[part].to(dtype)
                finite = right.isfinite() & ~gate.isnan()
                close = torch.isclose(found[part], right, rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-37)
                assert close[finite].all(), (dtype, part, gate[finite & ~close], found[part], right)


def test_where_the_kernels_do_not_run_pytorchs_ops_do(monkeypatch):
    spec = spec_of("silu")
    for dtype in (torch.float64, torch.float16):
        gate, up, grad = pre_activations(spec, dtype)
        assert not slopes._compiled(spec, gate, up, grad, gate, grad, up, None)
    gate, up, grad = pre_activations(spec, torch.float32)
    assert not slopes._compiled(spec, gate.t(), up.t(), grad.t(), gate.t(), grad.t(), up.t(), None)
    with FlopCounterMode(display=False):  # a dispatch mode would not see it
        assert not slopes._compiled(spec, gate, up, grad, gate, grad, up, None)
    monkeypatch.setattr(cpu, "available", lambda: "none")
    truth = by_autograd(spec, gate, up, grad, torch.float64)
    slopes.gradients(spec, gate, up, grad, gate, True, up, None)
    for name, place in (("gate", gate), ("up", grad), ("m", up)):
        assert torch.allclose(place.double(), truth[name], rtol=1e-5, atol=1e-6), name


def test_nothing_to_do(isa):
    for tokens, width in ((0, 5), (3, 0)):
        spec = spec_of("silu", d_ff=5)
        empty = torch.empty(tokens, width)
        slopes.coefficients(spec, empty, empty.clone(), empty.clone(), None)
