"""Rounding a matrix to integer codes: which scale, which minimum, and then which codes.

The compiled core does it where there is one (csrc/fit.h), NumPy elsewhere, with the same codes and scales: both sum a
group from its first weight to its last and round every operation.
N outputs, K inputs of a matrix; M groups of g weights, all rows' groups in one list.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..count import formats as stored
from .blocks import GGUF, TooLargeError, check_fits, reference
from .core import INTEGER, Array, Quantized, code_dtype, has_minimum, n_groups, offset

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
    if form.name not in INTEGER:
        raise ValueError(f"format {format!r} has no integer codes; known: {', '.join(INTEGER)}")
    if scales not in SCALES or (scales == "ggml" and form.name not in GGUF):
        raise ValueError(
            f"scales={scales!r}: known: {', '.join(SCALES[:2])}, and ggml for {', '.join(GGUF)}; format is {format!r}"
        )
    array, weight = _matrix(w), _importance(importance, np.shape(w))
    if scales == "ggml" and array.shape[1] % 32:
        raise ValueError(f"rows of {array.shape[1]} weights are not whole blocks of 32, which ggml's rounding needs")
    found = None
    if scales != "ggml":
        found = _compiled(array, form.name, weight, scales == "search")
    return found or _in_numpy(array, form.name, weight, scales)


def fit_groups(w: Array, format: str, weight: Array) -> tuple[Array, Array | None]:
    """(scale [M], minimum [M] or None), as they are stored, of groups w [M, g] float32, g at most the format's group.

    weight  [g]: how much each weight's squared error counts. Raises ValueError if a scale does not fit in float16.
    """
    if w.shape[1] > stored.get(format).group:
        raise ValueError(f"groups of {w.shape[1]} weights, expected at most {stored.get(format).group}")
    q = _compiled(w, format, weight, True) or _in_numpy(w, format, weight, "search")
    return q.scale[:, 0], None if q.minimum is None else q.minimum[:, 0]


class _Search:
    """The codes of a format, and the scales that are tried.

    The first is a group's range / plain; then range / step for each of `steps`, refined by least squares, and the best
    one so far refined `again` times. The range is max - min with a minimum, else max|w|, with its sign for q4_0.
    """

    def __init__(self, format: str, width: int, search: bool) -> None:
        self.format, self.minimum, self.signed = format, has_minimum(format), format == "q4_0"
        self.low, self.high = (-8, 7) if self.signed else (0, 15) if self.minimum else (-127, 127)
        self.plain = -8.0 if self.signed else float(self.high)
        self.steps, self.again = np.zeros(0, np.float32), 0
        if search and self.minimum:
            top = 17.6 if width > 64 else 16.8  # long groups gain from cutting off their extremes
            self.steps, self.again = np.arange(14.2, top, 0.4, dtype=np.float32), 2
        elif search:
            eights = [*(-d for d in np.arange(6.8, 9.3, 0.2)), 7.0, 7.4, 7.8]
            steps = eights if self.signed else [126.4, 126.7, 127.0, 127.3, 127.6]
            self.steps, self.again = np.asarray(steps, np.float32), 1


def _empty(format: str, n: int, k: int) -> tuple[Array, Array, Array | None]:
    """Codes [N, K], scales [N, G] and minima or None, not filled in."""
    scale = np.zeros((n, n_groups(format, k)), np.float16 if stored.get(format).group else np.float32)
    return np.empty((n, k), code_dtype(format)), scale, np.zeros_like(scale) if has_minimum(format) else None


def _compiled(w: Array, format: str, weight: Array | None, search: bool) -> Quantized | None:
    """By the compiled core; None where there is none, or where a scale cannot be stored: NumPy's way says which."""
    from ..kernels import cpu  # brings torch

    if cpu.available() is not None:
        return None
    n, k = w.shape
    rows = np.ascontiguousarray(w, np.float32)
    weights = np.ones(k, np.float32) if weight is None else np.ascontiguousarray(weight, np.float32)
    codes, scale, minimum = _empty(format, n, k)
    width = stored.get(format).group or max(k, 1)
    how = _Search(format, width, search)
    cpu.search_scales(
        rows, width, weights, (how.low, how.high, offset(format), how.signed, how.plain), how.steps, how.again,
        codes, scale, minimum,
    )  # fmt: skip
    if not np.isfinite(scale).all() or (minimum is not None and not np.isfinite(minimum).all()):
        return None
    return Quantized(format=format, codes=codes, scale=scale, minimum=minimum)


def _in_numpy(w: Array, format: str, weight: Array | None, scales: str) -> Quantized:
    n, k = w.shape
    codes, scale, minimum = _empty(format, n, k)
    groups, width = scale.shape[1], stored.get(format).group or max(k, 1)
    how = _Search(format, width, scales == "search")
    for rows, w_MG, weight_MG in _chunks(w, weight, groups, width):
        try:
            found = reference(w_MG, format) if scales == "ggml" else _fit(w_MG, how, weight_MG)
        except TooLargeError as error:
            row, group = divmod(error.index, groups)
            first = group * width
            raise ValueError(
                f"row {rows.start + row}, inputs {first} to {min(first + width, k) - 1}: {error}"
            ) from None
        codes[rows], scale[rows] = found[0].reshape(-1, groups * width)[:, :k], found[1].reshape(-1, groups)
        if minimum is not None and found[2] is not None:
            minimum[rows] = found[2].reshape(-1, groups)
    return Quantized(format=format, codes=codes, scale=scale, minimum=minimum)


