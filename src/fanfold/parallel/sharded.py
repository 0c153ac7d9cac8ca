"""What the modules of a cut FFN are at run time: their own classes with `forward` exchanged, parameters under their own
names, each holding this rank's part.

The FFN's forward is: enter, our kernels on this rank's channels, leave. Where that cannot stand for the module's own
code (a hook on a linear, dropout that is not in the description), its own code runs over linears that enter and leave
by themselves.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels import cpu, dispatch, op, train
from ..kernels import torch as torch_ops
from ..layout import SEPARATE, Layout
from ..nn import FeedForward, PackedFeedForward
from ..spec import Spec
from ..weights import Weights
from . import storing
from .lanes import Lane
from .plans import Plan

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
ATTRIBUTE = "_fanfold_cut"


class Cut:
    """What the modules of one FFN share.

    plan, rank   the division, and whose part this is.
    linears      role -> the linear;  conv1d: roles whose linear is a Conv1D.
    whole        whether one module is the FFN, so that its forward can be ours; else a layer's code connects the parts.
    scale, residual, dropout  as `models.find` found them.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        lane: Lane,
        linears: dict[str, nn.Module],
        *,
        conv1d: bool = False,
        whole: bool = True,
        scale: float = 1.0,
        residual: bool = False,
        dropout: bool = False,
        backend: str = "auto",
        save: str = "all",
    ) -> None:
        self.save = save  # of a FeedForward: what training keeps
        self.plan, self.rank, self.lane = plan, rank, lane
        self.linears, self.conv1d, self.whole = linears, conv1d, whole
        self.scale, self.residual, self.dropout, self.backend = scale, residual, dropout, backend
        own = plan.ranks[rank]
        self.spec = Spec.from_dict({**own.spec.to_dict(), "down_bias": False, "dropout": 0.0})
        self.inside = False  # between the first linear and down, while the module's own code runs
        self.entered: Tensor | None = None
        self.children: list[tuple[dict[str, Any], str, Any]] = []
        # a bias of down that the module's code does not add
        self.idle_bias = linears["down"].bias is not None and not plan.spec.down_bias

    def look(self, module: nn.Module) -> None:
        """Take the modules below the FFN as they are now for known."""
        self.children = [(m._modules, name, child) for m in module.modules() for name, child in m._modules.items()]

    def objection(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Why a call must run the module's own code, or None."""
        if kwargs or len(args) != 1 + self.residual or not isinstance(args[0], Tensor):
            return f"called with {len(args)} arguments and {sorted(kwargs)}"
        if any(places.get(name) is not child for places, name, child in self.children):
            return "a module was exchanged"
        below = [child for *_, child in self.children if child is not None]
        if any(getattr(m, hooks) for m in below for hooks in _HOOKS) or any("forward" in m.__dict__ for m in below):
            return "a hook"
        if self.dropout and module.training and not isinstance(module, FeedForward):
            return "dropout"
        return None

    def weights(self) -> Weights:
        """This rank's weights without down's bias, as autograd sees them."""
        arrays: dict[str, Any] = {"down": self._matrix("down")}
        if self.plan.layout.order != SEPARATE:
            fused = self.linears["gate_up"]
            arrays["gate"], arrays["up"] = self._halves(fused.weight, "weight")
            if fused.bias is not None:
                arrays["gate_bias"], arrays["up_bias"] = (b.contiguous() for b in self._halves(fused.bias, "bias"))
        else:
            for role in ("gate", "up") if self.plan.spec.gated else ("up",):
                arrays[role] = self._matrix(role)
                arrays[f"{role}_bias"] = storing.local(self.linears[role].bias)  # type: ignore[arg-type]
        return Weights.unchecked(self.spec, **arrays)

    def down_bias(self) -> Tensor | None:
        return None if self.idle_bias else self.linears["down"].bias  # type: ignore[return-value]

    def finish(self, y: Tensor, args: tuple[Any, ...]) -> Tensor:
        """What the module does to the FFN's output: a constant factor, a residual added."""
        if self.scale != 1.0:
            y = y * self.scale
        return y + args[1] if self.residual else y

    def run(self, x: Tensor, dropout: float) -> Tensor:
        """This rank's partial sum, by our kernels where they can.

        dropout  probability; every rank draws the mask of all channels and takes its own part: the masks of one device,
                 and random streams that stay the same on every rank.
        """
        weights = self.weights()
        if x.shape[-1] != self.plan.spec.d_model:
            raise ValueError(f"x has shape {tuple(x.shape)}, expected (…, {self.plan.spec.d_model})")
        if dropout:
            up = F.linear(x, weights.up, weights.up_bias)
            gate = F.linear(x, weights.gate, weights.gate_bias) if self.spec.gated else None
            m = torch_ops.coefficients(self.spec, up, gate)
            return F.linear(m * self.mask(m, dropout), weights.down)
        compiled = torch.compiler.is_compiling()
        learning = dispatch.needs_grad(x, weights)
        if learning and not compiled and self.save != "all" and self.backend != "cpu":
            return train.ffn(x, weights, self.save)
        if self.backend == "torch" or torch_ops.autocast_on(x) or (compiled and learning and self.backend == "auto"):
            return torch_ops.forward(x, weights)
        return op.ffn(x, weights, self.backend)

    def mask(self, m: Tensor, dropout: float) -> Tensor:
        """This rank's part of the mask [..., F] that one device would draw, scaled by 1 / (1 - dropout)."""
        own, d_ff = self.plan.ranks[self.rank], self.plan.spec.d_ff
        drawn = F.dropout(m.new_ones((*m.shape[:-1], d_ff)), dropout, training=True)
        return drawn[..., own.start : own.stop]

    def _matrix(self, role: str) -> Tensor:
        weight = storing.local(self.linears[role].weight)  # type: ignore[arg-type]
        assert weight is not None
        return weight.t() if self.conv1d else weight

    def _halves(self, fused: Any, kind: str) -> tuple[Tensor, Tensor]:
        part = storing.local(fused)
        assert part is not None
        return storing.halves(part, Layout(order=self.plan.layout.order), kind, self.conv1d)


class ParallelFFN:
    """forward of a module that is an FFN."""

    _fanfold_original: type[nn.Module]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cut: Cut = getattr(self, ATTRIBUTE)
        if cut.objection(self, args, kwargs) is not None:  # type: ignore[arg-type]
            return self._fanfold_original.forward(self, *args, **kwargs)  # type: ignore[arg-type]
        x = args[0]
        dropping = isinstance(self, FeedForward) and self.training
        y = cut.run(cut.lane.enter(x), cut.plan.spec.dropout if dropping else 0.0)
        return cut.finish(cut.lane.leave(y, cut.down_bias(), x), args)


class ColumnLinear:
    """forward of gate or up where the module's own code calls it: this rank's outputs."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        (x,) = args or kwargs.values()
        cut: Cut = getattr(self, ATTRIBUTE)
        weight, bias = storing.local(self.weight), storing.local(self.bias)  # type: ignore[attr-defined]
        assert weight is not None
        if cut.plan.layout.order != SEPARATE:
            weight = storing.flat(weight, "weight", cut.conv1d)
            bias = None if bias is None else storing.flat(bias, "bias", cut.conv1d)
        cut.inside, cut.entered = True, x
        return _product(cut.lane.enter(x), weight.t() if cut.conv1d else weight, bias, cut.backend)


class RowLinear:
    """forward of down where the module's own code calls it: the sum over all ranks, and the bias."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        (m,) = args or kwargs.values()
        cut: Cut = getattr(self, ATTRIBUTE)
        weight = storing.local(self.weight)  # type: ignore[attr-defined]
        assert weight is not None
        y = _product(m, weight.t() if cut.conv1d else weight, None, cut.backend)
        like, cut.inside, cut.entered = cut.entered, False, None
        return cut.lane.leave(y, self.bias, y if like is None else like)  # type: ignore[attr-defined]


class ParallelDropout:
    """forward of a dropout below the FFN: on coefficients it takes its part of the mask of all channels."""

    _fanfold_original: type[nn.Module]

    def forward(self, x: Tensor) -> Tensor:
        cut: Cut = getattr(self, ATTRIBUTE)
        if not (cut.inside and self.training and self.p):  # type: ignore[attr-defined]
            return self._fanfold_original.forward(self, x)  # type: ignore[arg-type]
        return x * cut.mask(x, self.p)  # type: ignore[attr-defined]


class ParallelPacked(PackedFeedForward):
    """This rank's part of a packed FFN, for inference; takes the place of the module that was packed.

    weights  of this rank, from `slices.shard`.       plan  of the whole.
    down_bias  of the whole, on every rank: it is added after the sum.
    """

    def __init__(
        self, weights: Weights, plan: Plan, lane: Lane, down_bias: Tensor | None, *, scale: float, residual: bool,
        backend: str,
    ) -> None:  # fmt: skip
        spec = Spec.from_dict({**weights.spec.to_dict(), "down_bias": False})
        super().__init__(weights.replace(spec=spec, down_bias=None), backend)
        self.plan, self.lane, self.scale, self.residual = plan, lane, scale, residual
        self.register_buffer("summed_bias", None if down_bias is None else down_bias.detach().float().clone())

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:  # type: ignore[override]
        if len(more) != self.residual:
            raise ValueError(f"{self.lane.path}: called with {1 + len(more)} tensors, expected {1 + self.residual}")
        y = self.lane.leave(super().forward(self.lane.enter(x)), self.summed_bias, x)  # type: ignore[arg-type]
        if self.scale != 1.0:
            y = y * self.scale
        return y + more[0] if self.residual else y

    def _apply(self, fn: Any, recurse: bool = True) -> ParallelPacked:
        bias = self._buffers["summed_bias"]
        super()._apply(fn, recurse)
        self._buffers["summed_bias"] = bias
        return self


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, backend: str) -> Tensor:
    """x @ weight.T + bias, by our kernel where no gradient is needed and it can."""
    tensors = (x, weight) if bias is None else (x, weight, bias)
    grads = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    named = dispatch.resolve(backend)
    if grads or named == "torch" or torch.compiler.is_compiling() or torch_ops.autocast_on(x):
        return F.linear(x, weight, bias)
    reason = torch_ops.transform_active() or cpu.linear_why_not(x, weight, bias)
    if named == "auto":
        reason = reason or cpu.slower_than_torch(x, weight)
    return F.linear(x, weight, bias) if reason else dispatch.linear(x, weight, bias)


_classes: dict[tuple[type, type], type] = {}


def install(module: nn.Module, base: type, cut: Cut) -> None:
    """Make `module` one of `base`, of its own class still."""
    original = type(module)
    if (base, original) not in _classes:
        body = {"_fanfold_original": original, "__module__": __name__}
        _classes[base, original] = type(f"Parallel{original.__name__}", (base, original), body)
    module.__class__ = _classes[base, original]
    module.__dict__[ATTRIBUTE] = cut
