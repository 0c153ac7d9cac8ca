"""The header of a safetensors file, checked before anything else is believed.

Format: 8 bytes, the header's length N (little endian); N bytes of JSON {name: {dtype, shape, data_offsets}}; the data,
from byte 8 + N on, aligned or not. https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from .errors import CheckpointError, show
from .jsonfile import parse
from .tensors import MappedFile, TensorRef, check_places

_MAX_HEADER = 100_000_000  # bytes; the limit of the reference implementation
_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


def read_header(path: Path) -> dict[str, TensorRef]:
    """Every tensor of the file by name. Reads the header only. Raises CheckpointError as `read_described` does."""
    return read_described(path)[0]


def read_described(path: Path) -> tuple[dict[str, TensorRef], dict[str, str]]:
    """(every tensor of the file by name, its metadata). Reads the header only.

    Raises CheckpointError on anything that the format does not allow: a length beyond the file or 100 MB, bad UTF-8
    or JSON, duplicate names, unknown dtypes, wrong shapes or offsets, overlaps, holes, trailing bytes.
    """
    file = MappedFile(path)
    if file.size < 8:
        raise CheckpointError(f"{path}: has {file.size} bytes; a safetensors file has 8 and a header at least")
    (length,) = struct.unpack("<Q", file.data[:8])
    if length > _MAX_HEADER or 8 + length > file.size:
        room = min(_MAX_HEADER, file.size - 8)
        raise CheckpointError(
            f"{path}: header length {length}, expected at most {room} (the file has {file.size} bytes)"
        )
    text = file.data[8 : 8 + length]
    if text[:1] != b"{":
        raise CheckpointError(f"{path}: the header begins with {show(text[:1])}, expected a JSON object")
    header = parse(text, f"{path}: header")
    metadata = header.pop("__metadata__", None) or {}
    _check_metadata(path, metadata)
    refs = {name: _tensor(file, name, entry, 8 + length) for name, entry in header.items()}
    check_places(path, list(refs.values()), 8 + length, file.size)
    return refs, metadata


def _check_metadata(path: Path, metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ is {show(metadata)}, expected an object of strings")


def _tensor(file: MappedFile, name: str, entry: Any, begin: int) -> TensorRef:
    where = f"{file.path}: tensor {show(name)}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        raise CheckpointError(f"{where}: {show(entry)}, expected an object with dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise CheckpointError(f"{where}: dtype {show(dtype)} is not known; known: {', '.join(_BITS)}")
    if not _is_sizes(shape):
        raise CheckpointError(f"{where}: shape {show(shape)}, expected a list of ints from 0 to 2^63 - 1")
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where}: data_offsets {show(offsets)}, expected [begin, end]")
    first, last = offsets
    if not first <= last <= file.size - begin:
        raise CheckpointError(
            f"{where}: data_offsets {show(offsets)}, expected 0 <= begin <= end <= {file.size - begin}"
        )
    bits = _BITS[dtype]
    for size in sorted(shape):  # a zero comes first and ends the growth; too many or too large sizes stop at 2^63
        bits *= size
        if bits >= 2**66:
            raise CheckpointError(f"{where}: shape {show(shape)} has more than 2^63 bytes")
        if bits == 0:
            break
    if bits != 8 * (last - first):
        raise CheckpointError(
            f"{where}: data_offsets {offsets} hold {last - first} bytes, expected {bits / 8:g} "
            f"for {dtype} {show(shape)}"
        )
    return TensorRef(name, dtype, tuple(shape), file, begin + first, last - first)


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**63 for v in value)
