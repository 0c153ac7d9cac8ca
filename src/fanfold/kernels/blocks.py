"""A training step of the FFN over blocks of tokens and channels: forward that keeps what it is told to, and backward.

T tokens, D d_model, F d_ff. Matrix products are PyTorch's, into buffers that one block after another uses; what is kept
lies whole. Plain tensors of one dtype, no autograd. Where the CPU multiplies float32 faster than that dtype, a block is
computed in float32: what it reads is widened, what it leaves is rounded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..weights import Weights
from . import slopes, widening

_ALL = slice(None)
_WIDE = ("gate", "up", "coefficients")
_ALIGNED = 64  # channels
# A gradient in 16 bits is rounded with each block added to it: after so many the sum goes on in float32.
_GROUP = 8


class Block(NamedTuple):
    """What is computed at a time: in backward `tokens` of a `parts`th of the channels, but of `least` if there are so
    many; in forward `forward` tokens of all channels, or as in backward if these are fewer and not in 16 bits."""

    forward: int
    tokens: int
    parts: int
    least: int = 1

    def width(self, d_ff: int) -> int:
        """Channels of a block of backward, whole cache lines of them in every dtype."""
        return min(-(-max(-(-d_ff // self.parts), self.least) // _ALIGNED) * _ALIGNED, d_ff)


class _Work:
    """What blocks are computed in: [rows, columns] by name, made when first asked for, because the first block is the
    largest. `wide`: in float32, whatever the dtype of `like`."""

    def __init__(self, like: Tensor) -> None:
        self._like, self._made = like, dict[str, Tensor]()
        self.dtype = widening.dtype_of_products(like.dtype, like.device)
        self.wide = self.dtype != like.dtype

    def get(self, name: str, rows: int, columns: int) -> Tensor:
        if name not in self._made:
            self._made[name] = self._like.new_empty(rows * columns, dtype=self.dtype)
        return self._made[name][: rows * columns].view(rows, columns)

    def of(self, name: str, values: Tensor) -> Tensor:
        """[rows, columns] of the given dtype as what products read."""
        return self.get(name, *values.shape).copy_(values) if self.wide else values

    def within(self, name: str, whole: Tensor, span: slice) -> Tensor:
        """Where rows `span` of `whole` are computed; `leave` brings them there."""
        return self.get(name, span.stop - span.start, whole.shape[1]) if self.wide else whole[span]

    def leave(self, block: Tensor, whole: Tensor, span: slice) -> None:
        if self.wide:
            whole[span].copy_(block)

    def linear(self, x: Tensor, weights: Weights, name: str, channels: slice, out: Tensor) -> None:
        """Pre-activations of gate or up."""
        weight, bias = self.of("matrix", getattr(weights, name)[channels]), getattr(weights, f"{name}_bias")
        _linear(x, weight, None if bias is None else bias[channels].to(self.dtype), out)


def _blocks(tokens: int, block: int) -> Iterator[slice]:
    for begin in range(0, tokens, block):
        yield slice(begin, min(begin + block, tokens))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def forward(
    x_TD: Tensor, weights: Weights, kept: Collection[str], block: Block, mask_TF: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """(y [T, D], {name: [T, F]} of what `kept` names among gate, up and coefficients).

    mask  the coefficients that dropout leaves (bools), or None.
    """
    spec, tokens = weights.spec, len(x_TD)
    y_TD = x_TD.new_empty(tokens, spec.d_model)
    whole = {name: x_TD.new_empty(tokens, spec.d_ff) for name in _WIDE if name in kept}
    work = _Work(x_TD)
    first = "gate" if spec.gated else "up"
    # Few channels of many tokens need less room, but y is rounded with each part: in 16 bits once more is too often.
    in_parts = work.wide or (block.forward < block.tokens and x_TD.dtype not in widening.HALF)
    rows, width = (block.tokens, block.width(spec.d_ff)) if in_parts else (block.forward, spec.d_ff)
    for span in _blocks(tokens, rows):
        x, y = work.of("x", x_TD[span]), work.within("y", y_TD, span)
        for channels in _blocks(spec.d_ff, width):
            mask = None if mask_TF is None else mask_TF[span, channels]

            def place(name: str, span: slice = span, channels: slice = channels) -> Tensor:
                if name in whole and not work.wide:
                    return whole[name][span]
                return work.get(name, span.stop - span.start, channels.stop - channels.start)

            m = place("coefficients")
            pre = place(first) if first in whole else m  # what nobody keeps gives its place to the coefficients
            gate, up = (pre, place("up")) if spec.gated else (None, pre)
            found = {"gate": gate, "up": up, "coefficients": m}
            for name in ("gate", "up") if spec.gated else ("up",):
                work.linear(x, weights, name, channels, found[name])
            slopes.coefficients(spec, gate, up, m, mask)
            for name in whole:
                work.leave(found[name], whole[name][:, channels], span)
            down = work.of("matrix", weights.down[:, channels])
            if channels.start == 0:
                _linear(m, down, None if weights.down_bias is None else weights.down_bias.to(work.dtype), y)
            else:
                torch.addmm(y, m, down.t(), out=y)
        work.leave(y, y_TD, span)
    return y_TD, whole


class _MatrixSum:
    """sum over blocks of tokens of left [t, out]^T @ right [t, in], in the dtype of the operands, a part at a time."""

    def __init__(self, shape: tuple[int, ...], like: Tensor, blocks: int, work: _Work) -> None:
        self._part, self._work = like.new_empty(shape), work
        self._total = (
            like.new_zeros(shape, dtype=torch.float32) if like.dtype in widening.HALF and blocks > _GROUP else None
        )
        self._added = 0

    def add(self, block: int, at: tuple[slice, slice], left: Tensor, right: Tensor) -> None:
        """What the `block`th block of tokens, from 0, adds to the entries `at`."""
        part, self._added = self._part[at], block + 1
        begins = block == 0 or (self._total is not None and block % _GROUP == 0)
        if begins and self._total is not None and block:
            self._total[at] += part
        if self._work.wide:
            wide = self._work.get("gradient", *part.shape)
            torch.mm(left.t(), right, out=wide)
            part.copy_(wide) if begins else part.add_(wide)
        elif begins:
            torch.mm(left.t(), right, out=part)
        else:
            torch.addmm(part, left.t(), right, out=part)

    def result(self) -> Tensor:
        if not self._added:
            return self._part.zero_()
        if self._total is None:
            return self._part
        self._total += self._part
        return self._total


class _RowSum:
    """sum over blocks of [t, n] over t, in float32 at least."""

    def __init__(self, shape: tuple[int, ...], like: Tensor) -> None:
        self._total = like.new_zeros(shape, dtype=torch.float32 if like.dtype in widening.HALF else like.dtype)

    def add(self, at: slice, rows: Tensor) -> None:
        self._total[at] += rows.sum(0, dtype=self._total.dtype)

    def result(self) -> Tensor:
        return self._total


class Backward:
    """The gradients of one call.

    grad, x  [T, D]; x and kept are what forward kept of x and of gate, up and coefficients [T, F]. With nothing kept of
             these, they are computed from x again.
    trained  names of the gradients wanted: "x" and names of Weights.
    mask     as in `forward`.
    A block is many tokens of few channels: channels have nothing to do with each other until the sum for x's gradient,
    so that a matrix is read once, and its gradient written once, however many parts there are.
    """

    def __init__(
        self,
        grad_TD: Tensor,
        x_TD: Tensor | None,
        weights: Weights,
        kept: dict[str, Tensor],
        trained: Collection[str],
        block: Block,
        mask_TF: Tensor | None,
    ) -> None:
        spec, tokens = weights.spec, len(grad_TD)
        self.grad_TD, self.x_TD, self.mask_TF = grad_TD, x_TD, mask_TF
        self.spec, self.weights, self.kept, self.block = spec, weights, kept, block
        self.down = "down" in trained
        self.to_gate = spec.gated and not {"x", "gate", "gate_bias"}.isdisjoint(trained)
        self.to_up = not {"x", "up", "up_bias"}.isdisjoint(trained)
        self.width = block.width(spec.d_ff)
        self.work = _Work(grad_TD)
        self.ours = self.work.wide or not kept  # gate and up in their buffers, to write over
        self.dx_TD = grad_TD.new_empty(grad_TD.shape) if "x" in trained else None
        blocks = -(-tokens // block.tokens)
        self.sums: dict[str, _MatrixSum | _RowSum] = {}
        for name, value in weights.items():
            if name in trained:
                shape = tuple(value.shape)
                matrix = len(shape) == 2
                self.sums[name] = _MatrixSum(shape, grad_TD, blocks, self.work) if matrix else _RowSum(shape, grad_TD)

    def run(self) -> dict[str, Tensor]:
        """{name: gradient} of each of `trained`. In 16 bits those of matrices and biases may come in float32."""
        for i, span in enumerate(_blocks(len(self.grad_TD), self.block.tokens)):
            # sum() gives one without strides, which each product would copy
            grad = self.work.of("grad", self.grad_TD[span]).contiguous()
            total = self.sums.get("down_bias")
            if isinstance(total, _RowSum):
                total.add(_ALL, grad)
            if self.to_gate or self.to_up or self.down:
                x = None if self.x_TD is None else self.work.of("x", self.x_TD[span])
                dx = None if self.dx_TD is None else self.work.within("to x", self.dx_TD, span)
                for channels in _blocks(self.spec.d_ff, self.width):
                    self._block(i, span, channels, grad, x, dx)
                if self.dx_TD is not None and dx is not None:
                    self.work.leave(dx, self.dx_TD, span)
        found = {name: total.result() for name, total in self.sums.items()}
        return found if self.dx_TD is None else {"x": self.dx_TD, **found}

    def _block(self, i: int, span: slice, channels: slice, grad: Tensor, x: Tensor | None, dx: Tensor | None) -> None:
        rows, width = len(grad), channels.stop - channels.start
        gate, up, m = self._computed(x, channels, rows) if not self.kept else self._sliced(span, channels)
        mask = None if self.mask_TF is None else self.mask_TF[span, channels]
        if not (self.to_gate or self.to_up):
            self._add_down(i, channels, grad, m if m is not None else self._coefficients(gate, up, mask))
            return
        down = self.work.of("matrix", self.weights.down[:, channels])
        dup = torch.mm(grad, down, out=self.work.get("to up", rows, width))
        # what is kept is not to be written over: a second backward may read it
        dgate = None
        if self.to_gate:
            dgate = gate if self.ours else self.work.get("to gate", rows, width)
        made = None
        if self.down and m is None:
            made = m = up if self.ours else self.work.get("coefficients", rows, width)
        slopes.gradients(self.spec, gate, up, dup, dgate, self.to_up, made, mask)
        self._add_down(i, channels, grad, m)
        begun = channels.start > 0
        for name, g in (("gate", dgate), ("up", dup if self.to_up else None)):
            if g is not None:
                self._add_inward(name, i, channels, g, x, dx, begun)
                begun = True

    def _sliced(self, span: slice, channels: slice) -> tuple[Tensor | None, ...]:
        gate, up, m = (
            self.work.of(name, self.kept[name][span, channels]) if name in self.kept else None for name in _WIDE
        )
        return gate, m if gate is None and up is None else up, m  # relu(relu(x)) is relu(x), in value and slope

    def _computed(self, x: Tensor | None, channels: slice, rows: int) -> tuple[Tensor | None, ...]:
        assert x is not None
        width = channels.stop - channels.start
        found = {}
        for name in ("gate", "up") if self.spec.gated else ("up",):
            found[name] = self.work.get(name, rows, width)
            self.work.linear(x, self.weights, name, channels, found[name])
        return found.get("gate"), found["up"], None

    def _coefficients(self, gate: Tensor | None, up: Tensor | None, mask: Tensor | None) -> Tensor:
        assert up is not None
        ours = up if gate is None else gate
        out = ours if self.ours else self.work.get("coefficients", *up.shape)
        slopes.coefficients(self.spec, gate, up, out, mask)
        return out

    def _add_inward(
        self, name: str, i: int, channels: slice, grad: Tensor, x: Tensor | None, dx: Tensor | None, begun: bool
    ) -> None:
        """What the gradient [t, F] of gate or up adds to its matrix, its bias, and x's gradient, if that has begun."""
        matrix, bias = self.sums.get(name), self.sums.get(f"{name}_bias")
        if isinstance(matrix, _MatrixSum):
            assert x is not None
            matrix.add(i, (channels, _ALL), grad, x)
        if isinstance(bias, _RowSum):
            bias.add(channels, grad)
        if dx is not None:
            weight = self.work.of("matrix", getattr(self.weights, name)[channels])
            torch.addmm(dx, grad, weight, out=dx) if begun else torch.mm(grad, weight, out=dx)

    def _add_down(self, i: int, channels: slice, grad: Tensor, m: Tensor | None) -> None:
        total = self.sums.get("down")
        if isinstance(total, _MatrixSum):
            assert m is not None
            total.add(i, (_ALL, channels), grad, m)
