"""The one table of activations: name, aliases, formula, derivative, torch form, source.

Every other table (the C++ ids, the torch ops, the identification candidates) is keyed by the names here.
All NumPy forms are float64 and stable in the tails: no NaN at +-1e4, no cancellation to 0 at -6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = Mapping[str, float]

_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
_INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)
_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def _sigmoid(x: Array) -> Array:
    # exp(-|x|) never overflows; for x < 0 sigmoid is e/(1+e), which keeps its full relative precision.
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0 / (1.0 + e), e / (1.0 + e))


def _dsigmoid(x: Array) -> Array:
    return _sigmoid(x) * _sigmoid(-x)


def _softplus(x: Array) -> Array:
    return np.logaddexp(0.0, x)


def _gelu_erf(x: Array, p: Params) -> Array:
    return 0.5 * x * _erfc(-x / math.sqrt(2.0))


def _dgelu_erf(x: Array, p: Params) -> Array:
    return 0.5 * _erfc(-x / math.sqrt(2.0)) + x * np.exp(-0.5 * x * x) * _INV_SQRT_2PI


def _gelu_tanh(x: Array, p: Params) -> Array:
    # 0.5 (1 + tanh u) == sigmoid(2u): the left form cancels to 0 from x = -6 on.
    return x * _sigmoid(2.0 * _SQRT_2_OVER_PI * (x + 0.044715 * x**3))


def _dgelu_tanh(x: Array, p: Params) -> Array:
    u2 = 2.0 * _SQRT_2_OVER_PI * (x + 0.044715 * x**3)
    du2 = 2.0 * _SQRT_2_OVER_PI * (1.0 + 3.0 * 0.044715 * x * x)
    return _sigmoid(u2) + x * _dsigmoid(u2) * du2


def _swish(x: Array, beta: float) -> Array:
    return x * _sigmoid(beta * x)


def _dswish(x: Array, beta: float) -> Array:
    return _sigmoid(beta * x) + beta * x * _dsigmoid(beta * x)


def _elu(x: Array, p: Params) -> Array:
    return np.where(x > 0, x, p["alpha"] * np.expm1(np.minimum(x, 0.0)))


def _delu(x: Array, p: Params) -> Array:
    return np.where(x > 0, 1.0, p["alpha"] * np.exp(np.minimum(x, 0.0)))


def _mish(x: Array, p: Params) -> Array:
    return x * np.tanh(_softplus(x))


def _dmish(x: Array, p: Params) -> Array:
    t = np.tanh(_softplus(x))
    return t + x * (1.0 - t * t) * _sigmoid(x)


def _xielu(x: Array, p: Params) -> Array:
    neg = (np.expm1(np.minimum(x, p["eps"])) - x) * p["alpha_n"]
    return np.where(x > 0, p["alpha_p"] * x * x, neg) + p["beta"] * x


def _dxielu(x: Array, p: Params) -> Array:
    # Between eps and 0 the clamped expm1 is constant, so its derivative is 0 there (as in the torch form).
    inner = np.where(x < p["eps"], np.exp(np.minimum(x, p["eps"])), 0.0)
    neg = (inner - 1.0) * p["alpha_n"]
    return np.where(x > 0, 2.0 * p["alpha_p"] * x, neg) + p["beta"]


@dataclass(frozen=True, kw_only=True)
class Activation:
    """One activation function.

    `numpy(x, params)` and `derivative(x, params)` take and return float64 arrays of any shape;
    `torch(torch_module, x, params)` is the same formula in torch ops (differentiable, any float dtype).
    `params` holds every name of `self.params`.
    """

    name: str
    formula: str
    source: str
    numpy: Callable[[Array, Params], Array]
    derivative: Callable[[Array, Params], Array]
    torch: Callable[[Any, Any, Params], Any]
    aliases: tuple[str, ...] = ()
    params: Mapping[str, float] = field(default_factory=dict)
    zero_preserving: bool = True  # act(0) == 0: a channel padded with zeros then adds nothing


_GELU = "Hendrycks & Gimpel 2016, arXiv:1606.08415"
_SWISH = "Ramachandran 2017, arXiv:1710.05941"

_TABLE = (
    Activation(
        name="relu",
        formula="max(x, 0)",
        source="Vaswani 2017, arXiv:1706.03762",
        numpy=lambda x, p: np.maximum(x, 0.0),
        derivative=lambda x, p: (x > 0).astype(np.float64),
        torch=lambda T, x, p: T.relu(x),
        aliases=("ReLU",),
    ),
    Activation(
        name="relu2",
        formula="max(x, 0)^2",
        source="So 2021 (Primer), arXiv:2109.08668",
        numpy=lambda x, p: np.maximum(x, 0.0) ** 2,
        derivative=lambda x, p: 2.0 * np.maximum(x, 0.0),
        torch=lambda T, x, p: T.square(T.relu(x)),
        aliases=("relu_squared", "squared_relu", "sqrelu", "relu^2", "relu_sqr"),
    ),
    Activation(
        name="gelu_erf",
        formula="x * (1 + erf(x / sqrt 2)) / 2",
        source=_GELU,
        numpy=_gelu_erf,
        derivative=_dgelu_erf,
        torch=lambda T, x, p: T.nn.functional.gelu(x),
        aliases=("gelu", "GELU", "gelu_python", "gelu_none"),
    ),
    Activation(
        name="gelu_tanh",
        formula="x * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))) / 2",
        source=_GELU,
        numpy=_gelu_tanh,
        derivative=_dgelu_tanh,
        torch=lambda T, x, p: T.nn.functional.gelu(x, approximate="tanh"),
        aliases=("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate", "gelu_approx"),
    ),
    Activation(
        name="gelu_sigmoid",
        formula="x * sigmoid(1.702 x)",
        source=_GELU,
        numpy=lambda x, p: _swish(x, 1.702),
        derivative=lambda x, p: _dswish(x, 1.702),
        torch=lambda T, x, p: x * T.sigmoid(1.702 * x),
        aliases=("quick_gelu", "gelu_quick"),
    ),
    Activation(
        name="silu",
        formula="x * sigmoid(beta x)",
        source=_SWISH,
        numpy=lambda x, p: _swish(x, p["beta"]),
        derivative=lambda x, p: _dswish(x, p["beta"]),
        torch=lambda T, x, p: T.nn.functional.silu(x) if p["beta"] == 1.0 else x * T.sigmoid(p["beta"] * x),
        aliases=("swish", "SiLU", "swish_1"),
        params={"beta": 1.0},
    ),
    Activation(
        name="sigmoid",
        formula="1 / (1 + exp(-x))",
        source="Dauphin 2016 (GLU), arXiv:1612.08083",
        numpy=lambda x, p: _sigmoid(x),
        derivative=lambda x, p: _dsigmoid(x),
        torch=lambda T, x, p: T.sigmoid(x),
        aliases=("logistic",),
        zero_preserving=False,
    ),
    Activation(
        name="tanh",
        formula="tanh(x)",
        source="classical",
        numpy=lambda x, p: np.tanh(x),
        derivative=lambda x, p: 4.0 * _dsigmoid(2.0 * x),
        torch=lambda T, x, p: T.tanh(x),
    ),
    Activation(
        name="identity",
        formula="x",
        source="Shazeer 2020 (bilinear), arXiv:2002.05202",
        numpy=lambda x, p: x.copy(),
        derivative=lambda x, p: np.ones_like(x),
        torch=lambda T, x, p: x,
        aliases=("linear", "none"),
    ),
    Activation(
        name="softplus",
        formula="log(1 + exp(x))",
        source="Dugas 2001",
        numpy=lambda x, p: _softplus(x),
        derivative=lambda x, p: _sigmoid(x),
        # torch's own default (threshold 20) drops up to 2e-9; 40 is exact in float64.
        torch=lambda T, x, p: T.nn.functional.softplus(x, threshold=40.0),
        zero_preserving=False,
    ),
    Activation(
        name="elu",
        formula="x if x > 0 else alpha * (exp(x) - 1)",
        source="Clevert 2015, arXiv:1511.07289",
        numpy=_elu,
        derivative=_delu,
        torch=lambda T, x, p: T.nn.functional.elu(x, alpha=p["alpha"]),
        params={"alpha": 1.0},
    ),
    Activation(
        name="mish",
        formula="x * tanh(log(1 + exp(x)))",
        source="Misra 2019, arXiv:1908.08681",
        numpy=_mish,
        derivative=_dmish,
        torch=lambda T, x, p: T.nn.functional.mish(x),
    ),
    Activation(
        name="leaky_relu",
        formula="x if x > 0 else slope * x",
        source="Maas 2013",
        numpy=lambda x, p: np.where(x > 0, x, p["slope"] * x),
        derivative=lambda x, p: np.where(x > 0, 1.0, p["slope"]),
        torch=lambda T, x, p: T.nn.functional.leaky_relu(x, p["slope"]),
        params={"slope": 0.01},
    ),
    Activation(
        name="xielu",
        formula="beta x + (alpha_p x^2 if x > 0 else alpha_n (expm1(min(x, eps)) - x))",
        source="Huang & Schlag 2024, arXiv:2411.13010",
        numpy=_xielu,
        derivative=_dxielu,
        torch=lambda T, x, p: (
            T.where(x > 0, p["alpha_p"] * x * x, (T.expm1(T.clamp(x, max=p["eps"])) - x) * p["alpha_n"]) + p["beta"] * x
        ),
        # alpha_p, alpha_n are the *effective* values: softplus of the stored ones, alpha_n with beta added.
        # At x = 0 the clamped branch leaves alpha_n * expm1(eps), about -1e-6: not exactly 0.
        params={"alpha_p": 0.8, "alpha_n": 0.8, "beta": 0.5, "eps": -1e-6},
        zero_preserving=False,
    ),
)

ACTIVATIONS: dict[str, Activation] = {a.name: a for a in _TABLE}
_BY_NAME = {alias: a for a in _TABLE for alias in (a.name, *a.aliases)}

# name -> (activation, further Spec fields). Shazeer 2020 for the first five; gpt-oss for the last.
GATED: dict[str, tuple[str, dict[str, float]]] = {
    "swiglu": ("silu", {}),
    "geglu": ("gelu_erf", {}),
    "geglu_erf": ("gelu_erf", {}),
    "geglu_tanh": ("gelu_tanh", {}),
    "reglu": ("relu", {}),
    "glu": ("sigmoid", {}),
    "bilinear": ("identity", {}),
    "swiglu_oai": ("silu", {"beta": 1.702, "gate_limit": 7.0, "up_limit": 7.0, "up_offset": 1.0}),
}


def get(name: str) -> Activation:
    """The activation called `name` (its own name or an alias; case of the alias as listed).

    Raises ValueError, listing the known names, when there is none.
    """
    found = _BY_NAME.get(name)
    if found is None:
        hint = " It names a gated FFN: use Spec.parse." if name in GATED else ""
        raise ValueError(f"activation {name!r} is not known; known: {', '.join(ACTIVATIONS)}.{hint}")
    return found
