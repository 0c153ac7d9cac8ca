"""Phase diagrams: for each density and importance of one extra feature, what the trained model does with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import closed, measures
from .toy import Progress, Trained, train

Array = np.ndarray[Any, np.dtype[np.float64]]
# A learned feature has ‖W_i‖ near 1, one that is not near 0; interference likewise.
LEARNED = 0.5


@dataclass(frozen=True, kw_only=True)
class Diagram:
    """Phases on a grid of densities [R] and importances [C] of the last feature (the others have importance 1).

    norm, interference  [R, C] of the last feature (interference: Σ_{j≠i} (Ŵ_i·W_j)²).
    phase  [R, C]: 0 the extra feature is not represented, 1 it has a dimension to itself, 2 it is in superposition.
    closed [R, C]: the same by the closed form of n=2, m=1; None for other sizes.
    """

    density: Array
    importance: Array
    norm: Array
    interference: Array
    phase: Any
    closed: Any
    trained: Trained

    def agreement(self, margin: float = 1.0) -> tuple[float, int]:
        """(share of points whose phase is the closed form's, number of points) among those whose importance is a
        factor of `margin` or more away from a boundary. Raises ValueError if there is no closed form."""
        if self.closed is None:
            raise ValueError("a closed form is known for n=2, m=1 only")
        p, r = np.meshgrid(self.density, self.importance, indexing="ij")
        lower, upper = closed.boundaries(p)
        lines = np.stack([lower, upper, np.ones_like(r)])
        # r = 1 parts the two phases without superposition, above the triple point only
        real = np.stack([p < 4 / 7, p < 4 / 7, p >= 4 / 7])
        distance = np.where(real, np.abs(np.log(r / lines)), np.inf).min(0)
        far = distance >= np.log(margin)
        return float((self.phase == self.closed)[far].mean()), int(far.sum())


def diagram(
    n: int,
    m: int,
    density: Iterable[float],
    importance: Iterable[float],
    seeds: int = 8,
    *,
    steps: int = 1500,
    batch: int = 64,
    progress: Progress | None = None,
) -> Diagram:
    """Train every point of a grid together and name its phase.

    density     [R], probability that a feature is active;  importance  [C], of feature n - 1, the others having 1.
    Source: Elhage et al. 2022 (n=2, m=1 and n=3, m=2, ten models a point).
    """
    p, r = np.array(list(density)), np.array(list(importance))
    grid_p, grid_r = np.meshgrid(p, r, indexing="ij")
    rows = np.ones((grid_p.size, n))
    rows[:, -1] = grid_r.ravel()
    trained = train(
        n, m, 1 - grid_p.ravel(), rows, seeds=seeds, steps=steps, batch=batch, learning_rate=2e-2, progress=progress
    )
    norm = measures.norms(trained.weights)[:, -1].reshape(grid_p.shape)
    between = measures.interference(trained.weights)[:, -1].reshape(grid_p.shape)
    phase = np.where(norm < LEARNED, 0, np.where(between < LEARNED**2, 1, 2))
    return Diagram(
        density=p,
        importance=r,
        norm=norm,
        interference=between,
        phase=phase,
        closed=closed.phase(grid_p, grid_r) if (n, m) == (2, 1) else None,
        trained=trained,
    )
