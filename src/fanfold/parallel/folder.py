"""Writing the parts of every rank: a folder each, in one folder that is there whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from ..checkpoints import Checkpoint, shards
from ..kernels.packed import PackedMatrix, is_packed
from ..quantize.files import Folder
from ..weights import PROJECTIONS, Weights
from . import slices
from .plans import plan

Progress = Callable[[int, int], None]
_FORMATS = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
_STARTED = "started.json"


def save(
    checkpoint: Checkpoint,
    out: str | os.PathLike[str],
    tp: int,
    source: str = "",
    version: str = "",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write the folder `out` with the parts of `tp` ranks: `ff.load(out, rank=r, tp=n)` reads one, for any n.

    checkpoint  what `ff.load` gave; matrices keep their format and codes, floats their dtype and bits.
    source      the model's name, for the index;  version  of fanfold;  progress  called with (layers done, all).
    -> {"out", "tp", "layers": [a row each], "ranks": [{"folder", "bytes"}, …]}. The same call makes the same bytes.
    One layer is in memory at a time. Until all is written the folder is OUT.partial; what a stopped run left there is
    begun anew. Raises ValueError if OUT exists, a layer cannot be divided, or its dtype cannot be packed.
    """
    final = Path(out)
    if final.exists() or final.is_symlink():
        raise ValueError(f"{final} exists: give another place with -o, or remove it")
    if not final.parent.is_dir():
        raise ValueError(f"{final.parent} is not a folder: -o names the folder to make, in one that exists")
    layers = list(checkpoint.ffns)
    plans = {layer: plan(checkpoint.spec(layer), tp, checkpoint.format(layer)) for layer in layers}
    partial = final.with_name(final.name + ".partial")
    _begin(partial)
    rows: list[list[dict[str, Any]]] = [[] for _ in range(tp)]
    described: list[dict[str, Any]] = []
    folders = [Folder(partial / shards.folder_of(r, tp), {"source": source}, version) for r in range(tp)]
    for folder in folders:
        folder.__enter__()
    try:
        for i, layer in enumerate(layers):
            weights = packed(checkpoint.ffns[layer], f"layer {layer}")
            made = plans[layer]
            for r, folder in enumerate(folders):
                metadata = folder.write(i, layer, slices.shard(weights, made, r), {})
                entry = {"layer": layer, "file": folder.place(i).name, "sha256": metadata["sha256"]}
                rows[r].append({**entry, "bytes": os.path.getsize(folder.place(i))})
            spec, format = made.spec.to_dict(), made.form.name
            described.append({"layer": layer, "spec": spec, "format": format, "channels": list(map(list, made.ranges))})
            if progress:
                progress(i + 1, len(layers))
        for r, folder in enumerate(folders):
            said = {"format": described[0]["format"], "method": "shard", "source": source}
            folder.finish({**said, "layers": rows[r], "config": checkpoint.config})
    finally:
        for folder in folders:
            folder.__exit__()
    ranks = [shards.folder_of(r, tp) for r in range(tp)]
    index = {"fanfold_shards": shards.VERSION, "fanfold": version, "tp": tp, "source": source, "ranks": ranks}
    _finish(partial, final, {**index, "layers": described, "config": checkpoint.config})
    sizes = [{"folder": name, "bytes": sum(row["bytes"] for row in rows[r])} for r, name in enumerate(ranks)]
    return {"out": str(final), "tp": tp, "source": source, "layers": described, "ranks": sizes}


def packed(weights: Weights, what: str) -> Weights:
    """`weights` as packed matrices that hold the same numbers, biases float32. Raises ValueError for float64."""
    if is_packed(weights):
        return weights
    arrays: dict[str, Any] = {}
    for name, value in weights.items():
        assert isinstance(value, Tensor)
        if name not in PROJECTIONS:
            arrays[name] = value.detach().float().contiguous()
            continue
        if str(value.dtype) not in _FORMATS:
            raise ValueError(f"{what}: {name} is {value.dtype}, expected one of {', '.join(_FORMATS)}")
        arrays[name] = PackedMatrix.pack(value, _FORMATS[str(value.dtype)])
    return Weights(weights.spec, **arrays)


def _begin(partial: Path) -> None:
    """Make the folder of unfinished work; what an earlier run left in it goes. Raises ValueError if it is not ours."""
    if partial.exists() and not (partial / _STARTED).exists():
        raise ValueError(f"{partial} exists and is not what a stopped `fanfold shard` leaves: remove it")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    (partial / _STARTED).write_text("{}\n", encoding="utf-8")


def _finish(partial: Path, final: Path, index: dict[str, Any]) -> None:
    with open(partial / shards.INDEX, "w", encoding="utf-8") as file:
        file.write(json.dumps(index, indent=1, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.remove(partial / _STARTED)
    os.rename(partial, final)
