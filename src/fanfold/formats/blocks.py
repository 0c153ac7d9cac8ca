"""GGUF's blocks Q8_0, Q4_0 and Q4_1: their bytes, read and written without rounding, and ggml's way to fill them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..count import formats as stored
from .core import Array, Quantized, code_dtype

GGUF = ("q8_0", "q4_0", "q4_1")


def block_bytes(format: str) -> int:
    """Bytes of one block of 32 weights. Raises ValueError if `format` is not one of GGUF's."""
    if format not in GGUF:
        raise ValueError(f"format {format!r} has no GGUF blocks; known: {', '.join(GGUF)}")
    return stored.get(format).matrix_bytes(1, 32)


def from_gguf_blocks(data: Any, format: str, shape: tuple[int, int]) -> Quantized:
    """The matrix that GGUF's blocks hold, code by code and scale by scale: nothing is rounded again.

    data   bytes or uint8 array: N rows of K/32 blocks: scale, minimum (q4_1), codes; of 4-bit codes the low halves are
           weights 0 to 15, the high halves 16 to 31. https://github.com/ggml-org/ggml src/ggml-common.h
    shape  (N, K). Raises ValueError if K is not whole blocks or the data are not as long as that.
    """
    n, k = shape
    size = block_bytes(format)
    raw = np.frombuffer(data, np.uint8) if not isinstance(data, np.ndarray) else data.reshape(-1)
    if k % 32 or raw.dtype != np.uint8 or raw.size != n * (k // 32) * size:
        raise ValueError(
            f"{format} blocks of a [{n}, {k}] matrix: {raw.size} bytes of {raw.dtype}, expected rows of whole blocks "
            f"of 32 weights, {size} bytes each: {n * k / 32 * size:g} bytes"
        )
    blocks = raw.reshape(n, k // 32, size)
    head = stored.get(format).group_bytes
    tables = np.ascontiguousarray(blocks[..., :head]).view(np.float16)
    body = blocks[..., head:]
    codes = body if head + 32 == size else np.concatenate([body & 15, body >> 4], axis=-1)
    return Quantized(
        format=format,
        codes=np.ascontiguousarray(codes.reshape(n, k)).view(code_dtype(format)),
        scale=np.ascontiguousarray(tables[..., 0]),
        minimum=np.ascontiguousarray(tables[..., 1]) if head == 4 else None,
    )


def to_gguf_blocks(q: Quantized) -> bytes:
    """The inverse of `from_gguf_blocks`. Raises ValueError for another format or a width that is not whole blocks."""
    size = block_bytes(q.format)
    n, k = q.shape
    if k % 32:
        raise ValueError(f"rows of {k} weights are not whole blocks of 32: GGUF has no short last block")
    blocks = np.empty((n, k // 32, size), np.uint8)
    tables = [t for t in (q.scale, q.minimum) if t is not None]
    head = 2 * len(tables)
    blocks[..., :head] = np.ascontiguousarray(np.stack(tables, axis=-1)).view(np.uint8).reshape(n, k // 32, head)
    codes = np.ascontiguousarray(q.codes).view(np.uint8).reshape(n, k // 32, 32)
    blocks[..., head:] = codes if head + 32 == size else codes[..., :16] | (codes[..., 16:] << 4)
    return blocks.tobytes()


class TooLargeError(ValueError):
    """The scale or minimum of group `index` is larger than its dtype."""

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index


def check_fits(w: Array, name: str, value: Array, dtype: Any) -> None:
    """Raise TooLargeError if a scale or minimum [M] of groups w [M, g] is infinite as `dtype`."""
    with np.errstate(over="ignore", invalid="ignore"):
        lost = np.flatnonzero(~np.isfinite(value.astype(dtype)))
    if lost.size:
        i, most = int(lost[0]), float(np.finfo(dtype).max)
        raise TooLargeError(
            i,
            f"weights from {w[i].min():g} to {w[i].max():g} need a {name} of {value[i]:g}; the largest in "
            f"{np.dtype(dtype)} is {most:g}: scale the matrix down",
        )


def reference(w: Array, format: str) -> tuple[Array, Array, Array | None]:
    """(codes, scale, minimum) that ggml's reference makes of blocks w [M, 32].

    The codes come from the scale before it is rounded, halves away from zero. Raises TooLargeError.
    """
    peak = np.take_along_axis(w, np.abs(w).argmax(axis=1)[:, None], axis=1)
    low = w.min(axis=1, keepdims=True)
    d = {"q8_0": np.abs(peak) / 127, "q4_0": peak / -8, "q4_1": (w.max(axis=1, keepdims=True) - low) / 15}[format]
    check_fits(w, "scale", d[:, 0], np.float16)
    check_fits(w, "minimum", low[:, 0], np.float16)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.where(d == 0, 0, 1 / d).astype(np.float32)
        if format == "q8_0":
            steps = w * inverse
            codes = np.copysign(np.floor(np.abs(steps) + np.float32(0.5)), steps)
        elif format == "q4_0":
            codes = np.trunc(w * inverse + np.float32(8.5)).clip(0, 15)
        else:
            codes = np.trunc((w - low) * inverse + np.float32(0.5)).clip(0, 15)
    scale, minimum = d[:, 0].astype(np.float16), low[:, 0].astype(np.float16)
    return codes.astype(code_dtype(format)), scale, minimum if format == "q4_1" else None
