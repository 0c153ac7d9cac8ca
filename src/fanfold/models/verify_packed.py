"""The verification of packed weights: our output against float64 of what the kernels see, PyTorch's beside it.

Two things are told apart. The *kernel's* error is measured against float64 on the weights as stored and the activations
as they are quantized, under the tolerance rule. What the *format* changes is measured against the original weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import numerics, reference
from ..kernels import packed
from ..kernels import torch as torch_ops
from ..weights import Weights, to_float64
from . import emulate
from .linears import matrix, quiet
from .packed_weight import PackedWeight
from .report import SwapRow
from .verify import Truth, agrees

_TOKENS = (1, 40)
_SCALES = (1.0, 30.0)

# A format that changes half of the output has lost the weights (too small for float16, or for its scales).
_MOST_LOST = 0.5


@dataclasses.dataclass
class Case:
    """One batch: our output, the original's, and what they answer to, all [T, D]; `ours` is run by `judge`."""

    x: Tensor
    original: Tensor
    exact: np.ndarray  # float64 on the original weights
    truth: emulate.Truth
    torch_y: Tensor


def judge(row: SwapRow, cases: list[Case], run: Callable[[Tensor], Tensor]) -> None:
    """Fill in the row's errors from running `run` on each case; set it to "left" if the rule is broken."""
    worst: numerics.Comparison | None = None
    for case in cases:
        y = run(case.x)
        if not np.isfinite(case.exact).all():
            row.status, row.reason = "left", "its weights are not finite: there is nothing to verify against"
            return
        if not agrees(row, case.original.reshape(case.exact.shape), case.exact):
            return
        y, torch_y = y.reshape(case.exact.shape), case.torch_y.to(y.dtype)
        truth = case.truth.settled(y)
        beside = to_float64(torch_y) - case.truth.settled(torch_y) + truth  # PyTorch's error at its own edges
        result = numerics.compare(y, truth, beside, dtype=y.dtype)
        if worst is None or result.ratio > worst.ratio:
            worst = result
            row.error_torch = numerics.relative_error(beside, truth)
        if row.format is not None:
            row.format_error = _larger(row.format_error, numerics.relative_error(case.truth.exact, case.exact))
            row.quantization_error = _larger(row.quantization_error, numerics.relative_error(truth, case.exact))
    assert worst is not None
    row.error, row.ratio = worst.rms, worst.ratio
    if not worst.ok:
        row.status, row.reason = "left", f"verification failed: error is {worst.ratio:.3g} x what the rule allows"
    elif row.format_error is not None and not row.format_error < _MOST_LOST:
        lost = f"{row.format_error:.0%}"
        row.status, row.reason = "left", f"{row.format} does not hold its weights: rounding them changes {lost} of y"


def _larger(before: float | None, now: float) -> float:
    return now if before is None else max(before, now)


def _rounds(x: Tensor, parts: list[Any]) -> bool:
    """Whether the kernels multiply this batch by one of `parts` in the CPU's bfloat16 unit, instead of int8 codes."""
    tokens = x.numel() // x.shape[-1]
    return any(m.activations == "int8" and packed.arithmetic(x.dtype, m, tokens) == "bf16" for m in parts)


def _in_bfloat16(cases: list[Case], parts: list[Any], torch_bf16: Callable[[Tensor], Tensor]) -> list[Case]:
    """The cases, with those that round to bfloat16 held against the unrounded product, and PyTorch's in bfloat16."""
    out = []
    for case in cases:
        if _rounds(case.x, parts):
            exact = case.truth.exact
            flat = case.x.reshape(-1, case.x.shape[-1]).bfloat16()
            beside = torch_bf16(flat).to(case.torch_y.dtype)
            case = dataclasses.replace(case, truth=emulate.Truth(exact, exact, []), torch_y=beside)
        out.append(case)
    return out


