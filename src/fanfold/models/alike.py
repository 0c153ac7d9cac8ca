"""When two modules are of one kind: the same code over the same shapes, so that one experiment speaks for both."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import nn

from .snapshot import attributes
from .structure import Site


def kind(module: nn.Module, site: Site) -> Hashable | None:
    """What two sites share if their modules differ in weights alone (and in integers, such as a layer's number).

    None for a module with single numbers among its parameters: an activation's own (xIELU), part of its description.
    """
    tree: list[Hashable] = [site.kind, site.first, site.last, site.fused, site.transposed, site.d_model, site.d_ff]
    for name, m in module.named_modules():
        tensors = {**m._parameters, **m._buffers}
        if any(p is not None and p.numel() == 1 for p in m._parameters.values()):
            return None
        shapes = tuple((n, None if t is None else (tuple(t.shape), t.dtype, t.is_meta)) for n, t in tensors.items())
        own = tuple((n, _same(v)) for n, v in sorted(attributes(m).items()))
        tree.append((name, type(m), shapes, own))
    return tuple(tree)


def _same(value: Any) -> Hashable:
    if type(value) in (float, str, bool, type(None)):
        return value
    return id(value) if callable(value) else type(value)
