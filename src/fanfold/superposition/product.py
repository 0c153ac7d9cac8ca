"""The gate's "A and B, then write C": channels that it takes to write the product of two features.

One gated channel multiplies what two keys read; ungated channels have to build the product from bends.
M models, N samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .. import activations
from .small import Channels, applied, r_squared, read_out
from .toy import Progress

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
TARGETS = {"a·b, a and b in [0, 1]": (0.0, 1.0), "a·b, a and b in [-1, 1]": (-1.0, 1.0)}
_SIDE = 20  # samples lie on a grid of 20 x 20


def pair_product(a: Any, b: Any, activation: str = "silu") -> Any:
    """a·b from two gated channels, exactly: act(a)·b + act(-a)·(-b).

    act(z) = z s(z) with s(z) + s(-z) = 1 gives act(a) - act(-a) = a: so for silu, every GELU and ReLU. float64.
    """
    act = activations.get(activation)
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    return act.numpy(a, act.params) * b + act.numpy(-a, act.params) * -b


def errors(
    low: float,
    high: float,
    activation: str,
    gated: bool,
    widths: Sequence[int] = WIDTHS,
    seeds: int = 8,
    steps: int = 2000,
) -> list[float]:
    """Error of the best of `seeds` trained FFNs of each width on a·b over a square grid: root mean square over the
    target's standard deviation (1: no better than the mean)."""
    line = torch.linspace(low, high, _SIDE)
    x = torch.cartesian_prod(line, line)
    y = x.prod(1, keepdim=True)
    models = len(widths) * seeds
    many_x, many_y = x.expand(models, -1, -1).contiguous(), y.expand(models, -1, -1).contiguous()
    each = [w for w in widths for _ in range(seeds)]
    channels = Channels(2, each, activation, gated, list(range(seeds)) * len(widths))
    channels.fit(many_x, many_y, steps, batch=len(x), learning_rate=2e-2)
    with torch.no_grad():
        features = channels.coefficients(many_x.double())
        left = 1 - r_squared(many_y, applied(features, read_out(features, many_y)))[:, 0]
    return left.clamp_min(0).sqrt().view(len(widths), seeds).min(1).values.tolist()


def experiment(
    widths: Sequence[int] = WIDTHS, seeds: int = 8, steps: int = 2000, progress: Progress | None = None
) -> dict[str, Any]:
    """Errors by width of SwiGLU, ReGLU, ReLU and GELU channels on both targets.

    -> {target: {"swiglu": [error, …], …}}, and "widths". Equal channels are not equal parameters: a gated channel has
    three vectors, an ungated one two.
    """
    kinds = {
        "swiglu": ("silu", True),
        "reglu": ("relu", True),
        "relu": ("relu", False),
        "gelu_erf": ("gelu_erf", False),
    }
    out: dict[str, Any] = {"widths": list(widths)}
    done = 0
    for target, (low, high) in TARGETS.items():
        out[target] = {}
        for kind, (activation, gated) in kinds.items():
            out[target][kind] = errors(low, high, activation, gated, widths, seeds, steps)
            done += 1
            if progress is not None:
                progress(done, len(TARGETS) * len(kinds))
    return out


def channels_needed(widths: Sequence[int], found: Sequence[float], error: float) -> int | None:
    """The fewest of `widths` channels whose error is at most `error`; None if none of them is."""
    return next((w for w, e in zip(widths, found) if e <= error), None)
