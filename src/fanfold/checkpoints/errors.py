"""The one error of this package, and how names from a file are shown in it."""

from __future__ import annotations

from collections.abc import Iterable

_SHOWN = 120


class CheckpointError(ValueError):
    """A file or folder cannot be read as a model: says which file, which tensor, what was expected and found."""


def show(value: object) -> str:
    """`value` as one short, printable line: a hostile file chooses its names, so they are quoted and cut."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def some(names: Iterable[str], limit: int = 3) -> str:
    """The first few of `names`, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(show(n) for n in listed[:limit]) + more
