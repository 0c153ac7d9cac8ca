"""The toy models of superposition: many small models, one for each point and seed, trained as one tensor program."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import activations
from . import measures
from .samples import Samples

# P points, S seeds, M = P * S models, B samples, n features, m dimensions
Progress = Callable[[int, int], None]
Array = np.ndarray[Any, np.dtype[np.float64]]
HIDDEN = ("relu", "abs")
_AT_ONCE = 2**24  # numbers in a batch of all models: 64 MB, of which a step holds some ten
_EVALUATE = 2**14  # samples that the loss is measured on, the same for all seeds


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The best model of each point, NumPy float64.

    density     [P], probability that a feature is active;  importance [P, n].
    weights     W [P, m, n]: column i is the direction that stands for feature i.
    bias        b [P, n].
    out         [P, n, m], the second matrix where it is not Wᵀ (hidden="abs"), else None.
    loss        [P], the lowest over seeds;  losses [P, S];  seed [P], the one that gave it.
    """

    density: Array
    importance: Array
    weights: Array
    bias: Array
    out: Array | None
    loss: Array
    losses: Array
    seed: Array

    def norms(self) -> Array:
        """‖W_i‖ [P, n]: about 1 if the feature is represented, about 0 if not."""
        return measures.norms(self.weights)

    def interference(self) -> Array:
        """Σ_{j≠i} (Ŵ_i·W_j)² [P, n]: what other features read in feature i's direction; 0 if it stands alone."""
        return measures.interference(self.weights)

    def dimensionality(self) -> Array:
        """D_i [P, n], the share of a dimension that feature i has to itself."""
        return measures.dimensionality(self.weights)

    def dimensions_per_feature(self) -> Array:
        """D* = m / ‖W‖_F² [P]."""
        return measures.dimensions_per_feature(self.weights)


