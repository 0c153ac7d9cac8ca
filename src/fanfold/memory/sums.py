"""The sum rule: Σ coefficient · value + bias is what the layer gave, as near as its own arithmetic can come.

T tokens, D d_model.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import numerics, reference
from ..kernels import packed
from ..kernels import torch as torch_ops
from ..kernels.packed import PackedMatrix
from ..models import emulate
from ..models.packed_state import PackedLinearState
from ..weights import PROJECTIONS, Weights, to_float64
from .layers import Layer


@dataclasses.dataclass(frozen=True)
class SumRule:
    """How far Σ m_i v_i + bias is from the captured y, and how far it may be, over the rms of y.

    error, allowed  root mean square over all tokens;  worst, worst_allowed  the largest of a token.
    arithmetic      what the allowance follows: "float32", "bfloat16", …, or a packed format that rounds activations.
    """

    layer: int
    error: float
    allowed: float
    worst: float
    worst_allowed: float
    arithmetic: str

    @property
    def holds(self) -> bool:
        return self.error <= self.allowed and self.worst <= self.worst_allowed


@torch.no_grad()
def sum_rule(
    layer: Layer, weights: Weights, x: Tensor, y: Tensor, m: Tensor, dtype: torch.dtype, largest: float
) -> SumRule:
    """Hold Σ m_i v_i + bias against y.  x, y [T, D], m [T, F] float32; dtype, largest  as in `Captured`.

    The rule of `fanfold.numerics`, twice: the sum, from float32 coefficients, and the layer's own y may each be off
    float64 by twice PyTorch's error in their dtypes (at least one rounding of the number that y was rounded in).
    Where packed weights meet activations in int8, y answers to float64 on the rounded activations, and the difference
    that their rounding makes to float64 is allowed beside.
    """
    down_DF = to_float64(weights.down)
    bias = 0.0 if weights.down_bias is None else to_float64(weights.down_bias)
    total = to_float64(m) @ down_DF.T + bias
    exact = reference.forward(x, weights)
    scale = float(np.sqrt(np.mean(exact**2))) or 1.0 if exact.size else 1.0
    ours = numerics.compare(total, exact, _in_torch(x, weights, torch.float32), dtype=torch.float32)
    truth, rounded, beside, kind, name = exact, np.zeros_like(exact), None, dtype, numerics.dtype_name(dtype)
    held = packed_weights(layer, weights)
    if held is not None and emulate.quantizes(held):
        if _rounds_to_bfloat16(x, held, dtype):
            kind, name = torch.bfloat16, f"{held.up.format} on bfloat16 activations"
        else:
            factor = layer.found.scale
            whole = emulate.ffn(to_float64(x), held).scaled(factor)
            in_torch = to_float64(emulate.ffn_in_torch(x, held)) * factor
            truth = whole.settled(y)
            rounded = (truth - whole.exact) / scale
            beside = in_torch - whole.settled(in_torch) + truth  # PyTorch's error, at its own roundings' edges
            name = f"{held.up.format} on int8 activations"
    beside = _in_torch(x, weights, kind) if beside is None else beside
    theirs = numerics.compare(y, truth, beside, dtype=kind)
    grain = numerics.FACTOR * numerics.UNIT_ROUNDOFF[numerics.dtype_name(dtype)] * largest / scale
    gap = (total - to_float64(y)) / scale
    return SumRule(
        layer=layer.index,
        error=_rms(gap),
        allowed=ours.rms_allowed + max(theirs.rms_allowed, grain) + _rms(rounded),
        worst=_worst(gap),
        worst_allowed=ours.worst_allowed + max(theirs.worst_allowed, grain) + _worst(rounded),
        arithmetic=name,
    )


def _rms(d_TD: Any) -> float:
    return float(np.sqrt(np.mean(d_TD**2))) if d_TD.size else 0.0


def _worst(d_TD: Any) -> float:
    return float(np.sqrt(np.mean(d_TD**2, axis=-1)).max()) if d_TD.size else 0.0


def _in_torch(x: Tensor, weights: Weights, dtype: torch.dtype) -> Tensor:
    cast = {name: value.to(dtype) for name, value in weights.items()}
    return torch_ops.forward(x.to(dtype), Weights.unchecked(weights.spec, **cast)).double()


def packed_weights(layer: Layer, plain: Weights) -> Weights | None:
    """The layer's matrices as they are packed, with its biases; None if any of them is not."""
    states: dict[str, Any] = {}
    for role, path in layer.found.projections.items():
        linear = layer.model.get_submodule(path)
        states[role] = linear.__dict__.get("_fanfold")
        if not isinstance(states[role], PackedLinearState) or not states[role].holds(linear):
            return None
    parts: dict[str, PackedMatrix] = {role: s.weight.parts[0] for role, s in states.items() if role != "gate_up"}
    if "gate_up" in states:
        parts["gate"], parts["up"] = states["gate_up"].weight.parts
    biases = {name: value for name, value in plain.items() if name not in PROJECTIONS}
    if layer.found.scale != 1.0 and "down_bias" in biases:
        biases["down_bias"] = biases["down_bias"] / layer.found.scale
    return Weights.unchecked(plain.spec, **parts, **biases)


def _rounds_to_bfloat16(x: Tensor, held: Weights, dtype: torch.dtype) -> bool:
    parts = [m for _, m in held.items() if isinstance(m, PackedMatrix) and m.activations == "int8"]
    return any(packed.arithmetic(dtype, m, len(x)) == "bf16" for m in parts)
