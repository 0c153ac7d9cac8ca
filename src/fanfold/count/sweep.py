"""Curves: cost over tokens or over d_ff, and wider d_ff against wider d_model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ..spec import Spec
from .block import Block, Widened, widen
from .cost import Cost, count
from .models import Model
from .settings import Settings

NAMES = ("tokens", "d_ff")
_MOST = 10_000
_FACTORS = (1.1, 1.25, 1.5, 2.0, 3.0, 4.0)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Costs at each value of `name` ("tokens" or "d_ff"), in rising order."""

    name: str
    values: tuple[int, ...]
    costs: tuple[Cost, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, units in the keys: one row per value."""
        return {
            "sweep": self.name,
            "rows": [
                {self.name: value, "bound": cost.bound, **cost.whole.to_dict()}
                for value, cost in zip(self.values, self.costs, strict=True)
            ],
        }


def parse(text: str) -> tuple[str, tuple[int, ...]]:
    """("tokens", (1, 2, 4, …)) of "tokens=1:4096" (doubling), "d_ff=8192:16384:256" (by 256) or "tokens=1,8,64".

    Raises ValueError, with the three forms, for anything else.
    """
    name, _, values = text.partition("=")
    if name not in NAMES:
        raise ValueError(f"sweep {text!r}: {name!r} cannot be swept; known: {', '.join(NAMES)}")
    forms = f"expected {name}=1,8,64 or {name}=1:4096 (doubling) or {name}=64:1024:64 (by 64)"
    try:
        numbers = [int(v) for v in values.replace(":", ",").split(",")]
    except ValueError:
        raise ValueError(f"sweep {text!r}: {forms}") from None
    if any(n < 1 for n in numbers) or (":" in values and ("," in values or not 2 <= len(numbers) <= 3)):
        raise ValueError(f"sweep {text!r}: {forms}, all of them at least 1")
    if ":" in values:
        first, last, *step = numbers
        if last < first:
            raise ValueError(f"sweep {text!r}: {last} is below {first}")
        numbers = list(range(first, last + 1, step[0])) if step else _doubling(first, last)
    if len(numbers) > _MOST:
        raise ValueError(f"sweep {text!r} has {len(numbers)} values, expected at most {_MOST}")
    return name, tuple(sorted(set(numbers)))


def _doubling(first: int, last: int) -> list[int]:
    out = [first]
    while out[-1] * 2 <= last:
        out.append(out[-1] * 2)
    return out if out[-1] == last else [*out, last]


def sweep(what: Spec | Block | Model, s: Settings, name: str, values: tuple[int, ...]) -> Sweep:
    """The cost at each value. Over d_ff, everything else stays. Raises ValueError as `cost` does."""
    costs = []
    for value in values:
        if name == "tokens":
            costs.append(count(what, s.replace(tokens=value, sequences=min(s.sequences, value))))
        else:
            costs.append(count(at_width(what, value), s))
    return Sweep(name=name, values=values, costs=tuple(costs))


def at_width(what: Spec | Block | Model, d_ff: int) -> Any:
    """The same with another d_ff."""
    spec = what if isinstance(what, Spec) else what.ffn
    changed = Spec.from_dict({**spec.to_dict(), "d_ff": d_ff})
    if isinstance(what, Spec):
        return changed
    return dataclasses.replace(what, ffn=changed)


def widths(block: Block, context: int, width: int) -> dict[float, list[Widened]]:
    """{times the parameters: the block made so much larger by d_ff, by d_model and by both}."""
    return {factor: widen(block, factor, context, width) for factor in _FACTORS}
