"""Closed forms of the toy model with one dimension: losses of fixed weights, and where the best one changes.

p  probability that a feature is active, its value uniform in [0, 1];  r  importance of the extra feature, the first
having 1. A feature that is left out is answered by its mean, p/2, from the bias.
Sources: Elhage et al. 2022, Toy Models of Superposition, "a mathematical understanding" and its notebook of exact
losses (wattenberg/superposition); the boundaries follow from the losses by elementary algebra. They compare three
fixed weights: a trained model is free to choose others, and does where features are dense.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any  # a float, or a NumPy array that broadcasts

TRIPLE_POINT = (4 / 7, 1.0)  # (p, r): above this density two equally important features are never superposed
PHASES = ("extra not represented", "extra alone", "superposition")
PENTAGON_DIMENSIONALITY = 2 / 5


def mean_square_left(p: Array) -> Array:
    """E (x - p/2)² = p/3 - p²/4: the loss of a feature of importance 1 that is left out."""
    return p / 3 - np.square(p) / 4


def loss_ignoring_extra(p: Array, r: Array) -> Array:
    """W = [1, 0]."""
    return r * mean_square_left(p)


def loss_ignoring_first(p: Array, r: Array) -> Array:
    """W = [0, 1]."""
    return mean_square_left(p) + 0 * r


def loss_antipodal(p: Array, r: Array) -> Array:
    """W = [1, -1], b = 0: (1 + r) p² / 6, from the times when both are active."""
    return (1 + r) * np.square(p) / 6


def boundaries(p: Array) -> tuple[Array, Array]:
    """(lower, upper) importance of the extra feature between which [1, -1] is best: 2p/(4-5p) and (4-5p)/(2p).

    For p > 4/7 lower exceeds upper: there is no such importance. From p = 4/5 on the forms have no meaning: NaN.
    """
    p = np.asarray(p, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(p < 4 / 5, (4 - 5 * p) / (2 * p), np.nan)
        return 1 / ratio, ratio


def phase(p: Array, r: Array) -> Any:
    """Which of PHASES (0, 1, 2) has the lowest loss."""
    p, r = np.broadcast_arrays(np.asarray(p, dtype=np.float64), np.asarray(r, dtype=np.float64))
    return np.argmin([loss_ignoring_extra(p, r), loss_ignoring_first(p, r), loss_antipodal(p, r)], axis=0)


def best_loss(p: Array, r: Array) -> Any:
    """The lowest of the three losses."""
    return np.minimum(np.minimum(loss_ignoring_extra(p, r), loss_ignoring_first(p, r)), loss_antipodal(p, r))


def loss_linear(p: float, importance: Any, m: int) -> float:
    """The lowest loss of the linear baseline x' = WᵀWx + b when features are independent: the m most important ones
    are kept whole and each other one costs I_i (p/3 - p²/4)."""
    left = np.sort(np.asarray(importance, dtype=np.float64))[::-1][m:]
    return float(left.sum() * mean_square_left(p))


def tight_frame_dimensionality(k: int, m: int) -> float:
    """D = m / k of k unit vectors in m dimensions whose WWᵀ is a multiple of the identity."""
    return m / k
