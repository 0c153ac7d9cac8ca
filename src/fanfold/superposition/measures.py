"""What says whether features are in superposition: norms, interference, dimensionality, and the shape they form.

W [..., m, n]: column i is the direction of feature i. All in NumPy float64.
Source: Elhage et al. 2022, Toy Models of Superposition, Transformer Circuits Thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
_TINY = 1e-12


def norms(w: Array) -> Array:
    """‖W_i‖, [..., n]."""
    return np.linalg.norm(w, axis=-2)


def _overlaps(w: Array) -> Array:
    """Σ_j (Ŵ_i·W_j)², j = i included, [..., n]; 0 for a feature of norm 0."""
    gram = np.swapaxes(w, -1, -2) @ w
    square = np.einsum("...ii->...i", gram)
    total = np.square(gram).sum(-1)
    return np.divide(total, square, out=np.zeros_like(total), where=square > _TINY)


def interference(w: Array) -> Array:
    """Σ_{j≠i} (Ŵ_i·W_j)², [..., n]: how much of the others is read in feature i's direction."""
    return np.maximum(_overlaps(w) - np.square(norms(w)), 0.0)


def dimensionality(w: Array) -> Array:
    """D_i = ‖W_i‖² / Σ_j (Ŵ_i·W_j)², [..., n]: 1 for a feature with a dimension to itself, 0 for one not learned."""
    square, total = np.square(norms(w)), _overlaps(w)
    return np.divide(square, total, out=np.zeros_like(total), where=total > _TINY)


def dimensions_per_feature(w: Array) -> Array:
    """D* = m / ‖W‖_F², [...]; infinite if nothing is learned."""
    total = np.square(w).sum((-1, -2))
    return np.divide(w.shape[-2], total, out=np.full(np.shape(total), np.inf), where=total > _TINY)


SERVED = 0.2  # share of a coefficient's largest |read · write| from which it serves a feature


def served(read: Array, written: Array) -> Array:
    """Which features each coefficient of the |x| model works for, [m, n] bool: those it reads and writes with a
    positive hand. A coefficient whose largest product is below a tenth of the largest of all is not in use.

    read  [m, n], W;  written  [n, m], W_out.
    """
    product = np.abs(read) * np.maximum(written.T, 0)
    top = product.max(1, keepdims=True)
    return (product >= SERVED * top) & (top >= 0.1 * product.max())


def asymmetry(read: Array, written: Array) -> tuple[int, int]:
    """(pairs whose more strongly read feature is the more weakly written one, all pairs) of features that share a
    coefficient: in asymmetric superposition every pair is such a one. Random weights give about two thirds."""
    size, back = np.abs(read), written.T
    opposite = pairs = 0
    for on, reads, writes in zip(served(read, written), size, back):
        at = np.flatnonzero(on)
        for i in at:
            for j in at[at > i]:
                pairs += 1
                opposite += bool((reads[i] - reads[j]) * (writes[i] - writes[j]) < 0)
    return opposite, pairs
