"""The verification of a swap: our output and PyTorch's, both held against float64 on the FFN's own weights."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from .. import numerics, reference
from ..kernels import dispatch
from ..kernels import torch as torch_ops
from ..layout import Layout
from ..weights import Weights
from .find import Found
from .linears import matrix, quiet
from .report import SwapRow
from .states import FFNState
from .timing import ALWAYS

_TOKENS = (1, 40)  # decode and prefill take different paths through the kernels
_SCALES = (1.0, 30.0)
_OWN = 64.0  # roundings by which the module's own output may differ from float64, as in identification


class Truth:
    """float64 outputs of the original FFN on its own weights, and PyTorch's outputs, for a few tokens."""

    def __init__(
        self, module: nn.Module, linears: dict[str, nn.Module], found: Found, more: Tensor | None = None
    ) -> None:
        """more  further inputs [T, D], of the model's own."""
        self.found = found
        down = matrix(linears["down"])
        generator = torch.Generator().manual_seed(1)
        d = down.shape[0]
        shapes = [(t, s) for s in _SCALES for t in _TOKENS]
        self.xs = [(torch.randn(1, t, d, generator=generator) * s).to(down.device, down.dtype) for t, s in shapes]
        if more is not None:
            self.xs.append(more[None].to(down.device, down.dtype))
        self.original = [self.run(module, linears, x) for x in self.xs]
        self.weights = self._weights(linears)

    def _weights(self, linears: dict[str, nn.Module]) -> Weights:
        assert self.found.spec is not None
        assert self.found.layout is not None
        state = FFNState.__new__(FFNState)
        state.spec, state.layout = self.found.spec, self.found.layout
        state.idle_bias = linears["down"].bias is not None and not self.found.spec.down_bias
        return state._build(linears)

    def run(self, module: nn.Module, linears: dict[str, nn.Module], x: Tensor) -> Tensor:
        """The FFN's output in the model's own way: the module itself, or for a pair its linears in turn."""
        with torch.no_grad():
            if self.found.kind == "module":
                with quiet(module):
                    return type(module).forward(module, *((x, torch.zeros_like(x)) if self.found.residual else (x,)))
            assert self.found.spec is not None
            assert self.found.layout is not None
            if "gate_up" in linears:
                rows = Layout(order=self.found.layout.order, transposed=True)
                gate, up = rows.split(linears["gate_up"](x))
            else:
                gate, up = linears["gate"](x) if "gate" in linears else None, linears["up"](x)
            return linears["down"](torch_ops.coefficients(self.found.spec, up, gate)) * self.found.scale

    def judge(self, row: SwapRow, module: nn.Module, linears: dict[str, nn.Module]) -> None:
        """Fill in the row's errors; set it to "left" if the rule is broken."""
        try:
            self._judge(row, module, linears)
        finally:
            for state in row.states:
                state.choice = None

    def _judge(self, row: SwapRow, module: nn.Module, linears: dict[str, nn.Module]) -> None:
        worst: numerics.Comparison | None = None
        ran: list[str] = []
        for state in row.states:
            state.choice = ALWAYS  # every path that may run is verified, whatever is faster
        for x, original in zip(self.xs, self.original):
            calls = row.calls
            y = self.run(module, linears, x)
            ran.append(dispatch.last_backend() or "torch" if row.calls > calls else "torch")
            truth = reference.forward(x, self.weights) * self.found.scale
            if not np.isfinite(truth).all():
                row.status, row.reason = "left", "its weights are not finite: there is nothing to verify against"
                return
            if not agrees(row, original, truth):
                return
            result = numerics.compare(y, truth, original, dtype=x.dtype)
            if worst is None or result.ratio > worst.ratio:
                worst = result
                row.error_torch = numerics.relative_error(original, truth)
        assert worst is not None
        row.error, row.ratio = worst.rms, worst.ratio
        row.backend = ran[0] if len(set(ran)) == 1 else f"{ran[0]} (few tokens), {ran[1]} (many)"
        if not worst.ok:
            row.status, row.reason = "left", f"verification failed: error is {worst.ratio:.3g} x what the rule allows"
        elif set(ran) == {"torch"} and row.save is None and dispatch.resolve(row.states[-1].backend) == "auto":
            reasons = "; ".join(row.stepped_aside) or "PyTorch's own ops are faster here"
            row.status, row.reason = "left", f"our kernels would not run it: {reasons}"


def agrees(row: SwapRow, original: Tensor, exact: np.ndarray) -> bool:
    """Whether the module's own output is its description's in float64; if not, the row says so and is left."""
    own = numerics.relative_error(original, exact)
    if own <= _OWN * numerics.UNIT_ROUNDOFF[numerics.dtype_name(original)]:
        return True
    row.status, row.reason = "left", f"its own output is not what the description says: relative error {own:.1e}"
    return False
