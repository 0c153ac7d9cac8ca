"""Folders of quantized FFNs: the layout on disk, and reading it.

Version 1. A folder with
  fanfold.json            {"fanfold_quantized": 1, "packed_layout": 1, "fanfold": the version that wrote it,
                          "format", "method", "source": the model's name, "config": its config, "calibration": the
                          text's sha256 and its tokens, or null,
                          "layers": [{"layer": 0 or "encoder.0", "file", "sha256": of the file's data, …}, …]}
  ffn-00000.safetensors   one FFN. Tensors `up`, `down`, `gate`: uint8 [bytes], in the reading order of
                          `kernels.packed`, whose LAYOUT_VERSION is "packed_layout"; `up_bias`, `gate_bias`, `down_bias`
                          float32. Metadata: "fanfold_quantized", "packed_layout", "fanfold", "layer", "sha256", "spec"
                          (JSON of `Spec.to_dict`), "matrices" (JSON, {name: {"format", "activations"}}).
The data begin on a 64-byte line, so that the kernels read the mapped file itself.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..kernels.packed import ACTIVATIONS, FORMATS, LAYOUT_VERSION, PackedMatrix, packed_bytes
from ..layout import Layout
from ..spec import Spec
from ..weights import PROJECTIONS, Weights
from . import jsonfile, safetensors
from .errors import CheckpointError, show, some
from .tensors import TensorRef

VERSION = 1
INDEX = "fanfold.json"
JOB = "job.json"  # in a folder that is not finished
_VERSIONS = {"fanfold_quantized": VERSION, "packed_layout": LAYOUT_VERSION}


@dataclass(frozen=True)
class PackedFFN:
    """One FFN of such a folder: its header checked, not yet read."""

    spec: Spec
    matrices: dict[str, dict[str, str]]  # name -> format and activations
    parts: dict[str, TensorRef]
    path: Path
    sha256: str  # what the file says of its data
    layout: Layout = field(default_factory=Layout)

    def intact(self) -> bool:
        """Whether the data are those that were written."""
        return digest(ref.raw() for ref in self.parts.values()) == self.sha256

    def read(self) -> Weights:
        """Its Weights of `PackedMatrix`: the mapped file itself, in the kernels' reading order. Raises CheckpointError
        if the data are not those that were written."""
        if not self.intact():
            raise CheckpointError(
                f"{self.path}: damaged: its data are not those of its sha256; quantize the model again"
            )
        arrays: dict[str, Any] = {}
        for name, ref in self.parts.items():
            if name in self.matrices:
                said = self.matrices[name]
                arrays[name] = PackedMatrix(said["format"], shape_of(self.spec, name), ref.raw(), said["activations"])
            else:
                arrays[name] = ref.read().contiguous()
        return Weights(self.spec, **arrays)

    read_packed = read


def digest(tensors: Iterable[Tensor]) -> str:
    """The sha256 of the bytes of tensors, one after the other."""
    made = hashlib.sha256()
    for tensor in tensors:
        made.update(tensor.detach().contiguous().view(torch.uint8).numpy().data)
    return made.hexdigest()


def shape_of(spec: Spec, name: str) -> tuple[int, int]:
    """(n_out, n_in) of the matrix called `name`."""
    return (spec.d_model, spec.d_ff) if name == "down" else (spec.d_ff, spec.d_model)


def is_quantized(path: Path) -> bool:
    """Whether the folder holds quantized FFNs. Raises CheckpointError if it was to, but is not finished."""
    if os.path.exists(path / INDEX):
        return True
    if os.path.exists(path / JOB) and any(name.startswith("ffn-") for name in os.listdir(path)):
        raise CheckpointError(f"{path}: an unfinished quantization: run the same `fanfold quantize` again to finish it")
    return False


def open_quantized(path: Path) -> tuple[dict[int | str, PackedFFN], dict[str, Any], list[str]]:
    """(the FFNs by layer, the model's config, notes). Reads headers only. Raises CheckpointError."""
    where = path / INDEX
    index = jsonfile.read(where)
    check_versions(str(where), index)
    layers, config = index.get("layers"), index.get("config")
    if not isinstance(layers, list) or not layers or not all(isinstance(entry, dict) for entry in layers):
        raise CheckpointError(f"{where}: layers is {show(layers)}, expected a list of objects")
    if not isinstance(config, dict):
        raise CheckpointError(f"{where}: config is {show(config)}, expected an object")
    ffns: dict[int | str, PackedFFN] = {}
    for entry in layers:
        layer, file = entry.get("layer"), entry.get("file")
        if type(layer) not in (int, str) or layer in ffns:
            raise CheckpointError(f"{where}: layer {show(layer)}: expected an int or a string that occurs once")
        if not isinstance(file, str) or not file.endswith(".safetensors") or set(file) & set("/\\:\0"):
            raise CheckpointError(f"{where}: layer {show(layer)} is in {show(file)}, expected a .safetensors file name")
        ffns[layer], metadata = read_part(path / file)
        if metadata["layer"] != json.dumps(layer) or metadata.get("sha256") != entry.get("sha256"):
            raise CheckpointError(f"{path / file}: is not the file that {INDEX} lists for layer {show(layer)}")
    said = (index.get("format"), index.get("method"), index.get("source"))
    return ffns, config, [f"quantized FFNs of {show(said[2])}: format {show(said[0])}, method {show(said[1])}"]


def check_versions(where: str, said: dict[str, Any]) -> None:
    """Raise CheckpointError unless the versions are those that this fanfold reads."""
    for key, version in _VERSIONS.items():
        value = said.get(key)
        if value not in (version, str(version)) or isinstance(value, bool):
            raise CheckpointError(
                f"{where}: {key} is {show(value)}, this fanfold reads {version} (written by fanfold "
                f"{show(said.get('fanfold'))}): quantize the model again, or use that fanfold"
            )


def read_part(path: Path) -> tuple[PackedFFN, dict[str, str]]:
    """(one FFN, its file's metadata) after checking every name, size and dtype. Raises CheckpointError."""
    refs, metadata = safetensors.read_described(path)
    check_versions(str(path), dict(metadata))
    try:
        spec = Spec.from_dict(jsonfile.parse(metadata.get("spec", "").encode(), f"{path}: spec"))
    except CheckpointError:
        raise
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: spec: {error}") from None
    if "layer" not in metadata:
        raise CheckpointError(f"{path}: its metadata lack the layer")
    matrices = jsonfile.parse(metadata.get("matrices", "").encode(), f"{path}: matrices")
    biases = [f"{name}_bias" for name in PROJECTIONS if getattr(spec, f"{name}_bias")]
    wanted = [name for name in PROJECTIONS if name != "gate" or spec.gated]
    if set(matrices) != set(wanted) or set(refs) != {*wanted, *biases}:
        raise CheckpointError(
            f"{path}: holds {some(refs)} and describes {some(matrices)}, expected {', '.join([*wanted, *biases])} "
            f"of {spec.describe()}"
        )
    for name in wanted:
        _check_matrix(path, name, matrices[name], spec, refs[name])
    for name in biases:
        length = spec.d_model if name == "down_bias" else spec.d_ff
        if (refs[name].format, refs[name].shape) != ("F32", (length,)):
            found = f"{refs[name].format} {list(refs[name].shape)}"
            raise CheckpointError(f"{path}: {name} is {found}, expected F32 [{length}]")
    sha256 = metadata.get("sha256", "")
    return PackedFFN(spec, matrices, {name: refs[name] for name in (*wanted, *biases)}, path, sha256), metadata


def _check_matrix(path: Path, name: str, said: Any, spec: Spec, ref: TensorRef) -> None:
    if not isinstance(said, dict) or set(said) != {"format", "activations"} or said["format"] not in FORMATS:
        known = ", ".join(FORMATS)
        raise CheckpointError(
            f"{path}: {name} is described as {show(said)}, expected activations and a format: {known}"
        )
    allowed = ACTIVATIONS if said["format"] not in ("fp32", "bf16", "fp16") else ("float",)
    if said["activations"] not in allowed:
        raise CheckpointError(f"{path}: {name} has activations {show(said['activations'])}, expected {allowed}")
    n_bytes = packed_bytes(said["format"], *shape_of(spec, name))
    if (ref.format, ref.shape) != ("U8", (n_bytes,)):
        raise CheckpointError(
            f"{path}: {name} is {ref.format} {list(ref.shape)}, expected U8 [{n_bytes}] for {said['format']} "
            f"{list(shape_of(spec, name))}"
        )
