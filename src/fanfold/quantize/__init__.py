"""Weights in fewer bits: `fanfold.quantize(weights, format="int4", method="rtn" | "gptq", inputs=…)`.

Round-to-nearest with error-minimising scales or GPTQ on the FFN's own inputs; the outlier guard, which says where
activations in int8 would cost too much; and files of quantized FFNs, which `fanfold.load` reads.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from .ffn import quantize

__all__ = ["quantize"]


class _Callable(types.ModuleType):
    """Importing `fanfold.quantize.guard` makes this package the attribute `fanfold.quantize`, where the function of
    the same name belongs: so the package answers to a call as that function does."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return quantize(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
