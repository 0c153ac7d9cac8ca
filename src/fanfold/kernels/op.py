"""`ffn`, and the FFN as one PyTorch operator: what torch.compile and autograd see of the compiled kernels."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..spec import Spec
from ..weights import Weights
from . import dispatch, op_text, packed, packed_op, train
from . import graph_op as graph_op  # registers its operator
from . import torch as torch_ops

_NAMES = ("up", "down", "gate", "up_bias", "gate_bias", "down_bias")


@functools.lru_cache(maxsize=256)
def _spec(text: str) -> Spec:
    return Spec.from_dict(op_text.read(text))


def _weights(spec: str, tensors: list[Tensor | None]) -> Weights:
    return Weights.unchecked(_spec(spec), **dict(zip(_NAMES, tensors)))


@torch.library.custom_op("fanfold::ffn", mutates_args=())
def _ffn(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    gate: Tensor | None,
    up_bias: Tensor | None,
    gate_bias: Tensor | None,
    down_bias: Tensor | None,
    spec: str,
    backend: str,
) -> Tensor:
    weights = _weights(spec, [up, down, gate, up_bias, gate_bias, down_bias])
    with torch.no_grad():
        y = dispatch.run_seen(x, weights, backend)
    return y.contiguous()


@_ffn.register_fake
def _(x, up, down, gate, up_bias, gate_bias, down_bias, spec, backend):
    return x.new_empty(x.shape)


def _gradients(grad_y: Tensor, given: list[Tensor | None], spec: str, needed: list[bool]) -> list[Tensor | None]:
    """Gradients of the tensors marked in `needed`, by recomputing the forward: x is all that the cpu kernel's forward
    keeps. In PyTorch's ops where those are to be seen: by a tracing compiler, or by autograd (create_graph)."""
    again = torch.is_grad_enabled()
    if not again and torch_ops.transform_active() is None:
        return train.gradients(grad_y, given, _spec(spec), needed)
    leaves = given if again else [t if t is None else t.detach().requires_grad_(n) for t, n in zip(given, needed)]
    wanted = [t for t, n in zip(leaves, needed) if n and t is not None]
    with torch.enable_grad():
        x, *rest = leaves
        assert x is not None
        y = torch_ops.forward(x, _weights(spec, rest))
    grads = iter(torch.autograd.grad(y, wanted, grad_y, create_graph=again))
    return [next(grads) if n else None for n in needed]


def _setup_context(ctx, inputs, output) -> None:
    *tensors, spec, _ = inputs
    ctx.save_for_backward(*tensors)
    ctx.spec = spec


def _backward(ctx, grad_y):
    grads = _gradients(grad_y, list(ctx.saved_tensors), ctx.spec, list(ctx.needs_input_grad[:7]))
    return (*grads, None, None)


_ffn.register_autograd(_backward, setup_context=_setup_context)


def ffn(x: Tensor, weights: Weights, backend: str = "auto") -> Tensor:
    """Apply the feed-forward network to each token.

    y = down @ (act(gate @ x) * (up @ x))
    x  [..., d_model] float32 or bfloat16 (any float dtype with the torch backend)  ->  [..., d_model], x's dtype.
    weights  tensors of one dtype, or packed matrices (`kernels.packed`), which the torch backend dequantizes.
    backend  "auto", or a name that then runs or raises. `dispatch.last_backend()` says which one ran.
    Sums accumulate in float32; error <= 2 x torch eager in x's dtype. Differentiable.
    Raises BackendError, with the reason. Reference: Shazeer 2020, arXiv:2002.05202.
    """
    grads = dispatch.needs_grad(x, weights)
    named = dispatch.resolve(backend)
    if packed.is_packed(weights):
        return _packed(x, weights, named, grads)
    if grads and named == "cpu" and x.dtype != weights.up.dtype:
        raise dispatch.BackendError(
            f"backend 'cpu' cannot run this call: gradients need x and weights of one dtype, got {x.dtype} and "
            f"{weights.up.dtype}"
        )
    # As an operator the call can be seen by tracing and transforms, and has a derivative.
    compiling = torch.compiler.is_compiling()
    if compiling and torch_ops.forward_mode():
        return torch_ops.forward(x, weights)
    if compiling or (named == "cpu" and (grads or torch_ops.transform_active())):
        tensors = [getattr(weights, name) for name in _NAMES]
        return torch.ops.fanfold.ffn(x, *tensors, op_text.from_json(weights.spec.to_json()), named)
    return dispatch.run(x, weights, backend)


def _packed(x: Tensor, weights: Weights, named: str, grads: bool) -> Tensor:
    if grads and named == "cpu":
        raise dispatch.BackendError(
            "backend 'cpu' cannot run this call: packed weights are for inference, and a gradient is needed (use "
            "torch.no_grad(), or backend 'torch')"
        )
    if torch.compiler.is_compiling() and named != "torch" and not grads and not torch_ops.forward_mode():
        return packed_op.call_ffn(x, weights, packed_op.describe_ffn(weights))
    return dispatch.run(x, weights, named)
