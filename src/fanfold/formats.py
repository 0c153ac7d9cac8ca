"""Matrices in integer codes: what a code, a scale and a minimum mean, and the plain way to choose them.

`count.formats` says how each format is stored, to the byte; here its numbers are made and read. NumPy only: this is the
truth that the packed kernels answer to. N outputs, K inputs of a matrix, G = ceil(K / group) groups of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .count import formats as stored

Array = np.ndarray[Any, Any]
INTEGER = tuple(name for name, f in stored.FORMATS.items() if f.compute == "int8")  # formats with integer codes
FLOAT = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, eq=False, kw_only=True)
class Quantized:
    """A matrix in integer codes: w[n, k] = scale[n, k // group] * (code[n, k] - offset) + minimum[n, k // group].

    format   a name of `INTEGER`; it says the group (0: one scale a row), the offset (8 for q4_0) and the codes' range.
    codes    [N, K]  int8 for 8-bit formats (-128..127), uint8 for 4-bit ones (0..15); one code an element.
    scale    [N, G]  float16; float32 [N, 1] for one scale a row ("int8").
    minimum  [N, G]  float16, for int4_g* and q4_1, else None.
    Raises ValueError if dtypes or shapes are others.
    """

    format: str
    codes: Array
    scale: Array
    minimum: Array | None = None

    def __post_init__(self) -> None:
        if self.format not in INTEGER:
            raise ValueError(f"format {self.format!r} has no integer codes; known: {', '.join(INTEGER)}")
        if self.codes.ndim != 2 or self.codes.dtype != code_dtype(self.format):
            raise ValueError(
                f"codes are {self.codes.dtype} {self.codes.shape}, expected {code_dtype(self.format)} [n_out, n_in]"
            )
        n, k = self.codes.shape
        expected = (n, n_groups(self.format, k))
        wanted = np.dtype(np.float16 if stored.get(self.format).group else np.float32)
        if self.scale.shape != expected or self.scale.dtype != wanted:
            raise ValueError(f"scale is {self.scale.dtype} {self.scale.shape}, expected {wanted} {expected}")
        if (self.minimum is not None) != has_minimum(self.format):
            raise ValueError(f"format {self.format} {'has' if has_minimum(self.format) else 'has no'} minimum")
        if self.minimum is not None and (self.minimum.shape != expected or self.minimum.dtype != np.float16):
            raise ValueError(f"minimum is {self.minimum.dtype} {self.minimum.shape}, expected float16 {expected}")

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self, dtype: Any = np.float32) -> Array:
        """The weights [N, K] as `dtype`. In float64 they are exact: codes, float16 scales and one sum."""
        spread = _spread(self.format, self.shape[1])
        w = (self.codes.astype(dtype) - offset(self.format)) * self.scale.astype(dtype)[:, spread]
        return w if self.minimum is None else w + self.minimum.astype(dtype)[:, spread]


def code_dtype(format: str) -> np.dtype[Any]:
    """dtype of one unpacked code."""
    return np.dtype(np.int8 if stored.get(format).code_bits == 8 else np.uint8)


def has_minimum(format: str) -> bool:
    """Whether a group has a minimum beside its scale."""
    return stored.get(format).group_bytes == 4


def offset(format: str) -> int:
    """What is taken off a code before it is scaled."""
    return 8 if stored.get(format).name == "q4_0" else 0


def n_groups(format: str, length: int) -> int:
    """Scales of a row of `length` weights."""
    group = stored.get(format).group
    return -(-length // group) if group else 1


def _spread(format: str, length: int) -> Array:
    """[K]: the group of each weight of a row."""
    return np.arange(length) // (stored.get(format).group or max(length, 1))


def quantize_activations(x: Array, format: str) -> tuple[Array, Array]:
    """What the kernels make of activations that meet a matrix in `format`: (codes [T, K] int8, scale [T, A] float32).

    x [T, K] float32. A group of activations is the matrix's own (128 where a row has one scale):
    scale = max|x| / 127, code = round(x / scale), ties to even.
    """
    width = activation_group(format)
    t, k = x.shape
    padded = np.zeros((t, -(-k // width) * width), np.float32)
    padded[:, :k] = x
    groups = padded.reshape(t, -1, width)
    top = np.abs(groups).max(axis=2)
    scale = (top / np.float32(127)).astype(np.float32)
    lift = np.where(top < np.float32(2.0**-64), np.float32(2.0**64), np.float32(1))  # 127 / top could overflow
    with np.errstate(divide="ignore"):
        inverse = np.where(top > 0, np.float32(127) / (top * lift), np.float32(0)).astype(np.float64)
    codes = np.rint(groups.astype(np.float64) * lift[..., None] * inverse[..., None])  # products exact, rounded once
    return codes.reshape(t, -1)[:, :k].astype(np.int8), scale


def activation_group(format: str) -> int:
    """Inputs whose activations share a scale."""
    return stored.get(format).group or 128


# ---- choosing codes ----

SCALES = ("search", "plain", "ggml")
_CHUNK = 1 << 17  # weights worked on at once: the temporaries stay in cache
_WORTH = 1 - 1e-3  # a candidate must beat the best by this much, so that rounding of float32 sums cannot make it worse


def quantize_matrix(w: Any, format: str, importance: Any = None, scales: str = "search") -> Quantized:
    """Round a matrix to nearest in `format`, its scales chosen for the least squared error.

    Each group's sum over k of importance[k] * (w[k] - (scale * (code[k] - offset) + minimum))^2 is made small: scales
    around max|w| / 127, / 8 or (max - min) / 15 are tried, each refined by least squares and rounded as it is stored
    (float16; float32 for one scale a row) before codes are picked. No group is worse than "plain" leaves it.

    w           [N, K] floats; a last group that K does not fill is fitted on the weights it has.
    importance  [K], at least 0: how much an input's error counts (its mean square, say); default: all alike.
    scales      "search"; "plain": the first of those scales, and nothing else; "ggml" (q8_0, q4_0, q4_1): the codes
                and scales that ggml's reference quantization makes, bit by bit.
    A scale below float16's range becomes the smallest that float16 has, and zeros stay zeros.
    Raises ValueError if a weight is not finite or a scale or minimum is larger than float16 (65504) can be.
    """
    form = stored.get(format)
    array, weight = _matrix(w), _importance(importance, np.shape(w))
    if form.name not in INTEGER:
        raise ValueError(f"format {format!r} has no integer codes; known: {', '.join(INTEGER)}")
    if scales not in SCALES or (scales == "ggml" and form.name not in GGUF):
        raise ValueError(
            f"scales={scales!r}: known: {', '.join(SCALES[:2])}, and ggml for {', '.join(GGUF)}; format is {format!r}"
        )
    n, k = array.shape
    groups = n_groups(form.name, k)
    width = form.group or max(k, 1)
    codes = np.empty((n, groups * width), code_dtype(form.name))
    scale = np.empty((n, groups), np.float16 if form.group else np.float32)
    minimum = np.empty_like(scale) if has_minimum(form.name) else None
    for rows, w_MG, weight_MG in _chunks(array, weight, groups, width):
        try:
            if scales == "ggml":
                found = _ggml(w_MG, form.name)
            else:
                found = fit_groups(w_MG, form.name, weight_MG, search=scales == "search")
        except _OverflowError as error:
            row, group = divmod(error.index, groups)
            first = group * width
            raise ValueError(
                f"row {rows.start + row}, inputs {first} to {min(first + width, k) - 1}: {error}"
            ) from None
        codes[rows] = found[0].reshape(-1, groups * width)
        scale[rows] = found[1].reshape(-1, groups)
        if minimum is not None:
            minimum[rows] = found[2].reshape(-1, groups)  # pyright: ignore[reportOptionalMemberAccess]
    return Quantized(format=form.name, codes=np.ascontiguousarray(codes[:, :k]), scale=scale, minimum=minimum)


def fit_groups(w: Array, format: str, weight: Array, search: bool = True) -> tuple[Array, Array, Array | None]:
    """(codes [M, g], scale [M], minimum [M] or None) of groups w [M, g] float32, squared errors weighted by `weight`.

    The scale and minimum are as they are stored. Raises ValueError if one does not fit in float16.
    """
    best = _Best(w, format, weight)
    if has_minimum(format):
        _fit_affine(best, search)
    else:
        _fit_symmetric(best, search)
    return best.codes + offset(format) if offset(format) else best.codes, best.scale, best.minimum


class _OverflowError(ValueError):
    """The scale or minimum of group `index` is too large for float16."""

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index


class _Best:
    """The best scale, minimum and codes so far of each group; codes are those without offset."""

    def __init__(self, w: Array, format: str, weight: Array) -> None:
        self.w, self.weight = w, np.broadcast_to(weight, w.shape)
        self.low, self.high = {"q4_0": (-8, 7)}.get(format, (0, 15) if has_minimum(format) else (-127, 127))
        self._dtype: Any = np.float16 if stored.get(format).group else np.float32
        self._code_dtype = np.int8 if offset(format) else code_dtype(format)
        self.minimum: Array | None = None

    def begin(self, scale: Array, minimum: Array | None) -> None:
        """Take a first candidate, whatever its error. Raises ValueError if it cannot be stored."""
        for name, value in (("scale", scale), ("minimum", minimum)):
            stored_as = self._stored(value)
            if stored_as is not None and not np.isfinite(stored_as).all():
                i = int(np.flatnonzero(~np.isfinite(stored_as))[0])
                assert value is not None
                raise _OverflowError(
                    i,
                    f"weights from {self.w[i].min():g} to {self.w[i].max():g} need a {name} of {value[i]:g}; the largest "
                    f"that {np.dtype(self._dtype)} holds is {float(np.finfo(self._dtype).max):g}: scale the matrix down",
                )
        self.scale, self.minimum, codes, self.error = self._judged(scale, minimum)
        self.codes = codes.astype(self._code_dtype)

    def offer(self, scale: Array, minimum: Array | None) -> None:
        """Take a candidate in the groups where it is better."""
        with np.errstate(all="ignore"):
            scale, minimum, codes, error = self._judged(scale, minimum)
            better = error < self.error * np.float32(_WORTH)
        self.scale = np.where(better, scale, self.scale)
        if self.minimum is not None:
            self.minimum = np.where(better, minimum, self.minimum)
        self.error = np.where(better, error, self.error)
        np.copyto(self.codes, codes, where=better[:, None], casting="unsafe")

    def pick(self, scale: Array, minimum: Array | None) -> Array:
        """The codes nearest to w, as floats: those of `scale` and `minimum` [M]."""
        shifted = self.w if minimum is None else self.w - minimum.astype(np.float32)[:, None]
        with np.errstate(all="ignore"):
            # a division, not a product with the reciprocal, which overflows for subnormal scales
            steps = shifted / scale.astype(np.float32)[:, None]
        codes = np.rint(steps, out=steps)
        np.copyto(codes, 0, where=(scale == 0)[:, None])
        return np.clip(codes, self.low, self.high, out=codes)

    def _stored(self, value: Array | None) -> Array | None:
        with np.errstate(over="ignore", invalid="ignore"):
            return None if value is None else value.astype(self._dtype)

    def _judged(self, scale: Array, minimum: Array | None) -> tuple[Array, Array | None, Array, Array]:
        tiny = np.finfo(self._dtype).smallest_subnormal
        rounded, low = self._stored(scale), self._stored(minimum)
        assert rounded is not None
        lost = (rounded == 0) & (scale != 0)
        rounded = np.where(lost, np.copysign(tiny, scale), rounded).astype(self._dtype)
        codes = self.pick(rounded, low)
        with np.errstate(all="ignore"):
            off = codes * rounded.astype(np.float32)[:, None]
            if low is not None:
                off += low.astype(np.float32)[:, None]
            off -= self.w
            error = np.einsum("mg,mg,mg->m", off, off, self.weight)
        return rounded, low, codes, error


def _fit_symmetric(best: _Best, search: bool) -> None:
    w, weight = best.w, best.weight
    at = np.abs(w).argmax(axis=1)[:, None]
    peak = np.take_along_axis(w, at, axis=1)[:, 0]  # the largest in size, with its sign
    four = best.high == 7
    best.begin(peak / np.float32(-8) if four else np.abs(peak) / np.float32(127), None)
    if not search:
        return
    steps = [-d for d in np.arange(6.8, 9.3, 0.2)] + [7.0, 7.4, 7.8] if four else [126.4, 126.7, 127.0, 127.3, 127.6]
    for step in steps:
        _refine_symmetric(best, weight, peak / np.float32(step) if four else np.abs(peak) / np.float32(step))
    _refine_symmetric(best, weight, best.scale.astype(np.float32))


def _refine_symmetric(best: _Best, weight: Array, scale: Array) -> None:
    """Offer the scale that suits the codes of `scale` best: sum(w q) / sum(q q)."""
    q = best.pick(scale, None)
    with np.errstate(all="ignore"):
        fitted = np.einsum("mg,mg,mg->m", best.w, q, weight) / np.einsum("mg,mg,mg->m", q, q, weight)
    best.offer(np.where(np.isfinite(fitted), fitted, scale), None)


def _fit_affine(best: _Best, search: bool) -> None:
    low, high = best.w.min(axis=1), best.w.max(axis=1)
    with np.errstate(over="ignore"):
        span = high - low
    best.begin(span / np.float32(15), low)
    if not search:
        return
    top = 17.6 if best.w.shape[1] > 64 else 16.8  # long groups gain from cutting off their extremes
    for steps in np.arange(14.2, top, 0.4, dtype=np.float32):
        scale = span / steps
        _refine_affine(best, scale, low + (span - 15 * scale) / 2)
    for _ in range(2):
        assert best.minimum is not None
        _refine_affine(best, best.scale.astype(np.float32), best.minimum.astype(np.float32))


def _refine_affine(best: _Best, scale: Array, minimum: Array) -> None:
    """Offer the scale and minimum that suit the codes of these best, the scale for the minimum as it is stored."""
    q = best.pick(scale, minimum)
    with np.errstate(all="ignore"):
        shifted = best.w - minimum[:, None]  # small numbers: a common offset would cancel badly
        weighted = best.weight * q
        n, s_q, s_qq = best.weight.sum(1), weighted.sum(1), np.einsum("mg,mg->m", weighted, q)
        s_w = np.einsum("mg,mg->m", best.weight, shifted)
        s_wq = np.einsum("mg,mg->m", weighted, shifted)
        fitted = (n * s_wq - s_q * s_w) / (n * s_qq - s_q * s_q)
        new = best._stored(minimum + (s_w - fitted * s_q) / n)
        assert new is not None
        new = new.astype(np.float32)
        fitted = (s_wq - (new - minimum) * s_q) / s_qq
    good = np.isfinite(fitted) & np.isfinite(new)
    best.offer(np.where(good, fitted, scale), np.where(good, new, minimum))


def _chunks(w: Array, weight: Array | None, groups: int, width: int) -> Iterator[tuple[slice, Array, Array]]:
    """(rows, their groups [M, g], the weight of each element) some rows at a time."""
    n, k = w.shape
    short = groups * width - k
    one = np.ones(k, np.float32) if weight is None else weight
    spread = np.pad(one, (0, short)).reshape(1, groups, width)
    step = max(1, _CHUNK // max(groups * width, 1))
    for first in range(0, n if k else 0, step):
        part = w[first : first + step].astype(np.float32)
        if short:  # filled up with its last weight, which counts nothing there and moves neither maximum nor minimum
            part = np.pad(part, ((0, 0), (0, short)), mode="edge")
        m = part.shape[0]
        yield (
            slice(first, first + m),
            part.reshape(m * groups, width),
            np.broadcast_to(spread, (m, groups, width)).reshape(m * groups, width),
        )


def _matrix(w: Any) -> Array:
    array = np.asarray(w)
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.floating):
        raise ValueError(f"the matrix is {array.dtype} {array.shape}, expected floats [n_out, n_in]")
    with np.errstate(over="ignore"):
        bad = ~np.isfinite(array.astype(np.float32))
    if bad.any():
        row, column = (int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"weight [{row}, {column}] is {array[row, column]}: {int(bad.sum())} of {array.size} weights are not finite "
            "in float32, and integer codes cannot hold them"
        )
    return array


def _importance(importance: Any, shape: tuple[int, ...]) -> Array | None:
    if importance is None:
        return None
    weight = np.asarray(importance, np.float32)
    if weight.shape != shape[1:] or not np.isfinite(weight).all() or (weight < 0).any():
        raise ValueError(f"importance has shape {weight.shape}, expected {shape[1:]} finite numbers of at least 0")
    return weight


# ---- GGUF's blocks ----

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
            f"{format} blocks of a [{n}, {k}] matrix: {raw.size} bytes of {raw.dtype}, expected rows of whole blocks of "
            f"32 weights, {size} bytes each: {n * k / 32 * size:g} bytes"
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


def _ggml(w: Array, format: str) -> tuple[Array, Array, Array | None]:
    """What ggml's reference makes of blocks w [M, 32]: codes from the scale before it is rounded, halves away from 0."""
    peak = np.take_along_axis(w, np.abs(w).argmax(axis=1)[:, None], axis=1)
    low = w.min(axis=1, keepdims=True)
    d = {"q8_0": np.abs(peak) / 127, "q4_0": peak / -8, "q4_1": (w.max(axis=1, keepdims=True) - low) / 15}[format]
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
