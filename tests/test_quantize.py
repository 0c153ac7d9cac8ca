"""Quantizing one FFN: rounding, GPTQ against rounding, the guard's choice of activations, and what is refused."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

import fanfold as ff
from fanfold import formats, numerics
from fanfold.kernels import torch as torch_ops
from fanfold.kernels.packed import FORMATS, PackedMatrix
from fanfold.quantize import gptq, guard
from fanfold.quantize.ffn import quantize_ffn
from fanfold.weights import Weights

D, F, T = 96, 200, 600  # neither width is a whole number of groups of 64 or 128


def _weights(name: str = "swiglu", seed: int = 0, **fields) -> Weights:
    spec = ff.Spec.parse(name, d_model=D, d_ff=F, **fields)
    return numerics.random_weights(spec, seed, make=lambda a: torch.from_numpy(a).float())


def _inputs(seed: int = 0, spread: float = 1.5) -> torch.Tensor:
    """[T, D] correlated inputs of unequal size, as a model's are: GPTQ lives on that."""
    rng = np.random.default_rng(seed)
    mix = np.random.default_rng(7).normal(size=(24, D))
    x = rng.normal(size=(T, 24)) @ mix / 24**0.5 + 0.3 * rng.normal(size=(T, D))
    return torch.from_numpy(x * np.exp(np.linspace(-spread, spread, D))).float()


def _truth(x: torch.Tensor, weights: Weights) -> torch.Tensor:
    return torch_ops.forward(x, weights)


def _weights_only(x: torch.Tensor, packed: Weights) -> torch.Tensor:
    return torch_ops.forward(x, torch_ops.dequantized(packed, torch.float32))


def _error(x: torch.Tensor, packed: Weights, weights: Weights) -> float:
    return numerics.relative_error(_weights_only(x, packed), _truth(x, weights))


@pytest.mark.parametrize("format", [*FORMATS, "int4"])
@pytest.mark.parametrize("name", ["swiglu", "gelu_erf"])
def test_every_format(format, name):
    """Packed matrices of that format; each dequantizes to the weights, up to its own rounding."""
    biases = {"up_bias": True, "down_bias": True}
    w = _weights(name, **biases, **({"gate_bias": True} if name == "swiglu" else {}))
    q = ff.quantize(w, format)
    assert q.spec == w.spec
    for key, value in q.items():
        if key.endswith("bias"):
            assert torch.equal(value, getattr(w, key))
            assert value.is_contiguous()
            continue
        assert isinstance(value, PackedMatrix)
        assert value.format == ("int4_g32" if format == "int4" else format)
        wanted = (
            formats.quantize_matrix(getattr(w, key).numpy(), format).dequantize()
            if value.format in formats.INTEGER
            else getattr(w, key).to(value.dequantize().dtype)
        )
        assert np.array_equal(value.dequantize().float().numpy(), torch.as_tensor(wanted).float().numpy())


def test_accepts_arrays_tensors_of_any_dtype_and_packed_matrices():
    w = _weights()
    base = ff.quantize(w, "int8_g64")
    arrays = w.replace(**{n: v.double().numpy() for n, v in w.items()})
    arrays.up.flags.writeable = False
    strided = w.replace(up=torch.stack([w.up, w.up], dim=-1)[..., 0])
    for other in (arrays, strided):
        assert torch.equal(ff.quantize(other, "int8_g64").up.data, base.up.data)
    again = ff.quantize(base, "int8_g64", method="gptq", inputs=_inputs())
    assert torch.equal(again.up.data, base.up.data)  # its own codes, by any method
    half = ff.quantize(w.replace(**{n: v.bfloat16() for n, v in w.items()}), "bf16")
    assert torch.equal(half.up.dequantize(), w.up.bfloat16())
    assert ff.quantize(base, "fp32").up.dequantize().equal(base.up.dequantize())


@pytest.mark.parametrize("format", ["int4_g32", "int4_g128", "q4_0", "q4_1", "int8_g64", "int8"])
@pytest.mark.parametrize("name", ["swiglu", "gelu_erf"])
def test_gptq_beats_rounding_on_other_inputs(format, name):
    """Calibrated on one half of the inputs, measured on the other: squared error at least halved on 4 bits."""
    w, x = _weights(name), _inputs()
    rtn = _error(_inputs(1), ff.quantize(w, format), w)
    calibrated = _error(_inputs(1), ff.quantize(w, format, method="gptq", inputs=x), w)
    assert calibrated**2 < rtn**2 / (2 if "4" in format.split("_")[0] else 1)


