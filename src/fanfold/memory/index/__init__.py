"""What triggers each channel, over any amount of text: `memory.index(model, tokenizer, texts, directory)`, kept in one
SQLite file; `Index.open(directory)` answers questions about it, and `geva` measures what Geva et al. 2021 measured.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from .build import index
from .geva import geva
from .query import Index

__all__ = ["Index", "geva", "index"]


class _Callable(types.ModuleType):
    """Importing one of this package's modules makes the package the attribute `memory.index`, where the function of the
    same name belongs: so the package answers to a call as that function does."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return index(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
