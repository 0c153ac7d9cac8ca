"""Fanfold: the feed-forward network of Transformers, from every side.

`import fanfold` is light: torch is imported when a name that needs it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import activations, layout, reference
from .spec import Spec
from .weights import Weights

__version__ = "0.1.0"

# public name -> (module, attribute); None for the module itself
_LAZY: dict[str, tuple[str, str | None]] = {
    "cost": ("fanfold.count.cost", "cost"),
    "explain": ("fanfold.kernels.dispatch", "explain"),
    "ffn": ("fanfold.kernels.op", "ffn"),
    "find": ("fanfold.models.find", "find"),
    "load": ("fanfold.checkpoints", "load"),
    "memory": ("fanfold.memory", None),
    "nn": ("fanfold.nn", None),
    "numerics": ("fanfold.numerics", None),
    "parallel": ("fanfold.parallel", None),
    "quantize": ("fanfold.quantize", None),  # the package, which can be called
    "size": ("fanfold.count.sizing", "size"),
    "superposition": ("fanfold.superposition", None),
    "study": ("fanfold.study", None),
    "swap": ("fanfold.models.swap", "swap"),
    "unswap": ("fanfold.models.swap", "unswap"),
}

__all__ = [
    "Spec",
    "Weights",
    "activations",
    "cost",
    "explain",
    "ffn",
    "find",
    "layout",
    "load",
    "memory",
    "nn",
    "numerics",
    "parallel",
    "quantize",
    "reference",
    "size",
    "study",
    "superposition",
    "swap",
    "unswap",
]

if TYPE_CHECKING:
    from . import memory, nn, numerics, parallel, study, superposition
    from .checkpoints import load
    from .count.cost import cost
    from .count.sizing import size
    from .kernels.dispatch import explain
    from .kernels.op import ffn
    from .models.find import find
    from .models.swap import swap, unswap
    from .quantize import quantize


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'fanfold' has no attribute {name!r}; public names: {', '.join(__all__)}")
    module, attribute = _LAZY[name]
    loaded = importlib.import_module(module)
    value = loaded if attribute is None else getattr(loaded, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
