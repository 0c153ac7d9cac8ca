"""Quantizing all FFNs of a checkpoint into a folder: one layer in memory at a time, stopped and continued at will."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import formats
from ..checkpoints import Checkpoint
from ..kernels import torch as torch_ops
from ..kernels.packed import PackedMatrix
from ..numerics import relative_error
from ..weights import PROJECTIONS, Weights
from .calibrate import walk
from .ffn import check, quantize_ffn, to_float32
from .files import Folder
from .guard import Decision

Progress = Callable[[int, int], None]
_ERROR_TOKENS = 512  # calibration tokens that the reported output error is measured on


@dataclass
class Calibration:
    """A model to run, and the calibration text as its inputs ({"input_ids": [B, S], …})."""

    model: nn.Module
    inputs: dict[str, Any]

    def describe(self) -> dict[str, Any]:
        """What identifies the text, and how much of it there is."""
        ids = self.inputs["input_ids"]
        digest = hashlib.sha256(ids.contiguous().numpy().tobytes()).hexdigest()
        return {"sha256": digest, "sequences": ids.shape[0], "tokens": ids.numel()}


def quantize_checkpoint(
    checkpoint: Checkpoint,
    out: str | os.PathLike[str],
    format: str = "int4",
    method: str = "rtn",
    activations: str = "auto",
    calibration: Calibration | None = None,
    source: str = "",
    version: str = "",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write the folder `out` with every FFN of the checkpoint in `format`; `fanfold.load(out)` reads it.

    format, method, activations  as for `fanfold.quantize`; matrices that are packed in `format` keep their codes.
    calibration  for gptq and for the guard: its model is run once, and its FFN weights are overwritten on the way.
    source       the model's name, for the index;  version  of fanfold;  progress  called with (done, total).
    -> {"layers": [a row each], "bytes", "fp32_bytes", "kept": layers that an earlier, stopped run had finished, …}.
    The same call makes the same bytes (gptq: with the same number of threads). Memory: the mapped file, one layer,
    and the calibration's model if there is one. Raises ValueError; nothing is left but OUT.partial, which continues.
    """
    name = check(format, method, activations)
    if method == "gptq" and calibration is None:
        raise ValueError('method "gptq" needs a calibration: a model that runs, and text for it')
    described = calibration.describe() if calibration else None
    job = {
        "format": name,
        "method": method,
        "activations": activations,
        "calibration": described,
        "source": source,
        "files": fingerprint(checkpoint),
        "fanfold": version,
    }
    with Folder(Path(out), job, version) as folder:
        work = _Work(checkpoint, folder, name, method, activations)
        if calibration is None:
            for position in range(len(work.layers)):
                work.layer(position, None)
                if progress:
                    progress(position + 1, len(work.layers))
        else:

            def visit(position: int, x: Tensor) -> Weights:
                weights = work.layer(position, x)
                if progress:
                    progress(len(work.rows), len(work.layers))
                return weights

            walk(calibration.model, calibration.inputs, checkpoint, visit)
        rows = [work.rows[i] for i in range(len(work.layers))]
        kept = sum(row.pop("kept") for row in rows)
        said = {"format": name, "method": method, "source": source, "calibration": described}
        folder.finish({**said, "layers": rows, "config": checkpoint.config})
    total = {key: sum(row[key] for row in rows) for key in ("bytes", "fp32_bytes")}
    return {**said, "out": str(out), **total, "kept": kept, "layers": rows}


class _Work:
    """What is done with each layer, in whatever order they come."""

    def __init__(self, checkpoint: Checkpoint, folder: Folder, format: str, method: str, activations: str) -> None:
        self.checkpoint, self.folder = checkpoint, folder
        self.asked = (format, method)
        self.activations = activations
        self.layers = list(checkpoint.ffns)
        self.rows: dict[int, dict[str, Any]] = {}

    def layer(self, position: int, inputs: Tensor | None) -> Weights:
        """Quantize a layer and write it, or take the part that is already there."""
        layer = self.layers[position]
        before = self.folder.finished(position, layer)
        if before is not None:
            weights, metadata = before
            row = json.loads(metadata["row"])
        else:
            own = self.checkpoint.ffns[layer]
            try:
                result = quantize_ffn(own, *self.asked, inputs=inputs, activations=self.activations)
            except ValueError as error:
                raise ValueError(f"layer {layer}: {error}") from None
            weights = result.weights
            row = _row(layer, own, weights, inputs, result.decisions, result.notes)
            metadata = self.folder.write(position, layer, weights, {"row": json.dumps(row)})
        file = self.folder.place(position).name
        self.rows[position] = {**row, "file": file, "sha256": metadata["sha256"], "kept": before is not None}
        return weights


def _row(
    layer: int | str,
    own: Weights,
    packed: Weights,
    inputs: Tensor | None,
    decisions: dict[str, Decision],
    notes: list[str],
) -> dict[str, Any]:
    """What the report says about one layer."""
    matrices = {name: value for name, value in packed.items() if isinstance(value, PackedMatrix)}
    errors = {name: relative_error(m.dequantize(), to_float32(getattr(own, name))) for name, m in matrices.items()}
    biases = sum(4 * v.numel() for n, v in packed.items() if n not in matrices)
    row: dict[str, Any] = {
        "layer": layer,
        "ffn": packed.spec.describe(),
        "bytes": sum(m.nbytes for m in matrices.values()) + biases,
        "fp32_bytes": 4 * packed.spec.n_params,
        "activations": {name: m.activations for name, m in matrices.items()},
        "weights_error": errors,
        "guard": {name: {"error": d.error, "reason": d.reason} for name, d in decisions.items()},
        "notes": [*notes, *_short(packed)],
    }
    if inputs is not None:
        x = inputs[torch.isfinite(inputs).all(1)][:_ERROR_TOKENS]
        floats = {n: to_float32(v) for n, v in own.items()}
        truth = torch_ops.forward(x, Weights(own.spec, **floats))
        row["output_error"] = relative_error(torch_ops.forward(x, torch_ops.dequantized(packed, x.dtype)), truth)
    return row


def _short(packed: Weights) -> list[str]:
    """Rows whose last group is not full: kept right, and said."""
    out = []
    for name in PROJECTIONS:
        matrix = getattr(packed, name)
        if not isinstance(matrix, PackedMatrix) or matrix.format not in formats.INTEGER:
            continue
        group, k = formats.group(matrix.format), matrix.shape[1]
        if group and k % group:
            out.append(f"{name}: rows of {k} in groups of {group}: the last group has {k % group}")
    return out


def fingerprint(checkpoint: Checkpoint) -> list[list[Any]]:
    """[name, bytes, time of the last change, sha256 of some of them] of the files that the checkpoint reads: to notice
    another model, which may have the same size and, unpacked from an archive, the same time."""
    paths = sorted({ref.file.path for layer in checkpoint.ffns for ref in checkpoint.refs(layer)})
    stats = [(path, path.stat()) for path in paths]
    return [[path.name, stat.st_size, stat.st_mtime_ns, _sample(path, stat.st_size)] for path, stat in stats]


def _sample(path: Path, size: int, pieces: int = 64, length: int = 4096) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for i in range(pieces):
            file.seek(size * i // pieces)
            digest.update(file.read(length))
    return digest.hexdigest()