def test_gptq_without_passing_errors_on_is_seen():
    """Mutant: a Hessian without its off-diagonal is rounding to nearest; it must not pass the test above."""
    w, x = _weights().up, _inputs()
    y = _inputs(1) @ w.T

    def error(q):
        return numerics.relative_error(_inputs(1) @ torch.from_numpy(q.dequantize()).T, y)

    h = gptq.hessian(x)
    whole = error(gptq.gptq(w, gptq.prepare(h, "int4_g32")))
    mutant = error(gptq.gptq(w, gptq.prepare(torch.diag(h.diagonal()), "int4_g32")))
    assert whole**2 < error(formats.quantize_matrix(w.numpy(), "int4_g32")) ** 2 / 2 < mutant**2


def test_gptq_says_where_a_scale_no_longer_fits():
    """Errors passed on can make a weight larger than the matrix had any."""
    found = formats.quantize_matrix(np.ones((4, 64), np.float32), "int4_g32")
    table = gptq._Table("int4_g32", found, np.ones(64, np.float32))
    w = torch.zeros(4, 64)
    w[2, 40] = 1e7
    with pytest.raises(ValueError, match=r"group 1, while gptq was at work: row 2, inputs 0 to 31: .* scale"):
        table.fit(w, 32, 64, 1)
    assert table.fit(w, 0, 32, 0)[0].shape == (4,)


def test_gptq_is_deterministic_and_leaves_its_arguments_alone():
    w, x = _weights(), _inputs()
    before = w.up.clone(), x.clone()
    first, second = (ff.quantize(w, "int4_g128", method="gptq", inputs=x) for _ in range(2))
    for name, matrix in first.items():
        assert torch.equal(matrix.data, getattr(second, name).data)
    assert torch.equal(before[0], w.up)
    assert torch.equal(before[1], x)


def test_gptq_calibrates_down_on_the_coefficients_of_the_quantized_gate_and_up():
    w, x = _weights(), _inputs()
    q = ff.quantize(w, "int4_g32", method="gptq", inputs=x)
    up, gate = (x @ m.dequantize().T for m in (q.up, q.gate))
    c = torch_ops.coefficients(w.spec, up, gate)
    expected = PackedMatrix.pack(gptq.gptq(w.down, gptq.prepare(gptq.hessian(c), "int4_g32")))
    assert torch.equal(q.down.data, expected.data)


def test_dead_inputs_are_rounded_to_nearest():
    """An input that is always zero in the calibration may not be so later: its weights must not be lost."""
    w, x = _weights(), _inputs()
    x[:, 10:20] = 0
    q = ff.quantize(w, "int8_g32", method="gptq", inputs=x).up.dequantize()
    step = (w.up.abs().amax(1, keepdim=True) / 127).numpy()
    assert (np.abs((q - w.up)[:, 10:20].numpy()) <= step).all()


def test_gptq_falls_back_with_the_reason():
    w = _weights()
    with pytest.warns(UserWarning, match="all calibration inputs are zero: rounded to nearest") as seen:
        q = ff.quantize(w, "int4", method="gptq", inputs=torch.zeros(50, D))
    assert [str(one.message).split(":")[1] for one in seen] == [" gate and up", " down"]
    assert {one.filename for one in seen} == {__file__}
    assert torch.equal(q.up.data, ff.quantize(w, "int4").up.data)
    with pytest.raises(gptq.HessianError, match="not positive definite at input 1"):
        gptq.inverse_factor(torch.tensor([[1.0, 5.0], [5.0, 1.0]]))
    with pytest.raises(gptq.HessianError, match="not finite"):
        gptq.inverse_factor(torch.tensor([[1.0, math.nan], [math.nan, 1.0]]))


def test_few_tokens_are_enough_for_a_positive_definite_hessian():
    w = _weights()
    result = quantize_ffn(w, "int4_g64", "gptq", _inputs()[:1])
    assert result.notes == []


