"""Which tensor parallelism at which latency: a plan for 8 to 4096 devices, by the alpha-beta model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..spec import Spec
from .block import Block
from .cost import count
from .models import Model
from .settings import Settings, positive

DEVICES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_TOKENS = tuple(sorted({1 << i for i in range(17)} | {3 << i for i in range(15)}))  # 1, 2, 3, 4, 6, 8, … 65536
_N_TARGETS = 7


@dataclass(frozen=True, kw_only=True)
class Point:
    """One way to run: tp ranks per replica, so many tokens at once in each, and what that gives.

    tokens_per_s  of all devices together; memory_bytes  of weights and cache on one.
    """

    devices: int
    target_s: float
    tp: int
    replicas: int
    tokens: int
    step_s: float
    tokens_per_s: float
    memory_bytes: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, units in the keys."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The best tp at each latency target and number of devices; made by `plan`.

    points   by target, then devices; a target that nothing meets has none.
    targets  in seconds per step;  devices;  ranks: the tp that were tried.
    notes    what was not tried and why.
    """

    targets: tuple[float, ...]
    devices: tuple[int, ...]
    ranks: tuple[int, ...]
    points: tuple[Point, ...]
    notes: tuple[str, ...]

    def at(self, target_s: float, devices: int) -> Point | None:
        """The best point of a target and a number of devices, or None where nothing meets the target."""
        return next((p for p in self.points if p.target_s == target_s and p.devices == devices), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, units in the keys."""
        return {
            "targets_s": list(self.targets),
            "devices": list(self.devices),
            "tp_tried": list(self.ranks),
            "points": [p.to_dict() for p in self.points],
            "notes": list(self.notes),
        }


def plan(
    what: Spec | Block | Model,
    s: Settings,
    devices: Sequence[int] = DEVICES,
    targets_s: Sequence[float] | None = None,
) -> Plan:
    """The tp and tokens per replica with the most tokens per second, for each latency target and number of devices.

    N devices make floor(N / tp) replicas; each runs as many tokens at once as its step, floor + all-reduce, meets the
    target with, and as its memory holds (weights / tp, and for attention the cache of `context` positions a token).
    targets_s  of one step; default: a series from the fastest step on.
    tp is tried at every power of two and three times one that divides width, groups and heads and fills whole nodes.

    Raises ValueError without hardware or links, or for a count below 1.
    """
    if s.device is None:
        raise ValueError("a plan needs a device: name the hardware")
    if s.links is None:
        raise ValueError(f"a plan needs links, and those of {s.device.slug} are not in the table: give intra_GBps")
    counts = tuple(positive("devices", n) for n in devices)
    tried, notes = _ranks(what, s, max(counts))
    timed = {tp: _timed(what, s, tp, notes) for tp in tried}
    fastest = min((t[0][1] for t in timed.values() if t), default=None)
    if fastest is None:
        return Plan(targets=(), devices=counts, ranks=tried, points=(), notes=tuple(notes))
    targets = tuple(targets_s) if targets_s is not None else _series(timed, fastest, counts)
    for target in targets:
        if not (isinstance(target, (int, float)) and math.isfinite(target) and target > 0):
            raise ValueError(f"target={target!r}: expected seconds above 0")
    points = [p for target in targets for n in counts if (p := _best(timed, target, n)) is not None]
    return Plan(targets=targets, devices=counts, ranks=tried, points=tuple(points), notes=tuple(dict.fromkeys(notes)))


def _ranks(what: Spec | Block | Model, s: Settings, most: int) -> tuple[tuple[int, ...], list[str]]:
    spec = what if isinstance(what, Spec) else what.ffn
    attention = None if isinstance(what, Spec) else what.attention
    assert s.links is not None
    node = s.links.devices_per_node
    found = []
    for tp in sorted({1 << i for i in range(13)} | {3 << i for i in range(11)}):
        fits = spec.d_ff % (tp * max(s.form.group, 1)) == 0 and (attention is None or attention.n_heads % tp == 0)
        if tp <= most and fits and (tp <= node or tp % node == 0):
            found.append(tp)
    group = f" in groups of {s.form.group}" if s.form.group else ""
    heads = f", {attention.n_heads} heads" if attention else ""
    return tuple(found), [f"tp tried: {', '.join(map(str, found))} (d_ff={spec.d_ff}{group}{heads}, nodes of {node})"]


def _timed(what: Spec | Block | Model, s: Settings, tp: int, notes: list[str]) -> list[tuple[int, float, float]]:
    """(tokens, seconds of a step, bytes on a device), for rising token counts, as far as memory holds."""
    assert s.device is not None
    out = []
    for tokens in _TOKENS:
        found = count(what, s.replace(tp=tp, tokens=tokens, sequences=tokens))
        memory = found.whole.value("weight_bytes") / tp
        if "attention" in found.sections:
            layers = what.n_attentions if isinstance(what, Model) else 1
            kv_heads = what.attention.n_kv_heads if not isinstance(what, Spec) and what.attention else 1
            memory += layers * found.sections["attention"].value("cache_bytes") / min(tp, kv_heads)
        if s.device.memory_bytes is not None and memory > s.device.memory_bytes:
            if not out:
                notes.append(
                    f"tp={tp}: {memory / 1e9:.1f} GB do not fit the {s.device.memory_bytes / 1e9:.0f} GB of a device"
                )
            break
        out.append((tokens, float(found["step_s"]), memory))
    return out


def _series(
    timed: dict[int, list[tuple[int, float, float]]], fastest: float, counts: tuple[int, ...]
) -> tuple[float, ...]:
    """1, 2, 5, 10, … from the first above the fastest step on, as long as a looser target changes something."""
    out: list[float] = []
    power = 10.0 ** math.floor(math.log10(fastest))
    before: list[tuple[int, int] | None] = []
    for i in range(3 * _N_TARGETS):
        target = float(f"{(1, 2, 5)[i % 3] * power * 10.0 ** (i // 3):.1g}")
        best = [_best(timed, target, n) for n in counts]
        now = [None if p is None else (p.tp, p.tokens) for p in best]
        if target > fastest and now != before:
            out.append(target)
        before = now
    return tuple(out[:_N_TARGETS])


def _best(timed: dict[int, list[tuple[int, float, float]]], target: float, devices: int) -> Point | None:
    found = []
    for tp, rows in timed.items():
        meeting = [row for row in rows if row[1] <= target]
        if tp > devices or not meeting:
            continue
        tokens, step, memory = max(meeting, key=lambda row: row[0] / row[1])
        replicas = devices // tp
        rate = replicas * tokens / step
        found.append(
            Point(
                devices=devices, target_s=target, tp=tp, replicas=replicas, tokens=tokens, step_s=step,
                tokens_per_s=rate, memory_bytes=memory,
            )
        )  # fmt: skip
    return max(found, key=lambda p: (p.tokens_per_s, -p.tp), default=None)
