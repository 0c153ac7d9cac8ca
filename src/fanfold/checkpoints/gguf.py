"""The header of a GGUF file, checked before anything else is believed.

Format: "GGUF", version, tensor count, key count; the keys with typed values; the tensors' names, sizes, types and
offsets; padding to `general.alignment`; the data. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
The gguf package's own reader trusts every length in the file, so only its tables and its decoding are used.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from .errors import CheckpointError, show
from .tensors import MappedFile, TensorRef, check_places

_VERSIONS = (2, 3)
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_KEPT = 4096  # longest numeric array that is kept as metadata: widths by layer are, a vocabulary's scores are not
_MIN_KEY, _MIN_TENSOR = 8 + 4 + 1, 8 + 4 + 4 + 8  # bytes of the shortest entry: bounds the counts by the file size


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, TensorRef]]:
    """(metadata, tensors by name). Reads the header only.

    metadata holds scalars, strings and numeric arrays of up to 4096 values; longer arrays and arrays of strings
    (the tokenizer) are checked and skipped. Raises CheckpointError on anything that the format does not allow.
    """
    cursor = _Cursor(MappedFile(path))
    n_tensors, n_keys = _preamble(cursor)
    metadata: dict[str, Any] = {}
    for _ in range(n_keys):
        key = cursor.string("a key")
        if key in metadata:
            raise CheckpointError(f"{path}: the key {show(key)} occurs twice")
        metadata[key] = _value(cursor, key, cursor.number("<I", f"the type of {show(key)}"))
    entries = [_entry(cursor) for _ in range(n_tensors)]
    align = _alignment(path, metadata)
    begin = -(-cursor.position // align) * align
    refs: dict[str, TensorRef] = {}
    for entry in entries:
        ref = _tensor(cursor.file, begin, align, *entry)
        if ref.name in refs:
            raise CheckpointError(f"{path}: tensor {show(ref.name)} occurs twice")
        refs[ref.name] = ref
    if refs:
        check_places(path, list(refs.values()), begin, cursor.file.size, align)
    return {k: v for k, v in metadata.items() if v is not None}, refs


class _Cursor:
    """Reads forward through the header; every step is checked against the file's size."""

    def __init__(self, file: MappedFile) -> None:
        self.file, self.position = file, 0

    def take(self, n_bytes: int, what: str) -> bytes:
        self.skip(n_bytes, what)
        return self.file.data[self.position - n_bytes : self.position]

    def skip(self, n_bytes: int, what: str) -> None:
        left = self.file.size - self.position
        if n_bytes > left:
            raise CheckpointError(f"{self.file.path}: {what} needs {n_bytes} bytes, the file has {left} left")
        self.position += n_bytes

    def number(self, form: str, what: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form), what))[0]

    def string(self, what: str) -> str:
        raw = self.take(self.number("<Q", f"the length of {what}"), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.file.path}: {what} is {show(raw)}, expected UTF-8") from None


def _preamble(cursor: _Cursor) -> tuple[int, int]:
    path, size = cursor.file.path, cursor.file.size
    magic = cursor.take(min(4, size), "the magic number")
    if magic != b"GGUF":
        raise CheckpointError(f"{path}: begins with {show(magic)}, expected b'GGUF'")
    version = cursor.number("<I", "the version")
    if version & 0xFFFF == 0 and version:
        raise CheckpointError(f"{path}: is big-endian; expected a little-endian GGUF file: convert it")
    if version not in _VERSIONS:
        raise CheckpointError(f"{path}: GGUF version {version}, expected one of {_VERSIONS}")
    n_tensors, n_keys = cursor.number("<Q", "the tensor count"), cursor.number("<Q", "the key count")
    left = size - cursor.position
    if n_tensors * _MIN_TENSOR + n_keys * _MIN_KEY > left:
        raise CheckpointError(
            f"{path}: announces {n_tensors} tensors and {n_keys} keys, but only {left} bytes follow: "
            "truncated or damaged"
        )
    return n_tensors, n_keys


def _value(cursor: _Cursor, key: str, kind: int) -> Any:
    """The value of a key; None for an array that is skipped."""
    what, path = f"the value of {show(key)}", cursor.file.path
    if kind == _STRING:
        return cursor.string(what)
    if kind in _SCALARS:
        return cursor.number(_SCALARS[kind], what)
    if kind != _ARRAY:
        raise CheckpointError(f"{path}: the key {show(key)} has type {kind}, which is not known")
    item, count = cursor.number("<I", what), cursor.number("<Q", what)
    if item == _STRING:
        if count * 8 > cursor.file.size - cursor.position:
            raise CheckpointError(f"{path}: {what} announces {count} strings, more than the file can hold")
        for _ in range(count):
            cursor.skip(cursor.number("<Q", what), what)
        return None
    if item not in _SCALARS:
        raise CheckpointError(f"{path}: {what} is an array of type {item}, which is not read")
    size = struct.calcsize(_SCALARS[item])
    if count > _KEPT:
        cursor.skip(count * size, what)
        return None
    raw = cursor.take(count * size, what)
    return [v for (v,) in struct.iter_unpack(_SCALARS[item], raw)]


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape outermost first, type, offset) of one tensor."""
    name = cursor.string("a tensor's name")
    what = f"the entry of tensor {show(name)}"
    n_dims = cursor.number("<I", what)
    if n_dims > 4:
        raise CheckpointError(f"{cursor.file.path}: tensor {show(name)} has {n_dims} dimensions, expected at most 4")
    sizes = [cursor.number("<Q", what) for _ in range(n_dims)]
    # GGUF lists the innermost size first.
    return name, tuple(reversed(sizes)), cursor.number("<I", what), cursor.number("<Q", what)


def _alignment(path: Path, metadata: dict[str, Any]) -> int:
    align = metadata.get("general.alignment", 32)
    # 24 is legal by the format's text and refused by some readers; it is used as it stands, never replaced.
    good = type(align) is int and align > 0 and (align % 8 == 0 or align & (align - 1) == 0)
    if not good:
        raise CheckpointError(f"{path}: general.alignment={show(align)}, expected a positive multiple of 8")
    return align


def _tensor(
    file: MappedFile, begin: int, align: int, name: str, shape: tuple[int, ...], kind: int, offset: int
) -> TensorRef:
    where = f"{file.path}: tensor {show(name)}"
    try:
        form = GGMLQuantizationType(kind)
    except ValueError:
        raise CheckpointError(
            f"{where}: type {kind} is not known to the gguf package: its size cannot be checked"
        ) from None
    block, block_bytes = GGML_QUANT_SIZES[form]
    count = 1
    for size in shape:
        count *= size
    if (shape[-1] if shape else 1) % block:
        raise CheckpointError(f"{where}: rows of {shape[-1] if shape else 1} weights, expected a multiple of {block}")
    if offset % align:
        raise CheckpointError(f"{where}: offset {offset}, expected a multiple of the alignment {align}")
    n_bytes = count // block * block_bytes
    if begin + offset + n_bytes > file.size:
        raise CheckpointError(
            f"{where}: {form.name} {list(shape)} needs bytes {begin + offset} to {begin + offset + n_bytes}, "
            f"the file has {file.size}"
        )
    return TensorRef(name, form.name, shape, file, begin + offset, n_bytes)
