"""`Spec`: what a feed-forward network is, in one frozen, validated object."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import activations


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The description of one feed-forward network (FFN).

    gated:    y = down(act(min(gate x, gate_limit)) * (clip(up x, -up_limit, up_limit) + up_offset))
    ungated:  y = down(act(up x))

    d_model, d_ff  positive ints: width of a token, number of channels.
    activation     a name or alias of `fanfold.activations`; stored under its own name ("gelu" -> "gelu_erf").
    gated          whether there is a gate projection.
    up_bias, gate_bias, down_bias  whether the projection adds a bias.
    activation_params  {name: value} of the activation's own parameters; missing ones take the table's default.
    beta           shorthand for activation_params={"beta": ...} (Swish's slope, xIELU's linear part).
    gate_limit, up_limit, up_offset  gated only: upper clamp of the gate, two-sided clamp of up (both before
                   the activation), and the constant added to up. gpt-oss: 7, 7, 1 with beta 1.702.
    dropout        probability of dropping a coefficient (after activation and gate, before down), in training.

    Raises ValueError for anything else. Source of the gated form: Shazeer 2020, arXiv:2002.05202.
    """

    d_model: int
    d_ff: int
    activation: str
    gated: bool = False
    up_bias: bool = False
    gate_bias: bool = False
    down_bias: bool = False
    beta: float | None = None
    activation_params: tuple[tuple[str, float], ...] = ()
    gate_limit: float | None = None
    up_limit: float | None = None
    up_offset: float = 0.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("d_model", "d_ff"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: expected a positive int")
        for name in ("gated", "up_bias", "gate_bias", "down_bias"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: expected True or False")
        act = activations.get(self.activation)
        set_ = object.__setattr__
        set_(self, "activation", act.name)
        set_(self, "activation_params", self._checked_params(act))
        set_(self, "beta", dict(self.activation_params).get("beta"))
        if not self.gated:
            for name, neutral in (("gate_bias", False), ("gate_limit", None), ("up_limit", None), ("up_offset", 0.0)):
                if getattr(self, name) != neutral:
                    raise ValueError(f"{name}={getattr(self, name)!r} needs gated=True")
        for name in ("gate_limit", "up_limit"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and value > 0):
                raise ValueError(f"{name}={value!r}: expected a positive number or None")
        if not _is_number(self.up_offset):
            raise ValueError(f"up_offset={self.up_offset!r}: expected a finite number")
        if not (_is_number(self.dropout) and 0 <= self.dropout < 1):
            raise ValueError(f"dropout={self.dropout!r}: expected 0 <= dropout < 1")
        set_(self, "_json", json.dumps(self.to_dict()))  # made once: operators carry it in each call

    def _checked_params(self, act: activations.Activation) -> tuple[tuple[str, float], ...]:
        given: dict[str, float] = dict(self.activation_params)
        if self.beta is not None:
            if "beta" in given and given["beta"] != self.beta:
                raise ValueError(f"beta={self.beta} and activation_params beta={given['beta']} disagree: give one")
            given["beta"] = self.beta
        unknown = sorted(set(given) - set(act.params))
        if unknown:
            known = ", ".join(act.params) or "none"
            raise ValueError(f"activation {act.name!r} has no parameter {', '.join(unknown)}; it has: {known}")
        for name, value in given.items():
            if not _is_number(value):
                raise ValueError(f"activation parameter {name}={value!r}: expected a finite number")
        return tuple((name, float(given.get(name, default))) for name, default in act.params.items())

    @property
    def params(self) -> dict[str, float]:
        """Every parameter of the activation, defaults filled in."""
        return dict(self.activation_params)

    @property
    def n_params(self) -> int:
        """Number of weights and biases."""
        matrices = (3 if self.gated else 2) * self.d_model * self.d_ff
        return matrices + self.d_ff * (self.up_bias + self.gate_bias) + self.d_model * self.down_bias

    @property
    def pad_exact(self) -> bool:
        """True if channels padded with zeros (weights and biases) leave the output exactly unchanged.

        A zero `value` (column of down) always does; this says that act(0) * up(0) is 0 as well.
        """
        if self.gated and self.up_offset == 0.0:
            return True  # the padded up is exactly 0
        return activations.get(self.activation).zero_preserving

    def describe(self) -> str:
        """One line: kind, widths, biases, extras."""
        extra = [f"{k}={v:g}" for k, v in self.params.items() if v != activations.get(self.activation).params[k]]
        extra += [f"{k}={getattr(self, k):g}" for k in ("gate_limit", "up_limit") if getattr(self, k) is not None]
        extra += [f"up_offset={self.up_offset:g}"] if self.up_offset else []
        biases = [p for p in ("gate", "up", "down") if getattr(self, f"{p}_bias")]
        extra += [f"bias on {'+'.join(biases)}"] if biases else []
        kind = f"gated {self.activation}" if self.gated else self.activation
        return f"{kind} {self.d_model}->{self.d_ff}" + (f" ({', '.join(extra)})" if extra else "")

    def to_dict(self) -> dict[str, Any]:
        """A dict of plain JSON values; `from_dict` gives the equal Spec back."""
        out = dataclasses.asdict(self)
        out["activation_params"] = dict(self.activation_params)
        return out

    def to_json(self) -> str:
        """`to_dict` as one line of JSON."""
        return self._json  # type: ignore[attr-defined]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Spec:
        """The Spec of `to_dict`'s dict. Raises ValueError on unknown or missing keys."""
        fields = {f.name: f for f in dataclasses.fields(cls)}
        unknown = sorted(set(data) - set(fields))
        if unknown:
            raise ValueError(f"unknown key {', '.join(unknown)}; known: {', '.join(fields)}")
        missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in data]
        if missing:
            raise ValueError(f"missing key {', '.join(missing)}")
        values = dict(data)
        values["activation_params"] = tuple(dict(values.get("activation_params", ())).items())
        return cls(**values)

    @classmethod
    def parse(cls, name: str, **fields: Any) -> Spec:
        """The Spec of a variant's name: `Spec.parse("swiglu", d_model=4096, d_ff=11008)`.

        swiglu geglu reglu glu bilinear (Shazeer 2020), geglu_tanh, swiglu_oai (gpt-oss), or any activation name
        for an ungated FFN. "geglu" means gelu_erf here; some software means the tanh form: say geglu_tanh for it.
        """
        if name in activations.GATED:
            activation, extra = activations.GATED[name]
            clash = sorted(set(extra) & set(fields))
            if clash:
                raise ValueError(f"{name!r} fixes {', '.join(clash)}; use Spec(activation={activation!r}, …) instead")
            return cls(activation=activation, gated=True, **extra, **fields)
        try:
            return cls(activation=name, gated=False, **fields)
        except ValueError as error:
            if "is not known" not in str(error):
                raise
            known = ", ".join((*activations.GATED, *activations.ACTIVATIONS))
            raise ValueError(f"FFN variant {name!r} is not known; known: {known}") from None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
