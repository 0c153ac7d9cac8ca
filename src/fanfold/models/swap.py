"""`swap`: run a model's FFNs on our kernels, each verified against what it replaces; `unswap` undoes it."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import numerics, reference
from ..kernels import cpu, dispatch
from ..kernels import torch as torch_ops
from ..layout import Layout
from ..nn import FORMATS, FeedForward
from ..spec import Spec
from ..weights import Weights, to_float64
from .find import Found, Progress, find
from .linears import matrix
from .swapped import FFNState, LinearState, Swapped, SwappedFFN, SwappedLinear, install, is_swapped, uninstall

SWAP_FORMATS = (None, "fp32", "bf16")
_TOKENS = (1, 40)  # decode and prefill take different paths through the kernels


@dataclasses.dataclass(kw_only=True)
class SwapRow:
    """One FFN of the report.

    status  "swapped" or "left" (then `reason` says why).  backend  what ran in the verification.
    error, error_torch  relative errors of our output and of PyTorch's own against float64;
    ratio   our error as a share of what the tolerance rule allows (at most 1).
    format_error  what storing the weights in `format` changes by itself (None for format=None).
    """

    path: str
    kind: str
    spec: Spec | None
    layout: Layout | None
    format: str | None
    backend: str | None
    status: str
    reason: str
    error: float | None = None
    error_torch: float | None = None
    ratio: float | None = None
    format_error: float | None = None
    states: list[LinearState] = dataclasses.field(default_factory=list, repr=False)

    @property
    def calls(self) -> int:
        """Calls since the swap that ran on our kernels."""
        return sum(state.calls for state in self.states)

    @property
    def stepped_aside(self) -> dict[str, int]:
        """{reason: calls} since the swap that ran the module's own code."""
        out: dict[str, int] = {}
        for state in self.states:
            for reason, count in state.aside.items():
                out[reason] = out.get(reason, 0) + count
        return out

    def to_dict(self) -> dict[str, Any]:
        names = [f.name for f in dataclasses.fields(self) if f.name != "states"]
        out = {name: getattr(self, name) for name in names}
        out["spec"] = self.spec.to_dict() if self.spec else None
        out["layout"] = dataclasses.asdict(self.layout) if self.layout else None
        return out | {"calls": self.calls, "stepped_aside": self.stepped_aside}


@dataclasses.dataclass(kw_only=True)
class SwapReport:
    """What `swap` did, a row per FFN; prints as a table."""

    rows: list[SwapRow]

    @property
    def n_swapped(self) -> int:
        return sum(row.status == "swapped" for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        return {"n_swapped": self.n_swapped, "n_ffns": len(self.rows), "rows": [row.to_dict() for row in self.rows]}

    def __str__(self) -> str:
        head = ("path", "ffn", "layout", "format", "backend", "status", "error/allowed", "reason")
        lines = [head] + [
            (
                row.path or "(root)",
                row.spec.describe() if row.spec else "?",
                row.layout.describe() if row.layout else "?",
                row.format or "in place",
                row.backend or "-",
                row.status,
                "-" if row.ratio is None else f"{row.ratio:.2f}",
                row.reason,
            )
            for row in self.rows
        ]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        text = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in lines]
        return "\n".join([*text, f"{self.n_swapped} of {len(self.rows)} FFNs swapped"])


def swap(
    model: nn.Module,
    format: str | None = None,
    backend: str = "auto",
    verify: bool = True,
    inputs: Any = None,
    keep_originals: bool = False,
    progress: Progress | None = None,
) -> SwapReport:
    """Run the FFNs of `model` on our kernels.

    Every FFN is found by structure and identified by experiment; one that matches no description, or two, is left.
    format    None: the model's own parameters stay where they are and are read in place. "fp32", "bf16": for
              inference: weights are converted and the originals freed (keep_originals=True keeps them for unswap).
    backend   "auto", or a name that then runs or raises.
    verify    hold each swapped FFN to the tolerance rule on its own weights; one that fails is put back.
    inputs    see `find`; progress  called with (done, total).
    -> SwapReport: a row per FFN. While gradients are needed, in training with dropout, under autocast, or when an
    adapter or hook is found, a swapped FFN runs its own code; `rows[i].stepped_aside` counts that.
    Raises FindError if there is no FFN, ValueError on an unknown format or a model already swapped.
    """
    if format not in SWAP_FORMATS:
        known = ", ".join(str(f) for f in SWAP_FORMATS)
        raise ValueError(f"format={format!r} is not known; known: {known}")
    dispatch.resolve(backend)
    already = [path for path, module in model.named_modules() if is_swapped(module)]
    if already:
        raise ValueError(f"{already[0] or 'the model'} is already swapped: call unswap(model) first")
    found = find(model, inputs=inputs)
    packer = _Packer(format, keep_originals)
    rows = []
    for i, item in enumerate(found):
        rows.append(_swap_one(model, item, packer, backend, verify))
        if progress is not None:
            progress(i + 1, len(found))
    return SwapReport(rows=rows)


