"""The linear maps that FFNs are made of: nn.Linear (and subclasses) and GPT-2's Conv1D, behind one orientation."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module


def is_conv1d(module: nn.Module) -> bool:
    """transformers' Conv1D: y = x @ weight + bias with weight [in, out]. By structure: no import of transformers."""
    return any(c.__name__ == "Conv1D" for c in type(module).__mro__) and hasattr(module, "nf")


def is_linear(module: nn.Module) -> bool:
    """A module whose `weight` is one float matrix applied to the last dimension, as far as its type tells."""
    if not (isinstance(module, nn.Linear) or is_conv1d(module)):
        return False
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2 and weight.is_floating_point()


def sizes(module: nn.Module) -> tuple[int, int]:
    """(in, out) features."""
    out_size, in_size = matrix(module).shape
    return int(in_size), int(out_size)


def matrix(module: Any) -> Tensor:
    """The weight as [out, in]: for Conv1D a transposed view of the parameter, no copy."""
    return module.weight.t() if is_conv1d(module) else module.weight


def pristine(module: nn.Module) -> bool:
    """Whether calling `module` does no more than its class's forward: no hook, no forward patched on the instance,
    no parametrization, and plain parameters (not a DTensor or another subclass)."""
    if (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or "parametrizations" in module._modules
    ):
        return False
    if module._parameters.get("weight") is None:  # pruning and weight norm compute it
        return False
    if module._parameters.get("bias") is None and getattr(module, "bias", None) is not None:
        return False
    if any(p is not None and type(p) is not nn.Parameter for p in module._parameters.values()):
        return False
    return type(module) is nn.Linear or is_linear(module)


def global_hooks() -> bool:
    """Whether hooks are registered that fire for every module in the process."""
    return bool(
        _module._global_forward_hooks
        or _module._global_forward_pre_hooks
        or _module._global_backward_hooks
        or _module._global_backward_pre_hooks
    )


def is_half(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextlib.contextmanager
def quiet(module: nn.Module) -> Iterator[None]:
    """Eval mode and no hooks, for runs on our own random inputs; everything is put back."""
    tree = list(module.modules())
    modes = [m.training for m in tree]
    hooks = [[getattr(m, name) for name in _HOOKS] for m in tree]
    try:
        for m in tree:
            m.training = False
            for name in _HOOKS:
                setattr(m, name, OrderedDict())
        yield
    finally:
        for m, mode, kept in zip(tree, modes, hooks):
            m.training = mode
            for name, value in zip(_HOOKS, kept):
                setattr(m, name, value)