def ffn_cases(truth: Truth, weights: Weights, linears: list[Any]) -> list[Case]:
    """The cases of an FFN that runs as one call on the packed weights of these linears."""
    opened = {id(o.matrix): o for m in linears for o in m._fanfold.weight.open()}
    seen = Weights.unchecked(weights.spec, **{name: opened.get(id(v), v) for name, v in weights.items()})
    flat = torch.cat([x.reshape(-1, x.shape[-1]) for x in truth.xs])
    wide = to_float64(flat)
    scale = truth.found.scale
    exact = reference.forward(wide, truth.weights) * scale
    whole = emulate.ffn(wide, seen).scaled(scale)
    if emulate.quantizes(weights):
        beside = emulate.ffn_in_torch(flat.float(), seen) * scale
    else:
        beside = torch_ops.forward(flat, weights) * scale
    cases = _cut(truth.xs, truth.original, exact, whole, beside)
    parts = [m for _, m in weights.items() if isinstance(m, packed.PackedMatrix)]
    return _in_bfloat16(cases, parts, lambda x: torch_ops.forward(x, weights).float() * scale)


def _cut(xs: list[Tensor], originals: list[Tensor], exact: Any, whole: emulate.Truth, beside: Tensor) -> list[Case]:
    cases, at = [], 0
    for x, original in zip(xs, originals):
        end = at + x.numel() // x.shape[-1]
        cases.append(Case(x, original, exact[at:end], whole.rows(at, end), beside[at:end]))
        at = end
    return cases


class LinearTruth:
    """What one linear gives before it is packed, on random inputs and `more` [T, K] of the model's own."""

    def __init__(self, linear: Any, more: Tensor | None = None) -> None:
        weight = matrix(linear)
        generator = torch.Generator().manual_seed(1)
        shapes = [(t, s) for s in _SCALES for t in _TOKENS]
        self.xs = [torch.randn(1, t, weight.shape[1], generator=generator).to(weight.dtype) * s for t, s in shapes]
        if more is not None:
            self.xs.append(more[None].to(weight.dtype))
        self.bias = linear.bias
        with torch.no_grad(), quiet(linear):
            self.original = [type(linear).forward(linear, x) for x in self.xs]
        flat = torch.cat([x.reshape(-1, x.shape[-1]) for x in self.xs])
        bias = 0 if linear.bias is None else to_float64(linear.bias)
        self.exact = to_float64(flat) @ to_float64(weight).T + bias
        self.flat = flat

    def cases(self, weight: PackedWeight) -> list[Case]:
        wide = to_float64(self.flat)
        parts = [emulate.linear(wide, part, None) for part in weight.open()]
        bias = 0 if self.bias is None else to_float64(self.bias)
        y, exact = (
            weight.join([torch.from_numpy(getattr(p, name)) for p in parts], -1).numpy() + bias
            for name in ("y", "exact")
        )
        cases = _cut(self.xs, self.original, self.exact, emulate.Truth(y, exact, []), self._in_torch(weight))
        own = None if self.bias is None else self.bias.detach().bfloat16()

        def in_bfloat16(x: Tensor) -> Tensor:
            return nn.functional.linear(x, weight.matrix(torch.bfloat16), own)

        return _in_bfloat16(cases, list(weight.parts), in_bfloat16)

    def cases_in_place(self) -> list[Case]:
        """The cases of a linear whose own parameters are read: PyTorch's output is the original's."""
        beside = torch.cat([y.reshape(-1, y.shape[-1]) for y in self.original])
        return _cut(self.xs, self.original, self.exact, emulate.Truth(self.exact, self.exact, []), beside)

    def _in_torch(self, weight: PackedWeight) -> Tensor:
        bias = None if self.bias is None else self.bias.detach()
        if all(part.activations == "float" for part in weight.parts):
            dtype = self.flat.dtype
            return nn.functional.linear(self.flat, weight.matrix(dtype), bias)
        y = weight.join([emulate.linear_in_torch(self.flat.float(), part, None) for part in weight.open()], -1)
        return y if bias is None else y + bias.float()


def run_linear(linear: Any) -> Callable[[Tensor], Tensor]:
    """Calls of a packed linear as the model makes them, without its hooks."""

    def run(x: Tensor) -> Tensor:
        with torch.no_grad(), quiet(linear):
            return type(linear).forward(linear, x)

    return run
