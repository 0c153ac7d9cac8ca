"""Packed linears that a layer's own code connects (BERT, OPT), cut: the layer's code runs between them on this rank's
channels."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels import cpu, dispatch, packed
from ..kernels import torch as torch_ops
from ..kernels.packed import PackedMatrix
from ..layout import SEPARATE, Layout
from ..models.find import Found
from ..models.linears import pristine
from ..models.packed_state import EXCHANGED, TABLE
from ..models.packed_weight import PackedWeight
from ..weights import Weights
from .lanes import Lane


def weights_of(found: Found, linears: dict[str, Any]) -> Weights:
    """The whole FFN's Weights: the packed matrices of its linears, {role: linear}, in place; biases float32.

    Raises ValueError, with the reason, if a linear is no longer what was packed or does more than a linear.
    """
    assert found.spec is not None
    assert found.layout is not None
    arrays: dict[str, Any] = {}
    for role, linear in linears.items():
        state = linear._fanfold
        if not state.holds(linear) or state.table() is not None:
            raise ValueError(f"{state.path}: {TABLE if state.holds(linear) else EXCHANGED}")
        if not pristine(linear):
            raise ValueError(f"{state.path} is hooked, or holds a foreign tensor")
        bias = state.bias(linear)
        if role == "gate_up":
            halves = (None, None) if bias is None else Layout(order=found.layout.order).split(bias)
            parts = zip(("gate", "up"), state.weight.parts, halves, strict=True)
        else:
            parts = [(role, state.weight.parts[0], bias)]
        for name, matrix, own in parts:
            arrays[name] = matrix
            if own is not None:
                arrays[f"{name}_bias"] = own.detach().contiguous()
    return Weights(found.spec, **arrays)


class Link:
    """What the linears of one FFN share: the lane, and what the first was called with while the layer's code runs."""

    def __init__(self, lane: Lane, backend: str) -> None:
        self.lane, self.backend = lane, backend
        self.entered: Tensor | None = None


