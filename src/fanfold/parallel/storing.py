"""How a linear's parameters are kept when its FFN is cut: as DTensors, so that state_dict, optimizers, gradient
clipping, FSDP2 and distributed checkpoints see the whole tensor with this rank's part in it.

A matrix that holds gate and up cannot be cut into one piece of rows, so it becomes [2, d_ff, d_model] (halves) or
[d_ff, 2, d_model] (pairs), cut along d_ff; its bias likewise. Where the plan's ranges are not torch.chunk's (they are
not when that would leave a rank empty), DTensor cannot express them and the parameter is this rank's plain part.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ..layout import GATE_UP, GATE_UP_INTERLEAVED, INTERLEAVED, Layout
from .plans import Plan


@dataclass(frozen=True)
class Form:
    """How one parameter is kept: its shape (of the whole) and the dimension that is cut, None for none."""

    shape: tuple[int, ...]
    dim: int | None


def form_of(role: str, kind: str, plan: Plan, conv1d: bool) -> Form:
    """For the parameter `kind` ("weight", "bias") of the linear with `role` in an FFN."""
    d, f = plan.spec.d_model, plan.spec.d_ff
    fused = (f, 2) if plan.layout.order in INTERLEAVED else (2, f)
    if kind == "bias":
        if role == "down":
            return Form((d,), None)
        return Form(fused, _place(plan)) if role == "gate_up" else Form((f,), 0)
    if role == "down":
        return Form((f, d), 0) if conv1d else Form((d, f), 1)
    if role != "gate_up":
        return Form((d, f), 1) if conv1d else Form((f, d), 0)
    return Form((d, *fused), 1 + _place(plan)) if conv1d else Form((*fused, d), _place(plan))


def _place(plan: Plan) -> int:
    """The dimension of d_ff in [2, d_ff] or [d_ff, 2]."""
    return 0 if plan.layout.order in INTERLEAVED else 1


def keep(parameter: nn.Parameter, form: Form, plan: Plan, rank: int, mesh: DeviceMesh) -> nn.Parameter:
    """The parameter as this rank keeps it: a copy of its part."""
    part = parameter.detach().reshape(form.shape)
    if form.dim is not None:
        own = plan.ranks[rank]
        part = part.narrow(form.dim, own.start, own.channels)
    part = part.clone(memory_format=torch.contiguous_format)
    return kept(part, form, plan, mesh, parameter.requires_grad)


def kept(part: Tensor, form: Form, plan: Plan, mesh: DeviceMesh, requires_grad: bool) -> nn.Parameter:
    """This rank's part of a parameter, as the DTensor that it is a part of where there is one."""
    if form.dim is not None and not plan.chunked:
        return nn.Parameter(part, requires_grad)
    placement: Placement = Replicate() if form.dim is None else Shard(form.dim)
    shape, stride = torch.Size(form.shape), torch.empty(form.shape, device="meta").stride()
    whole = DTensor.from_local(part, mesh, [placement], run_check=False, shape=shape, stride=stride)
    return nn.Parameter(whole, requires_grad)


def local(parameter: Tensor | None) -> Tensor | None:
    """This rank's part of a parameter, as autograd sees it."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def halves(fused: Tensor, layout: Layout, kind: str, conv1d: bool) -> tuple[Tensor, Tensor]:
    """(gate, up) of this rank's part of a fused parameter, [out, in] if it is a matrix."""
    two = (layout.order in INTERLEAVED) + (conv1d and kind == "weight")
    first, second = fused.unbind(two)
    if kind == "weight" and conv1d:
        first, second = first.t(), second.t()
    return (first, second) if layout.order in (GATE_UP, GATE_UP_INTERLEAVED) else (second, first)


def flat(fused: Tensor, kind: str, conv1d: bool) -> Tensor:
    """This rank's part of a fused parameter as its linear multiplies it: [2F, D], [D, 2F] for a Conv1D, or [2F]."""
    return fused.flatten(1, 2) if conv1d and kind == "weight" else fused.flatten(0, 1)


def describe(parameter: Tensor) -> str:
    """What a report says of a parameter."""
    if not isinstance(parameter, DTensor):
        return f"plain {list(parameter.shape)}: ranges are not those of DTensor"
    (placement,) = parameter.placements
    where = f"Shard({placement.dim})" if isinstance(placement, Shard) else "Replicate()"
    return f"DTensor {list(parameter.shape)} {where}"
