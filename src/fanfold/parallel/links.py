"""How long an all-reduce takes over real ranks, and the alpha-beta model of `count.collective` fitted to that.

p ranks, n bytes: seconds = base + 2 (p-1) alpha + 2 (p-1)/p n / beta.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..count.collective import all_reduce
from ..count.hardware import Link, Links
from .together import together

SIZES = tuple(4096 << (2 * i) for i in range(7))  # bytes: 4 KiB to 16 MiB


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measurement: the median time of an all-reduce of `n_bytes` over `ranks`; low, high: 20th, 80th percentile."""

    ranks: int
    n_bytes: int
    seconds: float
    low: float
    high: float


def measure(group: Any, sizes: Sequence[int] = SIZES, repeats: int = 20, device: str = "cpu") -> list[Point]:
    """Time all-reduces of float32 over the ranks of `group`; every rank gets rank 0's points."""
    out: list[Point] = []
    with together("measuring the all-reduce", group):
        for n_bytes in sizes:
            x, times = torch.zeros(n_bytes // 4, device=device), []
            for i in range(repeats + 2):
                dist.barrier(group=group)
                begin = time.perf_counter()
                dist.all_reduce(x, group=group)
                if x.is_cuda:
                    torch.cuda.synchronize()
                if i >= 2:  # the first ones connect
                    times.append(time.perf_counter() - begin)
            low, high = np.quantile(times, (0.2, 0.8))
            out.append(
                Point(
                    ranks=dist.get_world_size(group),
                    n_bytes=n_bytes,
                    seconds=statistics.median(times),
                    low=float(low),
                    high=float(high),
                )
            )
        said = [out]
        dist.broadcast_object_list(said, group=group, group_src=0)
    return said[0]


def fit(points: Sequence[Point]) -> Links:
    """The links whose model is nearest to the points in relative error (least squares, nothing negative).

    From one number of ranks alone base and alpha cannot be told apart: base is 0 then.
    Raises ValueError with fewer than two points.
    """
    if len(points) < 2:
        raise ValueError(f"{len(points)} points: a fit needs at least 2")
    t = np.array([p.seconds for p in points])
    columns = np.array([[1.0, 2.0 * (p.ranks - 1), 2.0 * (p.ranks - 1) / p.ranks * p.n_bytes] for p in points])
    used = [0, 1, 2] if len({p.ranks for p in points}) > 1 else [1, 2]
    scale = np.abs(columns / t[:, None]).max(axis=0)  # seconds and seconds a byte differ by ten powers of ten
    x = np.zeros(3)
    while used:
        found = np.linalg.lstsq(columns[:, used] / t[:, None] / scale[used], np.ones(len(t)), rcond=None)[0]
        if (found >= 0).all():
            x[used] = found / scale[used]
            break
        used.pop(int(found.argmin()))
    most = max(p.ranks for p in points)
    link = Link(bytes_per_s=float(1.0 / x[2]) if x[2] > 0 else float("inf"), step_s=float(x[1]))
    return Links(devices_per_node=most, intra=link, inter=link, base_s=float(x[0]), source="fitted to measured times")


def compared(points: Sequence[Point], links: Links) -> list[dict[str, float]]:
    """Each point beside what the model says: {"ranks", "bytes", "seconds", "model_seconds", "model_over_measured"}."""
    rows = []
    for p in points:
        model = all_reduce(p.n_bytes, p.ranks, links).seconds
        rows.append(
            {"ranks": p.ranks, "bytes": p.n_bytes, "seconds": p.seconds, "low_s": p.low, "high_s": p.high}
            | {"model_seconds": model, "model_over_measured": model / p.seconds}
        )
    return rows
