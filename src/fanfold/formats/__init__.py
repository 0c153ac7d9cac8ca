"""Matrices in integer codes: what a code, a scale and a minimum mean, and how they are chosen.

`count.formats` says how each format is stored, to the byte; here its numbers are made and read. All of it in NumPy:
this is the truth that the packed kernels answer to. Codes and scales are chosen by the compiled core where there is
one, to the same result.
"""

from .blocks import GGUF, block_bytes, from_gguf_blocks, to_gguf_blocks
from .core import (
    FLOAT,
    INTEGER,
    Array,
    Quantized,
    activation_group,
    code_dtype,
    group,
    has_minimum,
    n_groups,
    offset,
    quantize_activations,
)
from .fit import SCALES, fit_groups, quantize_matrix

__all__ = [
    "FLOAT",
    "GGUF",
    "INTEGER",
    "SCALES",
    "Array",
    "Quantized",
    "activation_group",
    "block_bytes",
    "code_dtype",
    "fit_groups",
    "from_gguf_blocks",
    "group",
    "has_minimum",
    "n_groups",
    "offset",
    "quantize_activations",
    "quantize_matrix",
    "to_gguf_blocks",
]
