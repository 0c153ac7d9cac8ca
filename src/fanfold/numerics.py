"""The one tolerance rule, and the mutants that every comparison must reject.

Rule: error(kernel, float64) <= 2 * error(PyTorch eager in the same dtype, float64).
Errors are root mean square over elements, and the largest over tokens, on outputs scaled to unit variance.
The allowance never falls below one rounding of the output (unit roundoff times the largest output), because no
result that is stored in a dtype can be closer than that. Source of the self-scaling form: flash-attention's tests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from . import activations
from .spec import Spec
from .weights import Weights, to_float64

Array = np.ndarray[Any, np.dtype[np.float64]]

# unit roundoff: half the distance from 1 to the next number
UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
FACTOR = 2.0


def dtype_name(value: Any) -> str:
    """'float32', 'bfloat16', … of an array, a tensor or a dtype."""
    return str(getattr(value, "dtype", value)).removeprefix("torch.")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `compare` found; true if the kernel is within the rule.

    rms, worst_token        errors of the kernel against float64, outputs scaled to unit variance.
    rms_allowed, worst_allowed  what the rule allows for each.
    """

    rms: float
    worst_token: float
    rms_allowed: float
    worst_allowed: float

    @property
    def ok(self) -> bool:
        finite = np.isfinite(self.rms_allowed) and np.isfinite(self.worst_allowed)  # else the truth is no number
        return bool(finite) and self.rms <= self.rms_allowed and self.worst_token <= self.worst_allowed

    def __bool__(self) -> bool:
        return self.ok

    @property
    def ratio(self) -> float:
        """The larger of the two errors as a share of what is allowed: at most 1 when ok."""
        if not (np.isfinite(self.rms_allowed) and np.isfinite(self.worst_allowed)):
            return float("inf")
        pairs = ((self.rms, self.rms_allowed), (self.worst_token, self.worst_allowed))
        return max(0.0 if e == 0 else (e / a if a > 0 else float("inf")) for e, a in pairs)


def _errors(y: Array, truth: Array) -> tuple[float, float]:
    """(rms, largest rms of a token) of y - truth over unit-variance outputs; inf if anything is not finite."""
    if truth.size == 0:
        return 0.0, 0.0
    scale = float(np.sqrt(np.mean(truth**2))) or 1.0
    diff = (y - truth) / scale
    if not np.all(np.isfinite(diff)):
        return float("inf"), float("inf")
    per_token = np.sqrt(np.mean(diff.reshape(-1, diff.shape[-1]) ** 2, axis=1))
    return float(np.sqrt(np.mean(diff**2))), float(per_token.max())


def relative_error(y: Any, truth: Any) -> float:
    """Root mean square of y - truth over that of truth; inf if anything is not finite."""
    return _errors(to_float64(y), to_float64(truth))[0]


def compare(y: Any, truth: Any, torch_y: Any, dtype: Any = None) -> Comparison:
    """Hold `y` to the rule.

    y        the kernel's result; truth  the float64 reference; torch_y  PyTorch's result in the same dtype.
    dtype    the dtype both computed in (default: torch_y's), which sets the one-rounding floor.
    Raises ValueError when the shapes differ.
    """
    a, t, b = to_float64(y), to_float64(truth), to_float64(torch_y)
    if not a.shape == t.shape == b.shape:
        raise ValueError(f"shapes differ: kernel {a.shape}, truth {t.shape}, torch {b.shape}")
    rms, worst = _errors(a, t)
    torch_rms, torch_worst = _errors(b, t)
    roundoff = UNIT_ROUNDOFF[dtype_name(torch_y if dtype is None else dtype)]
    scale = float(np.sqrt(np.mean(t**2))) or 1.0 if t.size else 1.0
    floor = roundoff * (float(np.abs(t).max()) / scale if t.size else 0.0)
    return Comparison(rms, worst, FACTOR * max(torch_rms, floor), FACTOR * max(torch_worst, floor))


def ulp_error(y: Any, truth: Any, dtype: Any = np.float32) -> Array:
    """|y - truth| in units in the last place of `truth` rounded to `dtype` (a NumPy dtype), elementwise."""
    t = to_float64(truth)
    ulp = np.spacing(np.abs(t.astype(dtype))).astype(np.float64)
    return np.abs(to_float64(y) - t) / ulp


