"""Superposition in the FFNs of a model: how crowded their keys and values are, and what each channel does.

One row per layer, from the weights alone; the model runs once, on small random inputs, to find the norm before each
FFN.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..memory.anatomy import Anatomy
from ..weights import Weights
from . import classes, gains, gram
from .toy import Progress


def measure(
    anatomy: Anatomy,
    layers: Iterable[int] | None = None,
    threshold: float = classes.THRESHOLD,
    inputs: Any = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure the FFNs of a model.

    anatomy    of `fanfold.memory.anatomy`.
    layers     which, by number; default all.
    threshold  |cosine| from which a key counts as pointing along the value, for the input-output classes.
    -> {"threshold", "layers": [row, …], "left": [(path, reason), …]}, plain values. A row has layer, ffn, d_model,
    d_ff, norm (path of the norm folded into the keys, or None), and for "gate", "up" and "value" the statistics of
    `gram.Gram` with those of as many random directions under "random"; and the `classes`.
    Raises ValueError for a layer that does not exist.
    """
    chosen = anatomy.choose(layers)
    folded = gains.seen_by_residual(anatomy, inputs)
    shapes: dict[tuple[int, int], dict[str, Any]] = {}
    rows = []
    for i, layer in enumerate(chosen):
        norm = folded[layer.index]
        row = _layer(layer.weights(), norm, threshold, shapes)
        place = {"layer": layer.index, "path": layer.path, "ffn": layer.spec.describe()}
        rows.append({**place, "norm": norm[2] if norm else None, **row})
        if progress is not None:
            progress(i + 1, len(chosen))
    return {"threshold": threshold, "layers": rows, "left": [list(pair) for pair in anatomy.left]}


def _layer(weights: Weights, norm: Any, threshold: float, shapes: dict[tuple[int, int], Any]) -> dict[str, Any]:
    """Statistics of one FFN; `shapes` keeps those of random directions, which depend on the sizes alone."""
    spec = weights.spec
    size = (spec.d_ff, spec.d_model)
    if size not in shapes:
        shapes[size] = gram.random(*size).to_dict()
    sets = {"up": _key(weights.up, norm), "value": weights.down.T}
    if spec.gated:
        sets["gate"] = _key(weights.gate, norm)
    cos = classes.cosines(sets["up"], weights.down, sets.get("gate"))
    return {
        "d_model": spec.d_model,
        "d_ff": spec.d_ff,
        **{name: gram.gram(sets[name]).to_dict() for name in ("gate", "up", "value") if name in sets},
        "random": shapes[size],
        "welch": gram.welch(*size),
        "channels": classes.summary(cos, threshold),
    }


def _key(rows: torch.Tensor, norm: Any) -> torch.Tensor:
    """Keys as directions of the residual: the norm's gain multiplied in, its mean taken off."""
    if norm is None:
        return rows
    gain, centred, _ = norm
    folded = rows * gain
    return folded - folded.mean(1, keepdim=True) if centred else folded
