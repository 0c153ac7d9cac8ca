"""How what an FFN gives enters the residual: found by changing it and looking at what leaves the block.

B batch, T tokens, D d_model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..models.find import Found
from ..numerics import UNIT_ROUNDOFF, dtype_name
from .layers import Layer
from .taps import state_in
from .trace import Event, added, duplicated, events, outside

_ROUNDINGS = 16  # a change may be rounded in each of a few additions on its way out


def look_at_write(layer: Layer, call: tuple[tuple[Any, ...], dict[str, Any]], founds: list[Found]) -> None:
    """Fill in `write`, `write_reason`, `factor` and `post_norm` from two runs of the layer's block on `call`."""
    model, width = layer.model, layer.spec.d_model
    block = model.get_submodule(layer.block)
    ffn = model.get_submodule(layer.path if layer.found.kind == "module" else layer.found.projections["down"])
    modules = {p: m for p, m in outside(block, founds, layer.block).items() if m not in (block, ffn)}

    def run(at: nn.Module | None, change: Tensor | None) -> tuple[Tensor | None, list[Event], Tensor | None]:
        args, kwargs = duplicated(call)
        with events(modules | {"": ffn}) as seen:
            if at is None or change is None:
                return state_in(block(*args, **kwargs), width), seen, None
            with added(at, change) as real:  # after the events' hooks: they see what the module itself gave
                out = state_in(block(*args, **kwargs), width)
            return out, seen, real[0] if len(real) == 1 else None

    before, (out, seen, _) = state_in((*call[0], *call[1].values()), width), run(None, None)
    own = [e for e in seen if e.path == ""]
    if out is None or before is None or len(own) != 1:
        layer.write_reason = (
            f"its block {layer.block or '(the model)'} does not map one state [B, T, {width}] to another"
        )
        return
    y = own[0].y
    change = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y) * out.float().std().to(y)
    changed, seen_changed, real = run(ffn, change)
    rounded = UNIT_ROUNDOFF[dtype_name(out)] * sum(_size(t, out) for t in (out, before, y))

    def factor(there: Tensor | None, put: Tensor | None) -> float | None:
        """The constant by which what was put in arrives at the exit, or None if it arrives as something else."""
        if there is None or put is None or there.shape != out.shape or put.numel() != out.numel():
            return None
        put, arrived = put.reshape(out.shape).double(), there.double() - out.double()
        s = float((arrived * put).sum() / put.square().sum().clamp_min(1e-300))
        s = 1.0 if abs(s - 1.0) < 4 * UNIT_ROUNDOFF[dtype_name(out)] else s
        slack = _ROUNDINGS * (rounded + UNIT_ROUNDOFF[dtype_name(out)] * (put.abs() + there.double().abs()))
        return s if s != 0 and bool(((arrived - s * put).abs() <= slack).all()) else None

    direct = factor(changed, real)
    if direct is not None:
        layer.write, layer.factor = "additive", direct
        return
    for event in seen:
        if event.path and event.x.shape == y.shape == event.y.shape and torch.equal(event.x, y):
            there, _, put = run(event.module, change)
            through = factor(there, put)
            if through is not None:
                layer.write, layer.factor, layer.post_norm = "normed", through, event.path
                return
    layer.write_reason = _why_not(seen, seen_changed, real, out)


def _size(t: Tensor, like: Tensor) -> Tensor:
    return t.double().abs().reshape(like.shape)


def _why_not(seen: list[Event], changed: list[Event], real: Tensor | None, out: Tensor) -> str:
    """The last module that reads the sum of the FFN's output and something, and gives the block's output: post-LN."""
    for before, after in zip(seen, changed):
        if before.path and real is not None and before.x.numel() == real.numel() and torch.equal(before.y, out):
            arrived = after.x.double() - before.x.double()
            if float((arrived - real.reshape(arrived.shape)).abs().max()) < 0.05 * float(real.abs().max()):
                return (
                    f"{before.path} normalises the sum of its output and the residual again before they leave the block"
                )
    return "what it gives does not leave its block by addition"
