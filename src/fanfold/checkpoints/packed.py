"""A file's matrices packed for the kernels in the format that they have there: nothing is rounded."""

from __future__ import annotations

from typing import Any

from .. import formats
from ..kernels.packed import PackedMatrix
from ..layout import Layout
from .errors import CheckpointError, show
from .tensors import BLOCKS, TensorRef

_FORMATS = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}


def whole(ref: TensorRef, layout: Layout) -> PackedMatrix:
    """The matrix [n_out, n_in]. Raises CheckpointError if the kernels have no format that holds it exactly."""
    return pack_whole(ref, ref.quantized() if ref.format in BLOCKS else ref.read(), layout)


def halves(ref: TensorRef, layout: Layout) -> tuple[PackedMatrix, PackedMatrix]:
    """(gate, up) of a matrix that holds both."""
    return pack_halves(ref, ref.quantized() if ref.format in BLOCKS else ref.read(), layout)


def pack_whole(ref: TensorRef, array: Any, layout: Layout) -> PackedMatrix:
    """`whole` of what was read of `ref`: a tensor, or the codes of BLOCKS."""
    if ref.format in BLOCKS:
        return PackedMatrix.pack(array)
    return PackedMatrix.pack(array.t() if layout.transposed else array, _format(ref))


def pack_halves(ref: TensorRef, array: Any, layout: Layout) -> tuple[PackedMatrix, PackedMatrix]:
    """`halves` of what was read of `ref`."""
    if ref.format not in BLOCKS:
        gate, up = layout.split(array)
        return PackedMatrix.pack(gate, _format(ref)), PackedMatrix.pack(up, _format(ref))
    pairs = [
        (None, None) if table is None else layout.split(table) for table in (array.codes, array.scale, array.minimum)
    ]
    gate, up = (formats.Quantized(format=array.format, codes=c, scale=s, minimum=m) for c, s, m in zip(*pairs))
    return PackedMatrix.pack(gate), PackedMatrix.pack(up)


def _format(ref: TensorRef) -> str:
    if ref.format not in _FORMATS:
        raise CheckpointError(
            f"{ref.file.path}: tensor {show(ref.name)} has format {ref.format}, which cannot be packed as it is "
            f"(known: {', '.join((*_FORMATS, *BLOCKS))}): load it without packed=True, then ff.quantize"
        )
    return _FORMATS[ref.format]