def unswap(model: nn.Module) -> list[str]:
    """Put every swapped FFN back. -> a note per module whose weights could not be put back bit by bit.

    With format=None nothing was touched, so everything is as before. Packed weights return to their own dtype:
    exact where the format holds it, else they are now the rounded ones (unless keep_originals was given).
    """
    notes = []
    tied: dict[tuple[int, str], nn.Parameter] = {}
    for path, module in model.named_modules():
        if not is_swapped(module):
            continue
        state = uninstall(module)
        lossy = False
        for name, (dtype, requires_grad, kept) in state.originals.items():
            packed = module._parameters[name]
            assert packed is not None
            key = (id(packed), name)
            if key not in tied:
                tied[key] = kept if kept is not None else nn.Parameter(packed.detach().to(dtype), requires_grad)
            lossy |= kept is None and not _holds(packed.dtype, dtype)
            module._parameters[name] = tied[key]
        if lossy:
            notes.append(f"{path}: the weights are now the ones rounded to {state.format}")
    return notes


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every value of `narrow` has an exact one in `wide`."""
    return wide == narrow or (wide == torch.float32 and narrow in (torch.bfloat16, torch.float16))


class _Packer:
    """Converts linears to the format; parameters that were tied stay tied."""

    def __init__(self, format: str | None, keep: bool) -> None:
        self.format, self.keep = format, keep
        self._tied: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def pack(self, linear: nn.Module, state: LinearState) -> None:
        if self.format is None:
            return
        dtype = FORMATS[self.format]
        for name, parameter in linear._parameters.items():
            if parameter is None:
                continue
            # Weakly held: an original lives on only while another module still ties to it.
            original, packed = self._tied.get(id(parameter), (None, None))
            if original is None or original() is not parameter or packed is None:
                packed = nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
                self._tied[id(parameter)] = (weakref.ref(parameter), packed)
            state.originals[name] = (parameter.dtype, parameter.requires_grad, parameter if self.keep else None)
            linear._parameters[name] = packed


def _swap_one(model: nn.Module, found: Found, packer: _Packer, backend: str, verify: bool) -> SwapRow:
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
    linears = {role: model.get_submodule(path) for role, path in found.projections.items()}
    reason = _unusable(linears, found.spec, backend)
    if reason is not None:
        row.reason = reason
        return row
    truth = _Truth(module, linears, found) if verify else None
    installed = _install(module, linears, found, packer, backend)
    row.states = [m._fanfold for m in installed]  # type: ignore[attr-defined]
    row.status, row.backend = "swapped", "cpu" if backend == "auto" else backend
    if truth is not None:
        truth.judge(row, module, linears, packer.format)
        if row.status != "swapped":
            for m in installed:
                _restore(m)
    for state in row.states:
        state.calls = 0
        state.aside.clear()
    return row


def _restore(module: nn.Module) -> None:
    state = uninstall(module)
    for name, (dtype, requires_grad, kept) in state.originals.items():
        packed = module._parameters[name]
        assert packed is not None
        module._parameters[name] = (
            kept if kept is not None else nn.Parameter(packed.detach().to(dtype), requires_grad=requires_grad)
        )


def _unusable(linears: dict[str, nn.Module], spec: Spec, backend: str) -> str | None:
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
    module: nn.Module, linears: dict[str, nn.Module], found: Found, packer: _Packer, backend: str
) -> list[nn.Module]:
    installed = []
    if found.kind == "pair" or packer.format is not None:
        for role, linear in linears.items():
            state = LinearState(found.projections[role], packer.format, backend)
            packer.pack(linear, state)
            install(linear, SwappedLinear, state)
            installed.append(linear)
    if found.kind == "module":
        assert found.spec is not None and found.layout is not None
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
        installed.append(module)
    return installed


class _Truth:
    """float64 outputs of the original FFN on its own weights, and PyTorch's outputs, for a few tokens."""

    def __init__(self, module: nn.Module, linears: dict[str, nn.Module], found: Found) -> None:
        self.found = found
        down = matrix(linears["down"])
        generator = torch.Generator().manual_seed(1)
        d = down.shape[0]
        self.xs = [torch.randn(1, t, d, generator=generator).to(down.device, down.dtype) for t in _TOKENS]
        self.original = [self._run(module, linears, x) for x in self.xs]
        self.weights = self._weights(linears)

    def _weights(self, linears: dict[str, nn.Module]) -> Weights:
        assert self.found.spec is not None and self.found.layout is not None
        state = FFNState.__new__(FFNState)
        state.spec, state.layout = self.found.spec, self.found.layout
        return state._build(linears)

    def _run(self, module: nn.Module, linears: dict[str, nn.Module], x: Tensor) -> Tensor:
        """The FFN's output in the model's own way: the module itself, or for a pair its linears in turn."""
        with torch.no_grad():
            if self.found.kind == "module":
                modes = {m: m.training for m in module.modules()}
                module.eval()
                try:
                    return module(x, torch.zeros_like(x)) if self.found.residual else module(x)
                finally:
                    for m, mode in modes.items():
                        m.training = mode
            assert self.found.spec is not None and self.found.layout is not None
            if "gate_up" in linears:
                rows = Layout(order=self.found.layout.order, transposed=True)
                gate, up = rows.split(linears["gate_up"](x))
            else:
                gate, up = linears["gate"](x) if "gate" in linears else None, linears["up"](x)
            return linears["down"](torch_ops.coefficients(self.found.spec, up, gate)) * self.found.scale

    def judge(self, row: SwapRow, module: nn.Module, linears: dict[str, nn.Module], format: str | None) -> None:
        """Fill in the row's errors; set it to "left" if the rule is broken."""
        packed = self._weights(linears)
        same = format is None
        worst: numerics.Comparison | None = None
        ran: list[str] = []
        for x, original in zip(self.xs, self.original):
            calls = row.calls
            y = self._run(module, linears, x)
            ran.append(dispatch.last_backend() or "torch" if row.calls > calls else "torch")
            truth = reference.forward(x, packed) * self.found.scale
            torch_y = original if same else self._torch(x, packed)
            result = numerics.compare(y, truth, torch_y, dtype=x.dtype)
            if worst is None or result.ratio > worst.ratio:
                worst = result
                row.error_torch = numerics.relative_error(torch_y, truth)
            if not same:
                exact = reference.forward(x, self.weights) * self.found.scale
                row.format_error = max(row.format_error or 0.0, numerics.relative_error(truth, exact))
        assert worst is not None
        row.error, row.ratio = worst.rms, worst.ratio
        row.backend = ran[0] if len(set(ran)) == 1 else f"{ran[0]} (few tokens), {ran[1]} (many)"
        if not worst.ok:
            row.status, row.reason = "left", f"verification failed: error is {worst.ratio:.3g} x what the rule allows"
        elif set(ran) == {"torch"} and dispatch.resolve(row.states[-1].backend) == "auto" and same:
            reasons = "; ".join(row.stepped_aside) or "PyTorch's own ops are faster here"
            row.status, row.reason = "left", f"our kernels would not run it: {reasons}"

    def _torch(self, x: Tensor, packed: Weights) -> Tensor:
        """PyTorch on the packed weights in x's dtype."""
        same = {n: torch.from_numpy(to_float64(v).astype(np.float32)).to(x) for n, v in packed.items()}
        return torch_ops.forward(x, Weights.unchecked(packed.spec, **same)) * self.found.scale
