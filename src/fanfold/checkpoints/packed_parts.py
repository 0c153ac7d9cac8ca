"""Parts of packed matrices, read from their files: their bytes and no others, a batch of columns at a time.

What a cut moves to other columns or blocks is unpacked and packed anew, batch by batch, so memory holds the part and
little else; what it does not move is read as it lies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from ..kernels.packed import LANES, PackedMatrix, aligned, packed_bytes
from ..kernels.packed_spans import Range, region
from ..parallel import slices
from .partial import fill
from .tensors import TensorRef

_BATCH = 1 << 18  # bytes; unpacked and packed anew they take some ten times as many


@dataclass(frozen=True)
class Piece:
    """Outputs `rows` and `inputs` of a packed matrix [n_out, n_in] that lies at `ref`."""

    ref: TensorRef
    format: str
    activations: str
    whole: tuple[int, int]
    rows: Range
    inputs: Range

    @property
    def shape(self) -> tuple[int, int]:
        """(n_out, n_in) of the piece."""
        return self.rows[1] - self.rows[0], self.inputs[1] - self.inputs[0]

    def read(self) -> PackedMatrix:
        """The piece, all at once. Raises CheckpointError if the file has changed."""
        part = region(self.format, self.whole, self.rows, self.inputs)
        data = aligned(packed_bytes(self.format, *part.shape)).zero_()
        fill(self.ref.file, self.ref.name, [(self.ref.start + a, b, size) for a, b, size in part.spans], data)
        matrix = PackedMatrix(self.format, part.shape, data, self.activations)
        for dim, (wanted, found) in enumerate(((self.rows, part.rows), (self.inputs, part.inputs))):
            if wanted != found:
                matrix = slices.cut(matrix, dim, wanted[0] - found[0], wanted[1] - found[0])
        return matrix

    def batches(self, n_columns: int) -> Iterator[Piece]:
        """The piece in pieces of at most `n_columns` of the file's columns, of which none is read twice."""
        start, stop = self.rows
        step = n_columns * LANES
        for at in range(start // LANES * LANES, stop, step):
            yield dataclasses.replace(self, rows=(max(at, start), min(at + step, stop)))


def gather(pieces: list[Piece], dim: int) -> PackedMatrix:
    """The pieces one after the other along `dim` (0: outputs, 1: inputs) as one matrix of its own memory: bit by bit
    what cutting and joining the whole matrices gives.

    Raises ValueError if a group would be cut or the pieces are no parts of one matrix; CheckpointError.
    """
    kinds = sorted({(p.format, p.activations) for p in pieces})
    if len(kinds) > 1:
        raise ValueError(f"the pieces are packed as {kinds}: expected one format and activations")
    for piece in pieces:
        slices.check_groups(piece.format, piece.whole[1], *piece.inputs)
    ((format, activations),) = kinds
    total = sum(piece.shape[dim] for piece in pieces)
    n, k = (total, pieces[0].shape[1]) if dim == 0 else (pieces[0].shape[0], total)
    out = PackedMatrix(format, (n, k), aligned(packed_bytes(format, n, k)), activations)
    done, held = 0, None
    for batch in _batches(pieces, dim, max(_BATCH // packed_bytes(format, LANES, k), 1)):
        held = batch if held is None else slices.join([held, batch], 0)
        ready = held.shape[0]
        if done + ready < n:
            ready -= ready % LANES  # what is left goes into the column that the next batch begins
        if ready:
            _place(out, done, held if ready == held.shape[0] else slices.cut(held, 0, 0, ready))
            held = None if ready == held.shape[0] else slices.cut(held, 0, ready, held.shape[0])
            done += ready
    return out


def _batches(pieces: list[Piece], dim: int, n_columns: int) -> Iterator[PackedMatrix]:
    """Some outputs after the other of the matrix that the pieces make."""
    if dim == 0:
        for piece in pieces:
            yield from (batch.read() for batch in piece.batches(n_columns))
    else:
        for batch in zip(*(piece.batches(n_columns) for piece in pieces), strict=True):
            parts = [piece.read() for piece in batch]
            yield parts[0] if len(parts) == 1 else slices.join(parts, 1)


def _place(out: PackedMatrix, row: int, batch: PackedMatrix) -> None:
    """Put whole columns where they belong."""
    n, k = batch.shape
    for a, b, size in region(out.format, (out.shape[0], out.shape[1]), (row, row + n), (0, k)).spans:
        out.data[a : a + size] = batch.data[b : b + size]
