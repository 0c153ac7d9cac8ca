"""The shapes that superposed features form: the graph of those that overlap, and which polytope each part is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .measures import dimensionality

Array = np.ndarray[Any, np.dtype[np.float64]]

LEARNED = 0.5  # ‖W_i‖ above which a feature counts as represented
EDGE = 0.15  # |cos| above which two features are joined in the graph
# How far a shape's cosines and mean D_i may be off and it still has its name: training leaves some noise.
TOLERANCE_COS, TOLERANCE_D_SHAPE = 0.12, 0.03
# How far a single D_i may lie from a line of the paper's scatter plot: half of the smallest distance between two lines,
# 2/5 and 3/8. The antiprism itself lies at 0.366 or 0.375, by its height.
TOLERANCE_D = 0.0125


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A named arrangement of k unit vectors in r dimensions; D = r / k where they form a tight frame."""

    name: str
    vertices: Array  # [r, k]

    @property
    def k(self) -> int:
        return self.vertices.shape[1]

    @property
    def rank(self) -> int:
        return self.vertices.shape[0]

    @property
    def dimensionality(self) -> float:
        return float(dimensionality(self.vertices).mean())

    @property
    def cosines(self) -> Array:
        return _cosines(self.vertices)


def _polygon(k: int) -> Array:
    angle = 2 * np.pi * np.arange(k) / k
    return np.stack([np.cos(angle), np.sin(angle)])


def square_antiprism(height: float) -> Array:
    """Eight unit vectors [3, 8]: two squares at ±height, turned by an eighth of a circle against each other."""
    angle = 2 * np.pi * np.concatenate([np.arange(4) / 4, np.arange(4) / 4 + 1 / 8])
    z = np.repeat([height, -height], 4)
    r = np.sqrt(1 - z**2)
    return np.stack([r * np.cos(angle), r * np.sin(angle), z])


def _tetrahedron() -> Array:
    return np.array([[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]]).T / np.sqrt(3)


# D = 1, 1/2, 2/3, 3/4, 2/5, 3/8 (Elhage et al. 2022); the antiprism has 3/8 at this height, 0.3664 at the one where
# its smallest distance is largest.
SHAPES = (
    Shape(name="alone", vertices=np.ones((1, 1))),
    Shape(name="antipodal pair", vertices=np.array([[1.0, -1.0]])),
    Shape(name="triangle", vertices=_polygon(3)),
    Shape(name="tetrahedron", vertices=_tetrahedron()),
    Shape(name="pentagon", vertices=_polygon(5)),
    Shape(name="square antiprism", vertices=square_antiprism(1 / np.sqrt(3))),
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A connected part of the feature graph: `features` (indices), the dimensions they span, and its name.

    name  of SHAPES, or "k in r" for k features in r dimensions that form none of them.
    """

    features: tuple[int, ...]
    rank: int
    name: str
    dimensionality: float


def graph(w: Array, edge: float = EDGE, learned: float = LEARNED) -> Array:
    """[n, n] bool: the pairs of represented features of W [m, n] whose |cos| is above `edge`."""
    length = np.linalg.norm(w, axis=0)
    cos = (w.T @ w) / np.maximum(np.outer(length, length), 1e-12)
    on = length > learned
    joined = (np.abs(cos) > edge) & on[:, None] & on[None, :]
    np.fill_diagonal(joined, False)
    return joined


def parts(w: Array, edge: float = EDGE, learned: float = LEARNED) -> list[Part]:
    """The connected parts of W's feature graph, largest first; features that are not represented are in none."""
    joined = graph(w, edge, learned)
    d = dimensionality(w)
    left = {int(i) for i in np.flatnonzero(np.linalg.norm(w, axis=0) > learned)}
    out = []
    while left:
        found, frontier = set(), {min(left)}
        while frontier:
            found |= frontier
            frontier = {int(j) for i in frontier for j in np.flatnonzero(joined[i])} - found
        left -= found
        members = tuple(sorted(found))
        rank, name = recognise(w[:, members])
        out.append(Part(features=members, rank=rank, name=name, dimensionality=float(d[list(members)].mean())))
    return sorted(out, key=lambda p: (-len(p.features), p.features))


def recognise(w: Array) -> tuple[int, str]:
    """(dimensions spanned, name) of the shape that the columns of W [m, k] form.

    The same shape up to rotation, order and lengths: k and rank agree, the sorted cosines of all pairs are within
    TOLERANCE_COS, and the mean D_i is within TOLERANCE_D_SHAPE of the shape's.
    """
    unit = w / np.maximum(np.linalg.norm(w, axis=0), 1e-12)
    values = np.linalg.svd(unit, compute_uv=False)
    rank = int((values > 0.3 * values[0]).sum())
    k = w.shape[1]
    d = dimensionality(w)
    for shape in SHAPES:
        if (shape.k, shape.rank) != (k, rank):
            continue
        near = k == 1 or np.abs(_cosines(unit) - shape.cosines).max() <= TOLERANCE_COS
        if near and abs(d.mean() - shape.dimensionality) <= TOLERANCE_D_SHAPE:
            return rank, shape.name
    return rank, f"{k} in {rank}"


def line_of(d: float) -> str | None:
    """The name of the shape on whose line of the paper's scatter plot a D_i lies, within TOLERANCE_D; else None."""
    nearest = min(SHAPES, key=lambda s: abs(s.dimensionality - d))
    return nearest.name if abs(nearest.dimensionality - d) <= TOLERANCE_D else None


def _cosines(unit: Array) -> Array:
    """Sorted cosines of all pairs of columns."""
    rows, columns = np.triu_indices(unit.shape[1], 1)
    return np.sort((unit.T @ unit)[rows, columns])
