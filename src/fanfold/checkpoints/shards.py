"""Folders that `fanfold shard` wrote: one folder of packed FFNs for each rank, read for the same or another number.

Version 1. A folder with
  fanfold_shards.json     {"fanfold_shards": 1, "fanfold": the version that wrote it, "tp", "source", "config",
                          "ranks": [folder names], "layers": [{"layer", "spec": of the whole FFN, "format": of down,
                          "channels": [[first, after the last], …] by rank}, …]}
  rank-0-of-4, …          each a folder as `checkpoints.quantized` describes, of that rank's parts: `fanfold.load` reads
                          one by itself, too.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..layout import Layout
from ..parallel import slices
from ..parallel.plans import Cut, Plan, plan
from ..spec import Spec
from ..weights import Weights
from . import jsonfile, quantized
from .errors import CheckpointError, show
from .packed_parts import Piece, gather
from .partial import read_cut
from .quantized import PackedFFN
from .tensors import TensorRef

VERSION = 1
INDEX = "fanfold_shards.json"
_Source = tuple[int, int, PackedFFN]  # first channel, after the last, the part


@dataclass(frozen=True)
class JoinedFFN:
    """One rank's part of an FFN (or with tp=1 the whole) out of parts that were cut for another number of ranks."""

    spec: Spec
    sources: list[_Source]
    parts: dict[str, TensorRef]
    plan: Plan
    rank: int
    layout: Layout = field(default_factory=Layout)

    def read(self) -> Weights:
        """Its Weights of `PackedMatrix`, bit by bit what cutting the whole for this number of ranks gives; no other
        bytes are read, into memory of its own."""
        own = self.plan.ranks[self.rank]
        used = [
            (ffn, (max(own.start, start) - start, min(own.stop, stop) - start))
            for start, stop, ffn in self.sources
            if max(own.start, start) < min(own.stop, stop)
        ]
        first, arrays = used[0][0], {}
        for name in first.parts:
            if name == "down_bias":
                if own.spec.down_bias:
                    arrays[name] = read_cut(first.parts[name], Cut(0, ((0, own.spec.d_model),)))
            elif name in first.matrices:
                arrays[name] = gather([_piece(ffn, name, part) for ffn, part in used], int(name == "down"))
            else:
                arrays[name] = slices.join([read_cut(ffn.parts[name], Cut(0, (part,))) for ffn, part in used], 0)
        return Weights(own.spec, **arrays)

    read_packed = read


def _piece(ffn: PackedFFN, name: str, channels: tuple[int, int]) -> Piece:
    """The part of the matrix called `name` that belongs to these channels."""
    shape, said = quantized.shape_of(ffn.spec, name), ffn.matrices[name]
    rows, inputs = ((0, shape[0]), channels) if name == "down" else (channels, (0, shape[1]))
    return Piece(ffn.parts[name], said["format"], said["activations"], shape, rows, inputs)


def is_sharded(path: Path) -> bool:
    """Whether the folder holds the parts of ranks."""
    return os.path.exists(path / INDEX)


def folder_of(rank: int, tp: int) -> str:
    """The name of one rank's folder."""
    return f"rank-{rank}-of-{tp}"


def open_sharded(
    path: Path, rank: int, tp: int
) -> tuple[dict[int | str, PackedFFN | JoinedFFN], dict[int | str, Plan], dict[str, Any], list[str]]:
    """(the parts of rank `rank` of `tp` by layer, the plans, the model's config, notes). Reads headers only.

    The rank's own folder where it was written for as many ranks, else what it needs of the others'.
    Raises CheckpointError, or ValueError where the channels cannot be divided so.
    """
    where = path / INDEX
    index = jsonfile.read(where)
    if index.get("fanfold_shards") != VERSION:
        raise CheckpointError(
            f"{where}: fanfold_shards is {show(index.get('fanfold_shards'))}, this fanfold reads {VERSION} (written by "
            f"fanfold {show(index.get('fanfold'))}): shard the model again, or use that fanfold"
        )
    written, layers, config = index.get("tp"), index.get("layers"), index.get("config")
    if type(written) is not int or not 1 <= written <= 2**16 or not isinstance(layers, list) or not layers:
        raise CheckpointError(f"{where}: tp is {show(written)}, layers {show(layers)}: expected an int and a list")
    if not isinstance(config, dict):
        raise CheckpointError(f"{where}: config is {show(config)}, expected an object")
    ranks = range(written) if tp != written else [rank]
    parts = {r: quantized.open_quantized(path / folder_of(r, written))[0] for r in ranks}
    ffns: dict[int | str, PackedFFN | JoinedFFN] = {}
    made: dict[int | str, Plan] = {}
    for entry in layers:
        layer, spec, format, ranges = _layer(where, entry, written)
        sources = [(*ranges[r], _part(path, found, layer, r, spec, ranges)) for r, found in parts.items()]
        made[layer] = plan(spec, tp, format, channels=[b - a for a, b in ranges] if tp == written else None)
        if tp == written:
            ffns[layer] = sources[0][2]
        else:
            refs = {f"{i}.{name}": ref for i, (*_, ffn) in enumerate(sources) for name, ref in ffn.parts.items()}
            ffns[layer] = JoinedFFN(made[layer].ranks[rank].spec, sources, refs, made[layer], rank)
    kind = f"parts for {written} ranks of {show(index.get('source'))}"
    return ffns, made, config, [kind if tp == written else f"{kind}, put together for {tp}"]


def _layer(where: Path, entry: Any, tp: int) -> tuple[int | str, Spec, str, list[tuple[int, int]]]:
    try:
        layer, format = entry["layer"], entry["format"]
        ranges = [(int(a), int(b)) for a, b in entry["channels"]]
        spec = Spec.from_dict(entry["spec"])
        plan(spec, tp, format, channels=[b - a for a, b in ranges])
        if [a for a, _ in ranges] != [0, *(b for _, b in ranges[:-1])] or type(layer) not in (int, str):
            raise ValueError("the ranges do not follow one another")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: {show(entry)} does not describe a layer: {error}") from None
    return layer, spec, format, ranges


def _part(
    path: Path,
    found: dict[int | str, PackedFFN],
    layer: int | str,
    rank: int,
    spec: Spec,
    ranges: list[tuple[int, int]],
) -> PackedFFN:
    """The part of one layer, if it is what the index says."""
    start, stop = ranges[rank]
    wanted = dataclasses.replace(spec, d_ff=stop - start, down_bias=spec.down_bias and rank == 0)
    place = path / folder_of(rank, len(ranges))
    if layer not in found:
        raise CheckpointError(f"{place}: holds no layer {show(layer)}, which {INDEX} lists")
    if found[layer].spec != wanted:
        raise CheckpointError(
            f"{place}: layer {show(layer)} is {found[layer].spec.describe()}, expected {wanted.describe()}: not the "
            f"folder that {INDEX} lists"
        )
    return found[layer]
