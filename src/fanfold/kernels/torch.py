"""The `torch` backend: the FFN in plain PyTorch ops. Any device, any float dtype, differentiable, compilable."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from .. import activations
from ..spec import Spec
from ..weights import Weights
from . import packed

# aliases: each look-up through the torch module costs a cache miss in a decoding model
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_stack = torch._C._functorch.peek_interpreter_stack  # type: ignore[attr-defined]
_is_tracing = torch._C._is_tracing
# (question, answer, …): what `transform_active` asks but for forward-mode AD, whose level is a number in a module
NO_TRANSFORM: tuple[Any, ...] = (_dispatch_modes, 0, _functorch_stack, None, _is_tracing, False)


def coefficients(spec: Spec, up: Tensor, gate: Tensor | None) -> Tensor:
    """[..., F] pre-activations -> [..., F] coefficients, in the dtype given."""
    act, params = activations.get(spec.activation), spec.params
    if not spec.gated:
        return act.torch(torch, up, params)
    assert gate is not None
    if spec.gate_limit is not None:
        gate = gate.clamp(max=spec.gate_limit)
    if spec.up_limit is not None:
        up = up.clamp(-spec.up_limit, spec.up_limit)
    if spec.up_offset:
        up = up + spec.up_offset
    return act.torch(torch, gate, params) * up


def forward(x: Tensor, weights: Weights, training: bool = False, mask: Tensor | None = None) -> Tensor:
    """y = down(act(gate x) * (up x)) in x's dtype; each matrix product rounds its result to that dtype.

    x  [..., d_model], the dtype and device of the weights (autocast applies as to nn.Linear). Packed matrices are
       dequantized to x's dtype for this one call.
    training  apply the spec's dropout to the coefficients.
    mask  bools [T, F] of those that dropout has left, instead of drawing them.
    """
    spec = weights.spec
    if packed.is_packed(weights):
        weights = dequantized(weights, x.dtype)
    up = F.linear(x, weights.up, weights.up_bias)
    gate = F.linear(x, weights.gate, weights.gate_bias) if spec.gated else None
    m = coefficients(spec, up, gate)
    if mask is not None:
        m = m * mask.view(m.shape).to(m.dtype).div_(1 - spec.dropout)
    elif training and spec.dropout:
        m = F.dropout(m, spec.dropout, training=True)
    return F.linear(m, weights.down, weights.down_bias)


def dequantized(weights: Weights, dtype: torch.dtype) -> Weights:
    """Packed weights as tensors of `dtype`: integer formats are made in float32 and rounded once."""
    matrices = {n: v.dequantize() if type(v) is packed.PackedMatrix else v for n, v in weights.items()}
    return Weights.unchecked(weights.spec, **{name: value.to(dtype) for name, value in matrices.items()})


def transform_active() -> str | None:
    """What of PyTorch's is watching or rewriting operations, so that work behind its back would go unseen; or None.

    A kernel called by address shows nothing to tracing, functorch (vmap, jvp, functionalize), dispatch modes or
    forward-mode AD, which no_grad does not switch off.
    """
    if _dispatch_modes() > 0:
        return "a torch dispatch mode is active"
    return differentiating()


def differentiating() -> str | None:
    """What of PyTorch's derives or rewrites functions by their ops, so that one with a derivative of its own must show
    its ops instead; or None. A dispatch mode sees the ops of either."""
    if _functorch_stack() is not None:
        return "a functorch transform is active"
    if _is_tracing():
        return "torch.jit is tracing"
    if forward_mode():
        return "forward-mode AD is active"
    return None


def forward_mode() -> bool:
    """Whether forward-mode differentiation (jvp, jacfwd) is active, which no_grad does not switch off and which would
    take the output of an operator of ours for a constant. For code that torch.compile traces, too: that compiles anew
    for another stack of transforms."""
    return forward_ad._current_level >= 0


# What torch.compiler.assume_constant_result does, which imports the compiler for it.
forward_mode._dynamo_marked_constant = True  # type: ignore[attr-defined]


def autocast_on(x: Tensor) -> bool:
    """Whether autocast is on for x's device (the meta device has none and must not be asked)."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def _kind(x: object) -> str:
    return f"{x.dtype} on {x.device}" if isinstance(x, Tensor) else type(x).__name__


def why_not(x: Tensor, weights: Weights) -> str | None:
    """None if this backend can run, else the reason."""
    if packed.is_packed(weights):
        if not isinstance(x, Tensor) or not x.is_cpu or not x.is_floating_point():
            return f"x is {_kind(x)}, expected a float CPU tensor beside packed weights"
        return None
    if not isinstance(weights.up, Tensor):
        return f"weights are {type(weights.up).__name__}, not torch tensors"
    if not isinstance(x, Tensor):
        return f"x is {type(x).__name__}, not a torch tensor"
    if x.device != weights.up.device:
        return f"x is on {x.device}, the weights on {weights.up.device}"
    if x.dtype != weights.up.dtype and not autocast_on(x):
        return f"x is {x.dtype}, the weights {weights.up.dtype}"
    return None
