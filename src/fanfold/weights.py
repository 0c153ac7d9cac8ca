"""`Weights`: the named matrices of one FFN together with the Spec that they satisfy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .spec import Spec

PROJECTIONS = ("gate", "up", "down")
_FIELDS = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")


class Weights:
    """The matrices and biases of one FFN.

    spec       what they compute; the only place where that is said (functions take no second spec).
    gate, up   [d_ff, d_model]; row i is channel i's key.
    down       [d_model, d_ff]; column i is channel i's value.
    gate_bias, up_bias  [d_ff];  down_bias  [d_model].

    Arrays are NumPy arrays or torch tensors of any float dtype (bfloat16 through torch), held as given: no copy,
    strides kept. Raises ValueError if a matrix or bias is missing, unexpected, of the wrong shape or not float.
    """

    __slots__ = ("down", "down_bias", "gate", "gate_bias", "spec", "up", "up_bias")

    def __init__(
        self,
        spec: Spec,
        *,
        up: Any,
        down: Any,
        gate: Any = None,
        up_bias: Any = None,
        gate_bias: Any = None,
        down_bias: Any = None,
    ) -> None:
        self.spec = spec
        self.up, self.down, self.gate = up, down, gate
        self.up_bias, self.gate_bias, self.down_bias = up_bias, gate_bias, down_bias
        self._check()

    @classmethod
    def unchecked(cls, spec: Spec, **arrays: Any) -> Weights:
        """Weights whose arrays the caller has already held against `spec`: no check, for calls that must be quick."""
        new = cls.__new__(cls)
        new.spec = spec
        for name in _FIELDS:
            setattr(new, name, arrays.get(name))
        return new

    def _check(self) -> None:
        spec = self.spec
        d, f = spec.d_model, spec.d_ff
        shapes = {"gate": (f, d), "up": (f, d), "down": (d, f), "gate_bias": (f,), "up_bias": (f,), "down_bias": (d,)}
        wanted = {
            "gate": spec.gated,
            "up": True,
            "down": True,
            "gate_bias": spec.gate_bias,
            "up_bias": spec.up_bias,
            "down_bias": spec.down_bias,
        }
        for name in _FIELDS:
            value = getattr(self, name)
            if (value is not None) != wanted[name]:
                has, says = ("given", "has none") if value is not None else ("missing", "has one")
                raise ValueError(f"{name} is {has}, but the spec {says}: {spec.describe()}")
            if value is None:
                continue
            if tuple(value.shape) != shapes[name]:
                raise ValueError(
                    f"{name} has shape {tuple(value.shape)}, expected {shapes[name]} for d_model={d}, d_ff={f}"
                )
            if not _is_float(value):
                raise ValueError(f"{name} has dtype {value.dtype}, expected a float dtype")

    def items(self) -> Iterator[tuple[str, Any]]:
        """(name, array) of everything present, in a fixed order."""
        for name in _FIELDS:
            value = getattr(self, name)
            if value is not None:
                yield name, value

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices and biases as stored."""
        return sum(int(v.nbytes) for _, v in self.items())

    def replace(self, **changes: Any) -> Weights:
        """A copy with some arrays (or `spec`) exchanged, checked again."""
        values = {name: getattr(self, name) for name in _FIELDS} | changes
        return Weights(values.pop("spec", self.spec), **values)

    def __repr__(self) -> str:
        return f"Weights({self.spec.describe()}, {self.up.dtype}, {self.nbytes} bytes)"


def to_float64(value: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A NumPy array or torch tensor (any float dtype, any device) as a float64 NumPy array."""
    if hasattr(value, "detach"):  # a torch tensor: NumPy has no bfloat16, so widen first
        return value.detach().cpu().double().numpy()
    return np.asarray(value, dtype=np.float64)


def _is_float(value: Any) -> bool:
    if hasattr(value, "is_floating_point"):
        return bool(value.is_floating_point())
    return np.issubdtype(value.dtype, np.floating)
