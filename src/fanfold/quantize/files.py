"""Writing folders of quantized FFNs: part by part, each complete or not there; `checkpoints.quantized` says what is in.

While the work goes on the folder is OUT.partial, with the job's description in it; when every layer is there it is
renamed to OUT. So OUT is whole or absent, and work that was stopped goes on where it was.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoints import CheckpointError, quantized
from ..kernels.packed import ALIGN, LAYOUT_VERSION, PackedMatrix
from ..weights import Weights

_DTYPES = {torch.uint8: "U8", torch.float32: "F32"}


class Folder:
    """The folder OUT while it is being written. Use as a context manager: it holds a lock.

    job  what identifies the work: every input that the result depends on, as JSON values.
    Raises ValueError if OUT exists, if OUT.partial is another job's, or if somebody else is writing it.
    """

    def __init__(self, out: Path, job: dict[str, Any], version: str) -> None:
        self.out, self.job, self.version = out, job, version
        self.partial = out.with_name(out.name + ".partial")
        if out.exists() or out.is_symlink():
            raise ValueError(f"{out} exists: give another place with -o, or remove it")
        if not out.parent.is_dir():
            raise ValueError(f"{out.parent} is not a folder: -o names the folder to make, in one that exists")

    def __enter__(self) -> Folder:
        self.partial.mkdir(exist_ok=True)
        path = self.partial / quantized.JOB
        self._lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ValueError(f"{self.partial} is being written by another process") from None
        text = json.dumps(self.job, sort_keys=True).encode()
        before = os.pread(self._lock, 1 << 24, 0)
        if before and before != text and any(p.name.startswith("ffn-") for p in self.partial.iterdir()):
            os.close(self._lock)
            raise ValueError(
                f"{self.partial} holds the unfinished work of another job ({_difference(before, self.job)}): "
                "finish that one, remove the folder, or give another place with -o"
            )
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, text, 0)
        os.fsync(self._lock)
        return self

    def __exit__(self, *_: Any) -> None:
        os.close(self._lock)

    def place(self, index: int) -> Path:
        return self.partial / f"ffn-{index:05d}.safetensors"

    def finished(self, index: int, layer: int | str) -> tuple[Weights, dict[str, str]] | None:
        """(weights, metadata) of a part that an earlier run finished; None if there is none, or a damaged one."""
        path = self.place(index)
        if not path.exists():
            return None
        try:
            ffn, metadata = quantized.read_part(path)
        except CheckpointError:
            return None
        if metadata["layer"] != json.dumps(layer) or not ffn.intact():
            return None
        return ffn.read(), metadata

    def write(self, index: int, layer: int | str, weights: Weights, more: dict[str, str]) -> dict[str, str]:
        """Write one part -> its metadata. It is there whole, or not at all."""
        tensors = {name: value.data if isinstance(value, PackedMatrix) else value for name, value in weights.items()}
        matrices = {
            name: {"format": value.format, "activations": value.activations}
            for name, value in weights.items()
            if isinstance(value, PackedMatrix)
        }
        metadata = {
            **self.versions(str),
            "layer": json.dumps(layer),
            "matrices": json.dumps(matrices),
            "sha256": quantized.digest(tensors.values()),
            "spec": weights.spec.to_json(),
            **more,
        }
        header = _header(tensors, metadata)
        _write(self.place(index), [header, *(_bytes(t) for t in tensors.values())])
        return metadata

    def finish(self, index: dict[str, Any]) -> None:
        """Write the index and give the folder its name."""
        document = {**self.versions(int), **index}
        _write(self.partial / quantized.INDEX, [json.dumps(document, indent=1, ensure_ascii=False).encode() + b"\n"])
        os.rename(self.partial, self.out)
        os.remove(self.out / quantized.JOB)
        for folder in (self.out, self.out.parent):
            _sync(folder)

    def versions(self, kind: type) -> dict[str, Any]:
        return {
            "fanfold_quantized": kind(quantized.VERSION),
            "packed_layout": kind(LAYOUT_VERSION),
            "fanfold": self.version,
        }


def _difference(before: bytes, job: dict[str, Any]) -> str:
    try:
        old = json.loads(before)
        keys = [k for k in sorted({*old, *job}) if old.get(k) != job.get(k)]
        return "; ".join(f"{k}: {str(old.get(k))[:60]} there, {str(job.get(k))[:60]} here" for k in keys)
    except (ValueError, TypeError, AttributeError):
        return "its description is damaged"


def _header(tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    """A safetensors header, filled up with spaces so that the data begin on a 64-byte line."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    return struct.pack("<Q", len(text)) + text


def _bytes(tensor: Tensor) -> Any:
    """The tensor's bytes, without a copy."""
    return tensor.detach().contiguous().view(torch.uint8).numpy().data


def _write(path: Path, parts: list[Any]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
