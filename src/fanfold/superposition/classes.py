"""What a channel does with what it reads: input-output classes from the cosines of its key and value.

A gated channel writes act(gate·x) (up·x) times its value. With a = cos(up, value), g = cos(gate, value):

    enrichment               |a| and |g| large, a > 0   writes more of the direction that it reads
    depletion                |a| and |g| large, a < 0   takes away what it reads
    conditional enrichment   only |a| large,    a > 0   the same, on the condition that another direction is there
    conditional depletion    only |a| large,    a < 0
    proportional change      only |g| large             detects a direction, changes it by what another one says
    orthogonal output        neither                    reads one thing, writes another

An ungated channel has one key: enrichment, depletion or orthogonal output.
Source: Gerstner & Schütze 2025, arXiv:2505.17936. The six names are theirs; that "large" means 0.5 in the paper, and
how its classes are cut, is quoted from memory and was not checked against its text: give `threshold` to vary it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

THRESHOLD = 0.5
CLASSES = (
    "enrichment",
    "depletion",
    "conditional enrichment",
    "conditional depletion",
    "proportional change",
    "orthogonal output",
)


@torch.no_grad()
def cosines(up: Tensor, down: Tensor, gate: Tensor | None = None) -> dict[str, Tensor]:
    """Cosines of each channel, [F]: "up, value", and with a gate "gate, value" and "gate, up"; 0 with a zero vector.

    up, gate  [F, D], keys;  down  [D, F], whose columns are the values.
    """
    value = down.T
    out = {"up, value": _cosine(up, value)}
    if gate is not None:
        out |= {"gate, value": _cosine(gate, value), "gate, up": _cosine(gate, up)}
    return out


def classify(cos: dict[str, Tensor], threshold: float = THRESHOLD) -> Tensor:
    """The class of each channel as an index into CLASSES, [F].

    Raises ValueError unless 0 < threshold < 1.
    """
    if not 0 < threshold < 1:
        raise ValueError(f"threshold={threshold!r}: expected a cosine between 0 and 1")
    a = cos["up, value"]
    reads = a.abs() >= threshold
    gated = cos["gate, value"].abs() >= threshold if "gate, value" in cos else reads
    less = (a < 0).long()
    out = torch.full(a.shape, 5)
    out[gated & ~reads] = 4
    out[reads & ~gated] = 2 + less[reads & ~gated]
    out[reads & gated] = less[reads & gated]
    return out


def counts(indices: Tensor) -> dict[str, int]:
    """{class: number of channels}, every class listed."""
    found = torch.bincount(indices, minlength=len(CLASSES)).tolist()
    return dict(zip(CLASSES, found))


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.detach().double(), b.detach().double()
    length = a.norm(dim=1) * b.norm(dim=1)
    dot = (a * b).sum(1)
    return torch.where(length > 0, dot / length.clamp_min(1e-300), 0.0)


def summary(cos: dict[str, Tensor], threshold: float = THRESHOLD) -> dict[str, Any]:
    """Classes counted, and for each cosine its mean, mean absolute value, and 1st and 99th percentile."""
    marks = torch.tensor([0.01, 0.99], dtype=torch.float64)
    out: dict[str, Any] = {"threshold": threshold, "classes": counts(classify(cos, threshold)), "cosines": {}}
    for name, c in cos.items():
        low, high = torch.quantile(c, marks).tolist()
        out["cosines"][name] = {"mean": float(c.mean()), "mean_abs": float(c.abs().mean()), "p1": low, "p99": high}
    return out
