"""A normalisation as a linear map with the scale of the state frozen, found by experiment on the module itself.

norm(h) = gain * (h - mean(h)) * s(h) + bias ("layer"), or gain * h * s(h) + bias ("rms"), with one number s(h) per
state. With s(h) and bias set aside it is linear, so the parts of a state have exact shares in what comes out.
D d_model.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from ..models.laboratory import ALLOWED, relative

_LARGE = 1024.0  # probes of this size: what a norm adds to the variance against division by zero is nothing beside it


@dataclasses.dataclass(frozen=True)
class Norm:
    """kind "rms", "layer" or "none"; gain [D] float64, bias [D] float64 or None."""

    kind: str
    gain: Tensor
    bias: Tensor | None
    module: nn.Module | None = dataclasses.field(repr=False, default=None)

    def centred(self, h: Tensor) -> Tensor:
        return h - h.mean(-1, keepdim=True) if self.kind == "layer" else h

    def scale(self, h: Tensor) -> Tensor:
        """s(h) of each state [..., D], as the module itself scales it  ->  [..., 1] float64."""
        h = h.double()
        if self.module is None:
            return torch.ones_like(h[..., :1])
        along = self.gain * self.centred(h)
        n = _run(self.module, h) if self.bias is None else _run(self.module, h) - self.bias
        return (n * along).sum(-1, keepdim=True) / along.square().sum(-1, keepdim=True).clamp_min(1e-300)

    def direction(self, scale: Tensor, e: Tensor) -> Tensor:
        """What a part of the state must be multiplied by, summed over D, to give its share of e . norm(h) [..., D]."""
        out = self.gain * e.double()
        return self.centred(out) * scale  # centring is symmetric: e . centred(c) = centred(e) . c

    def apply(self, h: Tensor) -> Tensor:
        """norm(h) in float64, from gain, bias and the module's own scale."""
        n = self.gain * self.centred(h.double()) * self.scale(h)
        return n if self.bias is None else n + self.bias


def no_norm(d_model: int) -> Norm:
    """The identity, for a model whose last state is read as it is."""
    return Norm("none", torch.ones(d_model, dtype=torch.float64), None)


def recognise(module: nn.Module, d_model: int, states: Tensor) -> Norm | None:
    """The Norm that `module` is, held against it on `states` [..., D] and on random ones; None if it is none."""
    try:
        twin = _float_copy(module)
        signs = torch.ones(d_model, dtype=torch.float64)
        signs[::2] = -1.0
        probe = (signs - signs.mean()) * _LARGE
        up, down = _run(twin, probe), _run(twin, -probe)
        # an odd part alone is scaled by the state; the even part is the bias
        gain = (up - down) / 2 / probe * probe.square().mean().sqrt()
        bias = (up + down) / 2
        shifted = _run(twin, probe + _LARGE)
        kind = "layer" if relative(shifted, up) < 1e-3 else "rms"
        norm = Norm(kind, gain, bias if bool(bias.any()) else None, twin)
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(16, d_model, generator=generator, dtype=torch.float64)
        tests = [states.reshape(-1, d_model), noise, noise * 30 + 3]
        if all(relative(_run(twin, h), norm.apply(h)) <= ALLOWED for h in tests):
            return norm
    except (RuntimeError, TypeError, ValueError, AttributeError):  # whatever a module that is no norm makes of this
        pass
    return None


def _float_copy(module: nn.Module) -> nn.Module:
    twin = copy.deepcopy(module).float().cpu().eval().requires_grad_(False)
    for m in twin.modules():
        for hooks in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks):
            hooks.clear()
    return twin


@torch.no_grad()
def _run(module: nn.Module, h: Tensor) -> Tensor:
    out: Any = module(h.float())
    if not isinstance(out, Tensor) or out.shape != h.shape:
        raise ValueError("not a map of states to states")
    return out.double()
