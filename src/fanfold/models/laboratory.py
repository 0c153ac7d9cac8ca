"""What both experiments work with: a copy to change freely, the measure of agreement, and the checks on code."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ..numerics import UNIT_ROUNDOFF
from .linears import is_half, matrix

SCALES = (0.1, 1.0, 3.0, 10.0, 30.0, 1000.0)
TOKENS = 48
# A match is agreement to rounding in float32. The module may round more often than one fused formula does, and sums
# over d_ff: 64 roundings. At pre-activation std 1 the nearest variants (gelu_erf, gelu_tanh) differ 50 times as much.
ALLOWED = 64 * UNIT_ROUNDOFF["float32"]


def relative(y: Tensor, truth: Tensor) -> float:
    error = ((y.double() - truth).square().mean() / truth.square().mean().clamp_min(1e-300)).sqrt()
    return float(error) if torch.isfinite(error) else float("inf")


def free_copy(module: nn.Module) -> nn.Module:
    """A float32 (or float64) copy in eval mode without hooks: what the code computes, free to be changed."""
    twin = copy.deepcopy(module)
    _unswap(twin)
    if any(is_half(p) for p in twin.parameters()):
        twin = twin.float()
    for m in twin.modules():
        for hooks in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks):
            hooks.clear()
    return twin.eval().requires_grad_(False)


def _unswap(twin: nn.Module) -> None:
    """Take swapped classes off a copy; packed linears get weights of their own (any: they are made random anyway)."""
    for m in twin.modules():
        original = getattr(type(m), "_fanfold_original", None)
        if original is not None:
            m.__class__ = original
            m.__dict__.pop("_fanfold")
            for name, p in m._parameters.items():
                if p is not None and p.numel() > 1 and not any(p.stride()):
                    m._parameters[name] = nn.Parameter(torch.zeros(p.shape, dtype=p.dtype), requires_grad=False)


def randomise(linear: Any, generator: torch.Generator) -> None:
    """Gaussian weights with unit-variance outputs, biases of std 0.5: independent of what training left there."""
    with torch.no_grad():
        weight, std = linear.weight, matrix(linear).shape[1] ** -0.5
        weight.copy_(torch.randn(weight.shape, generator=generator) * std)
        if linear.bias is not None:
            linear.bias.copy_(torch.randn(linear.bias.shape, generator=generator) * 0.5)


def disturb(twin: nn.Module, known: list[nn.Module], generator: torch.Generator) -> bool:
    """Change every float parameter and buffer but the known linears' weights and biases, so that one at a neutral value
    (an adapter's zeros, a scale of 1) shows that the code reads it. xIELU's own are part of its description.
    -> whether there are any."""
    any_changed = False
    for m in twin.modules():
        if all(hasattr(m, n) for n in ("alpha_p", "alpha_n", "beta", "eps")):
            continue
        for name, t in (*m._parameters.items(), *m._buffers.items()):
            if t is None or not t.is_floating_point() or (m in known and name in ("weight", "bias")):
                continue
            noise = torch.randn(t.shape, generator=generator).abs().to(t)
            t.data.copy_(t.data * (1.25 + 0.5 * noise) + 0.3 * (1.0 + noise))  # neither 0 nor 1 stays what it was
            any_changed = True
    return any_changed


class Unfit(Exception):  # noqa: N818 - carries the reason why a module is no FFN we can describe
    pass


class MixesTokens(Unfit):
    pass


def check_token_wise(y: Tensor, y_changed: Tensor) -> None:
    """The first token of the input was changed between the two: the others must have stayed, to rounding."""
    rest, rest_changed = (t.reshape(-1, t.shape[-1])[1:] for t in (y, y_changed))
    if relative(rest_changed, rest.double()) > ALLOWED:
        raise MixesTokens("the output of a token depends on other tokens: not a feed-forward network")


def first_changed(x: Tensor) -> Tensor:
    out = x.clone()
    out.view(-1, x.shape[-1])[0] *= -2.0
    return out


def double(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.double()


def cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (tuple, list)):
        return type(value)(cast(v, dtype) for v in value)
    if isinstance(value, dict):
        return {k: cast(v, dtype) for k, v in value.items()}
    return value


def negated(value: Any, d_model: int) -> Any:
    """The layer's arguments with every hidden state [..., d_model] changed."""
    if isinstance(value, Tensor):
        return value * -1.5 if value.is_floating_point() and value.dim() >= 2 and value.shape[-1] == d_model else value
    if isinstance(value, tuple):
        return tuple(negated(v, d_model) for v in value)
    return {k: negated(v, d_model) for k, v in value.items()} if isinstance(value, dict) else value


def check_linear(linear: Any, name: str, generator: torch.Generator) -> None:
    weight = matrix(linear)
    x = torch.randn(8, weight.shape[1], generator=generator).to(weight)
    truth = nn.functional.linear(x.double(), weight.double(), double(linear.bias))
    error = relative(linear(x), truth)
    if error > ALLOWED:
        raise Unfit(f"{name} ({type(linear).__name__}) is not x @ weight + bias: relative error {error:.1e}")
