"""How crowded a set of directions is: cosines of all pairs, beside as many random directions of the same dimension.

N vectors, D dimensions.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

_ROWS = 2048  # vectors whose nearest neighbours are looked for: all up to here, else a random choice


@dataclass(frozen=True, kw_only=True)
class Gram:
    """Statistics of N directions in D dimensions.

    mean_square_cosine       over all pairs; for random directions 1/D is expected.
    interference             (N - 1) · mean_square_cosine: what all others together read in one direction (unit
                             vectors), on average; the Welch bound is the least possible, N/D - 1 (0 for N <= D).
    nearest, nearest_largest |cosine| to the nearest other vector: mean over vectors, and the largest.
    effective_rank           exp of the entropy of the shares of variance, of the unit vectors (Roy & Vetterli 2007).
    features_per_dimension   1 / mean D_i, D_i = ‖v_i‖² / Σ_j (v̂_i·v_j)² with the vectors' own lengths (Elhage et al.
                             2022): how many share a dimension as they lie. At least N/D, which a tight frame has;
                             random directions have about 1 + N/D.
    """

    n: int
    d: int
    mean_square_cosine: float
    interference: float
    nearest: float
    nearest_largest: float
    effective_rank: float
    features_per_dimension: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def gram(vectors: Tensor) -> Gram:
    """Statistics of the rows of `vectors` [N, D]; float32, sums in float64. Rows of length 0 are left out.

    Raises ValueError with fewer than two rows that are not 0.
    """
    v = vectors.detach().float().cpu()
    length = v.norm(dim=1)
    v = v[length > 0]
    n, d = v.shape
    if n < 2:
        raise ValueError(f"{n} vectors that are not 0: expected two or more")
    unit = v / v.norm(dim=1, keepdim=True)
    covariance = (unit.T @ unit).double()  # [D, D]: its squares sum to those of the N x N cosines
    square = (float(covariance.square().sum()) - n) / (n * (n - 1))
    share = torch.linalg.eigvalsh(covariance).clamp_min(0) / n
    share = share[share > 0]
    # Σ_j (v̂_i·v_j)² = v̂_i' (V'V) v̂_i, without the N x N matrix
    overlap = (unit @ (v.T @ v) * unit).sum(1)
    dimensionality = (v.square().sum(1) / overlap).double()
    near = _nearest(unit)
    return Gram(
        n=n,
        d=d,
        mean_square_cosine=square,
        interference=square * (n - 1),
        nearest=float(near.mean()),
        nearest_largest=float(near.max()),
        effective_rank=float(torch.exp(-(share * share.log()).sum())),
        features_per_dimension=float(1 / dimensionality.mean()),
    )


def _nearest(unit: Tensor) -> Tensor:
    """The largest |cosine| of each row (of _ROWS of them, where there are more) to another row."""
    n = len(unit)
    rows = torch.arange(n)
    if n > _ROWS:
        rows = torch.randperm(n, generator=torch.Generator().manual_seed(0))[:_ROWS]
    out = []
    for part in rows.split(256):
        cos = (unit[part] @ unit.T).abs_()
        cos[torch.arange(len(part)), part] = 0
        out.append(cos.max(1).values)
    return torch.cat(out)


def random(n: int, d: int, seed: int = 0) -> Gram:
    """The same of n random directions of d dimensions, uniform on the sphere."""
    return gram(torch.randn(n, d, generator=torch.Generator().manual_seed(seed)))


def welch(n: int, d: int) -> float:
    """The least interference that n unit vectors in d dimensions can have on average: N/D - 1, or 0 (Welch 1974)."""
    return max(n / d - 1, 0.0)
