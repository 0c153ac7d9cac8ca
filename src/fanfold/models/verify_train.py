"""The verification of a swap for training: gradients of x and of the weights, each held against float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import numerics, reference
from ..kernels import torch as torch_ops
from ..kernels import train
from ..weights import Weights
from .find import Found
from .linears import quiet
from .report import SwapRow
from .verify import Truth

_TOKENS = 5  # rows that differ; the float64 gradients of the weights cost as much as their number


def judge_gradients(row: SwapRow, module: Any, found: Found, truth: Truth) -> None:
    """Fill in the row's gradient_ratio; set it to "left" if the rule is broken.

    x's gradient is that of the swapped module, those of the weights are those of its own weights in our derivative.
    """
    sample = truth.xs[1][0, :_TOKENS]
    generator = torch.Generator().manual_seed(2)
    grad_y = torch.randn(sample.shape, generator=generator).to(sample.device, sample.dtype)
    weights = _leaves(truth.weights)
    exact = reference.backward(sample, weights, grad_y * found.scale)
    own = _gradients(torch_ops.forward, sample, weights, grad_y * found.scale)
    ours = _gradients(lambda x, w: train.ffn(x, w, row.save or "all"), sample, weights, grad_y * found.scale)
    ours["x"] = _of_module(module, found, sample, grad_y)
    worst, name = 0.0, ""
    for key, gradient in ours.items():
        shape = (1, -1) if gradient.dim() == 1 else gradient.shape
        result = numerics.compare(
            gradient.reshape(shape), exact[key].reshape(shape), own[key].reshape(shape), dtype=sample.dtype
        )
        if result.ratio >= worst:
            worst, name = result.ratio, key
    row.gradient_ratio = worst
    if worst > 1:
        row.status, row.reason = (
            "left",
            f"the gradient of {name} failed: its error is {worst:.3g} x what the rule allows",
        )


def _leaves(weights: Weights) -> Weights:
    """The same memory, with gradients of its own."""
    return Weights.unchecked(weights.spec, **{n: t.detach().requires_grad_() for n, t in weights.items()})


def _gradients(forward: Any, x: Tensor, weights: Weights, grad_y: Tensor) -> dict[str, Tensor]:
    names, tensors = zip(*weights.items())
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        y = forward(leaf, weights)
    return dict(zip(("x", *names), torch.autograd.grad(y, (leaf, *tensors), grad_y)))


def _of_module(module: Any, found: Found, x: Tensor, grad_y: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    with quiet(module), torch.enable_grad():
        y = type(module).forward(module, *((leaf, torch.zeros_like(leaf)) if found.residual else (leaf,)))
    return torch.autograd.grad(y, leaf, grad_y)[0]
