"""Plain rounding to integer codes, quick: what synthetic weights are packed from. NumPy only.

Good enough to time with, and what peers do in a comparison of speeds; `fanfold.quantize` is for weights that matter.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from .. import formats
from ..count import formats as stored

Array = np.ndarray[Any, Any]
_ROWS = 32  # rounded at a time: a piece that stays in the cache


def plain(matrix: Array, format: str) -> formats.Quantized:
    """Round `matrix` [N, K] to the codes of `format`, a name of `formats.INTEGER` or an alias of one.

    8 bits, scale = max|w| / 127;  q4_0, scale = (the w of largest |w|) / -8;  other 4-bit formats, minimum = min w and
    scale = (max w - min w) / 15; each code is the nearest one to w under the scale and minimum as they are stored.
    A group without a scale (all weights equal, or below float16's range) gets code 0 (8 for q4_0).
    Raises ValueError for a format without codes.
    """
    format = stored.get(format).name
    if format not in formats.INTEGER:
        raise ValueError(f"format {format!r} has no integer codes; known: {', '.join(formats.INTEGER)}")
    n, k = matrix.shape
    groups = formats.n_groups(format, k)
    width = stored.get(format).group or max(k, 1)
    codes = np.empty((n, k), formats.code_dtype(format))
    scale = np.empty((n, groups), np.float16 if stored.get(format).group else np.float32)
    minimum = np.empty((n, groups), np.float16) if formats.has_minimum(format) else None

    def part(start: int) -> None:
        rows = slice(start, start + _ROWS)
        w = np.asarray(matrix[rows], np.float32)
        if k < groups * width:  # the last group repeats its last weight, which moves neither of its ends
            w = np.pad(w, ((0, 0), (0, groups * width - k)), mode="edge")
        w = w.reshape(-1, groups, width)
        low, high = w.min(2), w.max(2)
        base, first, last = np.float32(0), -127, 127
        if minimum is not None:
            minimum[rows] = low
            scale[rows] = (high - low) / 15
            base, first, last = minimum[rows].astype(np.float32)[..., None], 0, 15
        elif formats.offset(format):
            scale[rows] = np.where(high > -low, high, low) / -8
            first, last = -8, 7
        else:
            scale[rows] = np.maximum(high, -low) / 127
        step = scale[rows].astype(np.float32)[..., None]
        inverse = np.divide(1, step, out=np.zeros_like(step), where=np.abs(step) > np.finfo(np.float32).tiny)
        found = np.rint((w - base) * inverse)
        np.clip(found, first, last, out=found)
        codes[rows] = (found + formats.offset(format)).reshape(-1, groups * width)[:, :k]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(part, range(0, n, _ROWS)))
    return formats.Quantized(format=format, codes=codes, scale=scale, minimum=minimum)
