"""Weights that are packed already: a folder of `fanfold quantize` or a GGUF file, as the packed weights of a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import formats, numerics
from ..checkpoints import Checkpoint, load
from ..count import formats as stored
from ..kernels import packed
from ..kernels.packed import PackedMatrix
from ..layout import Layout
from ..weights import Weights
from .find import Found
from .linears import matrix

_FACTOR = 2.0  # a calibrated rounding moves weights further than the nearest code, but not twice as far


class Layers:
    """The packed FFNs of a checkpoint in the order of its layers, read one at a time.

    format  of the first one's up: what the other linears take if nothing else is asked for.
    """

    def __init__(self, checkpoint: Any) -> None:
        read = checkpoint if isinstance(checkpoint, Checkpoint) else load(checkpoint, packed=True)
        if not read.packed:
            read = load(read.path, packed=True)
        self.checkpoint = read
        self.keys = list(read.ffns)
        self.format: str = read.ffns[self.keys[0]].up.format

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, i: int) -> Weights:
        return self.checkpoint.ffns[self.keys[i]]

    def check_count(self, found: list[Found]) -> None:
        """Raises ValueError unless there is one for each FFN of the model."""
        if len(found) != len(self):
            raise ValueError(
                f"checkpoint {self.checkpoint.path} has {len(self)} FFNs, the model {len(found)}: expected one each"
            )


def parts(given: Weights | None, role: str) -> tuple[PackedMatrix, ...] | None:
    """The packed parts of the linear in this role, or None."""
    if given is None:
        return None
    names = ("gate", "up") if role == "gate_up" else (role,)
    return tuple(getattr(given, name) for name in names)


def differs(given: Weights, linears: dict[str, Any], found: Found) -> str | None:
    """Why packed weights are not these linears', as far as their format goes; or None."""
    assert found.layout is not None
    own: dict[str, Tensor] = {role: matrix(m).detach() for role, m in linears.items() if role != "gate_up"}
    if "gate_up" in linears:
        own["gate"], own["up"] = Layout(order=found.layout.order).split(matrix(linears["gate_up"]).detach())
    for name, weight in own.items():
        matrix_given = getattr(given, name)
        if matrix_given is None or tuple(matrix_given.shape) != tuple(weight.shape):
            has = None if matrix_given is None else tuple(matrix_given.shape)
            return f"the checkpoint's {name} has shape {has}, the model's {tuple(weight.shape)}"
        error, allowed = _error(matrix_given, weight)
        if not error <= allowed:
            return (
                f"the checkpoint's {name} is not the model's: they differ by {error:.2g}, and {matrix_given.format} "
                f"explains {allowed:.2g}"
            )
    if given.gate is not None and given.gate.format != given.up.format:
        return f"the checkpoint has gate in {given.gate.format} and up in {given.up.format}: expected one format"
    return None


def _error(given: PackedMatrix, weight: Tensor) -> tuple[float, float]:
    """(relative difference, what the format and the model's dtype explain)."""
    own = weight.to("cpu", torch.float32)
    size = float(own.norm()) or 1.0
    error = float((given.dequantize().float() - own).norm()) / size
    rounding = _FACTOR * numerics.UNIT_ROUNDOFF[numerics.dtype_name(weight)]
    if error <= rounding:
        return error, rounding
    if given.format in packed._FLOATS:
        stored_in = numerics.dtype_name(packed._FLOATS[given.format])
        return error, rounding + _FACTOR * numerics.UNIT_ROUNDOFF[stored_in]
    nearest = formats.quantize_matrix(own.contiguous().numpy(), stored.get(given.format).name, scales="plain")
    rounded = float((torch.from_numpy(nearest.dequantize()) - own).norm()) / size
    return error, rounding + _FACTOR * rounded