def train(
    n: int,
    m: int,
    sparsity: float | Sequence[float] | Array,
    importance: float | Sequence[float] | Array = 1.0,
    hidden: str | None = None,
    activation: str = "relu",
    seeds: int | Iterable[int] = 5,
    *,
    steps: int = 4000,
    batch: int = 512,
    learning_rate: float = 1e-2,
    progress: Progress | None = None,
) -> Trained:
    """Train the toy models of superposition at each sparsity, and keep the best of several seeds.

    hidden=None    x' = act(Wᵀ W x + b)                      activation="identity" is the linear baseline; any name of
                                                             `fanfold.activations` will do
    hidden="relu"  x' = act(Wᵀ relu(W x) + b)
    hidden="abs"   y  = act(W_out relu(W x) + b), y to be |x|, with x in [-1, 1]
    loss = mean over x of Σ_i I_i (x_i - x'_i)²;  x_i = 0 with probability `sparsity`, else uniform in [0, 1].

    n, m        features and dimensions.
    sparsity    a number or [P]: P points that are trained together.
    importance  a number r for I_i = r^i (1: all alike), or [n], or [P, n] for one row a point.
    seeds       how many (0, 1, …) or which.
    steps, batch, learning_rate  of Adam; the rate falls to 0 along a half cosine.
    progress    called with (steps done, all).
    -> `Trained`. Computed in float32. The same call gives the same numbers; a seed's model does not depend on the
    other seeds but for rounding.

    Raises ValueError for a sparsity outside [0, 1), sizes below 1, or an importance of another shape.
    Source: Elhage et al. 2022, Toy Models of Superposition, Transformer Circuits Thread.
    """
    density = 1 - np.atleast_1d(np.asarray(sparsity, dtype=np.float64))
    chosen = list(range(seeds)) if isinstance(seeds, int) else [int(s) for s in seeds]
    _check(n, m, density, hidden, chosen, steps, batch)
    weight = _importance(n, len(density), importance)
    activations.get(activation)  # an unknown name is refused before anything is trained
    at_once = max(1, _AT_ONCE // (len(chosen) * batch * n))
    pieces = range(0, len(density), at_once)
    parts = []
    for i, start in enumerate(pieces):
        job = _Job(n, m, density[start : start + at_once], weight[start : start + at_once], hidden, activation, chosen)
        job.fit(steps, batch, learning_rate, _shifted(progress, i * steps, len(pieces) * steps))
        parts.append(job.best())
    return parts[0] if len(parts) == 1 else _joined(parts)


def _check(n: int, m: int, density: Array, hidden: str | None, seeds: list[int], steps: int, batch: int) -> None:
    for name, value in (("n", n), ("m", m), ("steps", steps), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: expected a positive int")
    if density.ndim != 1 or not density.size or not np.all((density > 0) & (density <= 1)):
        raise ValueError(f"sparsity={np.round(1 - density, 6).tolist()}: expected a number or list in [0, 1)")
    if hidden not in (None, *HIDDEN):
        raise ValueError(f"hidden={hidden!r}: expected None, {' or '.join(map(repr, HIDDEN))}")
    if not seeds:
        raise ValueError("seeds is empty: expected at least one")


def _importance(n: int, points: int, given: Any) -> Array:
    """[P, n] from a number, [n] or [P, n]. Raises ValueError for another shape, or a value that is not positive."""
    value = np.asarray(given, dtype=np.float64)
    rows = value ** np.arange(n) if value.ndim == 0 else value
    if rows.shape not in ((n,), (points, n)):
        raise ValueError(f"importance has shape {value.shape}, expected a number, ({n},) or ({points}, {n})")
    if not np.all(np.isfinite(rows) & (rows > 0)):
        raise ValueError("importance: expected finite positive numbers")
    return np.broadcast_to(rows, (points, n)).copy()


def _shifted(progress: Progress | None, done: int, total: int) -> Progress:
    return (lambda d, _: progress(done + d, total)) if progress is not None else (lambda d, t: None)


class _Job:
    """The models of some points, all seeds, as batched tensors."""

    def __init__(
        self, n: int, m: int, density: Array, importance: Array, hidden: str | None, activation: str, seeds: list[int]
    ) -> None:
        self.n, self.m, self.hidden, self.seeds = n, m, hidden, seeds
        self.density, self.importance = density, importance
        self.act = activations.get(activation)
        points = len(density)
        # every point of a seed starts from the same weights, which a generator of its own makes
        starts = [_start(n, m, seed) for seed in seeds]
        self.w = torch.stack([w for w, _ in starts]).repeat(points, 1, 1).requires_grad_()  # [M, m, n]
        self.b = torch.zeros(points * len(seeds), 1, n, requires_grad=True)
        self.out = None
        if hidden == "abs":
            self.out = torch.stack([o for _, o in starts]).repeat(points, 1, 1).requires_grad_()  # [M, m, n]
        self.importance_M = torch.tensor(importance).float().repeat_interleave(len(seeds), 0)[:, None]  # [M, 1, n]

    def forward(self, x_MBn: Tensor) -> Tensor:
        h_MBm = torch.bmm(x_MBn, self.w.transpose(1, 2))
        if self.hidden is not None:
            h_MBm = torch.relu(h_MBm)
        z_MBn = torch.baddbmm(self.b, h_MBm, self.w if self.out is None else self.out)
        return self.act.torch(torch, z_MBn, dict(self.act.params))

    def losses(self, x_PSBn: Tensor, weight_PB: Tensor | None) -> Tensor:
        """The loss of each model on one batch, [M]; `weight` is what each sample counts for."""
        points, seeds, batch, n = x_PSBn.shape
        x_MBn = x_PSBn.reshape(points * seeds, batch, n)
        target = x_MBn.abs() if self.hidden == "abs" else x_MBn
        error = (self.forward(x_MBn) - target).square() * self.importance_M
        if weight_PB is not None:
            error = error * weight_PB.repeat_interleave(seeds, 0)[..., None]
        return error.sum((1, 2)) / batch

    def fit(self, steps: int, batch: int, learning_rate: float, progress: Progress) -> None:
        density = torch.tensor(self.density).float()
        samples = Samples(self.n, density, self.seeds, batch, self.hidden == "abs")
        parameters = [p for p in (self.w, self.b, self.out) if p is not None]
        optimizer = torch.optim.Adam(parameters, lr=learning_rate, fused=True)
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = learning_rate * 0.5 * (1 + math.cos(math.pi * step / steps))
            optimizer.zero_grad()
            self.losses(
                samples.draw(), samples.weight
            ).sum().backward()  # a model's gradient is its own: the sum only joins them
            optimizer.step()
            progress(step + 1, steps)

    @torch.no_grad()
    def best(self) -> Trained:
        """The model with the lowest loss of each point; the loss is measured on samples that all seeds share."""
        points, seeds = len(self.density), len(self.seeds)
        share = max(1, min(_EVALUATE, _AT_ONCE // (points * seeds * self.n)))
        samples = Samples(self.n, torch.tensor(self.density).float(), [2**31 - 1], share, self.hidden == "abs")
        total = torch.zeros(points * seeds, dtype=torch.float64)
        rounds = -(-_EVALUATE // samples.batch)
        for _ in range(rounds):
            total += self.losses(samples.draw().expand(-1, seeds, -1, -1), samples.weight).double()
        losses = (total / rounds).view(points, seeds)
        # a model that diverged must not win
        best = torch.where(losses.isfinite(), losses, math.inf).argmin(1)
        at = torch.arange(points) * seeds + best
        return Trained(
            density=self.density,
            importance=self.importance,
            weights=_numpy(self.w[at]),
            bias=_numpy(self.b[at, 0]),
            out=None if self.out is None else _numpy(self.out[at].transpose(1, 2)),
            loss=losses.gather(1, best[:, None])[:, 0].numpy(),
            losses=losses.numpy(),
            seed=np.array(self.seeds)[best.numpy()],
        )


def _numpy(t: Tensor) -> Array:
    return t.detach().double().numpy()


def _start(n: int, m: int, seed: int) -> tuple[Tensor, Tensor]:
    """W of Glorot's normal distribution and, for the model that has one, the second matrix |W|, both [m, n]."""
    generator = torch.Generator().manual_seed(seed + 2**32)  # not the stream that makes the samples
    w = torch.randn(m, n, generator=generator) * math.sqrt(2 / (n + m))
    # With a random second matrix half of the outputs begin below 0, where the ReLU passes no gradient, and sparse
    # features never wake them: the loss at S = 0.99 was twenty times higher.
    return w, w.abs()


def _joined(parts: list[Trained]) -> Trained:
    """Several points' results in one."""
    values: dict[str, Any] = {}
    for name in Trained.__dataclass_fields__:
        every = [getattr(p, name) for p in parts]
        values[name] = None if every[0] is None else np.concatenate(every)
    return Trained(**values)
