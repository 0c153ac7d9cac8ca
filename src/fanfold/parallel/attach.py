"""`apply`: cut the FFNs of a module or model over a mesh of ranks, in place."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel.style import ParallelStyle

from ..kernels import dispatch
from ..models.find import Found
from ..models.linears import is_conv1d
from ..nn import FeedForward
from ..spec import Spec
from . import storing
from .items import Item, facts, prepare, sums
from .lanes import Lane
from .packed_linear import Link, cut_linears
from .sharded import ATTRIBUTE, ColumnLinear, Cut, ParallelDropout, ParallelFFN, ParallelPacked, RowLinear, install
from .slices import shard
from .together import agree, jointly

_REPORT = "_fanfold_parallel"
_VERSION = 1  # of what ranks must have in common to run together: `sharded` and `storing`


@dataclass(frozen=True, kw_only=True)
class Row:
    """One FFN in the report of `apply`.

    status      "cut" or "left", with `reason`.
    channels    (first, after the last) of this rank;  tp: ranks.
    parameters  {name: how it is kept}: a DTensor and its placement, or why it is plain.
    """

    path: str
    spec: Spec | None
    status: str
    reason: str
    tp: int
    channels: tuple[int, int] | None = None
    parameters: dict[str, str] = dataclasses.field(default_factory=dict)


def apply(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    sequence_parallel: bool = False,
    backend: str = "auto",
    found: list[Found] | None = None,
    inputs: Any = None,
) -> nn.Module:
    """Cut every FFN of `module` over the ranks of `mesh`: each computes its channels, one all-reduce adds the sums.

    module   a `nn.FeedForward`, a model swapped or not: any module whose FFNs `find` identifies. Every rank holds the
             same whole; each keeps its part of the FFNs' parameters afterwards, under the same names: DTensors on
             `mesh` (see `report`). Packed FFNs (a swap to a format, `PackedFeedForward`) are replaced by packed parts,
             where a layer's own code connects packed linears each of these; `unswap` does not bring them back. Beside
             packed FFNs, float ones are cut that are `nn.FeedForward` or in `found`.
    mesh     one-dimensional: init_device_mesh("cpu", (tp,)), or mesh["tp"] of a larger one; FSDP2's fully_shard goes
             over the other dimension, after this.
    sequence_parallel  x and y hold this rank's tokens (dimension -2; Shard(1) of [batch, tokens, d_model]): all-gather
             before, reduce-scatter after. Plain tensors have as many tokens on each rank; give DTensors for any number.
    backend  as for `ffn` ("auto": that of a FeedForward).         found, inputs  as for `swap`.
    -> the module (in place; another object only where `module` itself is packed). Ranks need equal random streams where
    there is dropout. Dropout that a module's own code calls as a function on coefficients is not seen.

    Raises the same ParallelError on every rank if the ranks hold different specs, weights or versions or one of them
    fails; ValueError for a mesh of several dimensions or too many ranks for the channels.
    """
    group = one_dimensional(mesh)
    what = "parallel.apply"
    dispatch.resolve(backend)
    rank, tp = mesh.get_local_rank(), mesh.size()
    items, left = jointly(what, group, lambda: prepare(module, tp, found, inputs))
    agree(what, group, {"version": version(), **facts(items, sequence_parallel), "weights": sums(module, items)})
    rows = [Row(path=one.path, spec=None, status="left", reason=one.reason, tp=tp) for one in left]
    tied: dict[int, nn.Parameter] = {}
    for item in items:
        lane = Lane(mesh, sequence_parallel, item.path or "(root)")
        if item.apart:
            _replace_linears(module, item, lane, rank, backend)
        elif item.packed is not None:
            module = _replace(module, item, lane, rank, backend)
        else:
            _cut(module, item, lane, rank, backend, tied)
        rows.append(_row(module, item, rank))
    module.__dict__[_REPORT] = rows
    return module


def report(module: nn.Module) -> list[Row]:
    """What `apply` did to `module`: a row for each FFN. Raises ValueError if it was not applied to it."""
    if _REPORT not in module.__dict__:
        raise ValueError(f"parallel.apply was not called on this {type(module).__name__}")
    return module.__dict__[_REPORT]


class FFNParallel(ParallelStyle):
    """`apply` as a style for PyTorch's parallelize_module(model, mesh, {"layers.*.mlp": FFNParallel()}).

    sequence_parallel, backend  as for `apply`.
    """

    def __init__(self, *, sequence_parallel: bool = False, backend: str = "auto") -> None:
        super().__init__()
        self.sequence_parallel, self.backend = sequence_parallel, backend

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return apply(module, device_mesh, sequence_parallel=self.sequence_parallel, backend=self.backend)


def one_dimensional(mesh: Any) -> Any:
    """The mesh's group. Raises ValueError if it is not one-dimensional."""
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh is a {type(mesh).__name__}, expected a DeviceMesh: init_device_mesh('cpu', (tp,))")
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        pick = f"mesh[{names[-1]!r}]" if names else "one with mesh_dim_names, and one of its dimensions"
        shape = " x ".join(map(str, mesh.mesh.shape))
        raise ValueError(f"mesh has {mesh.ndim} dimensions ({shape}), FFNs are cut over one: pass {pick}")
    return mesh.get_group()


