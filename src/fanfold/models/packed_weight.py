"""What a packed linear holds instead of its matrix: the packed parts. What stands in for its parameter: `stubs`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import formats
from ..kernels import packed, packed_op
from ..kernels.packed import PackedMatrix
from ..layout import GATE_UP, SEPARATE, UP_GATE, UP_GATE_INTERLEAVED, Layout
from . import stubs
from .linears import is_conv1d


class PackedWeight:
    """The matrix of one linear [out, in], packed.

    parts  one PackedMatrix; or gate and up, where the linear computes both.
    order  how the rows of gate and up lie in the linear: a `Layout` order, SEPARATE for one part.
    """

    def __init__(self, parts: tuple[PackedMatrix, ...], order: str = SEPARATE) -> None:
        self.parts, self.order = parts, order
        self.decided = False  # whether its activations have been chosen
        self.opened: tuple[Opened, ...] = ()  # while it is being checked
        self.mark: tuple[Any, ...] | None = None  # of the untouched stub, which tied linears share as they do this
        self.describe()

    @classmethod
    def split(cls, matrix: Any, order: str) -> tuple[Any, ...]:
        """The parts of a float matrix [out, in], before they are packed."""
        return (matrix,) if order == SEPARATE else Layout(order=order).split(matrix)

    def describe(self) -> None:
        """Take down what the operators of `kernels.packed_op` must know; again after a change of `activations`."""
        self.descriptions = tuple(packed_op.describe(part) for part in self.parts)

    def open(self) -> tuple[Opened, ...]:
        """The parts for a check; `close` lets their codes go."""
        self.opened = self.opened or tuple(Opened(part) for part in self.parts)
        return self.opened

    def watch(self, stub: nn.Parameter) -> None:
        """Take the stub as it is for untouched. Once somebody has written to it, the operators refuse the parts."""
        self.mark = stubs.mark(stub)
        place = stubs.place(stub)
        if place is not None:
            for part in self.parts:
                packed_op.watch(part.data, *place)

    def close(self) -> None:
        self.opened = ()

    @property
    def format(self) -> str:
        return self.parts[0].format

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def width(self) -> int:
        """Inputs of the matrix."""
        return self.parts[0].shape[1]

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """The dequantized weights [out, in]."""
        return self.join([part.dequantize().to(dtype) for part in self.parts], 0)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x @ matrix.T + bias by the kernels; the caller has found them able to run it."""
        if len(self.parts) == 1:
            return packed.linear(x, self.parts[0], bias)
        y = self.join([packed.linear(x, part) for part in self.parts], -1)
        return y if bias is None else y + bias.to(y.dtype)

    def traced(
        self, x: Tensor, bias: Tensor | None, table: Tensor | None = None, column: Tensor | None = None, seen: str = ""
    ) -> Tensor:
        """`linear` as operators that torch.compile sees.  table, column, seen  see `packed_op.tied_linear`."""
        if table is not None:
            data, text = self.parts[0].data, self.descriptions[0]
            return torch.ops.fanfold.packed_tied_linear(x, data, table, column, bias, seen, text)
        if len(self.parts) == 1:
            return torch.ops.fanfold.packed_linear(x, self.parts[0].data, bias, self.descriptions[0])
        ys = [
            torch.ops.fanfold.packed_linear(x, part.data, None, text)
            for part, text in zip(self.parts, self.descriptions)
        ]
        y = self.join(ys, -1)
        return y if bias is None else y + bias.to(y.dtype)

    def traced_matrix(self, dtype: torch.dtype) -> Tensor:
        """`matrix` as operators that torch.compile sees."""
        parts = [
            torch.ops.fanfold.packed_weight(part.data, text, dtype) for part, text in zip(self.parts, self.descriptions)
        ]
        return self.join(parts, 0)

    def join(self, parts: list[Tensor], dim: int) -> Tensor:
        """Gate's and up's rows (dim 0) or outputs (dim -1) in the linear's own order."""
        if len(parts) == 1:
            return parts[0]
        gate, up = parts
        first, second = (up, gate) if self.order in (UP_GATE, UP_GATE_INTERLEAVED) else (gate, up)
        if self.order in (GATE_UP, UP_GATE):
            return torch.cat([first, second], dim)
        if dim == 0:
            return torch.stack([first, second], 1).flatten(0, 1)
        return torch.stack([first, second], -1).flatten(-2)

    def __getstate__(self) -> dict[str, Any]:
        kept = [(p.format, tuple(p.shape), p.data, p.activations) for p in self.parts]
        return {"parts": kept, "order": self.order}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # made anew, so that the bytes begin on a line of the cache in the copy as well
        self.__init__(tuple(PackedMatrix(*kept) for kept in state["parts"]), state["order"])


class Opened:
    """A packed matrix beside its codes, so that whoever checks it need not unpack it each time."""

    def __init__(self, matrix: PackedMatrix, codes: formats.Quantized | None = None) -> None:
        self.matrix, self._codes = matrix, codes

    @property
    def format(self) -> str:
        return self.matrix.format

    @property
    def shape(self) -> torch.Size:
        return self.matrix.shape

    @property
    def activations(self) -> str:
        return self.matrix.activations

    def quantized(self) -> formats.Quantized:
        if self._codes is None:
            self._codes = self.matrix.quantized()
        return self._codes

    def dequantize(self) -> Tensor:
        if self.format in packed._FLOATS:
            return self.matrix.dequantize()
        return torch.from_numpy(self.quantized().dequantize())


def pack(weight: Tensor, format: str) -> Opened:
    """A float matrix [out, in] in `format`; integer formats by the rounding of `formats`."""
    if format in packed._FLOATS:
        return Opened(PackedMatrix.pack(weight, format))
    plain = weight.detach().to("cpu", torch.float32).contiguous().numpy()
    codes = formats.quantize_matrix(plain, format)
    return Opened(PackedMatrix.pack(codes), codes)


def parameter(matrix: Tensor, linear: nn.Module, requires_grad: bool) -> nn.Parameter:
    """A matrix [out, in] as the parameter of `linear`, which is [in, out] in a Conv1D."""
    own = matrix.t().contiguous() if is_conv1d(linear) else matrix.contiguous()
    return nn.Parameter(own, requires_grad=requires_grad)
