"""`Quantized`: a matrix in integer codes, and the activations that it meets.

N outputs, K inputs of a matrix, G = ceil(K / group) groups of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..count import formats as stored

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

    x [T, K] float32. A group of activations is the matrix's own (256 where a row has one scale):
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


def group(format: str) -> int:
    """Weights of a row that share a scale; 0: all of them."""
    return stored.get(format).group


def activation_group(format: str) -> int:
    """Inputs whose activations share a scale."""
    return stored.get(format).group or 256
