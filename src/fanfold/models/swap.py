"""`swap`: run a model's FFNs on our kernels, each verified against what it replaces; `unswap` undoes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..kernels import cpu, dispatch
from ..nn import FeedForward
from ..spec import Spec
from .choose import choose_by_measurement
from .find import Found, Progress, find
from .linears import matrix
from .packing import Packer, put_back
from .report import SwapReport, SwapRow
from .states import FFNState, LinearState, reset
from .swapped import SwappedFFN, SwappedLinear, install, is_swapped
from .verify import Truth

SWAP_FORMATS = (None, "fp32", "bf16")


def swap(
    model: nn.Module,
    format: str | None = None,
    backend: str = "auto",
    verify: bool = True,
    inputs: Any = None,
    keep_originals: bool = False,
    found: list[Found] | None = None,
    progress: Progress | None = None,
) -> SwapReport:
    """Run the FFNs of `model` on our kernels.

    Every FFN is found by structure and identified by experiment; one that matches no description, or two, is left.
    format    None: the model's own parameters stay where they are and are read in place. "fp32", "bf16": for
              inference: weights are converted and the originals freed (keep_originals=True keeps them for unswap).
    backend   "auto": our kernels at the token counts where they are measured to be ahead of the module's own code on
              this machine (format=None), an FFN where they never are is left; or a name that then runs or raises.
    verify    hold each swapped FFN to the tolerance rule on its own weights; one that fails is put back.
    inputs    see `find`; found  what `find` gave for this very model, to spare finding again.
    progress  called with (done, total).
    -> SwapReport: a row per FFN. While gradients are needed, in training with dropout, under autocast, or when an
    adapter or hook is found, a swapped FFN runs its own code; `rows[i].stepped_aside` counts that.
    Raises FindError if there is no FFN, ValueError on an unknown format or a model already swapped.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}, expected a torch.nn.Module")
    if format not in SWAP_FORMATS:
        known = ", ".join(str(f) for f in SWAP_FORMATS)
        raise ValueError(f"format={format!r} is not known; known: {known}")
    dispatch.resolve(backend)
    already = list(_swapped(model))
    if already:
        raise ValueError(f"{already[0] or 'the model'} is already swapped: call unswap(model) first")
    if found is None:
        # identification is the first half of the work
        found = find(model, inputs=inputs, progress=progress and (lambda done, total: progress(done, 2 * total)))
    packer = Packer(format, keep_originals)
    rows: list[SwapRow] = []
    try:
        for i, item in enumerate(found):
            rows.append(_swap_one(model, item, packer, backend, verify))
            if progress is not None:
                progress(len(found) + i + 1, 2 * len(found))
        if format is None and dispatch.resolve(backend) == "auto":
            choose_by_measurement(model, rows)
    except BaseException:  # a model half swapped is nobody's wish; Ctrl-C included
        put_back(_swapped(model))
        raise
    return SwapReport(rows=rows)


def unswap(model: nn.Module) -> list[str]:
    """Put every swapped FFN back. -> a note per module whose weights could not be put back bit by bit.

    With format=None nothing was touched, so everything is as before. Packed weights return to their own dtype:
    exact where the format holds it, else they are now the rounded ones (unless keep_originals was given).
    """
    return put_back(_swapped(model))


def _swapped(model: nn.Module) -> dict[str, nn.Module]:
    return {path: module for path, module in model.named_modules() if is_swapped(module)}


def _swap_one(model: nn.Module, found: Found, packer: Packer, backend: str, verify: bool) -> SwapRow:
    row = SwapRow(
        path=found.path,
        kind=found.kind,
        spec=found.spec,
        layout=found.layout,
        format=packer.format,
        backend=None,
        status="left",
        reason=found.reason,
    )
    module = model.get_submodule(found.path)
    if found.spec is None or found.layout is None:
        return row
    if isinstance(module, FeedForward):
        row.reason = "a fanfold FeedForward already"
        return row
    linears: dict[str, Any] = {role: model.get_submodule(path) for role, path in found.projections.items()}
    reason = _unusable(linears, found.spec, backend)
    if reason is not None:
        row.reason = reason
        return row
    try:
        truth = Truth(module, linears, found) if verify else None
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        row.reason = f"its own code fails on 1 or 40 tokens: {type(error).__name__}: {error}"
        return row
    installed = _install(module, linears, found, packer, backend)
    row.states = [m._fanfold for m in installed]  # type: ignore[attr-defined]
    row.status, row.backend = "swapped", "cpu" if backend == "auto" else backend
    if truth is not None:
        truth.judge(row, module, linears, packer.format)
        if row.status != "swapped":
            put_back({m._fanfold.path: m for m in installed})  # type: ignore[attr-defined]
    packer.release(row.states)
    reset(row.states)
    return row


def _unusable(linears: dict[str, Any], spec: Spec, backend: str) -> str | None:
    """Why no kernel of ours would ever run for these parameters, or None."""
    if dispatch.resolve(backend) == "torch":
        return None
    for role, linear in linears.items():
        weight, bias = matrix(linear), linear.bias
        x = torch.empty(0, weight.shape[1], dtype=weight.dtype, device=weight.device)
        reason = cpu.linear_why_not(x, weight.detach(), None if bias is None else bias.detach())
        if reason is not None:
            if dispatch.resolve(backend) == "cpu":
                raise dispatch.BackendError(f"backend 'cpu' cannot run {role}: {reason}")
            return f"no kernel of ours can run it: {reason}"
    return None


def _install(
    module: nn.Module, linears: dict[str, nn.Module], found: Found, packer: Packer, backend: str
) -> list[nn.Module]:
    installed = []
    if found.kind == "pair" or packer.format is not None:
        for role, linear in linears.items():
            state = LinearState(found.projections[role], packer.format, backend)
            install(linear, SwappedLinear, state)  # first, so that a Ctrl-C finds what to put back
            packer.pack(linear, state)
            installed.append(linear)
    if found.kind == "module":
        assert found.spec is not None
        assert found.layout is not None
        prefix = len(found.path) + 1 if found.path else 0
        roles = {role: path[prefix:] for role, path in found.projections.items()}
        ffn_state = FFNState(
            module,
            found.path,
            found.spec,
            found.layout,
            roles,
            scale=found.scale,
            residual=found.residual,
            dropout=found.dropout,
            format=packer.format,
            backend=backend,
        )
        install(module, SwappedFFN, ffn_state)
        ffn_state.look(module)
        installed.append(module)
    return installed
