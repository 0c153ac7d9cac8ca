"""A sheet of figures: each with its unit, its formula and the numbers put in, so that every one can be traced."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Number = int | float


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure.

    key      its name in JSON, ending in its unit: weight_bytes, floor_s, forward_flop.
    label    its name for people; unit: B, FLOP, s, …
    value    None where it is not known or does not exist; `note` then says why.
    formula  how it is made, in Python's arithmetic over the names in `numbers` (and ceil, log2, max, min).
    """

    key: str
    label: str
    unit: str
    value: Number | None
    formula: str
    numbers: Mapping[str, Number] = field(default_factory=dict)
    note: str = ""

    def substituted(self) -> str:
        """The formula with the numbers put in."""
        return re.sub(r"[A-Za-z_]\w*", lambda m: _plain(self.numbers.get(m.group(), m.group())), self.formula)

    def why(self) -> str:
        """One line: label = formula = numbers = value unit."""
        if self.value is None:
            return f"{self.label}: {self.note}"
        parts = [self.label, self.formula, self.substituted(), f"{_plain(self.value)} {self.unit}".strip()]
        line = " = ".join(dict.fromkeys(parts))
        return f"{line} ({self.note})" if self.note else line


class Figures(Mapping[str, Figure]):
    """Figures by key, in the order in which they were added."""

    def __init__(self) -> None:
        self._by_key: dict[str, Figure] = {}

    def add(
        self, key: str, label: str, unit: str, value: Number | None, formula: str, note: str = "", /, **numbers: Number
    ) -> Number | None:
        """Add one and give its value back; `numbers` are the names in `formula`."""
        self._by_key[key] = Figure(
            key=key, label=label, unit=unit, value=value, formula=formula, numbers=numbers, note=note
        )  # fmt: skip
        return value

    def drop(self, key: str) -> None:
        """Take a figure out, if it is there."""
        self._by_key.pop(key, None)

    def __getitem__(self, key: str) -> Figure:
        if key not in self._by_key:
            raise KeyError(f"there is no figure {key!r}; there are: {', '.join(self._by_key)}")
        return self._by_key[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_key)

    def __len__(self) -> int:
        return len(self._by_key)

    def value(self, key: str) -> Number:
        """The value of a figure that has one."""
        found = self[key].value
        assert found is not None, key
        return found

    def to_dict(self) -> dict[str, Any]:
        """{key: value}."""
        return {key: figure.value for key, figure in self._by_key.items()}

    def why(self) -> list[str]:
        """A line for each figure: formula, numbers, value."""
        return [figure.why() for figure in self._by_key.values()]


def _plain(value: Number | str) -> str:
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.6g}"
    return str(value)
