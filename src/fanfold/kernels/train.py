"""`ffn`: the FFN in training, with a derivative of its own that keeps as much from forward to backward as it is told.

x [..., d_model]; T tokens, D d_model, F d_ff. In PyTorch's ops, so on any device and in any float dtype.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..count import ffn as counted
from ..spec import Spec
from ..weights import Weights
from . import blocks, dispatch, widening
from . import torch as torch_ops
from .blocks import Block

NAMES = counted.TRAINED  # in the order of an operator's arguments
# Between products lie two buffers of [forward, F] in forward and three of [tokens, F / parts] in backward, as much room
# in both. Backward's blocks are of few channels, not of few tokens, which would read and write the gradients of the
# matrices once each. Fewer channels save room and cost time: of eager's at 768x2048 with 2048 tokens
# in float32 "all" takes 0.98–1.00 in 1 or 2 parts, 1.02 in 3 or 4, 1.06 in 8; "tiles" 1.22–1.24 in 6, 1.26 in 8 (least
# times by turns in one run each, 2 threads, shared Xeon without AMX, 2026-11-30).
BLOCKS = {
    "all": Block(2048, 2048, 4, 1024),
    "preact": Block(2048, 2048, 4, 1024),
    "input": Block(768, 2048, 4),
    "tiles": Block(512, 2048, 6),
}
_AS_NARROW_AS_MAY_BE = 1 << 30
# Where products of 16 bits are computed in float32 (see widening): blocks of so many tokens and channels, small enough
# that "all" needs about the room of PyTorch's own way in 16 bits, "input" a quarter. At 768x2048 with 2048 tokens they
# take 1.2 ("all") to 1.35 times what BLOCKS would, and half to a quarter of the room (EPYC with AVX2 alone, 2 threads,
# 2026-12-01).
WIDENED = {
    "all": Block(512, 512, _AS_NARROW_AS_MAY_BE, 512),
    "preact": Block(512, 512, _AS_NARROW_AS_MAY_BE, 512),
    "input": Block(512, 512, _AS_NARROW_AS_MAY_BE, 192),
    "tiles": Block(256, 256, _AS_NARROW_AS_MAY_BE, 256),
}


class _Call(NamedTuple):
    spec: Spec
    save: str
    dropping: bool

    def block(self, like: Tensor) -> Block:
        wide = widening.dtype_of_products(like.dtype, like.device) != like.dtype
        return (WIDENED if wide else BLOCKS)[self.save]


def ffn(x: Tensor, weights: Weights, save: str = "all", training: bool = False) -> Tensor:
    """y = down(act(gate x) * (up x)), in training: backward needs no more than `save` tells forward to keep.

    x        [..., d_model]  ->  [..., d_model], x's dtype (autocast's under autocast).
    save     "all": x, gate, up and the coefficients; "preact": x, gate and up; "input": x alone, backward computes
             again, a quarter of the channels of 2048 tokens at a time; "tiles": x alone, a sixth. See
             `fanfold.count.ffn.kept`.
    training  apply the spec's dropout: the mask of torch's own dropout for the same seed, whatever `save` is.
    Gradients are the same to rounding; in 16 bits those of matrices are summed over 8 blocks of tokens at most before
    the sum goes on in float32, for which more than 8 of them take 4 bytes per weight for the moment. A second
    derivative computes forward again in PyTorch's ops; so does everything under functorch, jit tracing, forward-mode AD
    or with tensor subclasses, where `save` has no effect.
    Raises BackendError if the dtypes or devices of x and the weights differ.
    """
    call = _Call(weights.spec, save, training and weights.spec.dropout > 0)
    tensors = [x, *(getattr(weights, name) for name in NAMES[1:])]
    foreign = any(type(t) not in (Tensor, torch.nn.Parameter) for t in tensors if t is not None)
    if foreign or torch_ops.differentiating():
        return torch_ops.forward(x, weights, training=training)
    dispatch.choose(x, weights, "torch")
    dispatch.record("torch")
    if torch_ops.autocast_on(x) and x.dtype != torch.float64:
        tensors[0] = x.to(torch.get_autocast_dtype(x.device.type))
    if dispatch.needs_grad(x, weights):
        return _FFN.apply(call, *tensors)
    with torch.no_grad():
        return _forward(call, tensors, ())[0]


def gradients(grad_y: Tensor, tensors: list[Tensor | None], spec: Spec, needed: list[bool]) -> list[Tensor | None]:
    """Gradients of those of `tensors` (as NAMES) that are `needed`, from x alone, without dropout."""
    call = _Call(spec, "input", False)
    trained = [name for name, n in zip(NAMES, needed) if n]
    found = _backward(call, grad_y, tensors, {}, trained, None)
    return [found.get(name) for name in NAMES]


@contextlib.contextmanager
def _exact(x: Tensor) -> Iterator[None]:
    """Autocast off: what is to be cast has been."""
    if not torch_ops.autocast_on(x):
        yield
        return
    with torch.autocast(x.device.type, enabled=False):
        yield


def _weights(call: _Call, tensors: list[Tensor | None], dtype: torch.dtype) -> Weights:
    """The weights in the dtype of the products: their own, but under autocast, whose copies are not kept."""
    values = {name: t if t is None else t.to(dtype) for name, t in zip(NAMES[1:], tensors[1:])}
    return Weights.unchecked(call.spec, **values)


def _draw(call: _Call, x: Tensor, state: Tensor | None = None) -> Tensor | None:
    """The bools [T, F] of coefficients that dropout leaves, from the device's generator or from its state before."""
    if not call.dropping or x.numel() == 0:
        return None
    generator = None
    if state is not None:
        generator = torch.Generator(x.device)
        generator.set_state(state)
    mask = x.new_empty(x.numel() // call.spec.d_model, call.spec.d_ff, dtype=torch.bool)
    return mask.bernoulli_(1 - call.spec.dropout, generator=generator)


def _generator_state(x: Tensor) -> Tensor:
    return torch.get_device_module(x.device).get_rng_state() if x.device.type != "cpu" else torch.get_rng_state()


def _forward(call: _Call, tensors: list[Tensor | None], kept: tuple[str, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    x = tensors[0]
    assert x is not None
    with _exact(x):
        weights, mask = _weights(call, tensors, x.dtype), _draw(call, x)
        y, whole = blocks.forward(x.reshape(-1, call.spec.d_model), weights, kept, call.block(x), mask)
    if "mask" in kept and mask is not None:
        whole["mask"] = mask
    return y.view(x.shape), whole


def _backward(
    call: _Call,
    grad_y: Tensor,
    tensors: list[Tensor | None],
    whole: dict[str, Tensor],
    trained: list[str],
    mask: Tensor | None,
) -> dict[str, Tensor]:
    d_model, x = call.spec.d_model, tensors[0]
    with _exact(grad_y), torch.no_grad():
        weights = _weights(call, tensors, grad_y.dtype)
        rows = None if x is None else x.reshape(-1, d_model)
        step = blocks.Backward(grad_y.reshape(-1, d_model), rows, weights, whole, trained, call.block(grad_y), mask)
        found = step.run()
    if "x" in found:
        found["x"] = found["x"].view(grad_y.shape)
    return found


def _differentiable(
    call: _Call, grad_y: Tensor, tensors: list[Tensor | None], trained: list[str], mask: Tensor | None
) -> dict[str, Tensor]:
    """The gradients as functions of grad_y, x and the weights, for a second derivative."""
    x = tensors[0]
    if x is None:
        raise RuntimeError(
            f"a second derivative needs x, which save={call.save!r} does not keep where gate and up need no gradient: "
            "use save='input'"
        )
    with torch.enable_grad(), _exact(x):
        y = torch_ops.forward(x, _weights(call, tensors, x.dtype), mask=mask)
        wanted = [t for t, name in zip(tensors, NAMES) if t is not None and name in trained]
        return dict(zip(trained, torch.autograd.grad(y, wanted, grad_y, create_graph=True)))


class _FFN(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor | None) -> Tensor:
        given = list(tensors)
        x = given[0]
        assert x is not None
        ctx.call, ctx.trained = call, [name for name, needed in zip(NAMES, ctx.needs_input_grad[1:]) if needed]
        kept = counted.kept(call.spec, call.save, ctx.trained, call.dropping)
        again = call.dropping and not {"x", "gate", "up"}.isdisjoint(kept) and "mask" not in kept
        state = _generator_state(x) if again else None
        y, whole = _forward(call, given, kept)
        ctx.names = tuple(whole)
        ctx.save_for_backward(x if "x" in kept else None, *given[1:], state, *whole.values())
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved = list(ctx.saved_tensors)
        n = len(NAMES)
        tensors, state, whole = saved[:n], saved[n], dict(zip(ctx.names, saved[n + 1 :]))
        mask = whole.pop("mask", None)
        if mask is None and state is not None:
            mask = _draw(ctx.call, grad_y, state)
        if torch.is_grad_enabled():
            found = _differentiable(ctx.call, grad_y, tensors, ctx.trained, mask)
        else:
            found = _backward(ctx.call, grad_y, tensors, whole, ctx.trained, mask)
        return None, *(found.get(name) for name in NAMES)
