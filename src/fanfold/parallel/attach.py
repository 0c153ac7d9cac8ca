"""`apply`: cut the FFNs of a module or model over a mesh of ranks, in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel.style import ParallelStyle

from ..kernels import dispatch
from ..layout import Layout
from ..models.find import FindError, Found, find
from ..models.linears import is_conv1d, pristine
from ..models.packed_ffn import PackedFFNState
from ..models.packing import put_back
from ..models.states import LinearState
from ..models.swapped import Swapped
from ..nn import FeedForward, PackedFeedForward
from ..spec import Spec
from ..weights import Weights
from . import storing
from .lanes import Lane
from .plans import Plan, plan
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


@dataclass
class _Item:
    """One FFN to be cut: where it is and what it is."""

    path: str
    spec: Spec
    layout: Layout
    projections: dict[str, str]
    whole: bool = True
    scale: float = 1.0
    residual: bool = False
    dropout: bool = False
    packed: Weights | None = None
    plan: Plan | None = None


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
             `mesh` (see `report`). Packed FFNs (a swap to a format, `PackedFeedForward`) are replaced by packed parts.
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
    items, rows = jointly(what, group, lambda: _prepare(module, tp, found, inputs))
    agree(what, group, {"version": version(), **_facts(items, sequence_parallel), "weights": _sums(module, items)})
    tied: dict[int, nn.Parameter] = {}
    for item in items:
        lane = Lane(mesh, sequence_parallel, item.path or "(root)")
        if item.packed is not None:
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


def _prepare(module: nn.Module, tp: int, found: list[Found] | None, inputs: Any) -> tuple[list[_Item], list[Row]]:
    """(the FFNs to cut, with their plans; rows of those that are left). Changes nothing but undoing swaps in place."""
    if not isinstance(module, nn.Module):
        raise ValueError(f"module is a {type(module).__name__}, expected a torch.nn.Module")
    if any(ATTRIBUTE in m.__dict__ or isinstance(m, ParallelPacked) for m in module.modules()):
        raise ValueError("its FFNs are cut already: apply is called once, on the whole module")
    items = list(_packed(module)) or _floats(module, found, inputs)
    rows = [Row(path=i.path, spec=None, status="left", reason=i.reason, tp=tp) for i in items if isinstance(i, Found)]
    items = [i for i in items if isinstance(i, _Item)]
    if not items:
        said = "; ".join(f"{row.path or '(root)'}: {row.reason}" for row in rows[:3])
        raise ValueError(f"no FFN of {type(module).__name__} can be cut: {said}")
    for item in items:
        format = item.packed.down.format if item.packed is not None else "fp32"
        item.plan = plan(item.spec, tp, format, item.layout)
    return items, rows


def _packed(module: nn.Module) -> Iterator[_Item | Found]:
    for path, m in module.named_modules():
        if isinstance(m, PackedFeedForward):
            yield _Item(path, m.spec, Layout(), {}, packed=m.weights())
        state = m.__dict__.get("_fanfold")
        if isinstance(state, PackedFFNState):
            weights = state.weights(m)
            if isinstance(weights, str):
                raise ValueError(f"{path}: {weights}")
            yield _Item(
                path, state.spec, Layout(), {}, scale=state.scale, residual=state.residual, packed=weights,
            )  # fmt: skip


def _floats(module: nn.Module, found: list[Found] | None, inputs: Any) -> list[_Item | Found]:
    ours = {path: m for path, m in module.named_modules() if isinstance(m, FeedForward)}
    if found is None:
        try:
            found = [] if "" in ours else find(module, inputs=inputs)
        except FindError:
            if not ours:
                raise
            found = []
    items: list[_Item | Found] = []
    for path, m in ours.items():
        at = f"{path}." if path else ""
        roles = ("gate", "up", "down") if m.spec.gated else ("up", "down")
        items.append(_Item(path, m.spec, Layout(), {role: f"{at}{role}_proj" for role in roles}))
    users = _users(module)
    for one in found:
        if one.path in ours:
            continue
        items.append(one if one.spec is None else _found(module, one, users))
    return items


def _found(module: nn.Module, one: Found, users: dict[int, set[str]]) -> _Item | Found:
    """An identified FFN as an item, or with the reason why it is left."""
    assert one.spec is not None
    assert one.layout is not None
    linears = {path: module.get_submodule(path) for path in one.projections.values()}
    mine = {one.path: module.get_submodule(one.path), **linears} if one.kind == "module" else linears
    # a swap in place changed no parameter: without it the modules are what they were
    put_back({path: m for path, m in mine.items() if isinstance(m, Swapped)})
    for path, linear in linears.items():
        if isinstance(linear.__dict__.get("_fanfold"), LinearState) or not pristine(linear):
            return dataclasses.replace(one, spec=None, reason=f"{path} is packed, hooked, or holds a foreign tensor")
        shared = {p for t in linear._parameters.values() if t is not None for p in users[id(t)]} - set(linears)
        if any(id(module.get_submodule(p)) not in {id(m) for m in linears.values()} for p in shared):
            return dataclasses.replace(one, spec=None, reason=f"{path} shares a parameter with {sorted(shared)[0]}")
    return _Item(
        one.path, one.spec, one.layout, one.projections, one.kind == "module", one.scale, one.residual, one.dropout
    )  # fmt: skip


def _users(module: nn.Module) -> dict[int, set[str]]:
    """id of a parameter -> paths of the modules that hold it."""
    out: dict[int, set[str]] = {}
    for path, m in module.named_modules():
        for p in m._parameters.values():
            if p is not None:
                out.setdefault(id(p), set()).add(path)
    return out


def _facts(items: list[_Item], sequence_parallel: bool) -> dict[str, Any]:
    said: dict[str, Any] = {"sequence_parallel": sequence_parallel, "FFNs": [item.path for item in items]}
    for item in items:
        said[f"the spec of {item.path or '(root)'}"] = f"{item.spec.describe()}, {item.layout.describe()}"
    return said


def _sums(module: nn.Module, items: list[_Item]) -> list[Any]:
    """A sum over the bits of each FFN's tensors: ranks that loaded other files, or drew other numbers, differ."""
    out: list[Any] = []
    for item in items:
        if item.packed is not None:
            tensors = [v if isinstance(v, Tensor) else v.data for _, v in item.packed.items()]
        else:
            linears = [module.get_submodule(path) for path in item.projections.values()]
            tensors = [p.detach() for m in linears for p in m._parameters.values() if p is not None]
        total = 0
        for i, t in enumerate(tensors):
            if t.device.type != "meta":
                flat = t.contiguous().view(-1)
                bits = flat.view(torch.int64 if flat.nbytes % 8 == 0 else torch.uint8)
                total += (2 * i + 1) * int(bits.sum(dtype=torch.int64))
        out.append(total)
    return out


def _cut(
    root: nn.Module, item: _Item, lane: Lane, rank: int, backend: str, tied: dict[int, nn.Parameter]
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


def _replace(root: nn.Module, item: _Item, lane: Lane, rank: int, backend: str) -> nn.Module:
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


def _row(root: nn.Module, item: _Item, rank: int) -> Row:
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
