"""What the evidence supports: paired differences over seeds, with intervals, in words."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LEVEL = 0.05  # intervals hold 95 %


@dataclass(frozen=True, kw_only=True)
class Difference:
    """a - b in bits per byte, over seeds that both have: below zero, a is better.

    half   half the width of the 95 % interval of the mean, infinite with one seed.
    wins   seeds in which a was better.
    family how many comparisons were made together;  corrected  half the width of the interval that holds for all of
           them at once (Bonferroni).
    """

    a: str
    b: str
    mean: float
    half: float
    corrected: float
    wins: int
    seeds: int
    family: int

    @property
    def separated(self) -> bool:
        """Whether the 95 % interval of this difference excludes zero."""
        return abs(self.mean) > self.half

    @property
    def firmly(self) -> bool:
        """Whether it still does with all comparisons taken together."""
        return abs(self.mean) > self.corrected

    def words(self) -> str:
        """The verdict: no more than the interval carries."""
        a, b = (self.a, self.b) if self.mean <= 0 else (self.b, self.a)
        wins = self.wins if self.mean <= 0 else self.seeds - self.wins
        if not math.isfinite(self.half):
            return f"{a} vs {b}: one seed, no interval; the difference was {abs(self.mean):.4f} bits/byte"
        size = f"{abs(self.mean):.4f} ± {self.half:.4f} bits/byte, {wins} of {self.seeds} seeds"
        if not self.separated:
            return f"{self.a} vs {self.b}: not separated ({a} lower by {size})"
        note = "" if self.firmly else f"; not separated when all {self.family} comparisons count together"
        return f"{a} better than {b} by {size}{note}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; an infinite half width is null."""
        return {
            "a": self.a,
            "b": self.b,
            "mean": self.mean,
            "half": self.half if math.isfinite(self.half) else None,
            "corrected_half": self.corrected if math.isfinite(self.corrected) else None,
            "wins": self.wins,
            "seeds": self.seeds,
            "separated": self.separated,
            "separated_together": self.firmly,
            "words": self.words(),
        }


def difference(
    a: str, b: str, first: Mapping[int, float], second: Mapping[int, float], family: int = 1
) -> Difference | None:
    """The paired difference of two variants' {seed: bits per byte}; None if they share no seed."""
    shared = sorted(first.keys() & second.keys())
    if not shared:
        return None
    gaps = [first[s] - second[s] for s in shared]
    n = len(gaps)
    error = statistics.stdev(gaps) / math.sqrt(n) if n > 1 else math.inf
    return Difference(
        a=a,
        b=b,
        mean=statistics.fmean(gaps),
        half=t_quantile(LEVEL, n - 1) * error if n > 1 else math.inf,
        corrected=t_quantile(LEVEL / max(family, 1), n - 1) * error if n > 1 else math.inf,
        wins=sum(g < 0 for g in gaps),
        seeds=n,
        family=family,
    )


def t_quantile(alpha: float, freedom: int) -> float:
    """The two-sided quantile of Student's t for a level `alpha`, by bisection of its tail."""
    low, high = 0.0, 1.0
    while _tail(high, freedom) > alpha and high < 1e12:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _tail(middle, freedom) > alpha else (low, middle)
    return high


def _tail(t: float, freedom: int) -> float:
    """P(|T| > t): the closed sums for whole degrees of freedom (Abramowitz & Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(freedom))
    cos, sin = math.cos(angle), math.sin(angle)
    term, total = 1.0, 0.0
    if freedom % 2:
        term = cos
        for k in range(3, freedom + 1, 2):
            total += term
            term *= cos * cos * (k - 1) / k
        inside = 2 / math.pi * (angle + (sin * total if freedom > 1 else 0.0))
    else:
        for k in range(2, freedom + 1, 2):
            total += term
            term *= cos * cos * (k - 1) / k
        inside = sin * total
    return max(0.0, 1.0 - inside)


def comparisons(losses: Mapping[str, Mapping[int, float]], against: Sequence[str] = ()) -> list[Difference]:
    """Every pair of variants, or each with those in `against`; the best variant of a pair's means first."""
    names = sorted(losses, key=lambda n: statistics.fmean(losses[n].values()) if losses[n] else math.inf)
    pairs = [(a, b) for a, b in itertools.combinations(names, 2) if not against or a in against or b in against]
    made = [difference(a, b, losses[a], losses[b], len(pairs)) for a, b in pairs]
    return [d for d in made if d is not None]
