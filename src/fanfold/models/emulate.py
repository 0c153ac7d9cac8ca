"""What packed matrices compute, in float64, with the activations quantized as the kernels do it: the truth for them.

Where the coefficients are quantized too, a coefficient that lies at a rounding's edge may go either way, for kernels
and PyTorch round it in float32; `Truth.settled` moves the truth to the side that a result took, there and nowhere else.
T tokens, D d_model, F d_ff.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import formats, reference
from ..kernels import torch as torch_ops
from ..kernels.packed import PackedMatrix
from ..weights import Weights, to_float64
from .packed_weight import Opened

Array = np.ndarray[Any, Any]
Matrix = PackedMatrix | Opened
# Half the width of an edge, in steps of a code: 64 roundings of float32 on the largest coefficient, which is 127 steps.
_EDGE = 127 * 64 * 2.0**-24


@dataclasses.dataclass
class Edge:
    """A coefficient of a token at a rounding's edge; change [D]: what its other code adds to the output."""

    token: int
    change: Array


@dataclasses.dataclass
class Truth:
    """Float64 outputs [T, D] with activations quantized, and where they may as well be otherwise.

    exact  the same with activations as they are: what the quantization of activations costs is the difference.
    """

    y: Array
    exact: Array
    edges: list[Edge]

    def settled(self, result: Any) -> Array:
        """`y`, each edge on the side on which `result` [T, D] lies."""
        got, y = to_float64(result).reshape(self.y.shape), self.y.copy()
        for edge in self.edges:
            left = got[edge.token] - y[edge.token]
            size = float(edge.change @ edge.change)
            if size > 0 and float(left @ edge.change) > 0.5 * size:
                y[edge.token] += edge.change
        return y

    def scaled(self, factor: float) -> Truth:
        """Of an output that is `factor` times this one."""
        edges = [Edge(e.token, e.change * factor) for e in self.edges]
        return Truth(self.y * factor, self.exact * factor, edges)

    def rows(self, start: int, stop: int) -> Truth:
        """Of tokens start to stop."""
        edges = [Edge(e.token - start, e.change) for e in self.edges if start <= e.token < stop]
        return Truth(self.y[start:stop], self.exact[start:stop], edges)


def float_matrix(m: Any, dtype: Any = np.float64) -> Array:
    """A packed matrix, or an array or tensor, as an array of `dtype`; integer codes exactly in float64."""
    if not isinstance(m, (PackedMatrix, Opened)):
        return to_float64(m).astype(dtype)
    if m.format in formats.INTEGER:
        return m.quantized().dequantize(dtype)
    return to_float64(m.dequantize()).astype(dtype)


def seen(x: Array, m: Matrix) -> Array:
    """The activations [T, K] that `m` meets: quantized and scaled back, or as they are."""
    if m.activations != "int8":
        return x
    codes, scale = formats.quantize_activations(x.astype(np.float32), m.format)
    return codes.astype(x.dtype) * _spread(scale, m, x.shape[1]).astype(x.dtype)


def _spread(scale: Array, m: Matrix, k: int) -> Array:
    return scale[:, np.arange(k) // formats.activation_group(m.format)]


def linear(x: Array, m: Matrix, bias: Any, dtype: Any = np.float64) -> Truth:
    """y = m x + bias in `dtype`.  x  [T, K]."""
    w, x = float_matrix(m, dtype), x.astype(dtype)
    b = 0 if bias is None else to_float64(bias).astype(dtype)
    exact = x @ w.T + b
    return Truth(exact if m.activations != "int8" else seen(x, m) @ w.T + b, exact, [])


def ffn(x: Array, weights: Weights) -> Truth:
    """The FFN in float64.  x  [T, D]."""
    wide = Weights.unchecked(weights.spec, **{name: float_matrix(v) for name, v in weights.items()})
    x = x.astype(np.float64)
    exact = reference.forward(x, wide)
    m_TF = reference.coefficients(seen(x, weights.up), wide)
    b = 0 if wide.down_bias is None else wide.down_bias
    edges = _edges(m_TF, weights.down, wide.down) if weights.down.activations == "int8" else []
    return Truth(seen(m_TF, weights.down) @ wide.down.T + b, exact, edges)


@torch.no_grad()
def ffn_in_torch(x: Tensor, weights: Weights) -> Tensor:
    """The FFN as PyTorch computes it in float32 on what the kernels see.  x  [T, D] float32  ->  [T, D] float32."""
    up = linear_in_torch(x, weights.up, weights.up_bias)
    gate = linear_in_torch(x, weights.gate, weights.gate_bias) if weights.spec.gated else None
    m = torch_ops.coefficients(weights.spec, up, gate)
    return linear_in_torch(m, weights.down, weights.down_bias)


@torch.no_grad()
def linear_in_torch(x: Tensor, m: Matrix, bias: Tensor | None) -> Tensor:
    """The same for one matrix.  x  [T, K] float32  ->  [T, N] float32.

    A format with a minimum is two products, of scaled codes and of minima with sums of groups, as its definition says.
    """
    x, bias = _seen_tensor(x, m), None if bias is None else bias.float()
    if m.activations != "int8" or not formats.has_minimum(m.format):
        return nn.functional.linear(x, m.dequantize().float(), bias)
    q = m.quantized()
    assert q.minimum is not None
    codes = formats.Quantized(format=q.format, codes=q.codes, scale=q.scale, minimum=np.zeros_like(q.minimum))
    group = formats.activation_group(m.format)
    sums = nn.functional.pad(x, (0, -x.shape[1] % group)).unflatten(1, (-1, group)).sum(2)
    y = nn.functional.linear(x, torch.from_numpy(codes.dequantize()), bias)
    return y + nn.functional.linear(sums, torch.from_numpy(q.minimum.astype(np.float32)))


def _seen_tensor(x: Tensor, m: Matrix) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(seen(x.numpy(), m)))


def quantizes(weights: Weights) -> bool:
    """Whether any matrix meets quantized activations."""
    return any(getattr(v, "activations", "float") == "int8" for _, v in weights.items())


def _edges(m_TF: Array, down: Matrix, down_DF: Array) -> list[Edge]:
    codes, scale = formats.quantize_activations(m_TF.astype(np.float32), down.format)
    step_TF = _spread(scale, down, m_TF.shape[1]).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        real_TF = np.where(step_TF > 0, m_TF / step_TF, 0.0)
    beyond_TF = real_TF - codes  # within half a step; beyond an edge the other code is a step away
    where = np.argwhere(np.abs(np.abs(beyond_TF) - 0.5) < _EDGE)
    return [Edge(int(t), np.sign(beyond_TF[t, f]) * step_TF[t, f] * down_DF[:, f]) for t, f in where]
