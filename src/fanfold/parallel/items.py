"""The FFNs of a module that `apply` cuts: float or packed, in one module or connected by a layer's own code."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..layout import Layout
from ..models.find import FindError, Found, find
from ..models.linears import pristine
from ..models.packed_ffn import PackedFFNState
from ..models.packed_state import PackedLinearState
from ..models.packing import put_back
from ..models.states import LinearState
from ..models.swapped import Swapped
from ..nn import FeedForward, PackedFeedForward
from ..spec import Spec
from ..weights import Weights
from .packed_linear import ParallelPackedLinear, weights_of
from .plans import Plan, plan
from .sharded import ATTRIBUTE, ParallelPacked


@dataclass
class Item:
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
    apart: bool = False  # the packed linears are called by a layer's own code
    plan: Plan | None = None


class Left(NamedTuple):
    """An FFN that is not cut, and why."""

    path: str
    reason: str


def prepare(module: nn.Module, tp: int, found: list[Found] | None, inputs: Any) -> tuple[list[Item], list[Left]]:
    """(the FFNs to cut, with their plans; those that are left, with the reasons). Changes nothing but undoing swaps in
    place."""
    if not isinstance(module, nn.Module):
        raise ValueError(f"module is a {type(module).__name__}, expected a torch.nn.Module")
    if any(ATTRIBUTE in m.__dict__ or isinstance(m, (ParallelPacked, ParallelPackedLinear)) for m in module.modules()):
        raise ValueError("its FFNs are cut already: apply is called once, on the whole module")
    seen = list(_packed(module))
    # beside packed FFNs `find` would have to run their code: the others are those that are ours, or given
    known = {one.path for one in seen}
    given = found if found is None else [one for one in found if one.path not in known]
    seen += _floats(module, given or [] if seen else given, inputs)
    left = [one for one in seen if isinstance(one, Left)]
    items = [one for one in seen if isinstance(one, Item)]
    if not items:
        said = "; ".join(f"{one.path or '(root)'}: {one.reason}" for one in left[:3])
        raise ValueError(f"no FFN of {type(module).__name__} can be cut: {said}")
    for item in items:
        format = item.packed.down.format if item.packed is not None else "fp32"
        item.plan = plan(item.spec, tp, format, item.layout)
    return items, left


def _packed(module: nn.Module) -> Iterator[Item | Left]:
    apart: dict[int, tuple[Found, dict[str, str]]] = {}
    for path, m in module.named_modules():
        state = m.__dict__.get("_fanfold")
        if isinstance(m, PackedFeedForward):
            added = _added(m)
            yield Left(path, added) if added else Item(path, m.spec, Layout(), {}, packed=m.weights())
        elif isinstance(state, PackedFFNState):
            yield _whole(path, m, state)
        if isinstance(state, PackedLinearState) and state.found is not None:
            role = next(role for role, at in state.found.projections.items() if at == state.path)
            apart.setdefault(id(state.found), (state.found, {}))[1][role] = path
    for one, projections in apart.values():
        yield _apart(module, one, projections)


def _added(m: nn.Module) -> str | None:
    """What has been put on a module that will be replaced, and would be lost with it; or None."""
    hooks = (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
    if any(hooks):
        return "it has a hook, which its packed part would not have: remove it, and register it again after apply"
    return "its forward is patched" if "forward" in m.__dict__ else None


def _whole(path: str, m: nn.Module, state: PackedFFNState) -> Item | Left:
    """A packed FFN in one module, or the reason why it is left: an adapter, a hook, exchanged weights."""
    assert state.snapshot is not None
    weights = state.weights(m)
    reason = _added(m) or state.snapshot.change()
    if reason is not None or isinstance(weights, str):
        return Left(path, reason or str(weights))
    return Item(path, state.spec, Layout(), {}, scale=state.scale, residual=state.residual, packed=weights)


def _apart(module: nn.Module, one: Found, projections: dict[str, str]) -> Item | Left:
    """An FFN of packed linears that a layer's own code connects, or with the reason why it is left."""
    assert one.spec is not None
    assert one.layout is not None
    names = [path.split(".") for path in projections.values()]
    shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*names))
    path = ".".join(parts[0] for parts in shared)
    missing = [role for role in one.projections if role not in projections]
    try:
        if missing:
            raise ValueError(f"its {missing[0]} is no part of this module, or was replaced: apply is for the whole FFN")
        weights = weights_of(one, {role: module.get_submodule(at) for role, at in projections.items()})
    except ValueError as error:
        return Left(path, str(error))
    return Item(path, one.spec, Layout(order=one.layout.order), projections, packed=weights, apart=True)


def _floats(module: nn.Module, found: list[Found] | None, inputs: Any) -> list[Item | Left]:
    ours = {path: m for path, m in module.named_modules() if isinstance(m, FeedForward)}
    if found is None:
        try:
            found = [] if "" in ours else find(module, inputs=inputs)
        except FindError:
            if not ours:
                raise
            found = []
    items: list[Item | Left] = []
    for path, m in ours.items():
        at = f"{path}." if path else ""
        roles = ("gate", "up", "down") if m.spec.gated else ("up", "down")
        items.append(Item(path, m.spec, Layout(), {role: f"{at}{role}_proj" for role in roles}))
    users = _users(module)
    for one in found:
        if one.path in ours:
            continue
        items.append(Left(one.path, one.reason) if one.spec is None else _found(module, one, users))
    return items


def _found(module: nn.Module, one: Found, users: dict[int, set[str]]) -> Item | Left:
    """An identified FFN as an item, or with the reason why it is left."""
    assert one.spec is not None
    assert one.layout is not None
    linears = {path: module.get_submodule(path) for path in one.projections.values()}
    mine = {one.path: module.get_submodule(one.path), **linears} if one.kind == "module" else linears
    # a swap in place changed no parameter: without it the modules are what they were
    put_back({path: m for path, m in mine.items() if isinstance(m, Swapped)})
    for path, linear in linears.items():
        if isinstance(linear.__dict__.get("_fanfold"), LinearState) or not pristine(linear):
            return Left(one.path, f"{path} is packed, hooked, or holds a foreign tensor")
        shared = {p for t in linear._parameters.values() if t is not None for p in users[id(t)]} - set(linears)
        if any(id(module.get_submodule(p)) not in {id(m) for m in linears.values()} for p in shared):
            return Left(one.path, f"{path} shares a parameter with {sorted(shared)[0]}")
    return Item(
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


def facts(items: list[Item], sequence_parallel: bool) -> dict[str, Any]:
    said: dict[str, Any] = {"sequence_parallel": sequence_parallel, "FFNs": [item.path for item in items]}
    for item in items:
        said[f"the spec of {item.path or '(root)'}"] = f"{item.spec.describe()}, {item.layout.describe()}"
    return said


def sums(module: nn.Module, items: list[Item]) -> list[Any]:
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
