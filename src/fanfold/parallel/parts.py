"""`from_part`: the FFN over all ranks, put together of the parts that the ranks have read."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..kernels.packed import is_packed
from ..layout import Layout
from ..nn import FeedForward
from ..weights import Weights
from . import storing
from .attach import one_dimensional, version
from .lanes import Lane
from .plans import Plan
from .sharded import ColumnLinear, Cut, ParallelFFN, ParallelPacked, RowLinear, install
from .together import agree, jointly, together


def from_part(
    part: Weights, plan: Plan, mesh: DeviceMesh, *, sequence_parallel: bool = False, backend: str = "auto"
) -> nn.Module:
    """The FFN over all ranks of `mesh`, from the part that this rank has read: no rank ever holds the whole.

    part   of this rank, from `ff.load(path, rank=…, tp=…)` or `shard`: tensors, or packed matrices.
    plan   it was cut by: `checkpoint.plans[layer]`.
    -> a FeedForward whose parameters are DTensors, as `apply` makes them; for packed parts a packed module. Down's bias
    comes from rank 0. Raises the same ParallelError on every rank if the parts do not belong together.
    """
    group = one_dimensional(mesh)
    what, rank = "parallel.from_part", mesh.get_local_rank()
    jointly(what, group, lambda: _check_part(part, plan, mesh))
    facts = {"the spec": plan.spec.describe(), "the ranges": plan.ranges, "sequence_parallel": sequence_parallel}
    kinds = [str(v.dtype) for name, v in part.items() if name != "down_bias"]
    agree(what, group, {"version": version(), **facts, "the dtypes": kinds})
    lane = Lane(mesh, sequence_parallel, "(root)")
    bias = _shared_bias(part, plan, mesh) if plan.spec.down_bias else None
    if is_packed(part):
        return ParallelPacked(part, plan, lane, bias, scale=1.0, residual=False, backend=backend)
    module = FeedForward(plan.spec, device="meta")
    linears = {name.removesuffix("_proj"): linear for name, linear in module.named_children()}
    plain = dataclasses.replace(plan, layout=Layout())  # the part's gate and up are separate, whatever the file's were
    for role, linear in linears.items():
        for kind in [k for k, p in linear._parameters.items() if p is not None]:
            name = role if kind == "weight" else f"{role}_bias"
            value: Any = bias if name == "down_bias" else getattr(part, name)
            form = storing.form_of(role, kind, plain, False)
            linear._parameters[kind] = storing.kept(value.detach().contiguous(), form, plain, mesh, True)
    cut = Cut(plain, rank, lane, linears, backend=backend)
    for role, linear in linears.items():
        install(linear, RowLinear if role == "down" else ColumnLinear, cut)
    install(module, ParallelFFN, cut)
    cut.look(module)
    return module


def _check_part(part: Weights, plan: Plan, mesh: DeviceMesh) -> None:
    rank = mesh.get_local_rank()
    if plan.tp != mesh.size():
        raise ValueError(f"the plan is for {plan.tp} ranks, the mesh has {mesh.size()}: load with tp={mesh.size()}")
    if part.spec != plan.ranks[rank].spec:
        wanted = plan.ranks[rank].spec.describe()
        raise ValueError(f"the part is {part.spec.describe()}, expected {wanted}: load with rank={rank}")
    if not is_packed(part) and not isinstance(part.up, Tensor):
        raise ValueError(f"the part holds {type(part.up).__name__}, expected tensors or packed matrices")


def _shared_bias(part: Weights, plan: Plan, mesh: DeviceMesh) -> Tensor:
    """Rank 0's bias of down, on every rank."""
    like = part.down.data if is_packed(part) else part.down
    dtype = torch.float32 if is_packed(part) else part.down.dtype
    given = part.down_bias
    bias = like.new_empty(plan.spec.d_model, dtype=dtype) if given is None else given.detach().to(dtype).contiguous()
    with together("parallel.from_part", mesh.get_group()):
        dist.broadcast(bias, group=mesh.get_group(), group_src=0)
    return bias
