"""What an edit is asked to do, checked against the model: which channels, and what becomes of them."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..formats import INTEGER
from .layers import Layer


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """Another value for a channel: it writes scale · coefficient · vector in place of coefficient · value.

    vector  [d_model], anything that torch.as_tensor takes.
    """

    vector: Any
    scale: float = 1.0


Change = float | Value | Callable[[Tensor], Any]
Changes = Mapping[tuple[int, Any], Change] | Iterable[tuple[tuple[int, Any], Change]]
Added = tuple[int, Any, Any]  # layer, coefficient, vector


def fixed(coefficient: float) -> Callable[[Tensor], Tensor]:
    """The change that sets a channel's coefficient: `edit(model, {(12, 345): fixed(8.0)})`."""
    number = _finite("a fixed coefficient", coefficient)
    return lambda m: torch.full_like(m, number)


@dataclasses.dataclass(frozen=True)
class Step:
    """One change of some channels of a layer. several: they were given as a group, so a function gets [..., n]."""

    channels: tuple[int, ...]
    several: bool
    change: float | Value | Callable[[Tensor], Any]  # a Value's vector is a float32 tensor here


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """What one edit does in one layer: the steps, and (coefficient, vector) of what is added."""

    steps: tuple[Step, ...]
    added: tuple[tuple[Any, Tensor], ...]


def parts(layers: list[Layer], changes: Changes, add: Iterable[Added]) -> list[tuple[Layer, Part]]:
    """The edit layer by layer. Raises ValueError for anything that does not fit, naming what would."""
    steps: dict[int, list[Step]] = {}
    added: dict[int, list[tuple[Any, Tensor]]] = {}
    taken: set[tuple[int, int]] = set()
    for place, change in changes.items() if isinstance(changes, Mapping) else changes:
        if not isinstance(place, tuple) or len(place) != 2:
            raise ValueError(f"{place!r} is not a place to edit: expected (layer, channel), as in (0, 12)")
        layer = _layer(layers, place[0])
        channels, several = _channels(layer, place[1])
        for channel in channels:
            if (layer.index, channel) in taken:
                raise ValueError(f"channel {layer.index}:{channel} is changed twice: give each channel one change")
            taken.add((layer.index, channel))
        steps.setdefault(layer.index, []).append(Step(channels, several, _change(layer, change)))
    for index, coefficient, vector in add:
        layer = _layer(layers, index)
        if not callable(coefficient) and not isinstance(coefficient, Tensor):
            coefficient = _finite("an added coefficient", coefficient)
        added.setdefault(layer.index, []).append((coefficient, _vector(layer, vector)))
    return [(layers[i], Part(tuple(steps.get(i, ())), tuple(added.get(i, ())))) for i in sorted({*steps, *added})]


def notes(layer: Layer) -> list[str]:
    """Where an edit of this layer is less than exact."""
    states = [layer.model.get_submodule(p).__dict__.get("_fanfold") for p in layer.found.projections.values()]
    named = sorted({s.format for s in states if s is not None and s.format in INTEGER})
    if not named:
        return []
    return [
        f"layer {layer.index} is packed as {', '.join(named)}: coefficients and values are those of the dequantized "
        "weights, so what the kernels' own rounding adds stays"
    ]


def _layer(layers: list[Layer], index: Any) -> Layer:
    number = _whole("layer", index)
    if not 0 <= number < len(layers):
        raise ValueError(f"layer {number} is not in the model: its FFN layers are 0 to {len(layers) - 1}")
    return layers[number]


def _channels(layer: Layer, which: Any) -> tuple[tuple[int, ...], bool]:
    """(channels, whether they were given as a group)."""
    d_ff = layer.spec.d_ff
    if isinstance(which, slice):
        return tuple(range(d_ff)[which]), True
    several = not isinstance(which, str) and hasattr(which, "__len__") and getattr(which, "ndim", 1) > 0
    found = tuple(_whole("channel", c) for c in (which if several else (which,)))
    for channel in found:
        if not 0 <= channel < d_ff:
            raise ValueError(f"channel {channel} is not in layer {layer.index}: its channels are 0 to {d_ff - 1}")
    return found, several


def _change(layer: Layer, change: Any) -> float | Value | Callable[[Tensor], Any]:
    if isinstance(change, Value):
        return Value(_vector(layer, change.vector), _finite("a value's scale", change.scale))
    if callable(change):
        return change
    return _finite("a change", change, " (a factor of the coefficient), a function of the coefficients, or a Value")


def _vector(layer: Layer, vector: Any) -> Tensor:
    made = torch.as_tensor(vector).detach().to("cpu", torch.float32)
    d_model = layer.spec.d_model
    if tuple(made.shape) != (d_model,):
        raise ValueError(f"a vector for layer {layer.index} has shape {tuple(made.shape)}, expected ({d_model},)")
    if not bool(made.isfinite().all()):
        raise ValueError(f"a vector for layer {layer.index} has elements that are not finite")
    return made.clone()


def _finite(what: str, value: Any, more: str = "") -> float:
    number = value.item() if getattr(value, "ndim", None) == 0 else value  # NumPy's and torch's scalars
    if isinstance(number, bool) or not isinstance(number, Real) or not math.isfinite(number):
        raise ValueError(f"{what} is {value!r}, expected a finite number{more}")
    return float(number)


def _whole(what: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{what} is {value!r}, expected a whole number")
    return operator.index(value)
