"""Never slower by default: which token counts a swapped module takes to our kernels, measured on this machine.

Which of two good kernels is ahead depends on the processor, the shape and the number of tokens, so `swap` times both on
the model's own weights, by turns, over the layers of one kind in a row (so that small calls read weights from memory,
as in use). A named backend is not measured: it runs.
"""

from __future__ import annotations

import bisect
import itertools
import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

SIZES = (1, 2, 4, 8, 16, 24, 48, 128, 384)  # token counts that are timed; others go with the nearest by ratio
_MIN_WEIGHTS = 1 << 17  # smaller modules take microseconds: not worth the timing
_MANY_TOKENS = 16  # from here on arithmetic rules and a few layers are enough
_FEW_LAYERS = 6
_ROUNDS = 7
_SECONDS = 0.4  # no new round of one size after this

Call = Callable[[Tensor], object]


class Choice:
    """Whether our kernels are ahead, for every number of tokens.

    ratios  {tokens: (our time, time of a swapped module that runs its own code)}, both over that of the module as it
    was: stepping aside costs the look at what may have changed, 20 us in use.
    """

    def __init__(self, ratios: dict[int, tuple[float, float]]) -> None:
        self.ratios = ratios
        sizes = sorted(ratios)
        self.ahead = {s: ratios[s][0] <= ratios[s][1] for s in sizes}
        # the border between two sizes lies at their geometric mean
        self._borders = [int((a * b) ** 0.5) for a, b in itertools.pairwise(sizes)]
        self._values = list(self.ahead.values())

    @property
    def gain(self) -> float:
        """Geometric mean over the timed token counts of the time before over the time after the swap."""
        after = [min(pair) for pair in self.ratios.values()]
        return math.exp(-sum(map(math.log, after)) / len(after))

    def ours(self, tokens: int) -> bool:
        return self._values[bisect.bisect_left(self._borders, tokens)]

    def describe(self) -> str:
        """'cpu', 'torch', or at which of the timed token counts it is cpu."""
        if all(self._values):
            return "cpu"
        if not any(self._values):
            return "torch"
        return f"cpu at {_runs(self.ahead)} tokens, else torch"


ALWAYS, NEVER = Choice({1: (0.0, 1.0)}), Choice({1: (1.0, 0.0)})


def _runs(ahead: dict[int, bool]) -> str:
    """{1: True, 2: True, 4: False, 8: True} -> '1–2, 8'."""
    sizes = sorted(ahead)
    out: list[list[int]] = []
    for i, size in enumerate(sizes):
        if not ahead[size]:
            continue
        if out and i and out[-1][-1] == sizes[i - 1]:
            out[-1].append(size)
        else:
            out.append([size])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}–{r[-1]}" for r in out)


def worth_measuring(n_weights: int) -> bool:
    return n_weights >= _MIN_WEIGHTS


def measure(sides: Sequence[Sequence[Call]], width: int, like: Tensor) -> Choice:
    """Time modules of one kind, by turns.

    sides  the modules' own code, our kernels, and stepping aside: for each a callable of x [1, tokens, width] in like's
    dtype for every module.
    """
    ratios = {}
    generator = torch.Generator().manual_seed(2)  # the process's own generator stays where it is
    with torch.inference_mode():
        for tokens in SIZES:
            x = torch.randn(1, tokens, width, generator=generator).to(like)
            layers = len(sides[0]) if tokens < _MANY_TOKENS else min(len(sides[0]), _FEW_LAYERS)
            own, ours, aside = _seconds([side[:layers] for side in sides], x)
            ratios[tokens] = (ours / own, aside / own)
    return Choice(ratios)


def _seconds(sides: Sequence[Sequence[Call]], x: Tensor) -> list[float]:
    """Of each side, the least time over some rounds of a pass through all its modules."""
    best = [float("inf")] * len(sides)
    begin = time.perf_counter()
    for i in range(_ROUNDS + 1):
        for side in range(len(sides)) if i % 2 else reversed(range(len(sides))):
            start = time.perf_counter()
            for call in sides[side]:
                call(x)
            if i:  # the first round warms up
                best[side] = min(best[side], time.perf_counter() - start)
        if i and time.perf_counter() - begin > _SECONDS:
            break
    return best
