"""What a module with packed linears does outside its forward: moved, copied, and its own code run on real weights."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .packed_weight import parameter
from .stubs import make_stub


def apply_to_packed(module: Any, base: Callable[..., Any], fn: Callable[[Tensor], Tensor], recurse: bool) -> Any:
    """`nn.Module._apply` of a packed linear: .to(), .float() and the like, without giving the stub memory.

    Raises RuntimeError when told to leave the CPU.
    """
    state = module._fanfold
    if not state.holds(module):
        return base(fn, recurse)
    changed = fn(torch.full((), torch.nan, dtype=state.stub.dtype))
    if not changed.is_cpu:
        raise RuntimeError(
            f"{state.path} is packed as {state.format} and runs on the CPU, not on {changed.device}: call "
            "fanfold.unswap(model) before moving the model"
        )
    module._parameters["weight"] = None
    try:
        base(fn, recurse)
    finally:
        module._parameters["weight"] = state.stub
    if changed.dtype != state.stub.dtype:
        state.retype(changed.dtype)
        if state.kept is not None:
            state.kept.data = fn(state.kept.data)
    return module


def copy_packed(module: Any, memo: dict[int, Any]) -> Any:
    """`copy.deepcopy` of a packed linear: PyTorch would write the copy of an expanded parameter out in full."""
    state = module._fanfold
    if id(state.stub) not in memo and state.holds(module):
        twin = make_stub(state.stub.shape, state.stub.dtype)
        twin.requires_grad_(state.stub.requires_grad)
        memo[id(state.stub)] = twin
        memo.setdefault(id(memo), []).append(state.stub)  # alive while ids are looked up, as copy itself does it
    own = getattr(module._fanfold_original, "__deepcopy__", None)
    if own is not None:
        return own(module, memo)
    twin = module.__class__.__new__(module.__class__)
    memo[id(module)] = twin
    twin.__dict__.update({key: copy.deepcopy(value, memo) for key, value in module.__dict__.items()})
    return twin


def stub_used(y: Any, given: tuple[Any, ...]) -> bool:
    """Whether a result holds NaN although nothing that was given does."""
    return _has_nan(y) and not any(map(_has_nan, given))


def _has_nan(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point() and bool(value.isnan().any())
    if isinstance(value, (tuple, list)):
        return any(map(_has_nan, value))
    return False


@contextlib.contextmanager
def real_weights(linears: list[Any]) -> Iterator[None]:
    """The packed linears as they were before the swap, with the dequantized weights for parameters."""
    held = [m for m in linears if m._fanfold.holds(m)]
    classes = [type(m) for m in held]
    try:
        for m, cls in zip(held, classes):
            state = m._fanfold
            m._parameters["weight"] = parameter(state.weight.matrix(state.stub.dtype), m, False)
            m.__class__ = cls._fanfold_original
        yield
    finally:
        for m, cls in zip(held, classes):
            m.__class__ = cls
            m._parameters["weight"] = m._fanfold.stub


def resident_bytes(module: nn.Module) -> int:
    """Bytes that the parameters of one module (not of its children) take in memory: packed matrices as they are packed,
    stubs nothing."""
    state = module.__dict__.get("_fanfold")
    total = sum(p.nbytes for p in module._parameters.values() if p is not None)
    if state is None or not hasattr(state, "weight") or not state.holds(module):
        return total
    return total - state.stub.nbytes + state.weight.nbytes