def version() -> list[Any]:
    return [_VERSION, torch.__version__]


def _cut(
    root: nn.Module, item: Item, lane: Lane, rank: int, backend: str, tied: dict[int, nn.Parameter]
) -> None:  # fmt: skip
    assert item.plan is not None
    module = root.get_submodule(item.path)
    if isinstance(module, FeedForward) and backend == "auto":
        backend = module.backend
    linears = {role: root.get_submodule(path) for role, path in item.projections.items()}
    conv1d = is_conv1d(linears["down"])
    cut = Cut(
        item.plan, rank, lane, linears, conv1d=conv1d, whole=item.whole, scale=item.scale, residual=item.residual,
        dropout=item.dropout, backend=backend, save=module.save if isinstance(module, FeedForward) else "all",
    )  # fmt: skip
    for role, linear in linears.items():
        for kind, parameter in list(linear._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in tied:
                form = storing.form_of(role, kind, item.plan, conv1d)
                tied[id(parameter)] = storing.keep(parameter, form, item.plan, rank, lane.mesh)
                tied[id(tied[id(parameter)])] = tied[id(parameter)]  # a module met again holds the cut one already
            linear._parameters[kind] = tied[id(parameter)]
        if ATTRIBUTE not in linear.__dict__:
            install(linear, RowLinear if role == "down" else ColumnLinear, cut)
    for m in module.modules():
        if type(m) is nn.Dropout and item.whole:
            install(m, ParallelDropout, cut)
    if item.whole:
        install(module, ParallelFFN, cut)
        cut.look(module)


def _replace(root: nn.Module, item: Item, lane: Lane, rank: int, backend: str) -> nn.Module:
    """Put this rank's packed part in the place of a packed FFN -> the root."""
    assert item.plan is not None
    assert item.packed is not None
    part = shard(item.packed, item.plan, rank)
    made = ParallelPacked(
        part, item.plan, lane, item.packed.down_bias, scale=item.scale, residual=item.residual, backend=backend
    )  # fmt: skip
    made.train(root.training)
    if not item.path:
        return made
    parent, _, name = item.path.rpartition(".")
    root.get_submodule(parent)._modules[name] = made
    return root


def _replace_linears(root: nn.Module, item: Item, lane: Lane, rank: int, backend: str) -> None:
    """Put this rank's packed parts in the places of the packed linears of an FFN."""
    assert item.plan is not None
    assert item.packed is not None
    part = shard(item.packed, item.plan, rank)
    link = Link(lane, backend)
    cut_linears(root, item.projections, part, item.packed.down_bias, item.layout.order, link)


def _row(root: nn.Module, item: Item, rank: int) -> Row:
    assert item.plan is not None
    own = item.plan.ranks[rank]
    kept: dict[str, str] = {}
    for path in item.projections.values():
        for kind, p in root.get_submodule(path)._parameters.items():
            if p is not None:
                kept[f"{path}.{kind}"] = storing.describe(p)
    if item.packed is not None:
        kept = {name: f"packed {v.format} {list(v.shape)}" for name, v in item.packed.items() if hasattr(v, "format")}
    return Row(
        path=item.path, spec=item.spec, status="cut", reason="", tp=item.plan.tp, channels=(own.start, own.stop),
        parameters=kept,
    )  # fmt: skip
