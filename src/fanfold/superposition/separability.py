"""Why up, then down: what no linear read-out separates, read linearly after up and an activation.

Three tasks of two classes in d_model dimensions, through up → activation → linear read-out. Without the activation the
two matrices merge into one: nothing is won, exactly.
M models, N samples, D d_model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import activations
from .small import Channels, applied, read_out
from .toy import Progress

D_MODEL = 8
BITS = 4
FEATURES, NOISE_DENSITY = 16, 0.05  # of the XOR task: 16 features in 8 dimensions, those not asked for are rare
_TRAIN, _TEST = 1024, 4096


def parity(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The parity of 4 bits, each ±1 along a direction of its own, with noise in all dimensions: x [n, D], y [n] ±1."""
    bits = torch.randint(0, 2, (n, BITS), generator=generator) * 2.0 - 1
    x = torch.cat([bits, torch.zeros(n, D_MODEL - BITS)], 1) + 0.1 * torch.randn(n, D_MODEL, generator=generator)
    return x @ _rotation(), bits.prod(1)


def shells(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points on a sphere of radius 2 or on one of radius 3.5 around the same centre, with noise."""
    direction = torch.nn.functional.normalize(torch.randn(n, D_MODEL, generator=generator), dim=1)
    y = torch.randint(0, 2, (n,), generator=generator) * 2.0 - 1
    return direction * (2.75 + 0.75 * y)[:, None] + 0.1 * torch.randn(n, D_MODEL, generator=generator), y


def xor(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """XOR of two features among 16 in superposition in 8 dimensions: one of them is there, but not both."""
    directions = torch.nn.functional.normalize(
        torch.randn(FEATURES, D_MODEL, generator=torch.Generator().manual_seed(1)), dim=1
    )
    on = (torch.rand(n, FEATURES, generator=generator) < NOISE_DENSITY).float()
    on[:, :2] = torch.randint(0, 2, (n, 2), generator=generator).float()
    return on @ directions * 2, (on[:, 0] != on[:, 1]).float() * 2 - 1


TASKS: dict[str, Callable[[int, torch.Generator], tuple[Tensor, Tensor]]] = {
    "parity of 4 bits": parity,
    "concentric shells": shells,
    "XOR of superposed features": xor,
}


def _rotation() -> Tensor:
    return torch.linalg.qr(torch.randn(D_MODEL, D_MODEL, generator=torch.Generator().manual_seed(2)))[0]


def data(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """(x [tasks, N, D], y [tasks, N, 1]) of every task."""
    pairs = [make(samples, torch.Generator().manual_seed(seed)) for make in TASKS.values()]
    return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])[..., None]


def accuracy(y: Tensor, guess: Tensor) -> Tensor:
    """Share of samples on the right side of 0, by model [M]."""
    return ((guess > 0) == (y > 0)).double().mean((1, 2))


def linear() -> dict[str, float]:
    """Accuracy of the best linear read-out of x itself (least squares), by task; chance is 0.5."""
    x, y = data(_TRAIN, 0)
    far, answer = data(_TEST, 1)
    found = accuracy(answer, applied(far, read_out(x, y)))
    return dict(zip(TASKS, found.tolist()))


def experiment(
    names: Sequence[str] | None = None,
    ratios: Sequence[int] = (1, 2, 4, 8),
    seeds: int = 2,
    steps: int = 400,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Accuracy on unseen samples of every task, for each activation, gated and not, d_ff = ratio · d_model, with keys
    that are random and with trained ones; the read-out is the best one by least squares in both.

    names  of activations, default every one of the table.
    -> rows {task, activation, gated, d_ff, trained, accuracy} (mean over seeds). Ungated identity is the FFN with its
    activation removed.
    """
    chosen = list(names or activations.ACTIVATIONS)
    x, y = data(_TRAIN, 0)
    far, answer = data(_TEST, 1)
    tasks, widths = len(TASKS), [r * D_MODEL for r in ratios]
    # one model for each task, width and seed, in this order
    copies = len(widths) * seeds
    x, y, far, answer = (t.repeat_interleave(copies, 0) for t in (x, y, far, answer))
    width = [w for _ in range(tasks) for w in widths for _ in range(seeds)]
    seed = [s for _ in range(tasks * len(widths)) for s in range(seeds)]
    rows = []
    todo = [(name, gated) for name in chosen for gated in (False, True)]
    for i, (name, gated) in enumerate(todo):
        channels = Channels(D_MODEL, width, name, gated, seed)
        for trained in (False, True):
            if trained:
                channels.fit(x, y, steps, batch=256)
            with torch.no_grad():
                found = applied(channels.coefficients(far), read_out(channels.coefficients(x), y))
            share = accuracy(answer, found).view(tasks, len(widths), seeds).mean(2)
            for t, task in enumerate(TASKS):
                for k, w in enumerate(widths):
                    row = {"task": task, "activation": name, "gated": gated, "d_ff": w, "trained": trained}
                    rows.append({**row, "accuracy": float(share[t, k])})
        if progress is not None:
            progress(i + 1, len(todo))
    return rows


def merged(ratio: int = 4, steps: int = 400) -> dict[str, dict[str, float]]:
    """The FFN with its activation removed against the matrix that it merges into, in float64, by task.

    max_difference  largest |read_out(up x) - (read_out up) x| over samples, relative to the largest output.
    error, linear_error  mean squared error on the training samples, of the trained model and of the best linear one:
    the first is never below the second.
    """
    x, y = data(_TRAIN, 0)
    channels = Channels(D_MODEL, [ratio * D_MODEL] * len(TASKS), "identity", False, [0] * len(TASKS))
    channels.fit(x, y, steps, batch=256)
    out = {}
    with torch.no_grad():
        x64, keys, bias = x.double(), channels.keys_MPFD[:, 0].double(), channels.bias_MPF[:, 0].double()
        weights = read_out(channels.coefficients(x64), y)
        two = applied(channels.coefficients(x64), weights)
        one = x64 @ (keys.transpose(1, 2) @ weights[:, :-1]) + (bias[:, None] @ weights[:, :-1] + weights[:, -1:])
        best = applied(x64, read_out(x64, y))
        for t, task in enumerate(TASKS):
            out[task] = {
                "max_difference": float((two[t] - one[t]).abs().max() / two[t].abs().max()),
                "error": float((two[t] - y[t]).square().mean()),
                "linear_error": float((best[t] - y[t]).square().mean()),
            }
    return out