def test_tokens_that_are_not_finite_are_left_out():
    w, x = _weights(), _inputs()
    spoilt = torch.cat([x[:100], torch.full((1, D), math.nan), x[100:], torch.full((1, D), math.inf)])
    a, b = (ff.quantize(w, "int4", method="gptq", inputs=i) for i in (x, spoilt))
    assert torch.equal(a.down.data, b.down.data)
    with pytest.raises(ValueError, match="1 tokens, none of them finite"):
        ff.quantize(w, "int4", method="gptq", inputs=torch.full((1, D), math.nan))


def test_wrong_arguments():
    w, x = _weights(), _inputs()
    cases = [
        ({"format": "int5"}, r"'int5' is not known; known: fp32, bf16, .*q4_1, int4$"),
        ({"method": "awq"}, "'awq' is not known; known: rtn, gptq"),
        ({"method": "gptq"}, r"needs inputs=.*\[tokens, d_model\]"),
        ({"method": "gptq", "inputs": x[:, :-1]}, rf"inputs are \(600, 95\), expected .*d_model={D}"),
        ({"format": "bf16", "method": "gptq", "inputs": x}, "'gptq' is for formats with integer codes"),
        ({"format": "bf16", "activations": "int8"}, "activations='int8' is for formats with integer codes"),
        ({"activations": "int4"}, "known: auto, int8, float"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            ff.quantize(w, **arguments)
    bad = w.down.clone()
    bad[0, 3] = math.nan
    with pytest.raises(ValueError, match=r"down: weight \[0, 3\] is nan"):
        ff.quantize(w.replace(down=bad))
    with pytest.raises(ValueError, match=r"up: row 0, inputs 0 to 31: .*scale the matrix down"):
        ff.quantize(w.replace(up=w.up * 1e8))


def test_the_package_can_be_called_whatever_was_imported_first():
    """`fanfold.quantize` is a package and a verb: the import of a part of it must not hide the verb."""
    assert callable(ff.quantize)
    assert ff.quantize.guard is guard
    assert isinstance(ff.quantize(_weights(), "int8"), Weights)


@pytest.mark.parametrize("format", ["fp16", "int8_g64", "int4_g32", "q4_0"])
def test_runs_on_the_kernels(format):
    """The packed kernels give the product of the dequantized weights, with float activations to the rule."""
    w, x = _weights("swiglu", up_bias=True), _inputs()[:7]
    q = ff.quantize(w, format, activations="float")
    truth = ff.reference.forward(x.double().numpy(), _float64(q))
    assert numerics.compare(ff.ffn(x, q, "cpu"), truth, _weights_only(x, q))
    for _, mutant in numerics.mutants(torch_ops.dequantized(q, torch.float32)):
        assert not numerics.compare(torch_ops.forward(x, mutant), truth, _weights_only(x, q))


def _float64(q: Weights) -> Weights:
    return q.replace(
        **{n: torch_ops.dequantized(q, torch.float32).__getattribute__(n).double().numpy() for n, _ in q.items()}
    )


# ---- the guard ----


def _matrix(format: str = "int8_g32", n: int = 64) -> PackedMatrix:
    rng = np.random.default_rng(3)
    return PackedMatrix.pack(formats.quantize_matrix(rng.normal(size=(n, D)).astype(np.float32), format))


def _massive(factor: float) -> torch.Tensor:
    """Plain inputs, and one channel `factor` times as large, which the outputs hardly read."""
    x = torch.from_numpy(np.random.default_rng(4).normal(size=(T, D))).float()
    x[:, 40] *= factor
    return x


def _deaf(matrix: PackedMatrix) -> PackedMatrix:
    """The matrix with small weights for input 40: what is lost beside it is what counts."""
    w = matrix.dequantize().numpy().copy()
    w[:, 40] *= 1e-3
    return PackedMatrix.pack(formats.quantize_matrix(w, matrix.format))


def test_guard_takes_int8_for_plain_inputs():
    d = guard.decide(_matrix(), _massive(1))
    assert (d.activations, d.massive) == ("int8", 0)
    assert 0 < d.error < guard.LIMIT
    assert f"{guard.LIMIT:.2%} is allowed" in d.reason


def test_guard_finds_a_massive_channel():
    d = guard.decide(_deaf(_matrix()), _massive(300))
    assert (d.activations, d.massive) == ("float", 1)
    assert d.error > guard.LIMIT
    assert d.massive_share > 0.9
    assert "from 1 massive channel" in d.reason
    assert d.worst_token >= d.error


def test_guard_measures_what_it_says():
    """Its error is that of the codes which the kernels make, in float64."""
    matrix, x = _matrix("int8_g64"), _massive(5)
    codes, scale = formats.quantize_activations(x.numpy(), "int8_g64")
    seen = codes.astype(np.float64) * scale.astype(np.float64)[:, np.arange(D) // 64]
    w = matrix.quantized().dequantize(np.float64)
    share = np.linalg.norm((seen - x.numpy()) @ w.T, axis=1) / np.linalg.norm(x.double().numpy() @ w.T, axis=1)
    assert guard.decide(matrix, x).error == pytest.approx(float(np.sqrt(np.mean(share**2))), rel=1e-4)


def test_guard_expects_the_rounding_that_there_is():
    """weights_error, made from the scales alone, is within a fifth of the true one, for 8 and 4 bits."""
    rng = np.random.default_rng(5)
    w, x = rng.normal(size=(200, D)).astype(np.float32), _massive(1)
    for format in ("int8_g32", "int4_g32", "int8"):
        q = formats.quantize_matrix(w, format, scales="plain")
        true = numerics.relative_error(x @ torch.from_numpy(q.dequantize()).T, x @ torch.from_numpy(w).T)
        assert 0.8 < guard.decide(PackedMatrix.pack(q), x).weights_error / true < 1.25


def test_guard_allows_more_where_the_weights_are_coarse():
    found = [guard.decide(_deaf(_matrix(f)), _massive(25)) for f in ("int8_g32", "int4_g32")]
    assert [d.activations for d in found] == ["float", "int8"]
    assert "half of what the rounding of the weights costs" in found[1].reason


def test_guard_without_anything_to_judge():
    nan = torch.full((3, D), math.nan)
    for x in (torch.zeros(0, D), nan):
        d = guard.decide(_matrix(), x)
        assert (d.activations, d.error) == ("float", math.inf)
    spoilt = torch.cat([_massive(1), nan])
    assert guard.decide(_matrix(), spoilt) == guard.decide(_matrix(), _massive(1))
    zeros = guard.decide(_matrix(), torch.zeros(4, D))
    assert (zeros.activations, zeros.error) == ("int8", 0.0)
    assert guard.decide(PackedMatrix.pack(torch.ones(4, D), "bf16"), _massive(1)).activations == "float"
    with pytest.raises(ValueError, match=rf"shape \(5,\), expected \[tokens, {D}\]"):
        guard.decide(_matrix(), torch.zeros(5))


def test_gate_and_up_agree_and_the_worse_decides():
    good, bad, x = _matrix(), _deaf(_matrix()), _massive(300)
    assert guard.decide(good, _massive(1)).activations == "int8"
    together = guard.decide_together([good, bad], x)
    assert together == guard.decide(bad, x)


def test_quantize_uses_the_guard():
    w = _weights()
    calm = ff.quantize(w, "int8_g32", inputs=_massive(1))
    assert {m.activations for _, m in calm.items()} == {"int8"}
    small = {n: getattr(w, n).clone() for n in ("gate", "up")}
    for m in small.values():
        m[:, 40] *= 1e-3  # what is lost beside the massive input is what counts
    result = quantize_ffn(w.replace(**small), "int8_g32", inputs=_massive(3000))
    assert {n: m.activations for n, m in result.weights.items()}["gate"] == "float"
    assert result.weights.up.activations == "float"
    assert set(result.decisions) == {"gate and up", "down"}
    for forced in ("int8", "float"):
        q = ff.quantize(w, "int8_g32", inputs=_massive(3000), activations=forced)
        assert {m.activations for _, m in q.items()} == {forced}
    assert ff.quantize(w, "int8_g32").up.activations == "int8"  # nothing measured
    assert dataclasses.asdict(result.decisions["gate and up"])["activations"] == "float"
