"""Every other linear of a model on the same kernels: attention's projections, lm_head. linears="all"."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..kernels import cpu, dispatch
from .activations import choose_activations
from .job import Job, Owner
from .linears import matrix
from .packing import put_back
from .report import SwapRow
from .states import LinearState, reset
from .swapped import SwappedLinear, install
from .timing import ALWAYS
from .verify_packed import LinearTruth, judge, run_linear

_PAYS = 0.5  # a copy beside a tied table must halve the bytes that are read, or it is not worth its memory


def swap_linear(job: Job, path: str, linear: Any) -> SwapRow:
    """Swap one linear, verified against its own output. -> its row."""
    packer = job.packer
    n_out, n_in = matrix(linear).shape
    row = SwapRow(
        path=path,
        kind="linear",
        spec=None,
        layout=None,
        format=job.format,
        backend=None,
        status="left",
        reason="",
        shape=(n_in, n_out),
    )
    row.reason = unusable(path, linear, job.backend) or (packer and (job.reader(path) or job.unseen(path))) or ""
    if row.reason:
        return row
    try:
        truth = LinearTruth(linear, job.sample(path)) if job.verify else None
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        row.reason = f"its own code fails on 1 or 40 tokens: {type(error).__name__}: {error}"
        return row
    before, owner = linear.weight.nbytes, job.owner(linear)
    if packer is None:
        install(linear, SwappedLinear, LinearState(path, None, job.backend))
    else:
        packer.pack(linear, path)
        choose_activations(row, {"weight": linear}, {"weight": path}, job.activations, job.inputs)
        row.bytes_before, row.bytes_after = before, linear._fanfold.weight.nbytes
    row.states = [linear._fanfold]
    row.status, row.backend = "swapped", "cpu" if job.backend == "auto" else job.backend
    if owner is not None and packer is not None:
        _settle_tie(row, linear, owner, before)
    if truth is not None and row.status == "swapped":
        linear._fanfold.choice = ALWAYS  # what may run is verified, whatever is faster
        cases = truth.cases(linear._fanfold.weight) if packer else truth.cases_in_place()
        judge(row, cases, run_linear(linear))
        linear._fanfold.choice = None
    if row.status != "swapped":
        put_back({path: linear})
        row.states, row.backend = [], None
    if packer is not None:
        packer.release(row.states)
    reset(row.states)
    return row


def _settle_tie(row: SwapRow, linear: Any, owner: Owner, before: int) -> None:
    """A tied table stays for whoever looks things up in it; a packed copy beside it must pay."""
    path, module, name = owner
    after = row.bytes_after or 0
    linear._fanfold.tie((module, name))
    said = f"tied to {path}, which keeps its own {before / 1e6:.1f} MB"
    if after > _PAYS * before:
        row.status = "left"
        row.reason = f"{said}: a copy in {row.format} would add {after / 1e6:.1f} MB and hardly read fewer"
        return
    row.reason = f"{said}; this copy adds {after / 1e6:.1f} MB, and a call reads those instead"
    row.bytes_after = before + after


def unusable(path: str, linear: Any, backend: str) -> str | None:
    """Why no kernel of ours would ever run for this linear, or None. Raises BackendError if the cpu is named."""
    if type(linear._parameters.get("weight")) is not nn.Parameter:
        return "its weight is computed (pruning, parametrization) or of a foreign type"
    if "forward" in linear.__dict__:
        return "its forward is patched: another tool has already replaced it"
    if dispatch.resolve(backend) == "torch":
        return None
    weight, bias = matrix(linear), linear.bias
    x = torch.empty(0, weight.shape[1], dtype=weight.dtype, device=weight.device)
    reason = cpu.linear_why_not(x, weight.detach(), None if bias is None else bias.detach())
    if reason is None:
        return None
    if dispatch.resolve(backend) == "cpu":
        raise dispatch.BackendError(f"backend 'cpu' cannot run {path}: {reason}")
    return f"no kernel of ours can run it: {reason}"
