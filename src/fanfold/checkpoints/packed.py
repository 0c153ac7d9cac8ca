"""A file's matrices packed for the kernels in the format that they have there: nothing is rounded."""

from __future__ import annotations

from .. import formats
from ..kernels.packed import PackedMatrix
from ..layout import Layout
from .errors import CheckpointError, show
from .tensors import BLOCKS, TensorRef

_FORMATS = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}


def whole(ref: TensorRef, layout: Layout) -> PackedMatrix:
    """The matrix [n_out, n_in]. Raises CheckpointError if the kernels have no format that holds it exactly."""
    if ref.format in BLOCKS:
        return PackedMatrix.pack(ref.quantized())
    array = ref.read()
    return PackedMatrix.pack(array.t() if layout.transposed else array, _format(ref))


def halves(ref: TensorRef, layout: Layout) -> tuple[PackedMatrix, PackedMatrix]:
    """(gate, up) of a matrix that holds both."""
    if ref.format not in BLOCKS:
        gate, up = layout.split(ref.read())
        return PackedMatrix.pack(gate, _format(ref)), PackedMatrix.pack(up, _format(ref))
    q = ref.quantized()
    pairs = [(None, None) if table is None else layout.split(table) for table in (q.codes, q.scale, q.minimum)]
    gate, up = (formats.Quantized(format=q.format, codes=c, scale=s, minimum=m) for c, s, m in zip(*pairs))
    return PackedMatrix.pack(gate), PackedMatrix.pack(up)


def _format(ref: TensorRef) -> str:
    if ref.format not in _FORMATS:
        raise CheckpointError(
            f"{ref.file.path}: tensor {show(ref.name)} has format {ref.format}, which cannot be packed as it is "
            f"(known: {', '.join((*_FORMATS, *BLOCKS))}): load it without packed=True, then ff.quantize"
        )
    return _FORMATS[ref.format]
