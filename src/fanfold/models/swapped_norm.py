"""The norms between a model's linears on our kernels: linears="all". PyTorch runs one as six to eight operators."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import cpu, dispatch
from ..kernels import torch as torch_ops
from ..weights import to_float64
from . import emulate
from .job import Job
from .linears import quiet
from .norms import RmsNorm, may_be_rms, rms_norm
from .packing import put_back
from .quick import Quick, preparable
from .report import SwapRow
from .snapshot import Snapshot
from .states import AUTOCAST, GRADIENTS, LinearState, reset
from .swapped import Swapped, install
from .verify_packed import Case, judge, run_linear

_TOKENS = (1, 40)
_SCALES = (1e-3, 1.0, 30.0)  # beside eps, too

_is_compiling = torch.compiler.is_compiling
_run_plan = cpu.run_plan


class NormState(LinearState):
    """What a swapped norm remembers."""

    def __init__(self, path: str, backend: str, norm: RmsNorm, dtype: torch.dtype) -> None:
        super().__init__(path, None, backend)
        self.norm = norm
        self.dtype = dtype  # of the weight; what eps is may depend on it
        self.snapshot: Snapshot | None = None

    def look(self, module: nn.Module) -> None:
        """Take the swapped module as it is now for known."""
        self.snapshot = Snapshot(module, [module])

    def objection(self, module: Any, x: Any) -> str | None:
        """Why this call must run the module's own code, or None."""
        if _is_compiling():
            return "torch.compile"
        weight = module._parameters.get("weight")
        if type(weight) is not nn.Parameter:
            return "its weight is computed (pruning, parametrization) or of a foreign type"
        assert self.snapshot is not None
        change = self.snapshot.change() or torch_ops.transform_active()
        if change is not None:
            return change
        if not isinstance(x, Tensor):
            return f"x is a {type(x).__name__}"
        if torch_ops.autocast_on(x):
            return AUTOCAST
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            return GRADIENTS
        backend = dispatch.resolve(self.backend)
        if backend == "torch":
            return "backend torch"
        if weight.dtype != self.dtype:
            return f"its weight is {weight.dtype}, and was {self.dtype} when it was identified"
        reason = cpu.norm_why_not(x, weight)
        if reason is not None and backend == "cpu":
            raise dispatch.BackendError(f"backend 'cpu' cannot run {self.path}: {reason}")
        return reason


class SwappedNorm(Swapped):
    """forward of an RMS norm through our kernel, its own weight read in place."""

    _fanfold: NormState  # type: ignore[assignment]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._fanfold
        if len(args) != 1 or kwargs:
            if not _is_compiling():
                state.step_aside(f"called with {len(args)} arguments and {sorted(kwargs)}")
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        x = args[0]
        quick = state.quick
        if quick is not None and not _is_compiling():
            y = _run_plan(quick.plan, x)
            if y is False:
                state.quick = None
            elif y is not None:
                state.calls += 1
                dispatch.record("cpu")
                return y
        reason = state.objection(self, x)
        if reason is not None:
            if not _is_compiling():
                state.step_aside(reason)
            return super().forward(x)  # type: ignore[misc]
        state.calls += 1
        dispatch.record("cpu")
        norm, weight = state.norm, self.weight  # type: ignore[attr-defined]
        if preparable(x) and state.snapshot is not None:
            kernel = cpu.prepare_norm(x, weight, norm.eps, float(norm.unit_offset))
            watched = state.snapshot.watched(False)
            watched += [(self._parameters, "weight", weight)]  # type: ignore[attr-defined]
            state.quick = Quick(kernel, x, norm.width, watched, module=self)
        return cpu.rms_norm(x, weight, norm.eps, float(norm.unit_offset))


def find_norms(model: nn.Module, taken: list[str]) -> dict[str, tuple[nn.Module, RmsNorm]]:
    """{path: (module, what it is)} of the RMS norms of a model, but for those below the modules at `taken`."""
    below = {id(m) for path in taken for m in model.get_submodule(path).modules()}
    out = {}
    for path, module in model.named_modules():
        norm = rms_norm(module) if may_be_rms(module) and id(module) not in below else None
        if norm is not None:
            out[path] = (module, norm)
    return out


def swap_norm(job: Job, path: str, module: Any, norm: RmsNorm) -> SwapRow:
    """Swap one norm, verified against its own output. -> its row."""
    row = SwapRow(
        path=path,
        kind="norm",
        spec=None,
        layout=None,
        format=None,
        backend=None,
        status="left",
        reason="",
        norm=norm,
    )
    weight = module.weight
    x = torch.empty(0, norm.width, dtype=weight.dtype, device=weight.device)
    why_not = cpu.norm_why_not(x, weight.detach())
    if dispatch.resolve(job.backend) == "torch":
        row.reason = "backend torch: a norm then is PyTorch's own"
    elif "forward" in module.__dict__:
        row.reason = "its forward is patched: another tool has already replaced it"
    elif more := list(inspect.signature(type(module).forward).parameters)[2:]:
        row.reason = f"its code takes {', '.join(more)} as well"
    elif why_not is not None:
        row.reason = f"no kernel of ours can run it: {why_not}"
    if row.reason:
        return row
    try:
        cases = _cases(module, norm) if job.verify else None
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        row.reason = f"its own code fails on 1 or 40 tokens: {type(error).__name__}: {error}"
        return row
    state = NormState(path, job.backend, norm, weight.dtype)
    install(module, SwappedNorm, state)
    state.look(module)
    row.states = [state]
    row.status, row.backend = "swapped", "cpu"
    if cases is not None:
        judge(row, cases, run_linear(module))
        if row.status == "swapped" and state.calls != len(cases):  # judge stops at the first that fails
            row.status, row.reason = "left", f"our kernel would not run it: {'; '.join(state.aside)}"
    if row.status != "swapped":
        put_back({path: module})
        row.states, row.backend = [], None
    reset(row.states)
    return row


def _cases(module: Any, norm: RmsNorm) -> list[Case]:
    """Its own outputs on random inputs, beside float64."""
    weight = module.weight.detach()
    generator = torch.Generator().manual_seed(1)
    out = []
    for scale in _SCALES:
        for tokens in _TOKENS:
            x = ((torch.randn(1, tokens, norm.width, generator=generator) + 0.5) * scale).to(weight)
            with torch.no_grad(), quiet(module):
                y = type(module).forward(module, x)
            exact = to_float64(norm.exact(x, weight)).reshape(tokens, norm.width)
            out.append(Case(x, y, exact, emulate.Truth(exact, exact, []), y.reshape(tokens, norm.width)))
    return out
