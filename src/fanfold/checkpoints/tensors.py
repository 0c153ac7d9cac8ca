"""Memory-mapped files, and references to the tensors that lie in them."""

from __future__ import annotations

import mmap
import os
import stat
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import formats
from .errors import CheckpointError, show

# The formats that an FFN's tensors may have and that need no decoding; one name for safetensors and GGUF.
FLOATS: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# GGUF's blocks that are decoded to float32 on reading.
BLOCKS = ("Q8_0", "Q4_0", "Q4_1")


class MappedFile:
    """A file mapped into memory, copy on write: nothing is read before it is touched, nothing is written back.

    Raises CheckpointError if it is not a regular file (a pipe would block for ever), is empty, or cannot be mapped.
    A file that another program shortens while it is mapped is detected at the next read, not during one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise CheckpointError(f"{path}: expected a regular file")
            with open(path, "rb") as file:
                self.identity = identity(os.fstat(file.fileno()))
                if os.fstat(file.fileno()).st_size == 0:
                    raise CheckpointError(f"{path}: the file is empty (0 bytes)")
                self.data = _map(file.fileno())
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror or error}") from None
        self.size = len(self.data)

    def check_size(self) -> None:
        """Raise CheckpointError if the file has become shorter: touching the lost part would end the process."""
        now = self.data.size()
        if now < self.size:
            raise CheckpointError(
                f"{self.path}: had {self.size} bytes when it was opened, now has {now}: load it again"
            )


def identity(stat: os.stat_result) -> tuple[int, ...]:
    """What tells whether a path still means the same, unchanged file."""
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _map(descriptor: int) -> mmap.mmap:
    if sys.platform != "linux":
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    # A private writable map counts against memory + swap unless it is NORESERVE, so a checkpoint larger than the
    # memory could not be opened. Python names the flag from 3.13 on; 0x4000 is its value on x86, Arm and RISC-V.
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return mmap.mmap(descriptor, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


@dataclass(frozen=True)
class TensorRef:
    """Where a tensor lies in a file; its bytes are inside the file (the readers of the headers check that).

    format  "F32", "BF16", "Q4_1", …; only those of FLOATS and BLOCKS can be read.
    shape   row-major, outermost first.
    start, nbytes  bytes, from the beginning of the file.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    file: MappedFile
    start: int
    nbytes: int

    def read(self) -> torch.Tensor:
        """The tensor: a view of the mapped file where it is aligned, a copy where not, float32 for BLOCKS."""
        self.file.check_size()
        if self.format in BLOCKS:
            return self._decoded()
        dtype = FLOATS[self.format]
        if self.start % dtype.itemsize == 0:
            flat = torch.frombuffer(self.file.data, dtype=dtype, count=self.nbytes // dtype.itemsize, offset=self.start)
        else:  # safetensors may begin its data anywhere
            flat = torch.frombuffer(bytearray(self.file.data[self.start : self.start + self.nbytes]), dtype=dtype)
        return flat.reshape(self.shape)

    def quantized(self) -> formats.Quantized:
        """The codes and scales of a matrix in BLOCKS, as they lie in the file."""
        return formats.from_gguf_blocks(self.raw().numpy(), self.format.lower(), (self.shape[0], self.shape[1]))

    def raw(self) -> torch.Tensor:
        """The tensor's bytes [nbytes] uint8: a view of the mapped file."""
        self.file.check_size()
        return torch.frombuffer(self.file.data, dtype=torch.uint8, count=self.nbytes, offset=self.start)

    def _decoded(self) -> torch.Tensor:
        import numpy as np
        from gguf import GGMLQuantizationType, quants

        raw = np.frombuffer(self.file.data, dtype=np.uint8, count=self.nbytes, offset=self.start)
        rows = raw.reshape(*self.shape[:-1], -1)
        with np.errstate(all="ignore"), warnings.catch_warnings():  # a scale may be inf or NaN: so is the weight then
            warnings.simplefilter("ignore")
            return torch.from_numpy(quants.dequantize(rows, GGMLQuantizationType[self.format]))


def check_places(path: Path, refs: list[TensorRef], begin: int, end: int, align: int = 1) -> None:
    """Raise CheckpointError unless `refs` fill begin … end (bytes, begin aligned) without overlap and without holes.

    Each tensor must begin where the one before it ends, rounded up to `align`; the last may be padded to `align`.
    Bytes that belong to no tensor are a mistake of the writer or hidden data, and are refused.
    """

    def padded(position: int) -> int:
        return -(-position // align) * align

    position, before = begin, "the header"
    for ref in sorted(refs, key=lambda r: (r.start, r.nbytes)):
        expected = padded(position)
        if ref.start != expected:
            fault = "overlaps" if ref.start < expected else f"leaves {ref.start - expected} unused bytes after"
            raise CheckpointError(
                f"{path}: tensor {show(ref.name)} begins at byte {ref.start}, expected {expected}: it {fault} {before}"
            )
        position, before = ref.start + ref.nbytes, show(ref.name)
    if not position <= end <= padded(position):
        raise CheckpointError(f"{path}: the tensors end at byte {position}, but the file has {end} bytes")
