"""Where FFNs may be in a module tree, by shapes alone. What they compute is for `identify` to find out.

D d_model, F d_ff. Two kinds of site:
  module  one module owns the linears and nothing else with matrices: it *is* the FFN.
  pair    the linears sit in a layer beside attention (OPT), or in two modules of one parent (BERT's intermediate and
          output): the layer's own code connects them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from .linears import is_conv1d, is_linear, sizes


@dataclass(frozen=True, kw_only=True)
class Site:
    """One place that may be an FFN.

    path   of the module, or of the layer that holds the pair.
    first  paths (relative to `path`) of the linears D -> F (one or two) or D -> 2F (fused).
    last   relative path of the linear F -> D.
    alternatives  other readings of the same shapes (which linear is down), for the experiment to decide.
    """

    path: str
    kind: str
    first: tuple[str, ...]
    last: str
    d_model: int
    d_ff: int
    fused: bool
    transposed: bool
    alternatives: tuple[Site, ...] = ()

    @property
    def weak(self) -> bool:
        """D == F: attention's projections have such shapes too, so shapes alone are little evidence of an FFN."""
        return self.d_model == self.d_ff


@dataclass(frozen=True, kw_only=True)
class Overlooked:
    """Something with an FFN's shapes that is not searched further, and why."""

    path: str
    reason: str


def scan(model: nn.Module) -> tuple[list[Site], list[Overlooked], list[str]]:
    """(sites, overlooked, looked at): every candidate in `model` in tree order, and a line per module examined."""
    sites: list[Site] = []
    overlooked: list[Overlooked] = []
    looked: list[str] = []
    taken: set[int] = set()
    for path, module in model.named_modules():
        linears = {n: m for n, m in _linears(module).items() if id(m) not in taken}
        experts = _experts(module)
        if experts:
            overlooked.append(Overlooked(path=path, reason=f"experts in 3-D parameters ({experts}): not supported yet"))
        if linears:
            shapes = ", ".join(f"{n} {a}->{b}" for n, (a, b) in ((n, sizes(m)) for n, m in linears.items()))
            looked.append(f"{path or '(root)'} ({type(module).__name__}): {shapes}")
        found = list(_in_module(path, module, linears)) or list(_split(path, module))
        for site in found:
            taken.update(id(module.get_submodule(name)) for name in (*site.first, site.last))
        sites.extend(found)
    return sites, overlooked, looked


def _linears(module: nn.Module) -> dict[str, nn.Module]:
    """Direct children that are linears; a list's members are not one function."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return {}
    return {n: c for n, c in module.named_children() if is_linear(c)}


def _experts(module: nn.Module) -> str | None:
    shapes = {n: tuple(p.shape) for n, p in module._parameters.items() if p is not None and p.dim() == 3}
    if len(shapes) < 2:
        return None
    counts = {s[0] for s in shapes.values()}
    return ", ".join(f"{n} {s}" for n, s in shapes.items()) if len(counts) == 1 and max(counts) > 1 else None


def _has_matrices(module: nn.Module) -> bool:
    return any(p.dim() >= 2 for p in module.parameters())


def _in_module(path: str, module: nn.Module, linears: dict[str, nn.Module]) -> Iterator[Site]:
    matches = list(_match({n: sizes(m) for n, m in linears.items()}))
    if not matches:
        return
    first, last, _, _, _ = matches[0]
    others = [c for n, c in module.named_children() if n not in (*first, last)]
    alone = len(linears) == len(first) + 1 and not any(_has_matrices(c) for c in others)
    kind = "module" if alone else "pair"
    best, *rest = (_site(path, kind, module, *match) for match in matches)
    yield dataclasses.replace(best, alternatives=tuple(rest))


def _match(shape: dict[str, tuple[int, int]]) -> Iterator[tuple[tuple[str, ...], str, int, int, bool]]:
    """Every (first, last, D, F, fused) that the (in, out) shapes of a module's linears allow, the likeliest first.

    Two linears a->b and b->a fit both ways round: the one registered last is taken for down first.
    """
    names = list(shape)
    square = all(a == b for a, b in shape.values())
    if square and len(names) not in (2, 3):
        return  # attention's four D -> D
    for last in reversed(names):
        f, d = shape[last]
        up = tuple(n for n in names if n != last and shape[n] == (d, f))
        if len(up) in (1, 2):
            yield up, last, d, f, False
        both = tuple(n for n in names if n != last and shape[n] == (d, 2 * f))
        if len(both) == 1:
            yield both, last, d, f, True


def _split(path: str, module: nn.Module) -> Iterator[Site]:
    """Neighbouring children A (one linear D -> F) and B (one linear F -> D), as BERT's intermediate and output."""
    before: tuple[str, nn.Module] | None = None
    for name, child in module.named_children():
        if is_linear(child) or isinstance(child, (nn.ModuleList, nn.Sequential)):
            before = None
            continue
        own = {n: m for n, m in child.named_children() if is_linear(m)}
        only = len(own) == 1 and not any(_has_matrices(c) for n, c in child.named_children() if n not in own)
        if not only:
            before = None
            continue
        ((linear_name, linear),) = own.items()
        if before is not None:
            (d, f), (f2, d2) = sizes(before[1]), sizes(linear)
            if f == f2 and d == d2 and before[1] is not linear:
                yield _site(path, "pair", module, (before[0],), f"{name}.{linear_name}", d, f, False)
                before = None
                continue
        before = (f"{name}.{linear_name}", linear)


def _site(
    path: str, kind: str, module: nn.Module, first: tuple[str, ...], last: str, d: int, f: int, fused: bool
) -> Site:
    transposed = is_conv1d(module.get_submodule(last))
    return Site(path=path, kind=kind, first=first, last=last, d_model=d, d_ff=f, fused=fused, transposed=transposed)
