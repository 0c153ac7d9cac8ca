"""Normalisations, found by experiment on the module itself: what the parts of a state become, and RMS norms in numbers.

`recognise` gives a norm as a linear map with the scale of the state frozen.

norm(h) = gain * (h - mean(h)) * s(h) + bias ("layer"), or gain * h * s(h) + bias ("rms"), with one number s(h) per
state. With s(h) and bias set aside it is linear, so the parts of a state have exact shares in what comes out.
D d_model.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from .laboratory import ALLOWED, free_copy, relative
from .swapped import is_swapped

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


def recognise(module: nn.Module, d_model: int, states: Tensor | None = None) -> Norm | None:
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
        tests = [noise, noise * 30 + 3, *(() if states is None else [states.reshape(-1, d_model)])]
        if all(relative(_run(twin, h), norm.apply(h)) <= ALLOWED for h in tests):
            return norm
    except (RuntimeError, TypeError, ValueError, AttributeError):  # whatever a module that is no norm makes of this
        pass
    return None


def _float_copy(module: nn.Module) -> nn.Module:
    return free_copy(module).float().cpu()


@dataclasses.dataclass(frozen=True)
class RmsNorm:
    """y = x / sqrt(mean(x^2) + eps) * weight, or with `unit_offset` * (weight + 1) (Gemma's), over `width` inputs.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """

    width: int
    eps: float
    unit_offset: bool = False

    def describe(self) -> str:
        return f"rms norm {self.width} ({'weight + 1, ' if self.unit_offset else ''}eps {self.eps:.3g})"

    def exact(self, x: Tensor, weight: Tensor) -> Tensor:
        """The norm of x [..., width] in float64, with a weight [width]."""
        x = x.detach().double()
        gain = weight.detach().double() + self.unit_offset
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * gain


def may_be_rms(module: nn.Module) -> bool:
    """A module whose one tensor is a weight [width], as far as its structure tells."""
    held = [(name, p) for name, p in (*module._parameters.items(), *module._buffers.items()) if p is not None]
    if module._modules or [name for name, _ in held] != ["weight"] or is_swapped(module):
        return False
    weight = held[0][1]
    plain = type(weight) is nn.Parameter and not weight.is_meta and weight.is_floating_point()
    return plain and weight.dim() == 1 and weight.numel() > 1


def rms_norm(module: nn.Module) -> RmsNorm | None:
    """The RmsNorm that a module (see `may_be_rms`) is, in values and in either mode; None if it is none."""
    weight = module.weight.detach().double().cpu()  # type: ignore[operator, union-attr]
    width = weight.numel()
    found = recognise(module, width)
    if found is None or found.kind != "rms" or found.bias is not None:
        return None
    offsets = [o for o in (False, True) if relative(found.gain, weight + o) <= ALLOWED]
    twin = _float_copy(module)
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(8, width, generator=generator, dtype=torch.float64) + 0.5
    for offset in offsets:
        norm = RmsNorm(width, _eps(twin, noise, weight + offset), offset)
        scales = (_TINY, norm.eps**0.5, 1.0, 30.0)
        tests = [noise * s for s in scales if s]
        expected = [norm.exact(x.float(), weight) for x in tests]
        if all(
            relative(_run(twin.train(mode), x), y) <= ALLOWED for x, y in zip(tests, expected) for mode in (True, False)
        ):
            return norm
    return None


_TINY = 2.0**-40  # inputs whose mean square is nothing beside eps


def _eps(twin: nn.Module, noise: Tensor, gain: Tensor) -> float:
    """What a norm adds to the mean square, from what it makes of tiny inputs: the number that the module holds, where
    one is that to 1e-5, else the measured one."""
    x = (noise * _TINY).float().double()
    y = _run(twin, x)
    mean = x.square().mean(-1)
    square = float(((gain * x).square().sum(-1) / y.square().sum(-1).clamp_min(1e-300) - mean).mean())
    known = [v for v in vars(twin).values() if type(v) is float] + [torch.finfo(torch.float32).eps]
    return next((v for v in known if abs(v - square) <= 1e-5 * (abs(square) + float(mean.mean()))), max(square, 0.0))


@torch.no_grad()
def _run(module: nn.Module, h: Tensor) -> Tensor:
    out: Any = module(h.float())
    if not isinstance(out, Tensor) or out.shape != h.shape:
        raise ValueError("not a map of states to states")
    return out.double()
