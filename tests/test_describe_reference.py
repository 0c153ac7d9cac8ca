"""The float64 reference against torch and finite differences; the tolerance rule against its mutants."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import fanfold as ff
from fanfold import numerics, reference
from fanfold.activations import ACTIVATIONS
from fanfold.kernels import torch as eager

ALL = sorted(ACTIVATIONS)


def _specs() -> list[ff.Spec]:
    out = []
    for name in ALL:
        for d_model, d_ff in ((5, 7), (6, 6)):
            base = ff.Spec(d_model=d_model, d_ff=d_ff, activation=name)
            out += [base, dataclasses.replace(base, up_bias=True, down_bias=True)]
            gated = dataclasses.replace(base, gated=True)
            out += [gated, dataclasses.replace(gated, gate_bias=True, up_bias=True, down_bias=True)]
    clamped = {"gate_limit": 1.5, "up_limit": 1.0}
    out += [ff.Spec(d_model=5, d_ff=7, activation=n, gated=True, **clamped, up_offset=1.0) for n in ALL]
    out += [ff.Spec(d_model=5, d_ff=7, activation="silu", gated=True, gate_bias=True), *_oai()]
    return out


def _oai() -> list[ff.Spec]:
    return [ff.Spec.parse("swiglu_oai", d_model=6, d_ff=6, up_bias=True, gate_bias=True, down_bias=True)]


def _name(spec: ff.Spec) -> str:
    return spec.describe().replace(" ", "_")


def _inputs(spec: ff.Spec, tokens: int = 4, seed: int = 3) -> tuple[np.ndarray, ff.Weights, np.ndarray]:
    rng = np.random.default_rng(seed)
    x, grad_y = rng.normal(size=(2, tokens, spec.d_model))
    x *= max(1.0, (spec.gate_limit or 0.0) / 1.5)
    return x, numerics.random_weights(spec, seed), grad_y


def _torch(x: np.ndarray, weights: ff.Weights, grad_y: np.ndarray, dtype: torch.dtype):
    """(y, gradients by name) of PyTorch eager in `dtype`."""
    tensors = {n: torch.tensor(a, dtype=dtype, requires_grad=True) for n, a in weights.items()}
    xt = torch.tensor(x, dtype=dtype, requires_grad=True)
    y = eager.forward(xt, ff.Weights(weights.spec, **tensors))
    y.backward(torch.tensor(grad_y, dtype=dtype))
    return y.detach(), {"x": xt.grad, **{n: t.grad for n, t in tensors.items()}}


@pytest.mark.parametrize("spec", _specs(), ids=_name)
def test_forward_and_backward_against_torch(spec):
    """Nearer to torch's float64 autograd than twice torch's float32: forward, and the gradient of everything."""
    x, weights, grad_y = _inputs(spec)
    y64, grads64 = _torch(x, weights, grad_y, torch.float64)
    y32, grads32 = _torch(x, weights, grad_y, torch.float32)
    assert numerics.compare(reference.forward(x, weights), y64, y32).ok
    grads = reference.backward(x, weights, grad_y)
    assert grads.keys() == grads64.keys()
    for name, grad in grads.items():
        assert grad.shape == tuple(grads64[name].shape)
        assert numerics.compare(grad, grads64[name], grads32[name]).ok, name


@pytest.mark.parametrize("spec", _specs(), ids=_name)
def test_mutants_fail(spec):
    """Every wrong FFN and every wrong output is outside the rule, in the forward pass."""
    x, weights, grad_y = _inputs(spec, tokens=12)
    y64, _ = _torch(x, weights, grad_y, torch.float64)
    y32, _ = _torch(x, weights, grad_y, torch.float32)
    wrong = {name: reference.forward(x, w) for name, w in numerics.mutants(weights)}
    wrong.update(numerics.output_mutants(y64))
    assert len(wrong) >= 5
    for name, y in wrong.items():
        assert not numerics.compare(y, y64, y32).ok, name


def _difference(x, weights, grad_y, name: str, along: np.ndarray, h: float) -> float:
    """Central difference of sum(forward * grad_y) when `name` moves by h along `along`."""

    def moved(step: float) -> float:
        if name == "x":
            return float(np.sum(reference.forward(x + step * along, weights) * grad_y))
        changed = weights.replace(**{name: getattr(weights, name) + step * along})
        return float(np.sum(reference.forward(x, changed) * grad_y))

    return (moved(h) - moved(-h)) / (2 * h)


def _difference_bound(x, weights, grad_y, coarse: float, fine: float, h: float) -> float:
    """How far the difference with step h may be from the derivative.

    Truncation is c h^2: that of step h is a third of what separates step 2h from step h; allowed three times over.
    Rounding: each of the two sums has at most D + F + T products and as many roundings of its largest partial sum.
    """
    spec = weights.spec
    absolute = {n: np.abs(a) for n, a in weights.items()}
    m = np.abs(reference.coefficients(x, weights))
    size = float(np.sum(np.abs(grad_y) * (m @ absolute["down"].T + absolute.get("down_bias", 0.0))))
    terms = spec.d_model + spec.d_ff + x.size
    return abs(coarse - fine) + terms * numerics.UNIT_ROUNDOFF["float64"] * size / h


@pytest.mark.parametrize("spec", _specs(), ids=_name)
def test_backward_against_finite_differences(spec):
    x, weights, grad_y = _inputs(spec)
    grads = reference.backward(x, weights, grad_y)
    rng = np.random.default_rng(11)
    h = 2.0**-16
    for name, grad in grads.items():
        along = rng.normal(size=grad.shape)
        coarse = _difference(x, weights, grad_y, name, along, 2 * h)
        fine = _difference(x, weights, grad_y, name, along, h)
        bound = _difference_bound(x, weights, grad_y, coarse, fine, h)
        assert abs(fine - np.sum(grad * along)) <= bound, name
        for other in (-grad, grad * 1.001, np.zeros_like(grad)):
            assert abs(fine - np.sum(other * along)) > bound, name


@pytest.mark.parametrize("spec", [_specs()[3], *_oai()], ids=_name)
def test_zero_and_one_token(spec):
    for shape in ((0, spec.d_model), (2, 0, spec.d_model), (spec.d_model,), (2, 1, spec.d_model)):
        x = np.ones(shape)
        weights = numerics.random_weights(spec)
        assert reference.forward(x, weights).shape == shape
        assert reference.coefficients(x, weights).shape == (*shape[:-1], spec.d_ff)
        grads = reference.backward(x, weights, np.ones(shape))
        assert grads["x"].shape == shape
        if not x.size:
            assert all(not g.any() for g in grads.values())


def test_every_token_has_its_own_row():
    """Rows that differ, each equal to the row computed alone: a kernel that writes row 0 only would be seen."""
    x, weights, _ = _inputs(ff.Spec(d_model=5, d_ff=7, activation="silu", gated=True))
    whole = reference.forward(x, weights)
    for row, y in zip(x, whole, strict=True):
        assert numerics.compare(reference.forward(row, weights)[None], y[None], y[None].astype(np.float32)).ok


def test_properties():
    """Permuting channels changes nothing; scaling down scales y; the sum of two shards is the whole."""
    x, weights, _ = _inputs(ff.Spec(d_model=5, d_ff=8, activation="gelu", gated=True))
    y = reference.forward(x, weights)
    order = np.random.default_rng(0).permutation(8)
    y32 = y.astype(np.float32)
    parts = {n: getattr(weights, n) for n in ("gate", "up", "down")}
    permuted = weights.replace(gate=parts["gate"][order], up=parts["up"][order], down=parts["down"][:, order])
    assert numerics.compare(reference.forward(x, permuted), y, y32).ok
    assert np.array_equal(reference.forward(x, weights.replace(down=2 * parts["down"])), 2 * y)
    half = dataclasses.replace(weights.spec, d_ff=4)
    shards = [
        ff.Weights(half, gate=parts["gate"][s], up=parts["up"][s], down=parts["down"][:, s])
        for s in (slice(0, 4), slice(4, 8))
    ]
    assert numerics.compare(sum(reference.forward(x, w) for w in shards), y, y32).ok


def test_reference_errors():
    x, weights, grad_y = _inputs(ff.Spec(d_model=5, d_ff=7, activation="silu"))
    with pytest.raises(ValueError, match=r"x has shape \(4, 4\), expected \(…, 5\)"):
        reference.forward(x[:, :4], weights)
    with pytest.raises(ValueError, match=r"grad_y has shape \(3, 5\), expected x's \(4, 5\)"):
        reference.backward(x, weights, grad_y[:3])


# --- the rule itself ---


def test_compare_floor_is_one_rounding():
    """Where torch happens to be exact, a result may still be off by twice its own rounding, and by no more."""
    truth = np.random.default_rng(0).normal(size=(64, 64))
    exact = torch.tensor(truth)
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        assert numerics.compare(exact.to(dtype), truth, truth, dtype=name).ok
        largest = np.abs(truth).max()
        off = truth + 3 * numerics.UNIT_ROUNDOFF[name] * largest
        assert not numerics.compare(off, truth, truth, dtype=name).ok


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_compare_fails_what_is_not_finite(bad):
    truth = np.ones((3, 4))
    y = truth.copy()
    y[1, 2] = bad
    assert not numerics.compare(y, truth, truth.astype(np.float32)).ok
    assert numerics.compare(y, truth, truth.astype(np.float32)).ratio == np.inf
    assert numerics.relative_error(y, truth) == np.inf


def test_compare_one_bad_token_among_many():
    """The worst token is held to the rule too: the root mean square alone would hide one bad row in ten thousand."""
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(10_000, 8))
    y = truth.astype(np.float32)
    wrong = truth.copy()
    wrong[5000] += 2.0**-18
    found = numerics.compare(wrong, truth, y)
    assert found.rms <= found.rms_allowed
    assert not found.ok


def test_compare_shapes_and_nothing():
    with pytest.raises(ValueError, match=r"shapes differ: kernel \(2, 3\), truth \(3, 2\), torch \(3, 2\)"):
        numerics.compare(np.ones((2, 3)), np.ones((3, 2)), np.ones((3, 2)))
    assert numerics.compare(np.ones((0, 3)), np.ones((0, 3)), np.ones((0, 3), dtype=np.float32)).ok


# --- the battery fixture, as a backend's author uses it ---

BATTERY_SPECS = [s for s in _specs() if s.d_model == 6]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spec", BATTERY_SPECS, ids=_name)
def test_battery_passes_torch(ffn_battery, spec, dtype):
    probes = {"plain", "tail"} | ({"wide"} if spec.gate_limit else set())
    assert set(ffn_battery(eager.forward, spec, dtype=dtype)) == probes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_battery_catches_wrong_backends(ffn_battery, dtype):
    spec = ff.Spec.parse("geglu", d_model=16, d_ff=24, down_bias=True)

    def tanh_gelu(x, weights):
        wrong = dataclasses.replace(weights.spec, activation="gelu_tanh", beta=None, activation_params=())
        return eager.forward(x, weights.replace(spec=wrong))

    def deaf(x, weights):  # forgets whatever is special about these weights: right once, right for no mutant
        return kept.setdefault(tuple(x.flatten().tolist()), eager.forward(x, weights))

    def first_row(x, weights):
        y = eager.forward(x, weights)
        return torch.cat([y[:1]] * len(y))

    kept: dict = {}
    for forward, message in ((tanh_gelu, "probe"), (deaf, "mutants not rejected"), (first_row, "probe")):
        with pytest.raises(AssertionError, match=message):
            ffn_battery(forward, spec, dtype=dtype)


def test_battery_with_few_tokens(ffn_battery):
    spec = ff.Spec.parse("swiglu", d_model=6, d_ff=10)
    for tokens in (0, 1, 2):
        ffn_battery(eager.forward, spec, tokens=tokens)
