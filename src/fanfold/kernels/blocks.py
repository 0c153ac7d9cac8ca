"""A training step of the FFN over blocks of tokens: forward that keeps what it is told to, and backward.

T tokens, D d_model, F d_ff. Matrix products are PyTorch's, into buffers that one block after another uses; what is kept
lies whole. Plain tensors of one dtype, no autograd.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from ..weights import Weights
from . import slopes

_WIDE = ("gate", "up", "coefficients")
_HALF = (torch.bfloat16, torch.float16)
# A gradient in 16 bits is rounded with each block added to it: after so many the sum goes on in float32.
_GROUP = 8


class _Buffers:
    """[block, F] buffers by name, made when first asked for."""

    def __init__(self, like: Tensor, block: int, d_ff: int) -> None:
        self._like, self._shape = like, (block, d_ff)
        self._made: dict[str, Tensor] = {}

    def get(self, name: str, rows: int) -> Tensor:
        if name not in self._made:
            self._made[name] = self._like.new_empty(self._shape)
        return self._made[name][:rows]


def _blocks(tokens: int, block: int) -> Iterator[slice]:
    for begin in range(0, tokens, block):
        yield slice(begin, min(begin + block, tokens))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def forward(
    x_TD: Tensor, weights: Weights, kept: Collection[str], block: int, mask_TF: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """(y [T, D], {name: [T, F]} of what `kept` names among gate, up and coefficients).

    mask  the coefficients that dropout leaves (bools), or None.
    """
    spec, tokens = weights.spec, len(x_TD)
    y_TD = x_TD.new_empty(tokens, spec.d_model)
    whole = {name: x_TD.new_empty(tokens, spec.d_ff) for name in _WIDE if name in kept}
    work = _Buffers(x_TD, min(block, tokens), spec.d_ff)
    first = "gate" if spec.gated else "up"
    for span in _blocks(tokens, block):
        rows = span.stop - span.start
        x, mask = x_TD[span], None if mask_TF is None else mask_TF[span]
        m = whole["coefficients"][span] if "coefficients" in whole else work.get("coefficients", rows)
        pre = whole[first][span] if first in whole else m  # what nobody keeps gives its place to the coefficients
        if spec.gated:
            up = whole["up"][span] if "up" in whole else work.get("up", rows)
            _linear(x, weights.gate, weights.gate_bias, pre)
            _linear(x, weights.up, weights.up_bias, up)
            slopes.coefficients(spec, pre, up, m, mask)
        else:
            _linear(x, weights.up, weights.up_bias, pre)
            slopes.coefficients(spec, None, pre, m, mask)
        _linear(m, weights.down, weights.down_bias, y_TD[span])
    return y_TD, whole


class _MatrixSum:
    """sum over blocks of left [t, out]^T @ right [t, in], in the dtype of the operands."""

    def __init__(self, shape: tuple[int, ...], like: Tensor, blocks: int) -> None:
        self._part = like.new_empty(shape)
        self._total = like.new_zeros(shape, dtype=torch.float32) if like.dtype in _HALF and blocks > _GROUP else None
        self._added = 0

    def add(self, left: Tensor, right: Tensor) -> None:
        if self._added % _GROUP == 0 and (self._total is not None or self._added == 0):
            self._flush()
            torch.mm(left.t(), right, out=self._part)
        else:
            torch.addmm(self._part, left.t(), right, out=self._part)
        self._added += 1

    def _flush(self) -> None:
        if self._total is not None and self._added:
            self._total += self._part

    def result(self) -> Tensor:
        if not self._added:
            return self._part.zero_()
        self._flush()
        return self._part if self._total is None else self._total


class _RowSum:
    """sum over blocks of [t, n] over t, in float32 at least."""

    def __init__(self, shape: tuple[int, ...], like: Tensor) -> None:
        self._total = like.new_zeros(shape, dtype=torch.float32 if like.dtype in _HALF else like.dtype)

    def add(self, rows: Tensor) -> None:
        self._total += rows.sum(0, dtype=self._total.dtype)

    def result(self) -> Tensor:
        return self._total


class Backward:
    """The gradients of one call.

    grad, x  [T, D]; x and kept are what forward kept of x and of gate, up and coefficients [T, F]. With nothing kept of
             these, they are computed from x again.
    trained  names of the gradients wanted: "x" and names of Weights.
    mask     as in `forward`.
    """

    def __init__(
        self,
        grad_TD: Tensor,
        x_TD: Tensor | None,
        weights: Weights,
        kept: dict[str, Tensor],
        trained: Collection[str],
        block: int,
        mask_TF: Tensor | None,
    ) -> None:
        spec, tokens = weights.spec, len(grad_TD)
        self.grad_TD, self.x_TD, self.mask_TF = grad_TD, x_TD, mask_TF
        self.spec, self.weights, self.kept, self.block = spec, weights, kept, block
        self.down = "down" in trained
        self.to_gate = spec.gated and not {"x", "gate", "gate_bias"}.isdisjoint(trained)
        self.to_up = not {"x", "up", "up_bias"}.isdisjoint(trained)
        self.work = _Buffers(grad_TD, min(block, tokens), spec.d_ff)
        self.dx_TD = grad_TD.new_empty(grad_TD.shape) if "x" in trained else None
        blocks = -(-tokens // block)
        self.sums: dict[str, _MatrixSum | _RowSum] = {}
        for name, value in weights.items():
            if name in trained:
                shape = tuple(value.shape)
                self.sums[name] = _MatrixSum(shape, grad_TD, blocks) if len(shape) == 2 else _RowSum(shape, grad_TD)

    def run(self) -> dict[str, Tensor]:
        """{name: gradient} of each of `trained`. In 16 bits those of matrices and biases may come in float32."""
        for span in _blocks(len(self.grad_TD), self.block):
            self._block(span)
        found = {name: total.result() for name, total in self.sums.items()}
        return found if self.dx_TD is None else {"x": self.dx_TD, **found}

    def _block(self, span: slice) -> None:
        grad = self.grad_TD[span].contiguous()  # sum() gives a gradient without strides, which each product would copy
        self._add("down_bias", grad)
        if not (self.to_gate or self.to_up or self.down):
            return
        x = None if self.x_TD is None else self.x_TD[span]
        gate, up, m = self._computed(x, len(grad)) if not self.kept else self._sliced(span)
        mask = None if self.mask_TF is None else self.mask_TF[span]
        if not (self.to_gate or self.to_up):
            self._add("down", grad, m if m is not None else self._coefficients(gate, up, mask))
            return
        dup = torch.mm(grad, self.weights.down, out=self.work.get("grad", len(grad)))
        # recomputed pre-activations are ours to write over, kept ones are not: a second backward may read them
        dgate = None
        if self.to_gate:
            dgate = self.work.get("to_gate", len(grad)) if self.kept else gate
        made = None
        if self.down and m is None:
            made = m = self.work.get("coefficients", len(grad)) if self.kept else up
        slopes.gradients(self.spec, gate, up, dup, dgate, self.to_up, made, mask)
        self._add("down", grad, m)
        self._inward("gate", dgate, x, span, first=True)
        self._inward("up", dup if self.to_up else None, x, span, first=dgate is None)

    def _sliced(self, span: slice) -> tuple[Tensor | None, ...]:
        gate, up, m = (self.kept[name][span] if name in self.kept else None for name in _WIDE)
        return gate, m if gate is None and up is None else up, m  # relu(relu(x)) is relu(x), in value and slope

    def _computed(self, x: Tensor | None, rows: int) -> tuple[Tensor | None, ...]:
        assert x is not None
        w, gate, up = self.weights, None, self.work.get("up", rows)
        if self.spec.gated:
            gate = self.work.get("gate", rows)
            _linear(x, w.gate, w.gate_bias, gate)
        _linear(x, w.up, w.up_bias, up)
        return gate, up, None

    def _coefficients(self, gate: Tensor | None, up: Tensor | None, mask: Tensor | None) -> Tensor:
        assert up is not None
        out = up if gate is None else gate
        slopes.coefficients(self.spec, gate, up, out, mask)
        return out

    def _inward(self, name: str, grad: Tensor | None, x: Tensor | None, span: slice, first: bool) -> None:
        """What the gradient [t, F] of gate or up adds to its matrix, its bias, and x."""
        if grad is None:
            return
        self._add(name, grad, x)
        self._add(f"{name}_bias", grad)
        if self.dx_TD is not None:
            weight = getattr(self.weights, name)
            dx = self.dx_TD[span]
            torch.mm(grad, weight, out=dx) if first else torch.addmm(dx, grad, weight, out=dx)

    def _add(self, name: str, grad: Tensor, right: Tensor | None = None) -> None:
        total = self.sums.get(name)
        if isinstance(total, _MatrixSum):
            assert right is not None
            total.add(grad, right)
        elif total is not None:
            total.add(grad)
