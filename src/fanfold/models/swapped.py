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

from ..kernels import cpu, dispatch, op
from ..kernels import torch as torch_ops
from .linears import matrix
from .quick import Quick, preparable
from .states import AUTOCAST, FASTER, GRADIENTS, FFNState, LinearState


class Swapped:
    """Mixin of every swapped class; `_fanfold_original` is the class it was made from."""

    _fanfold_original: type[nn.Module]
    _fanfold: LinearState


class SwappedFFN(Swapped):
    """forward of a module that is an FFN, through our kernels."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not args:  # called by keyword: the module's own signature knows which
            return super().forward(**kwargs)  # type: ignore[misc]
        x, *rest = args
        state: FFNState = self._fanfold  # type: ignore[assignment]
        compiling = torch.compiler.is_compiling()
        quick = state.quick
        if quick is not None and not compiling and len(rest) == state.residual and not kwargs and quick.fits(x):
            if quick.holds() and not (state.dropout and self.training):  # type: ignore[attr-defined]
                if state.ahead(x, quick.limit):
                    state.calls += 1
                    dispatch.record("cpu")
                    return state.finish(quick.call(x), rest)
                state.aside[FASTER] += 1
                return super().forward(*args)  # type: ignore[misc]
            state.quick = None
        outcome: Tensor | str = state.objection(self, x, rest, kwargs) or self._compute(x)  # type: ignore[arg-type]
        if isinstance(outcome, Tensor):
            return state.finish(outcome, rest)
        if not compiling:
            state.step_aside(outcome)
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def _compute(self, x: Tensor) -> Tensor | str:
        """The FFN's output, or the reason why the module's own code must run."""
        state: FFNState = self._fanfold  # type: ignore[assignment]
        compiling = torch.compiler.is_compiling()
        weights = state.weights(self)  # type: ignore[arg-type]
        if isinstance(weights, str):
            return weights
        auto = dispatch.resolve(state.backend) == "auto"
        if auto and dispatch.needs_grad(x, weights):
            return GRADIENTS
        if compiling or not auto:
            y = op.ffn(x, weights, state.backend)
        else:
            y = state.slower(x, weights.up) or dispatch.attempt(x, weights)
        if not compiling and isinstance(y, Tensor):
            state.calls += 1
            if auto:
                state.prepare(self, x, weights)  # type: ignore[arg-type]
        return y


class SwappedLinear(Swapped):
    """forward of one linear through our kernels: for FFNs whose parts a layer's code connects, and for packed ones."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        (x,) = args or kwargs.values()  # nn.Linear calls it `input`, Conv1D `x`
        state = self._fanfold
        quick = state.quick
        if quick is not None and not torch.compiler.is_compiling() and quick.fits(x):
            if quick.holds():
                if state.ahead(x, quick.limit):
                    state.calls += 1
                    dispatch.record("cpu")
                    return quick.call(x)
                if self.weight.dtype is x.dtype:  # type: ignore[attr-defined]
                    state.aside[FASTER] += 1
                    return super().forward(x)  # type: ignore[misc]
            else:
                state.quick = None
        weight, bias = matrix(self), self.bias  # type: ignore[attr-defined]
        reason = self._objection(x, weight, bias)
        if reason is None:
            state.calls += 1
            self._prepare(x, weight, bias)
            return dispatch.linear(x, weight, bias)
        if not torch.compiler.is_compiling():
            state.step_aside(reason)
        if x.dtype == weight.dtype or torch_ops.autocast_on(x):
            return super().forward(x)  # type: ignore[misc]
        return nn.functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    def _prepare(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Bind the kernel for further calls like this one."""
        if not preparable(x):
            return
        call = cpu.prepare_linear(x, weight, bias)
        if call is not None:
            places = self._parameters  # type: ignore[attr-defined]
            watched = [(places, key, p) for key, p in places.items()]
            self._fanfold.quick = Quick(call, x, weight, watched)

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
