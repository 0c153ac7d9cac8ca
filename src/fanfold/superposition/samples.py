"""Sparse features to train the toy models on: x_i = 0 with probability S, else uniform."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

# P points (densities), S seeds, B samples, n features
PATTERNS_UP_TO = 5  # with so few features every pattern of active ones can stand in each batch


class Samples:
    """Batches of n sparse features for P densities and S seeds; a seed's batches depend on nothing but the seed.

    density  [P], the probability 1 - S that a feature is active.
    signed   active features are uniform in [-1, 1] instead of [0, 1].

    With n <= 5 each of the 2^n patterns of active features is in every batch and is weighted by its probability:
    rare patterns are then seen in each step, and the gradient has the noise of the values only.
    """

    def __init__(self, n: int, density: Tensor, seeds: list[int], batch: int, signed: bool) -> None:
        self.n, self.signed = n, signed
        self.density = density
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.patterns: Tensor | None = None
        self.weight: Tensor | None = None
        self.batch = batch
        if n <= PATTERNS_UP_TO:
            on = torch.tensor(list(itertools.product((0.0, 1.0), repeat=n)))
            repeats = -(-batch // len(on))
            self.patterns = on.repeat(repeats, 1)
            self.batch = len(self.patterns)
            p = density[:, None]
            active = self.patterns.sum(1)
            self.weight = p**active * (1 - p) ** (n - active) * len(on)  # [P, B], its mean over the batch is 1

    def draw(self) -> Tensor:
        """The next batch, [P, S, B, n]."""
        v_SBn = torch.stack([torch.rand(self.batch, self.n, generator=g) for g in self.generators])
        if self.patterns is not None:
            values = v_SBn * 2 - 1 if self.signed else v_SBn
            return (values * self.patterns).expand(len(self.density), *v_SBn.shape)
        # one uniform number says both: active where v < p, and v / p is then uniform in [0, 1]
        scaled = v_SBn * (1 / self.density).view(-1, 1, 1, 1)
        if self.signed:
            return torch.where(scaled < 1, 2 * scaled - 1, 0.0)
        return (1 - scaled).clamp_(min=0)
