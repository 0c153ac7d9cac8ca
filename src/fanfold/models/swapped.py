"""What a swapped module is at run time: its own class with `forward` exchanged, its own parameters in place.

A swapped module gets a subclass of its class, so isinstance, repr, state_dict, deepcopy and pickle go on working. Each
call first makes sure that nothing it does not know has been put in (an adapter, a hook, a patched forward, a foreign
tensor type, another activation module); if so it steps aside: the original forward runs, and the reason is counted.
"""

from __future__ import annotations

import copyreg
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import cpu, dispatch
from ..kernels import torch as torch_ops
from .linears import matrix
from .packed_module import apply_to_packed, copy_packed
from .packed_state import PackedLinearState
from .quick import Quick, preparable
from .states import AUTOCAST, FASTER, GRADIENTS, FFNState, LinearState

# Aliases: a look-up in the large torch module is a cache miss of its own.
_is_compiling = torch.compiler.is_compiling
_run_plan = cpu.run_plan


class Swapped:
    """Mixin of every swapped class; `_fanfold_original` is the class it was made from."""

    _fanfold_original: type[nn.Module]
    _fanfold: LinearState


class SwappedFFN(Swapped):
    """forward of a module that is an FFN, through our kernels."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state: FFNState = self._fanfold  # type: ignore[assignment]
        if not args:  # called by keyword: the module's own signature knows which
            return state.own_code(self, args, kwargs)
        x, *rest = args
        compiling = _is_compiling()
        quick = state.quick
        if quick is not None and not compiling and len(rest) == state.residual and not kwargs:
            dropping = state.dropout and self.training  # type: ignore[attr-defined]
            y = None if dropping else _run_plan(quick.plan, x)
            if y is True:
                state.aside[FASTER] += 1
                return super().forward(*args)  # type: ignore[misc]
            if y is False:
                state.quick = None
            elif y is not None:
                state.calls += 1
                dispatch.record("cpu")
                return state.finish(y, rest)
        compute = state.traced if compiling else state.compute
        outcome: Tensor | str = state.objection(self, x, rest, kwargs) or compute(self, x)  # type: ignore[arg-type]
        if isinstance(outcome, Tensor):
            return state.finish(outcome, rest)
        if not compiling:
            state.step_aside(outcome)
        return state.own_code(self, args, kwargs)


class PackedLinear(Swapped):
    """forward of one linear whose matrix is packed: alone, or below a packed FFN that runs its own code."""

    _fanfold: PackedLinearState  # type: ignore[assignment]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        (x,) = args or kwargs.values()  # nn.Linear calls it `input`, Conv1D `x`
        state = self._fanfold
        if _is_compiling():
            return state.traced(self, x)
        quick = state.quick
        if quick is not None:
            y = _run_plan(quick.plan, x)
            if y is False:
                state.quick = None
            elif y is not None:
                state.calls += 1
                dispatch.record("cpu")
                return y  # type: ignore[return-value]  # there is no limit
        return state.run(self, x)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        self._fanfold.save(self, destination, prefix)  # type: ignore[arg-type]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, strict: bool, *lists: Any) -> None:
        key, (missing, unexpected, errors) = f"{prefix}weight", lists
        given = state_dict.get(key)
        if metadata.get("assign_to_params_buffers") or not isinstance(given, Tensor):
            super()._load_from_state_dict(state_dict, prefix, metadata, strict, *lists)  # type: ignore[misc]
            return
        refused = self._fanfold.load(self, given, key)  # type: ignore[arg-type]
        if refused is not None:
            errors.append(refused)
        if tuple(given.shape) == tuple(self._fanfold.stub.shape):
            state_dict = {k: v for k, v in state_dict.items() if k != key}
        before = len(missing)
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)  # type: ignore[misc]
        missing[before:] = [name for name in missing[before:] if name != key]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return apply_to_packed(self, super()._apply, fn, recurse)  # type: ignore[misc, arg-type]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy_packed(self, memo)  # type: ignore[arg-type]


class SwappedLinear(Swapped):
    """forward of one linear through our kernels, its own parameters read in place."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        (x,) = args or kwargs.values()  # nn.Linear calls it `input`, Conv1D `x`
        state = self._fanfold
        quick = state.quick
        if quick is not None and not _is_compiling():
            y = _run_plan(quick.plan, x)
            if y is False:
                state.quick = None
            elif isinstance(y, Tensor):
                state.calls += 1
                dispatch.record("cpu")
                return y
            elif y is True and self.weight.dtype is x.dtype:  # type: ignore[attr-defined]
                state.aside[FASTER] += 1
                return super().forward(x)  # type: ignore[misc]
        weight, bias = matrix(self), self.bias  # type: ignore[attr-defined]
        reason = self._objection(x, weight, bias)
        if reason is None:
            state.calls += 1
            self._prepare(x, weight, bias)
            return dispatch.linear(x, weight, bias)
        if not torch.compiler.is_compiling():
            state.step_aside(reason)
        if x.dtype == weight.dtype or torch_ops.autocast_on(x) or not x.is_floating_point():
            return super().forward(x)  # type: ignore[misc]
        return nn.functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    def _prepare(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Bind the kernel for further calls like this one."""
        if not preparable(x):
            return
        kernel = cpu.prepare_linear(x, weight, bias)
        if kernel is not None:
            places = self._parameters  # type: ignore[attr-defined]
            watched = [(places, key, p) for key, p in places.items()]
            self._fanfold.quick = Quick(kernel, x, weight.shape[0], watched, limit=self._fanfold.limit(x, weight))

    def _objection(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
        if torch.compiler.is_compiling():
            return "torch.compile"
        parameters = self._parameters  # type: ignore[attr-defined]
        if parameters.get("weight") is None or any(
            type(p) not in (nn.Parameter, type(None)) for p in parameters.values()
        ):
            return "its weight is computed (pruning, parametrization) or of a foreign type"
        seen = torch_ops.transform_active()
        if seen is not None:
            return seen
        if torch_ops.autocast_on(x):
            return AUTOCAST
        tensors = (x, weight) if bias is None else (x, weight, bias)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return GRADIENTS
        backend = dispatch.resolve(self._fanfold.backend)
        if backend == "torch":
            return "backend torch"
        reason = cpu.linear_why_not(x, weight, bias)
        if backend == "cpu":
            if reason is not None:
                raise dispatch.BackendError(f"backend 'cpu' cannot run {self._fanfold.path}: {reason}")
            return None
        return reason or self._fanfold.slower(x, weight)


class _SwappedType(type):
    """The type of swapped classes, so that pickle can make them again instead of looking them up by name."""


_classes: dict[tuple[type, type], type[nn.Module]] = {}


def swapped_class(base: type, original: type[nn.Module]) -> type[nn.Module]:
    """The swapped subclass of `original`, made once."""
    key = (base, original)
    if key not in _classes:
        own = type(original)
        meta = _SwappedType if own is type else type("_SwappedType", (_SwappedType, own), {})
        copyreg.pickle(meta, _reduce_class)  # type: ignore[arg-type]
        body = {"_fanfold_original": original, "_fanfold_base": base, "__module__": __name__}
        _classes[key] = meta(f"Fanfold{original.__name__}", (base, original), body)
    return _classes[key]


def _reduce_class(cls: Any) -> tuple[Any, ...]:
    return swapped_class, (cls._fanfold_base, cls._fanfold_original)


def install(module: nn.Module, base: type, state: LinearState) -> None:
    module.__class__ = swapped_class(base, type(module))
    module.__dict__["_fanfold"] = state


def uninstall(module: nn.Module) -> LinearState:
    state: LinearState = module.__dict__.pop("_fanfold")
    module.__class__ = type(module)._fanfold_original  # type: ignore[attr-defined]
    return state


def is_swapped(module: nn.Module) -> bool:
    return isinstance(module, Swapped)