def mutants(weights: Weights) -> Iterator[tuple[str, Weights]]:
    """Wrong FFNs nearest to `weights`: each must fail a comparison against the right one.

    Another activation (the nearest ones first), gate and up exchanged, each bias missing, the clamps or the offset
    forgotten, one channel's row of each matrix wrong. Only those that really differ from `weights` are given.
    """
    spec = weights.spec
    grid = np.linspace(-4.0, 4.0, 17)
    here = activations.get(spec.activation).numpy(grid, spec.params)
    for name in _neighbours(spec.activation):
        act = activations.get(name)
        if np.array_equal(act.numpy(grid, act.params), here):
            continue  # silu with beta 1.702 is gelu_sigmoid
        fields = {"activation": name, "activation_params": tuple(act.params.items()), "beta": None}
        yield f"activation {name}", weights.replace(spec=dataclasses.replace(spec, **fields))
    symmetric = spec.activation == "identity" and spec.gate_limit == spec.up_limit is None and not spec.up_offset
    if spec.gated and not symmetric:
        swapped = dataclasses.replace(spec, up_bias=spec.gate_bias, gate_bias=spec.up_bias)
        yield (
            "gate and up exchanged",
            weights.replace(
                spec=swapped,
                gate=weights.up,
                up=weights.gate,
                gate_bias=weights.up_bias,
                up_bias=weights.gate_bias,
            ),
        )
    for name in ("gate_bias", "up_bias", "down_bias"):
        if getattr(spec, name):
            yield f"{name} missing", weights.replace(spec=dataclasses.replace(spec, **{name: False}), **{name: None})
    for name, neutral in (("gate_limit", None), ("up_limit", None), ("up_offset", 0.0)):
        if getattr(spec, name) != neutral:
            yield f"{name} forgotten", weights.replace(spec=dataclasses.replace(spec, **{name: neutral}))
    for name in ("gate", "up", "down"):
        value = getattr(weights, name)
        if value is not None:
            wrong = value.clone() if hasattr(value, "clone") else value.copy()
            wrong[-1] = -wrong[-1]
            yield f"last row of {name} negated", weights.replace(**{name: wrong})


def output_mutants(y: Any) -> Iterator[tuple[str, Any]]:
    """Wrong outputs made from a right one `y` [..., tokens, d_model]: zeros, one token zeroed, one token repeated."""
    y = to_float64(y)
    if y.size == 0:
        return
    yield "zeros", np.zeros_like(y)
    rows = y.reshape(-1, y.shape[-1])
    one = rows.copy()
    one[-1] = 0.0
    yield "last token zero", one.reshape(y.shape)
    if len(rows) > 1:
        repeated = rows.copy()
        repeated[-1] = rows[0]
        yield "first token written to the last", repeated.reshape(y.shape)


def _neighbours(name: str) -> list[str]:
    groups = (
        ("gelu_erf", "gelu_tanh", "gelu_sigmoid", "silu"),
        ("relu", "leaky_relu", "relu2"),
        ("silu", "mish", "gelu_sigmoid"),
        ("elu", "xielu", "leaky_relu"),
        ("sigmoid", "tanh", "softplus"),
    )
    near = [n for group in groups if name in group for n in group if n != name]
    return list(dict.fromkeys(near)) or ["relu", "silu"]


def random_weights(spec: Spec, seed: int = 0, make: Callable[[Array], Any] | None = None) -> Weights:
    """Gaussian weights with unit-variance pre-activations for unit-variance x; biases of std 0.5.

    make  turns each float64 array into what the Weights hold (a dtype, a tensor); default: the array itself.
    """
    rng = np.random.default_rng(seed)
    d, f = spec.d_model, spec.d_ff
    make = make or (lambda a: a)
    values: dict[str, Any] = {
        "up": make(rng.normal(size=(f, d)) / d**0.5),
        "down": make(rng.normal(size=(d, f)) / f**0.5),
    }
    if spec.gated:
        values["gate"] = make(rng.normal(size=(f, d)) / d**0.5)
    for name, size in (("gate_bias", f), ("up_bias", f), ("down_bias", d)):
        if getattr(spec, name):
            values[name] = make(rng.normal(size=size) * 0.5)
    return Weights(spec, **values)
