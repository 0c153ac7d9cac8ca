"""What a swapped module remembers: its description, what it looked like, and why calls ran its own code."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import cpu, dispatch, op, train
from ..kernels import torch as torch_ops
from ..layout import INTERLEAVED, SEPARATE, Layout
from ..spec import Spec
from ..weights import Weights
from .linears import global_hooks, matrix, pristine
from .quick import NO_LIMIT, Quick, memory, preparable
from .snapshot import Snapshot
from .timing import Choice

# Reasons that are no surprise: counted, but no warning.
GRADIENTS = "gradients are needed"
TRAINING = "training mode with dropout"
AUTOCAST = "autocast is on"
FASTER = "PyTorch is faster"
FORWARD_MODE = "forward-mode differentiation"
_QUIET = (GRADIENTS, TRAINING, AUTOCAST, FASTER, "torch.compile", "backend torch")


class LinearState:
    """What every swapped module remembers."""

    def __init__(self, path: str, format: str | None, backend: str) -> None:
        self.path, self.format, self.backend = path, format, backend
        self.trains: str | None = None  # what forward keeps for a derivative of ours; None: not asked for
        self.quick: Quick | None = None
        self.choice: Choice | None = None  # by measurement; None: the static rule of the cpu backend
        self.calls = 0
        self.aside: Counter[str] = Counter()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "quick": None}  # it watches this module, not the copy

    def forget(self) -> None:
        """Let go of everything but the counts."""
        self.quick = None

    def limit(self, x: Tensor, weight: Tensor) -> int | Callable[[int], bool]:
        """What `Quick` asks of a number of tokens; for a first weight [out, in]."""
        if self.backend != "auto":
            return NO_LIMIT
        return functools.partial(self.ahead, cpu.torch_limit(x.dtype, weight)[0])

    def ahead(self, limit: int, tokens: int) -> bool:
        """Whether our kernels are the better choice, as measured; without a measurement up to `limit` tokens."""
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
        save: str | None = None,
    ) -> None:
        """save  what forward keeps while gradients are needed; None: the module's own code runs then."""
        super().__init__(path, format, backend)
        self.trains = save
        self.spec, self.layout, self.roles = spec, layout, roles
        self.scale, self.residual, self.dropout = scale, residual, dropout
        # a bias of down that the module's code does not add
        self.idle_bias = module.get_submodule(roles["down"]).bias is not None and not spec.down_bias
        self.linears: dict[str, Any] = {role: module.get_submodule(name) for role, name in roles.items()}
        self.snapshot: Snapshot | None = None
        self._key: tuple[Any, ...] = ()
        self._weights: Weights | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_key": (), "_weights": None}  # views into this module's memory

    def forget(self) -> None:
        super().forget()
        self._weights, self._key = None, ()

    def look(self, module: nn.Module) -> None:
        """Take the module as it is now for known."""
        self.snapshot = Snapshot(module, list(self.linears.values()))

    def objection(self, module: nn.Module, x: Any, args: list, kwargs: dict[str, Any]) -> str | None:
        """Why this call must run the module's own code, or None."""
        if type(x) is not Tensor and type(x) is not nn.Parameter:
            return f"x is a {type(x).__name__}"
        if kwargs or len(args) != self.residual:
            return f"called with {len(args)} further arguments and {sorted(kwargs)}"
        if x.shape[-1] != self.spec.d_model:
            return f"x has shape {tuple(x.shape)}, expected (…, {self.spec.d_model})"
        snapshot = self.snapshot
        assert snapshot is not None
        if self.dropout and snapshot.dropping():
            return TRAINING
        if torch_ops.autocast_on(x) and not self.may_train:
            return AUTOCAST
        change = snapshot.change()
        if change is not None:
            return change
        if snapshot.constants and torch.is_grad_enabled() and snapshot.learning():
            return GRADIENTS
        if snapshot.constants and torch.compiler.is_compiling():
            return "torch.compile: what its code reads beside the linears would be taken for constant"
        for role, linear in self.linears.items():
            if not pristine(linear):
                return f"{role} holds a foreign tensor type, or its weight is computed (pruning, parametrization)"
        if global_hooks():
            return "hooks on every module are registered"
        if torch.compiler.is_compiling():
            return FORWARD_MODE if torch_ops.forward_mode() else None
        return torch_ops.differentiating() if self.may_train else torch_ops.transform_active()

    @property
    def may_train(self) -> bool:
        """Whether a call may run with a derivative of our own: in PyTorch's ops, which autocast and modes may see."""
        return self.trains is not None and torch.is_grad_enabled() and dispatch.resolve(self.backend) != "cpu"

    def finish(self, y: Tensor, args: list) -> Tensor:
        """What the module does to the FFN's output: a constant factor, a residual added."""
        if self.scale != 1.0:
            y = y * self.scale
        return y + args[0] if self.residual else y

    def own_code(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module was before the swap."""
        return module._fanfold_original.forward(module, *args, **kwargs)

    def compute(self, module: Any, x: Tensor) -> Tensor | str:
        """The FFN's output, or the reason why the module's own code must run."""
        weights = self.weights(module)
        if isinstance(weights, str):
            return weights
        auto = dispatch.resolve(self.backend) == "auto"
        if dispatch.needs_grad(x, weights):
            if self.may_train:
                self.calls += 1
                return train.ffn(x, weights, self.trains or "all")
            if auto:
                return GRADIENTS
        elif torch_ops.autocast_on(x):
            return AUTOCAST
        y = (self.slower(x, weights.up) or dispatch.attempt(x, weights)) if auto else op.ffn(x, weights, self.backend)
        if isinstance(y, Tensor):
            self.calls += 1
            if auto:
                self.prepare(module, x, weights)
        return y

    def traced(self, module: Any, x: Tensor) -> Tensor | str:
        """`compute` while torch.compile is tracing."""
        weights = self.weights(module)
        if isinstance(weights, str):
            return weights
        if torch_ops.autocast_on(x):
            return AUTOCAST
        lean = self.trains in ("input", "tiles")  # the compiler itself does as well as the others
        if not lean and dispatch.resolve(self.backend) == "auto" and dispatch.needs_grad(x, weights):
            return GRADIENTS
        return op.ffn(x, weights, self.backend)

    def prepare(self, module: nn.Module, x: Tensor, weights: Weights) -> None:
        """Bind the kernel for further calls like this one, which has passed every check."""
        # Tensors that the code reads beside the weights (xIELU's alphas) need the thorough look every time.
        if self._copies_biases or not preparable(x) or self.snapshot is None or self.snapshot.constants:
            return
        kernel = cpu.prepare(x, weights)
        if kernel is None:
            return
        assert self.snapshot is not None
        watched = self.snapshot.watched(self.dropout)
        for linear in self.linears.values():
            watched += [(linear._parameters, key, p) for key, p in linear._parameters.items()]
        below = [m for name, m, *_ in self.snapshot.nodes if name]
        limit = self.limit(x, weights.up)
        self.quick = Quick(kernel, x, self.spec.d_model, watched, below, module, limit)

    def weights(self, module: nn.Module) -> Weights | str:
        """The linears' parameters as Weights: views in place, made anew only if a parameter moved. If they no longer
        are what the spec says, the reason."""
        try:
            return self._current(module)
        except ValueError as error:
            return f"its weights have changed: {error}"

    def _current(self, module: nn.Module) -> Weights:
        linears = self.linears
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self._build(linears)  # views made without grad would cut the parameters off from autograd
        parameters = [p for linear in linears.values() for p in linear._parameters.values()]
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


def reset(states: list[LinearState]) -> None:
    """Forget the calls made while swapping."""
    for state in states:
        state.calls = 0
        state.aside.clear()
        state.quick = None  # prepared while hooks were set aside
