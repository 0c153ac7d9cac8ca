"""The predicted floor of this machine beside the measured time of our own kernel.

    python bench/floor.py            # a table; exit code 1 if a row is not as it should be
    python bench/floor.py --quick    # small layers only, a few seconds

A floor must not be above the measured time (within MARGIN), and in decode of a large layer at most 25 % below it. The
machine is probed again in the same run, and the fastest pass counts, as for the probe: what other programs take away is
not the machine's limit. Not a test of the suite: times on a shared machine are no pass or fail.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from fanfold import Spec, Weights
from fanfold.count import cost, probe
from fanfold.kernels import cpu
from fanfold.show.output import number, table

MARGIN = 0.05  # the probe and the passes are measured at different moments
BELOW = 0.25
LARGE = 200e6  # bytes of weights from which a layer is large: beyond the caches
SHAPES = ((576, 1536), (2048, 5632), (4096, 11008))
TOKENS = (1, 16, 128)
SECONDS = 1.5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def measured(spec: Spec, tokens: int, dtype: torch.dtype) -> float:
    """Seconds of the fastest of many passes of our kernel."""

    def make(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype).uniform_(-0.02, 0.02)

    d, f = spec.d_model, spec.d_ff
    weights = Weights(spec, gate=make(f, d), up=make(f, d), down=make(d, f))
    x = make(tokens, d)
    best = float("inf")
    with torch.inference_mode():
        cpu.forward(x, weights)
        end = time.perf_counter() + SECONDS
        passes = 0
        while time.perf_counter() < end or passes < 3:
            begin = time.perf_counter()
            cpu.forward(x, weights)
            best = min(best, time.perf_counter() - begin)
            passes += 1
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small layers only")
    args = parser.parse_args()
    missing = cpu.available()
    if missing is not None:
        print(missing, file=sys.stderr)
        return 1
    found = probe.probe(again=True)
    print(f"{found.processor}, {found.threads} threads; {found.notes}")
    rows, wrong = [], []
    for d_model, d_ff in SHAPES[: 1 if args.quick else None]:
        spec = Spec.parse("swiglu", d_model=d_model, d_ff=d_ff)
        for name, dtype in DTYPES.items():
            for tokens in TOKENS:
                seconds = measured(spec, tokens, dtype)
                floor = cost.cost(spec, tokens=tokens, format=name, hardware="this")
                # The bandwidth of a shared machine drifts within minutes: before a floor is called too high, the limit
                # is measured at this moment too (the probe keeps the larger rates).
                for _ in range(2):
                    if floor["floor_s"] <= seconds:
                        break
                    probe.probe(again=True)
                    floor = cost.cost(spec, tokens=tokens, format=name, hardware="this")
                share = floor["floor_s"] / seconds
                verdict = judge(share, floor["weight_bytes"], tokens)
                label = f"{d_model}x{d_ff} {name}, tokens: {tokens}"
                if verdict != "ok":
                    wrong.append(f"{label}: floor is {100 * share:.0f} % of the measured time, {verdict}")
                rows.append([label, number(1e3 * floor["floor_s"]), number(1e3 * seconds), f"{100 * share:.0f}",
                             floor.bound, verdict])  # fmt: skip
    table("", ["layer", "floor, ms", "measured, ms", "floor / measured, %", "bound", "verdict"], rows)
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


def judge(share: float, weight_bytes: float, tokens: int) -> str:
    """What is wrong with a floor that is `share` of the measured time, or "ok"."""
    if share > 1 + MARGIN:
        return "too high"
    if tokens == 1 and weight_bytes >= LARGE and share < 1 - BELOW - MARGIN:
        return "too low"
    return "ok"


if __name__ == "__main__":
    sys.exit(main())
