"""What the wider space of an FFN buys: superposed features read by a sparse linear read-out, before and after it.

n sparse features lie along random directions of d_model dimensions. A linear read-out of the residual itself explains
d_model features' worth of variance at most (Σ R²_i <= d_model: a projection's trace is its rank); after up and an
activation the bound is d_ff.
N samples, D d_model, F d_ff, K features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .small import Channels, r_squared
from .toy import Progress

ACTIVE = 2.0  # features that are there at once, on average
RECOVERED = 0.8  # R² from which a feature counts as recovered
PRICES = (3e-4, 3e-3, 3e-2)  # of the read-out's absolute weights; the best on held-out samples is taken
_TRAIN, _TEST = 4096, 4096
# (name, activation, gated): each gated one has 2/3 of the channels, and with them the same number of parameters
KINDS = (("relu", "relu", False), ("silu", "silu", False), ("reglu", "relu", True), ("swiglu", "silu", True))


def superposed(n: int, d_model: int, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """(x [N, D], features [N, n]): each feature is there with probability 2/n, its value uniform in [0, 1]; the
    directions are the same for every seed, random and of length 1."""
    generator = torch.Generator().manual_seed(seed)
    value = torch.rand(samples, n, generator=generator)
    on = torch.rand(samples, n, generator=generator) < ACTIVE / n
    directions = torch.randn(n, d_model, generator=torch.Generator().manual_seed(2**31 - 1))
    features = value * on
    return features @ torch.nn.functional.normalize(directions, dim=1), features


@torch.no_grad()
def lasso(x_NF: Tensor, y_NK: Tensor, price: float, steps: int = 300) -> tuple[Tensor, Tensor]:
    """Minimise mean |y - W z - c|² / 2 + price Σ |W| sd(y) over W, z being x scaled to unit variance (FISTA).

    -> (W [K, F] for x as it is, c [K]), float64. Beck & Teboulle 2009.
    """
    x, y = x_NF.double(), y_NK.double()
    mean, spread = x.mean(0), x.std(0, correction=0)
    scale = torch.where(spread > 0, 1 / spread.clamp_min(1e-12), 0.0)
    z, target = (x - mean) * scale, y - y.mean(0)
    gram, moment = z.T @ z / len(z), z.T @ target / len(z)
    step = 1 / torch.linalg.eigvalsh(gram)[-1].clamp_min(1e-12)
    limit = step * price * target.std(0, correction=0)
    w = ahead = torch.zeros_like(moment)
    t = 1.0
    for _ in range(steps):
        moved = ahead - step * (gram @ ahead - moment)
        new = moved.sign() * (moved.abs() - limit).clamp_min(0)
        faster = (1 + (1 + 4 * t * t) ** 0.5) / 2
        ahead = new + (t - 1) / faster * (new - w)
        w, t = new, faster
    w = (w * scale[:, None]).T
    return w, y.mean(0) - w @ mean


def recovery(read: tuple[Tensor, Tensor], read_test: tuple[Tensor, Tensor]) -> dict[str, float]:
    """How much a sparse read-out recovers: (what is read [N, F], features [N, n]), for fitting and for testing.

    -> explained: Σ R²_i over features (negative ones count 0);  recovered: features of R² >= 0.8;
    weights: read-out weights per feature that are not 0;  price: the one that served held-out samples best.
    """
    x, y = read
    half = len(x) // 2
    best: tuple[float, float] | None = None
    for price in PRICES:
        w, c = lasso(x[:half], y[:half], price)
        found = float(r_squared(y[half:], x[half:].double() @ w.T + c).clamp_min(0).sum())
        if best is None or found > best[0]:
            best = (found, price)
    assert best is not None
    w, c = lasso(x, y, best[1])
    share = r_squared(read_test[1], read_test[0].double() @ w.T + c)
    return {
        "explained": float(share.clamp_min(0).sum()),
        "recovered": int((share >= RECOVERED).sum()),
        "weights": float((w != 0).double().sum(1).mean()),
        "price": best[1],
    }


def experiment(
    d_model: int = 12,
    ratios: Sequence[int] = (1, 2, 4, 8),
    features: Sequence[int] = (12, 24, 48, 96),
    steps: int = 800,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Recovery of n features from d_model dimensions, from the residual and after up and activation of d_ff = ratio ·
    d_model channels (gated: 2/3 of them, the same parameters), with random keys and with keys trained for it.

    -> rows {features, kind, ratio, d_ff, parameters, trained, explained, recovered, weights, price}; kind "residual" is
    the read-out before the FFN. parameters: of up, gate and down at d_model.
    Raises ValueError if 2/3 of ratio · d_model is not whole.
    """
    if any(2 * r * d_model % 3 for r in ratios):
        raise ValueError(f"d_model={d_model} with ratios {tuple(ratios)}: 2/3 of the channels is not whole")
    rows = []
    done, total = 0, len(features) * len(KINDS)
    for n in features:
        x, y = superposed(n, d_model, _TRAIN, 0)
        far, answer = superposed(n, d_model, _TEST, 1)
        row: dict[str, Any] = {"features": n, "kind": "residual", "ratio": 0, "d_ff": 0, "parameters": 0}
        rows.append({**row, "trained": False, **recovery((x, y), (far, answer))})
        for kind, activation, gated in KINDS:
            widths = [r * d_model * 2 // 3 if gated else r * d_model for r in ratios]
            channels = Channels(d_model, widths, activation, gated, [0] * len(widths))
            many = x.expand(len(widths), -1, -1).contiguous()
            for trained in (False, True):
                if trained:
                    channels.fit(many, y.expand(len(widths), -1, -1), steps, batch=256, learning_rate=5e-3)
                with torch.no_grad():
                    near = channels.coefficients(many)
                    away = channels.coefficients(far.expand(len(widths), -1, -1))
                for k, width in enumerate(widths):
                    found = recovery((near[k, :, :width], y), (away[k, :, :width], answer))
                    size = (3 if gated else 2) * d_model * width
                    row = {"features": n, "kind": kind, "ratio": ratios[k], "d_ff": width, "parameters": size}
                    rows.append({**row, "trained": trained, **found})
            done += 1
            if progress is not None:
                progress(done, total)
    return rows
