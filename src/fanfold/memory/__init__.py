"""The key-value memory view of a model's FFNs: read it, index what triggers it, edit it.

y = Σ coefficient_i · value_i + bias: a channel detects a pattern with its key and writes its value into the residual.
Source: Geva et al. 2021, arXiv:2012.14913.
"""

from __future__ import annotations

# Functions that share their module's name: imported here at once, so that the names stand for the functions. `index` is
# a package, which can be called.
from .anatomy import Anatomy, Layer, anatomy
from .capture import Captured, Coefficients, capture, coefficients
from .changes import Value, fixed
from .check import CheckReport, check
from .edit import edit
from .index import Index
from .reading import Reading, read
from .selective import survive

__all__ = [
    "Anatomy",
    "Captured",
    "CheckReport",
    "Coefficients",
    "Index",
    "Layer",
    "Reading",
    "Value",
    "anatomy",
    "capture",
    "check",
    "coefficients",
    "edit",
    "fixed",
    "index",
    "read",
    "survive",
]
