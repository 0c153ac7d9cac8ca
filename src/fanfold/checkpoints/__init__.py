"""Read the feed-forward networks of a checkpoint: safetensors (Hugging Face names), GGUF, and what we quantized."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..layout import Layout
from ..spec import Spec
from ..weights import Weights
from .errors import CheckpointError

if TYPE_CHECKING:  # they import torch, which the table of model types (.config) does not need
    from ..parallel.plans import Plan
    from . import assemble
    from .assemble import FFN
    from .partial import PartialFFN
    from .quantized import PackedFFN
    from .shards import JoinedFFN
    from .tensors import TensorRef

    AnyFFN = FFN | PackedFFN | PartialFFN | JoinedFFN

__all__ = ["Checkpoint", "CheckpointError", "Layers", "load"]

Layer = int | str


class Layers(Mapping[Layer, Weights]):
    """layer -> Weights, read from the file each time a layer is asked for and not kept."""

    def __init__(self, ffns: Mapping[Layer, AnyFFN], packed: bool = False) -> None:
        self._ffns, self._packed = ffns, packed

    def __getitem__(self, layer: Layer) -> Weights:
        ffn = self._ffns[layer]
        return ffn.read_packed() if self._packed else ffn.read()

    def __iter__(self) -> Iterator[Layer]:
        return iter(self._ffns)

    def __len__(self) -> int:
        return len(self._ffns)

    def __contains__(self, layer: object) -> bool:
        return layer in self._ffns

    def __repr__(self) -> str:
        return f"Layers({', '.join(map(repr, self._ffns))})"


class Checkpoint:
    """The feed-forward networks (FFNs) of one checkpoint; made by `load`.

    path     the folder or file.
    ffns     layer -> Weights, torch tensors on the CPU: gate, up [d_ff, d_model], down [d_model, d_ff]. Keys are ints
             when the model has one stack of layers, else "encoder.0", "decoder.0", …  A layer's tensors are views of
             the memory-mapped file (of a copy where the file does not align them): transposed views where the file
             stores [in, out], halves where it fuses gate and up; GGUF's blocks are decoded to float32 anew each time.
             Writing into a view changes neither the file nor another process's view of it. With `packed`, and for
             folders of quantized FFNs: `kernels.packed.PackedMatrix` matrices, see `load`.
    layouts  layer -> Layout, how the matrices lay in the file.
    config   config.json's content; for GGUF its metadata, without arrays of strings and arrays over 4096 values.
    notes    what was decided on reading, one sentence each: the activation and why, files not read, …
    packed   whether the matrices are packed ones.
    plans    layer -> `parallel.plan` that it was cut by, and rank: whose parts they are; none where they are whole.
    """

    def __init__(
        self,
        path: Path,
        ffns: Mapping[Layer, AnyFFN],
        config: dict[str, Any],
        notes: list[str],
        packed: bool = False,
        plans: Mapping[Layer, Plan] | None = None,
        rank: int = 0,
    ) -> None:
        self.path, self.config, self.notes, self.packed = path, config, notes, packed
        self.plans, self.rank = dict(plans or {}), rank
        self._ffns = ffns
        self.ffns = Layers(ffns, packed)
        self.layouts: dict[Layer, Layout] = {layer: ffn.layout for layer, ffn in ffns.items()}

    def spec(self, layer: Layer) -> Spec:
        """The Spec of one layer, without reading its tensors. Raises KeyError if there is no such layer."""
        return self._ffns[layer].spec

    def format(self, layer: Layer) -> str:
        """The format of down, as a name of `count.formats`: "bf16", "q4_0", …; fp32 for decoded blocks and float64."""
        ffn = self._ffns[layer]
        matrices = getattr(ffn, "matrices", None)
        if matrices is not None:
            return matrices["down"]["format"]
        plans = self.plans.get(layer)
        if plans is not None:
            return plans.form.name
        kind = ffn.parts[("down", "weight")].format  # type: ignore[index]
        plain = {"F64": "fp32", "F32": "fp32", "F16": "fp16", "BF16": "bf16"}
        return plain.get(kind) or (kind.lower() if self.packed else "fp32")

    def refs(self, layer: Layer) -> list[TensorRef]:
        """Where the tensors of one layer lie."""
        return list(self._ffns[layer].parts.values())

    def __repr__(self) -> str:
        first = next(iter(self._ffns.values())).spec
        return f"Checkpoint({str(self.path)!r}, {len(self._ffns)} layers, {first.describe()})"


def load(
    path: str | os.PathLike[str],
    activation: str | None = None,
    packed: bool = False,
    rank: int | None = None,
    tp: int | None = None,
) -> Checkpoint:
    """Open a checkpoint and find the FFN of every layer, without reading its tensors.

    path        a Hugging Face folder (config.json, and model.safetensors or an index with its shards), a .safetensors
                file (a config.json beside it is used), a .gguf file, or a folder that `fanfold quantize` or
                `fanfold shard` wrote.
    activation  an activation's name or a gated variant ("silu", "swiglu", …), for files that do not say it or say it
                wrongly. It wins over the file.
    packed      give the matrices packed for the kernels, in the format that the file has, bit by bit: GGUF's Q8_0,
                Q4_0 and Q4_1 as q8_0, q4_0 and q4_1 with the file's own codes and scales, F32, BF16 and F16 as they
                are; biases become float32. One layer is in memory at a time, once. Quantized folders always are.

    rank, tp    give the parts of rank `rank` of `tp` alone, as `parallel.shard` cuts them (`plans` says where). No
                other bytes are read, into memory of their own; of packed matrices, which lie in columns of 16 outputs,
                the columns that the cut goes through are read whole. A folder of shards gives the rank's own, or for
                another tp what it needs of the others'.

    The activation comes, in this order, from `activation=`; from the code of the model type where that fixes it
    (BLOOM, MPT); from the field of config.json that this model type reads; from that model type's default. `notes`
    says which. The original's dropout and what its layer does around the FFN (norms, scales) are not part of the Spec.

    Nothing is executed, written or downloaded: pickles are refused. Every length and offset is checked against the
    file's size before it is used.

    Raises CheckpointError (a ValueError) if the path is not a model; the file is damaged; the activation cannot be
    known; a projection is missing; a shape contradicts another or the config; an FFN has a tensor that is not
    understood (a scale, an adapter); or the model is a mixture of experts.
    """
    from . import folder

    where, ours = Path(path), _asked(rank, tp)
    kind = folder.kind_of(where)
    if kind == "gguf":
        from .open_gguf import open_gguf

        return _checkpoint(where, *open_gguf(where, activation, packed), packed, ours)
    if kind == "folder":
        from . import quantized, shards

        sharded = shards.is_sharded(where)
        if activation is not None and (sharded or quantized.is_quantized(where)):
            raise CheckpointError(f"{where}: activation={activation!r}: a folder of quantized FFNs states its own")
        if sharded:
            ffns, plans, config, notes = shards.open_sharded(where, *(ours or (0, 1)))
            return Checkpoint(where, ffns, config, notes, True, plans if ours else None, ours[0] if ours else 0)
        if quantized.is_quantized(where):
            return _cut_packed(Checkpoint(where, *quantized.open_quantized(where), packed=True), ours)
    from .open_hf import open_hf

    found = folder.read_folder(where) if kind == "folder" else folder.read_single(where)
    return _checkpoint(where, *open_hf(found, activation), packed, ours)


def _asked(rank: int | None, tp: int | None) -> tuple[int, int] | None:
    """(rank, tp) if parts are wanted. Raises ValueError if only one is given or they do not fit."""
    if rank is None and tp is None:
        return None
    if type(rank) is not int or type(tp) is not int or not 0 <= rank < tp:
        raise ValueError(f"rank={rank!r}, tp={tp!r}: expected both, with 0 <= rank < tp, or neither")
    return rank, tp


def _checkpoint(
    path: Path,
    ffns: dict[assemble.Key, FFN],
    config: dict[str, Any],
    notes: list[str],
    packed: bool,
    ours: tuple[int, int] | None,
) -> Checkpoint:
    labelled = _labelled(ffns)
    if ours is None:
        return Checkpoint(path, labelled, config, notes, packed)
    from .partial import part_of

    parts = {layer: part_of(ffn, *ours) for layer, ffn in labelled.items()}
    plans = {layer: part.plan for layer, part in parts.items()}
    return Checkpoint(path, parts, config, notes, packed, plans, ours[0])


def _cut_packed(whole: Checkpoint, ours: tuple[int, int] | None) -> Checkpoint:
    """A quantized folder's checkpoint, or one rank's parts of it."""
    if ours is None:
        return whole
    from ..parallel.plans import plan
    from .shards import JoinedFFN

    rank, tp = ours
    plans = {layer: plan(whole.spec(layer), tp, whole.format(layer)) for layer in whole.ffns}
    ffns = {
        layer: JoinedFFN(made.ranks[rank].spec, [(0, made.spec.d_ff, ffn)], dict(ffn.parts), made, rank)  # type: ignore
        for layer, made in plans.items()
        for ffn in (whole._ffns[layer],)
    }
    return Checkpoint(whole.path, ffns, whole.config, whole.notes, True, plans, rank)


def _labelled(ffns: dict[assemble.Key, FFN]) -> dict[Layer, FFN]:
    """Int keys for one stack; for several, what distinguishes their paths and the layer: "encoder.0"."""
    roots = list(dict.fromkeys(root for root, _ in ffns))
    if len(roots) == 1:
        return {layer: ffn for (_, layer), ffn in ffns.items()}
    paths = [root.split(".")[:-1] for root in roots]
    shared = 0
    while len({tuple(parts[: shared + 1]) for parts in paths}) == 1:
        shared += 1
    labels = {root: ".".join([*parts[shared:], ""]) for root, parts in zip(roots, paths, strict=True)}
    return {f"{labels[root]}{layer}": ffn for (root, layer), ffn in ffns.items()}
