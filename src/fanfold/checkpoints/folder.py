"""Which files a path stands for, and the tensors in them."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import jsonfile, safetensors
from .errors import CheckpointError, show, some
from .tensors import TensorRef

_CONFIG, _SINGLE, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
_CONVERT = "can run code when it is read; convert it to safetensors (model.save_pretrained writes that)"


@dataclass
class Found:
    """The tensors that a path stands for.

    config      config.json's content, or None if there is no such file.
    named_by    the file that errors about the activation and the widths name.
    is_whole    whether the tensors are the whole model: a single file may be one shard of it.
    """

    path: Path
    refs: dict[str, TensorRef]
    config: dict[str, Any] | None
    named_by: Path
    is_whole: bool
    notes: list[str] = field(default_factory=list)


def kind_of(path: Path) -> str:
    """What the path is: folder, safetensors or gguf. Raises CheckpointError, saying what is read, for all else."""
    if os.path.isdir(path):  # os.path's tests are False, not errors, for names that no file can have
        return "folder"
    if not os.path.exists(path):
        raise CheckpointError(f"{show(str(path))}: does not exist (ff.load reads local files and downloads nothing)")
    suffix = path.suffix.lower()
    if suffix in _PICKLES:
        raise CheckpointError(f"{path}: is a pickle, which {_CONVERT}")
    if path.name.endswith(".index.json"):
        raise CheckpointError(f"{path}: is an index; pass its folder {path.parent}")
    if suffix not in (".safetensors", ".gguf"):
        raise CheckpointError(
            f"{path}: suffix {show(suffix)}; expected a .safetensors or .gguf file, or a folder with {_CONFIG} and "
            f"{_SINGLE} or {_INDEX}"
        )
    return suffix[1:]


def read_folder(path: Path) -> Found:
    """The tensors of a Hugging Face folder: of the index's files if there is an index, else of model.safetensors."""
    files = _listed(path)
    notes = []
    if _INDEX in files:
        refs, used = _read_index(path)
    elif _SINGLE in files:
        refs, used = safetensors.read_header(path / _SINGLE), {_SINGLE}
    else:
        raise CheckpointError(_nothing(path, files))
    stray = sorted(name for name in files if name.endswith(".safetensors") and name not in used)
    if stray:
        notes.append(f"not read: {some(stray)}; only {', '.join(sorted(used)[:3])}{' …' if len(used) > 3 else ''}")
    config = jsonfile.read(path / _CONFIG) if _CONFIG in files else None
    return Found(path, refs, config, path / _CONFIG if config is not None else path, True, notes)


def read_single(path: Path) -> Found:
    """The tensors of one safetensors file, with the config.json beside it if there is one."""
    beside = path.parent / _CONFIG
    config = jsonfile.read(beside) if os.path.exists(beside) else None
    return Found(path, safetensors.read_header(path), config, beside if config is not None else path, False)


def _listed(path: Path) -> set[str]:
    try:
        return set(os.listdir(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror or error}") from None


def _nothing(path: Path, files: set[str]) -> str:
    looked = f"{path}: holds no model: looked for {_SINGLE} and {_INDEX}"
    by_suffix = {s: sorted(f for f in files if Path(f).suffix.lower() in s) for s in ((".safetensors",), (".gguf",))}
    for found in by_suffix.values():
        if found:
            return f"{looked}; it has {some(found)}: pass the file itself"
    pickles = sorted(f for f in files if Path(f).suffix.lower() in _PICKLES)
    return f"{looked}; it has {some(pickles)}, a pickle, which {_CONVERT}" if pickles else looked


def _read_index(folder: Path) -> tuple[dict[str, TensorRef], set[str]]:
    """(tensors, file names) of an index; each tensor must be in the file that the index names, and in no other."""
    index = folder / _INDEX
    where = jsonfile.read(index).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise CheckpointError(
            f"{index}: weight_map is {show(where)}, expected an object of tensor names and file names"
        )
    for name, file in where.items():
        if not _is_plain(file):
            raise CheckpointError(
                f"{index}: tensor {show(name)} is in {show(file)}, expected a file name without a path"
            )
    refs: dict[str, TensorRef] = {}
    counts = Counter(where.values())
    for file in sorted(counts):
        if not os.path.exists(folder / file):
            raise CheckpointError(f"{index}: names {show(file)} for {counts[file]} tensors, but there is no such file")
        for name, ref in safetensors.read_header(folder / file).items():
            if where.get(name) != file:
                said = f"puts it into {show(where[name])}" if name in where else "does not list it"
                raise CheckpointError(f"{folder / file}: holds tensor {show(name)}, but {_INDEX} {said}")
            refs[name] = ref
    missing = [name for name in where if name not in refs]
    if missing:
        raise CheckpointError(f"{folder / where[missing[0]]}: lacks {some(missing)}, which {_INDEX} puts there")
    return refs, set(counts)


def _is_plain(file: Any) -> bool:
    # No separators at all: "../x", "/x", "C:x" and a symlinked subfolder all leave the folder. A shard may itself be
    # a symlink, for that is how the Hugging Face cache stores every file.
    return (
        isinstance(file, str) and file.endswith(".safetensors") and file.isprintable() and not set(file) & set("/\\:\0")
    )
