"""One rank's part of an FFN, read from the file by itself: its bytes and no others.

The parts are read with pread into memory of their own, not through the mapped file: pages are read whole, and rows of
down are mostly shorter than pages and what the system reads ahead.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .. import formats
from ..layout import Layout
from ..parallel.plans import Cut, Plan, plan
from ..spec import Spec
from ..weights import Weights
from . import packed
from .assemble import FFN
from .errors import CheckpointError, show
from .names import FUSED
from .tensors import BLOCKS, FLOATS, MappedFile, TensorRef, identity

_PLANNED = {"F64": "fp32", "F32": "fp32", "BF16": "bf16", "F16": "fp16"}  # fp64 has no groups either


@dataclass(frozen=True)
class PartialFFN:
    """What one rank reads of a checked FFN."""

    spec: Spec
    layout: Layout
    parts: Mapping[tuple[str, str], TensorRef]
    plan: Plan
    rank: int

    def read(self) -> Weights:
        """This rank's Weights, as `parallel.shard` of the whole gives them."""
        arrays: dict[str, torch.Tensor] = {}
        for (role, kind), ref, cut in self._cuts():
            part = read_cut(ref, cut)
            if isinstance(part, formats.Quantized):
                part = torch.from_numpy(part.dequantize())
            end = "" if kind == "weight" else "_bias"
            if role == FUSED:
                arrays[f"gate{end}"], arrays[f"up{end}"] = self.layout.split(part)
            else:
                arrays[f"{role}{end}"] = part.t() if self.layout.transposed and kind == "weight" else part
        return Weights(self.spec, **arrays)

    def read_packed(self) -> Weights:
        """The same, packed in the file's own formats; biases float32."""
        arrays: dict[str, Any] = {}
        for (role, kind), ref, cut in self._cuts():
            part = read_cut(ref, cut)
            if kind == "bias":
                made: Any = part.float().contiguous()  # type: ignore[union-attr]
                pair = self.layout.split(made) if role == FUSED else None
                arrays |= {"gate_bias": pair[0], "up_bias": pair[1]} if pair else {f"{role}_bias": made}
            elif role == FUSED:
                arrays["gate"], arrays["up"] = packed.pack_halves(ref, part, self.layout)
            else:
                arrays[role] = packed.pack_whole(ref, part, self.layout)
        return Weights(self.spec, **arrays)

    def _cuts(self) -> list[tuple[tuple[str, str], TensorRef, Cut]]:
        """(role and kind, tensor, the part that this rank reads); down's bias is rank 0's."""
        own = self.plan.ranks[self.rank]
        named = ((key, ref, own.cuts.get(f"{_role(key[0])}.{key[1]}")) for key, ref in self.parts.items())
        return [(key, ref, cut) for key, ref, cut in named if cut is not None]


def _role(role: str) -> str:
    return "gate_up" if role == FUSED else role


def part_of(ffn: FFN, rank: int, tp: int) -> PartialFFN:
    """Rank `rank`'s part of `tp`. Raises ValueError, with the ways out, if the channels cannot be divided so."""
    down = ffn.parts[("down", "weight")].format
    made = plan(ffn.spec, tp, _PLANNED.get(down) or down.lower(), ffn.layout)
    return PartialFFN(made.ranks[rank].spec, ffn.layout, ffn.parts, made, rank)


def read_cut(ref: TensorRef, cut: Cut) -> torch.Tensor | formats.Quantized:
    """A part of a tensor: floats, or the codes and scales of BLOCKS. Raises CheckpointError if the file has changed."""
    rows, width = ref.shape[0], ref.shape[1] if len(ref.shape) == 2 else 1
    lengths = (cut.length, width) if cut.dim == 0 else (rows, cut.length)
    unit = 32 if ref.format in BLOCKS else 1  # weights that are stored together
    size = formats.block_bytes(ref.format.lower()) if ref.format in BLOCKS else FLOATS[ref.format].itemsize
    row = width // unit * size
    out = torch.empty(lengths[0] * (lengths[1] // unit) * size, dtype=torch.uint8)
    if cut.dim == 0:
        spans = [(ref.start + start * row, (stop - start) * row) for start, stop in cut.ranges]
    else:
        inner = [(start // unit * size, (stop - start) // unit * size) for start, stop in cut.ranges]
        spans = [(ref.start + i * row + at, n) for i in range(rows) for at, n in inner]
    places = itertools.accumulate((n for _, n in spans), initial=0)
    fill(ref.file, ref.name, [(start, at, n) for (start, n), at in zip(spans, places)], out)
    if ref.format in BLOCKS:
        return formats.from_gguf_blocks(out.numpy(), ref.format.lower(), lengths)
    return out.view(FLOATS[ref.format]).reshape(lengths if len(ref.shape) == 2 else lengths[:1])


def fill(file: MappedFile, name: str, spans: list[tuple[int, int, int]], out: torch.Tensor) -> None:
    """Read spans (byte in the file, byte in `out`, bytes) of a file, for the tensor `name`, into `out` [bytes] uint8.

    Raises CheckpointError if the file has changed since it was opened.
    """
    try:
        descriptor = os.open(file.path, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(f"{file.path}: cannot be opened: {error.strerror or error}") from None
    try:
        if identity(os.fstat(descriptor)) != file.identity:
            raise CheckpointError(f"{file.path}: has changed since it was opened: load it again")
        memory = out.numpy().data
        for start, at, n_bytes in spans:
            done = 0
            while done < n_bytes:
                got = os.preadv(descriptor, [memory[at + done : at + n_bytes]], start + done)
                if got == 0:
                    raise CheckpointError(f"{file.path}: tensor {show(name)} ends early: load the file again")
                done += got
    finally:
        os.close(descriptor)