def _fit(w: Array, how: _Search, weight: Array) -> tuple[Array, Array, Array | None]:
    """(codes [M, g], scale [M], minimum [M] or None) of groups w [M, g] float32, weighted by `weight` [M, g]."""
    best = _Best(w, how, weight)
    if how.minimum:
        _fit_affine(best, how)
    else:
        _fit_symmetric(best, how)
    return best.codes + offset(how.format) if offset(how.format) else best.codes, best.scale, best.minimum


def _sum(of: Array) -> Array:
    """[M, g] -> [M], from the first to the last: np.sum's order depends on the layout."""
    return np.add.accumulate(of, axis=1)[:, -1]


class _Best:
    """The best scale, minimum and codes so far of each group; codes are those without offset."""

    def __init__(self, w: Array, how: _Search, weight: Array) -> None:
        self.w, self.weight, self.low, self.high = w, weight, how.low, how.high
        self._dtype: Any = np.float16 if stored.get(how.format).group else np.float32
        self._code_dtype = np.int8 if offset(how.format) else code_dtype(how.format)
        self.minimum: Array | None = None

    def begin(self, scale: Array, minimum: Array | None) -> None:
        """Take a first candidate, whatever its error. Raises ValueError if it cannot be stored."""
        for name, value in (("scale", scale), ("minimum", minimum)):
            if value is not None:
                check_fits(self.w, name, value, self._dtype)
        self.scale, self.minimum, codes, self.error = self._judged(scale, minimum)
        self.codes = codes.astype(self._code_dtype)

    def offer(self, scale: Array, minimum: Array | None) -> None:
        """Take a candidate in the groups where it is better."""
        with np.errstate(all="ignore"):
            scale, minimum, codes, error = self._judged(scale, minimum)
            better = error < self.error * np.float32(_WORTH)
        self.scale = np.where(better, scale, self.scale)
        if self.minimum is not None and minimum is not None:
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
            error = _sum(off * off * self.weight)
        return rounded, low, codes, error


def _fit_symmetric(best: _Best, how: _Search) -> None:
    at = np.abs(best.w).argmax(axis=1)[:, None]
    peak = np.take_along_axis(best.w, at, axis=1)[:, 0]  # the largest in size
    peak = peak if how.signed else np.abs(peak)
    best.begin(peak / np.float32(how.plain), None)
    for step in how.steps:
        _refine_symmetric(best, peak / step)
    for _ in range(how.again):
        _refine_symmetric(best, best.scale.astype(np.float32))


def _refine_symmetric(best: _Best, scale: Array) -> None:
    """Offer the scale that suits the codes of `scale` best: sum(w q) / sum(q q)."""
    q = best.pick(scale, None)
    with np.errstate(all="ignore"):
        fitted = _sum(best.w * q * best.weight) / _sum(q * q * best.weight)
    best.offer(np.where(np.isfinite(fitted), fitted, scale), None)


def _fit_affine(best: _Best, how: _Search) -> None:
    low, high = best.w.min(axis=1), best.w.max(axis=1)
    with np.errstate(over="ignore"):
        span = high - low
    best.begin(span / np.float32(how.plain), low)
    for step in how.steps:
        scale = span / step
        _refine_affine(best, scale, low + (span - how.high * scale) / 2)
    for _ in range(how.again):
        assert best.minimum is not None
        _refine_affine(best, best.scale.astype(np.float32), best.minimum.astype(np.float32))


def _refine_affine(best: _Best, scale: Array, minimum: Array) -> None:
    """Offer the scale and minimum that suit the codes of these best, the scale for the minimum as it is stored."""
    q = best.pick(scale, minimum)
    with np.errstate(all="ignore"):
        shifted = best.w - minimum[:, None]  # small numbers: a common offset would cancel badly
        weighted = best.weight * q
        n, s_q, s_qq = _sum(best.weight), _sum(weighted), _sum(weighted * q)
        s_w, s_wq = _sum(best.weight * shifted), _sum(weighted * shifted)
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
        said = f"{int(bad.sum())} of {array.size} weights are not finite, and integer codes cannot hold them"
        raise ValueError(f"weight [{row}, {column}] is {array[row, column]}: {said}")
    return array


def _importance(importance: Any, shape: tuple[int, ...]) -> Array | None:
    if importance is None:
        return None
    weight = np.asarray(importance, np.float32)
    if weight.shape != shape[1:] or not np.isfinite(weight).all() or (weight < 0).any():
        raise ValueError(f"importance has shape {weight.shape}, expected {shape[1:]} finite numbers of at least 0")
    return weight
