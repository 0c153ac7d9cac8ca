"""What a swapped module is at run time: its own class with `forward` exchanged, its own parameters in place.

A swapped module gets a subclass of its class, so isinstance, repr, state_dict, deepcopy and pickle go on working. Each
call first makes sure that nothing it does not know has been put in (an adapter, a hook, a patched forward, a foreign
tensor type, another activation module); if so it steps aside: the original forward runs, and the reason is counted.
"""

from __future__ import annotations

import copyreg
import warnings
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import cpu, dispatch, op
from ..kernels import torch as torch_ops
from ..layout import INTERLEAVED, SEPARATE, Layout
from ..spec import Spec
from ..weights import Weights
from .linears import global_hooks, matrix, pristine
from .quick import Quick, memory, preparable
from .timing import Choice

# Reasons that are no surprise: counted, but no warning.
GRADIENTS = "gradients are needed"
TRAINING = "training mode with dropout"
AUTOCAST = "autocast is on"
FASTER = "PyTorch is faster"
_QUIET = (GRADIENTS, TRAINING, AUTOCAST, FASTER, "torch.compile", "backend torch")


class LinearState:
    """What a swapped linear remembers: the format it was packed in, and how to undo it."""

    def __init__(self, path: str, format: str | None, backend: str) -> None:
        self.path, self.format, self.backend = path, format, backend
        self.quick: Quick | None = None
        self.choice: Choice | None = None  # by measurement; None: the static rule of the cpu backend
        self.calls = 0
        self.aside: Counter[str] = Counter()
        # name -> (dtype, requires_grad, kept original or None), filled when packed
        self.originals: dict[str, tuple[torch.dtype, bool, nn.Parameter | None]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "quick": None}  # it watches this module, not the copy

    def ahead(self, x: Tensor, limit: int) -> bool:
        """Whether our kernels are the better choice for x, as measured; without a measurement up to `limit` tokens."""
        if self.backend != "auto":
            return True
        tokens = x.numel() // x.shape[-1]
        return tokens <= limit if self.choice is None else self.choice.ours(tokens)

    def slower(self, x: Tensor, weight: Tensor) -> str | None:
        """Why PyTorch's own ops are the better choice for x and a first weight [out, in], or None."""
        if self.choice is None:
            return cpu.slower_than_torch(x, weight)
        return None if self.choice.ours(x.numel() // weight.shape[1]) else FASTER

    def step_aside(self, reason: str) -> None:
        if reason not in self.aside and not reason.startswith(_QUIET):
            warnings.warn(f"fanfold: {self.path} runs its own code: {reason}", stacklevel=4)
        self.aside[reason] += 1


class FFNState(LinearState):
    """What a swapped FFN module remembers: its description, and what it looked like when it was identified."""

    def __init__(
        self,
        module: nn.Module,
        path: str,
        spec: Spec,
        layout: Layout,
        roles: dict[str, str],
        *,
        scale: float,
        residual: bool,
        dropout: bool,
        format: str | None,
        backend: str,
    ) -> None:
        super().__init__(path, format, backend)
        self.spec, self.layout, self.roles = spec, layout, roles
        self.scale, self.residual, self.dropout = scale, residual, dropout
        # a bias of down that the module's code does not add
        self.idle_bias = module.get_submodule(roles["down"]).bias is not None and not spec.down_bias
        self.children: dict[str, Any] = dict(module._modules)
        self.types = {name: type(child) for name, child in self.children.items()}
        self.attributes = _attributes(module)
        self._key: tuple[Any, ...] = ()
        self._weights: Weights | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_key": (), "_weights": None}  # views into this module's memory

    def accept_changes(self, module: nn.Module) -> None:
        """Take the children as they are now for known (after packing them)."""
        self.types = {name: type(child) for name, child in module._modules.items()}

    def objection(self, module: nn.Module, x: Any, args: tuple, kwargs: dict[str, Any]) -> str | None:
        """Why this call must run the module's own code, or None."""
        if type(x) is not Tensor and type(x) is not nn.Parameter:
            return f"x is a {type(x).__name__}"
        if kwargs or len(args) != self.residual:
            return f"called with {len(args)} further arguments and {sorted(kwargs)}"
        if x.shape[-1] != self.spec.d_model:
            return f"x has shape {tuple(x.shape)}, expected (…, {self.spec.d_model})"
        if module.training and self.dropout:
            return TRAINING
        if torch_ops.autocast_on(x):
            return AUTOCAST
        children = module._modules
        if len(children) != len(self.children):
            return "its children have changed"
        for name, child in self.children.items():
            if children.get(name) is not child or type(child) is not self.types[name]:
                return f"{name} was exchanged (an adapter?)"
            if child._forward_hooks or child._forward_pre_hooks or child._backward_hooks or child._backward_pre_hooks:
                return f"{name} has a hook"
            if "forward" in child.__dict__:
                return f"{name}.forward is patched"
        own = module.__dict__
        for name, value in self.attributes.items():
            if own.get(name, self) is not value:
                return f"attribute {name} has changed"
        for name in self.roles.values():
            if not pristine(children[name]):  # type: ignore[arg-type]
                return f"{name} holds a foreign tensor type or a parametrization"
        return "hooks on every module are registered" if global_hooks() else None

    def finish(self, y: Tensor, args: tuple) -> Tensor:
        """What the module does to the FFN's output: a constant factor, a residual added."""
        if self.scale != 1.0:
            y = y * self.scale
        return y + args[0] if self.residual else y

    def prepare(self, module: nn.Module, x: Tensor, weights: Weights) -> None:
        """Bind the kernel for further calls like this one, which has passed every check."""
        if self._copies_biases or not preparable(x):
            return
        call = cpu.prepare(x, weights)
        if call is None:
            return
        watched = [(module._modules, name, child) for name, child in self.children.items()]
        watched += [(module.__dict__, name, value) for name, value in self.attributes.items()]
        for name in self.roles.values():
            places = self.children[name]._parameters
            watched += [(places, key, p) for key, p in places.items()]
        self.quick = Quick(call, x, weights.up, watched, list(self.children.values()))

    def weights(self, module: nn.Module) -> Weights | str:
        """The linears' parameters as Weights: views in place, made anew only if a parameter moved. If they no longer
        are what the spec says, the reason."""
        try:
            return self._current(module)
        except ValueError as error:
            return f"its weights have changed: {error}"

    def _current(self, module: nn.Module) -> Weights:
        linears = {role: module._modules[name] for role, name in self.roles.items()}
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self._build(linears)  # views made without grad would cut the parameters off from autograd
        parameters = [p for linear in linears.values() for p in linear._parameters.values()]  # type: ignore[union-attr]
        key = tuple((id(p), *memory(p)) for p in parameters if p is not None)
        if key != self._key or self._weights is None:
            weights = self._build(linears)
            if self._copies_biases:
                return weights
            self._key, self._weights = key, weights
        return self._weights

    @property
    def _copies_biases(self) -> bool:
        """Interleaved biases have stride 2, which the kernels do not read: they are copied anew for each call."""
        return self.layout.order in INTERLEAVED and self.spec.up_bias

    def _build(self, linears: dict[str, Any]) -> Weights:
        down = linears["down"]
        arrays: dict[str, Any] = {"down": matrix(down)}
        if self.spec.down_bias or not self.idle_bias:
            arrays["down_bias"] = down.bias
        if self.layout.order != SEPARATE:
            fused = linears["gate_up"]
            # matrix() has put Conv1D the right way round, so halves are rows here in either case
            rows = Layout(order=self.layout.order)
            arrays["gate"], arrays["up"] = rows.split(matrix(fused))
            if fused.bias is not None:
                arrays["gate_bias"], arrays["up_bias"] = (b.contiguous() for b in rows.split(fused.bias))
        else:
            for role in ("gate", "up") if self.spec.gated else ("up",):
                arrays[role] = matrix(linears[role])
                arrays[f"{role}_bias"] = linears[role].bias
        return Weights(self.spec, **arrays)  # checked: a bias that came or went, or a pruned matrix, raises


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The instance's own public attributes (functions, flags, widths): if one is exchanged, the code may mean something
    else."""
    return {k: v for k, v in module.__dict__.items() if not k.startswith("_") and k != "training"}


class Swapped:
    """Mixin of every swapped class; `_fanfold_original` is the class it was made from."""

    _fanfold_original: type[nn.Module]
    _fanfold: LinearState


class SwappedFFN(Swapped):
    """forward of a module that is an FFN, through our kernels."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        state: FFNState = self._fanfold  # type: ignore[assignment]
        compiling = torch.compiler.is_compiling()
        quick = state.quick
        if quick is not None and not compiling and len(args) == state.residual and not kwargs and quick.fits(x):
            if quick.holds() and not (state.dropout and self.training):  # type: ignore[attr-defined]
                if state.ahead(x, quick.limit):
                    state.calls += 1
                    dispatch.record("cpu")
                    return state.finish(quick.call(x), args)
                state.aside[FASTER] += 1
                return super().forward(x, *args)  # type: ignore[misc]
            state.quick = None
        outcome: Tensor | str = state.objection(self, x, args, kwargs) or self._compute(x)  # type: ignore[arg-type]
        if isinstance(outcome, Tensor):
            return state.finish(outcome, args)
        if not compiling:
            state.step_aside(outcome)
        return super().forward(x, *args, **kwargs)  # type: ignore[misc]

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

    def forward(self, x: Tensor) -> Tensor:
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


def reset(states: list[LinearState]) -> None:
    """Forget the calls made while swapping."""
    for state in states:
        state.calls = 0
        state.aside.clear()


def is_swapped(module: nn.Module) -> bool:
    return isinstance(module, Swapped)
