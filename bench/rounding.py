"""Rounding a matrix to integer codes: the compiled core beside NumPy, by turns in one run; both give the same codes.

python bench/rounding.py                                  # a Gaussian 2048x2048 matrix in every format
python bench/rounding.py --shape 5632x2048 --format int4_g32 --rounds 5
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fanfold import formats
from fanfold.formats import fit
from fanfold.show import machine
from fanfold.show.output import table


def seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    made = run()
    return time.perf_counter() - begin, made


def same(a: formats.Quantized, b: formats.Quantized) -> bool:
    minima = a.minimum is None or np.array_equal(a.minimum, b.minimum)
    return minima and np.array_equal(a.codes, b.codes) and np.array_equal(a.scale, b.scale)


def measure(w: formats.Array, format: str, rounds: int) -> list[str]:
    """The format's row: its least times, and whether both ways agree."""
    ways = {
        "compiled": lambda: fit._compiled(w, format, None, True),
        "numpy": lambda: fit._in_numpy(w, format, None, "search"),
    }
    least = dict.fromkeys(ways, float("inf"))
    made: dict[str, Any] = {}
    for _ in range(rounds):
        for name, way in ways.items():
            taken, made[name] = seconds(way)
            least[name] = min(least[name], taken)
    if made["compiled"] is None:
        raise ValueError("the compiled kernels cannot run here, so there is nothing to compare")
    if not same(made["compiled"], made["numpy"]):
        raise ValueError(f"{format}: the compiled core and NumPy give different codes or scales")
    rates = [w.size / least[name] / 1e6 for name in ways]
    return [format, *(f"{rate:.0f}" for rate in rates), f"{rates[0] / rates[1]:.1f}"]


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    p.add_argument("--shape", default="2048x2048", help="outputs x inputs")
    p.add_argument("--format", choices=formats.INTEGER, action="append", help="may be repeated; default: each")
    p.add_argument("--rounds", type=int, default=3)
    args = p.parse_args(argv)
    try:
        n, k = (int(size) for size in args.shape.split("x"))
    except ValueError:
        p.error(f"--shape {args.shape}: expected outputs x inputs, as in 5632x2048")
    if min(n, k, args.rounds) < 1:
        p.error("expected at least one output, one input and one round")
    w = np.random.default_rng(0).standard_normal((n, k), np.float32)
    print(f"{time.strftime('%Y-%m-%d')}, {machine.processor()}, threads: {torch.get_num_threads()}, {n}x{k}")
    rows = [measure(w, format, args.rounds) for format in args.format or formats.INTEGER]
    table("", ["format", "compiled, M weights/s", "NumPy", "times"], rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
