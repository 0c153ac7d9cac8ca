"""Many small FFNs at once with a linear read-out in the place of `down`: up (and gate), activation, read-out.

M models of up to F channels each (a mask closes those beyond a model's width), N samples, D d_model, K targets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import activations

_RIDGE = 1e-8  # of the mean square of a coefficient: keeps the read-out finite where channels are copies of each other


class Channels:
    """The channels of M FFNs: coefficient = act(up·x + b), or act(gate·x + b_gate) (up·x + b).

    widths  how many channels each of the models has;  seeds  one per model: it starts the same whatever stands beside.
    """

    def __init__(self, d_model: int, widths: Sequence[int], activation: str, gated: bool, seeds: Sequence[int]) -> None:
        act = activations.get(activation)
        self.act, self.params, self.gated = act, dict(act.params), gated
        self.widths = list(widths)
        most = max(widths)
        starts = [_start(d_model, most, 2 if gated else 1, seed) for seed in seeds]
        self.keys_MPFD = torch.stack([k for k, _ in starts]).requires_grad_()  # P: up, and gate
        self.bias_MPF = torch.stack([b for _, b in starts]).requires_grad_()
        self.mask_MF = (torch.arange(most) < torch.tensor(self.widths)[:, None]).float()

    def coefficients(self, x_MND: Tensor) -> Tensor:
        """[M, N, F]; 0 in channels that a model does not have."""
        keys, bias = self.keys_MPFD.to(x_MND.dtype), self.bias_MPF.to(x_MND.dtype)
        z = [torch.baddbmm(bias[:, p, None], x_MND, keys[:, p].transpose(1, 2)) for p in range(keys.shape[1])]
        out = self.act.torch(torch, z[-1], self.params)
        return (out * z[0] if self.gated else out) * self.mask_MF[:, None].to(x_MND.dtype)

    def fit(
        self, x_MND: Tensor, y_MNK: Tensor, steps: int, batch: int, learning_rate: float = 1e-2, l1: float = 0.0
    ) -> None:
        """Train keys together with a read-out on the squared error, by Adam with a rate that falls to 0; the read-out
        is then left behind: `read_out` fits it exactly. l1: price of the read-out's absolute weights."""
        models, n, _ = x_MND.shape
        generator = torch.Generator().manual_seed(0)
        out = torch.zeros(models, self.mask_MF.shape[1], y_MNK.shape[2], requires_grad=True)
        mean = torch.zeros(models, 1, y_MNK.shape[2], requires_grad=True)
        optimizer = torch.optim.Adam([self.keys_MPFD, self.bias_MPF, out, mean], lr=learning_rate, fused=True)
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = learning_rate * 0.5 * (1 + math.cos(math.pi * step / steps))
            rows = torch.randint(0, n, (min(batch, n),), generator=generator)
            optimizer.zero_grad()
            guess = torch.baddbmm(mean, self.coefficients(x_MND[:, rows]), out)
            loss = (guess - y_MNK[:, rows]).square().mean(1).sum() + l1 * out.abs().sum()
            loss.backward()
            optimizer.step()


def _start(d_model: int, width: int, projections: int, seed: int) -> tuple[Tensor, Tensor]:
    """Keys [P, F, D] of variance 2/D and biases [P, F] as large as half a pre-activation."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(projections, width, d_model, generator=generator) * math.sqrt(2 / d_model)
    return keys, torch.randn(projections, width, generator=generator) * 0.5


@torch.no_grad()
def read_out(features_MNF: Tensor, y_MNK: Tensor) -> Tensor:
    """The best linear read-out with a constant, by least squares in float64: [M, F + 1, K], the constant last."""
    x = with_constant(features_MNF)
    gram = x.transpose(1, 2) @ x
    diagonal = gram.diagonal(dim1=1, dim2=2)
    # channels that a model does not have are all 0: the ridge gives them the weight 0
    ridge = _RIDGE * diagonal.mean(1, keepdim=True).expand_as(diagonal)
    return torch.linalg.solve(gram + torch.diag_embed(ridge), x.transpose(1, 2) @ y_MNK.double())


def with_constant(features: Tensor) -> Tensor:
    """float64, with a 1 put after the features."""
    return torch.cat([features.double(), torch.ones(*features.shape[:-1], 1, dtype=torch.float64)], -1)


def applied(features_MNF: Tensor, weights: Tensor) -> Tensor:
    """What a read-out makes of features, [M, N, K] float64."""
    return with_constant(features_MNF) @ weights


def r_squared(y: Tensor, guess: Tensor) -> Any:
    """Share of the variance of each target that is explained, [..., K], over the samples of dimension -2."""
    y = y.double()
    return 1 - (y - guess).square().mean(-2) / (y - y.mean(-2, keepdim=True)).square().mean(-2).clamp_min(1e-300)
