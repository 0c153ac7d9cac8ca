"""All ranks or none: what every rank must agree on, and one error for all when a rank is lost."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
Group = Any  # a ProcessGroup, or None for all ranks
# What gloo, NCCL and the store say when a peer is gone or silent.
_LOST = ("Connection closed", "Connection reset", "Timed out", "timed out", "timeout", "Timeout", "Broken pipe")
_LOST += ("connection refused", "Connection refused", "failed to connect", "recvBytes", "remote process exited", "peer")


class ParallelError(ValueError):
    """The ranks of a group cannot go on together; the message is the same on each of them."""


@contextlib.contextmanager
def together(what: str, group: Group = None) -> Iterator[None]:
    """While a block runs collectives: a rank that ended or went silent makes every other rank raise the same
    ParallelError, within the group's timeout (that of `init_process_group`), instead of its backend's own words.

    what  names the work, for the message.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:
        if not any(words in str(error) for words in _LOST):
            raise
        limit = timeout_of(group)
        within = "" if limit is None else f" or has not answered within {limit:g} s"
        raise ParallelError(
            f"{what}: one of the {size_of(group)} ranks has ended{within}; every rank ends with this error. The "
            "rank that failed first says why; start them all again"
        ) from error


def jointly(what: str, group: Group, work: Callable[[], T]) -> T:
    """`work()` on every rank: its result if all succeed; if any raises, every rank raises a ParallelError that names
    the first such rank and its message."""
    failed: Exception | None = None
    result: Any = None
    try:
        result = work()
    except Exception as error:
        failed = error
    said = None if failed is None else (str(failed).strip() or type(failed).__name__).splitlines()[0]
    for rank, message in enumerate(_gathered(what, group, said)):
        if message is not None:
            raise ParallelError(f"{what}: rank {rank} of {size_of(group)}: {message}") from failed
    return result


def agree(what: str, group: Group, facts: Mapping[str, Any]) -> None:
    """Raise the same ParallelError on every rank unless all ranks hold equal `facts` (JSON values by name).

    The message names the first fact that differs and which ranks say what.
    """
    mine = {name: json.dumps(value, sort_keys=True) for name, value in facts.items()}
    everyone = _gathered(what, group, mine)
    for name in dict.fromkeys(key for said in everyone for key in said):
        by_value: dict[str, list[int]] = {}
        for rank, said in enumerate(everyone):
            by_value.setdefault(said.get(name, "nothing"), []).append(rank)
        if len(by_value) > 1:
            parts = "; ".join(f"{_short(value)} on {_ranks(ranks)}" for value, ranks in by_value.items())
            raise ParallelError(f"{what}: the ranks disagree on {name}: {parts}. Give every rank the same")


def size_of(group: Group) -> int:
    """Ranks in a group."""
    return dist.get_world_size(group)


def timeout_of(group: Group) -> float | None:
    """Seconds that a collective of the group waits, where its backend says."""
    own = group if group is not None else dist.group.WORLD
    device = torch.device("cuda" if dist.get_backend(own) == "nccl" else "cpu")
    options = getattr(own._get_backend(device), "options", None)  # type: ignore[union-attr]
    limit = getattr(options, "_timeout", None)
    return None if limit is None else limit.total_seconds()


def _gathered(what: str, group: Group, value: Any) -> list[Any]:
    out: list[Any] = [None] * size_of(group)
    with together(what, group):
        dist.all_gather_object(out, value, group=group)
    return out


def _short(text: str) -> str:
    return text if len(text) <= 160 else f"{text[:157]}…"


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