class ParallelPackedLinear(nn.Module):
    """This rank's part of a packed linear, for inference; takes the linear's place.

    parts  of this rank [n_out, n_in]: one matrix, or gate and up, whose outputs lie in `order`.
    bias   float32: of gate and up this rank's part, of down the whole on every rank: it is added after the sum.
    down   whether it is the last: its outputs are summed over the ranks; else they are this rank's channels.

    Buffers are `packed` (or `gate_packed` and `up_packed`) and `bias`; state_dict holds them. Casts leave them as they
    are; .to() another device raises. A gradient of x runs PyTorch's ops on the dequantized weights.
    """

    def __init__(
        self, parts: tuple[PackedMatrix, ...], bias: Tensor | None, link: Link, *, down: bool, order: str = SEPARATE
    ) -> None:
        super().__init__()
        self.link, self.down, self.order = link, down, order
        self.names = ("packed",) if len(parts) == 1 else ("gate_packed", "up_packed")
        self.kinds = [(part.format, tuple(part.shape), part.activations) for part in parts]
        for name, part in zip(self.names, parts, strict=True):
            self.register_buffer(name, part.data)
        self.register_buffer("bias", None if bias is None else bias.detach().float().clone())
        self._weight: PackedWeight | None = None
        self.weight()  # now: torch.compile cannot trace what it does

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        (x,) = args or kwargs.values()  # nn.Linear calls it `input`, Conv1D `x`
        link, lane = self.link, self.link.lane
        if not self.down:
            link.entered = x
            return self._product(lane.enter(x), self.bias)  # type: ignore[arg-type]
        y = self._product(x, None)
        like, link.entered = link.entered, None
        return lane.leave(y, self.bias, y if like is None else like)  # type: ignore[arg-type]

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x @ matrix.T + bias."""
        compiling, named, weight = torch.compiler.is_compiling(), dispatch.resolve(self.link.backend), self.weight()
        reason = "backend torch" if named == "torch" else None
        if torch.is_grad_enabled() and x.requires_grad:
            reason = "packed weights are for inference, and a gradient is needed"
        elif torch_ops.autocast_on(x):
            reason = "autocast is on"
        elif not compiling:
            reason = reason or torch_ops.transform_active() or packed.linear_why_not(x, weight.parts[0], None)
        elif torch_ops.forward_mode():
            reason = "forward-mode differentiation is active"
        elif x.dtype not in cpu._DTYPES:
            reason = f"x is {x.dtype}"
        if reason is None:
            if compiling:
                return weight.traced(x, bias)
            dispatch.record("cpu")
            return weight.linear(x, bias)
        if named == "cpu" and not torch_ops.autocast_on(x):
            raise dispatch.BackendError(f"backend 'cpu' cannot run {self.link.lane.path}: {reason}")
        if not compiling:
            dispatch.record("torch")
        matrix = weight.traced_matrix(x.dtype) if compiling else weight.matrix(x.dtype)
        return F.linear(x, matrix, None if bias is None else bias.to(x.dtype))

    def weight(self) -> PackedWeight:
        """The packed matrices: the same memory as the buffers."""
        if self._weight is None:
            parts = []
            for name, (format, (n, k), activations) in zip(self.names, self.kinds):
                parts.append(PackedMatrix(format, (n, k), getattr(self, name), activations))
                setattr(self, name, parts[-1].data)  # a copy where the bytes did not begin on a line of the cache
            self._weight = PackedWeight(tuple(parts), self.order)
        return self._weight

    def _apply(self, fn: Any, recurse: bool = True) -> ParallelPackedLinear:
        if not fn(torch.zeros((), dtype=torch.float32)).is_cpu:
            raise RuntimeError(f"{self.link.lane.path} is packed and runs on the CPU: its bytes are packed for it")
        bias = self._buffers["bias"]
        super()._apply(fn, recurse)
        self._buffers["bias"] = bias  # the kernels read float32 biases, whatever the model is cast to
        self._weight = None
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._weight = None  # assign=True gives other buffers

    def get_extra_state(self) -> Tensor:
        """What the bytes are, as JSON in a tensor: load_state_dict holds it against its own."""
        said = {"layout": packed.LAYOUT_VERSION, "order": self.order, "parts": self.kinds}
        return torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        theirs, own = (bytes(t.tolist()).decode() for t in (state, self.get_extra_state()))
        if theirs != own:
            raise ValueError(f"the state_dict is of {theirs}, this module of {own}: expected the same")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_weight": None}

    def extra_repr(self) -> str:
        kinds = ", ".join(f"{format} {n}x{k}" for format, (n, k), _ in self.kinds)
        return f"{kinds}, {'down: summed over the ranks' if self.down else 'this rank its channels'}"


def cut_linears(
    root: nn.Module, projections: dict[str, str], part: Weights, down_bias: Tensor | None, order: str, link: Link
) -> None:
    """Put this rank's parts in the places of an FFN's packed linears, {role: path}; everywhere, if shared."""
    made: dict[int, ParallelPackedLinear] = {}
    for role, path in projections.items():
        own = ("gate", "up") if role == "gate_up" else (role,)
        parts = tuple(getattr(part, name) for name in own)
        biases = [getattr(part, f"{name}_bias") for name in own]
        old = root.get_submodule(path)
        if role == "down":
            new = ParallelPackedLinear(parts, down_bias, link, down=True)
        elif role == "gate_up":
            joined = None if biases[0] is None else PackedWeight(parts, order).join(biases, 0)
            new = ParallelPackedLinear(parts, joined, link, down=False, order=order)
        else:
            new = ParallelPackedLinear(parts, biases[0], link, down=False)
        made[id(old)] = new.train(old.training)
    for module in list(root.modules()):
        for name, child in list(module._modules.items()):
            if id(child) in made:
                module._modules[name] = made[id(child)]
