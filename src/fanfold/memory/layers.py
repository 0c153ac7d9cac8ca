"""`Layer`: one FFN as a memory, with its keys and values as float32 tensors whatever they are stored in.

Orientation, once for all: row i of gate and up is channel i's key, key(i) . x + bias its pre-activation; column i of
down is its value, what the FFN gives (less down's bias) where coefficient i is 1 and all others are 0.
D d_model, F d_ff.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import torch as torch_ops
from ..layout import SEPARATE, Layout
from ..models.find import Found
from ..models.linears import is_conv1d, is_linear, matrix
from ..models.packed_state import PackedLinearState
from ..spec import Spec
from ..weights import Weights


@dataclasses.dataclass(kw_only=True)
class Layer:
    """One identified FFN, at its place in the order of execution.

    index       0, 1, …;  found  what `ff.find` says of it.
    call        which call of the module in one run this is (0, unless layers share their weights).
    block       path of the repeated block around it, whose entry and exit states are the residual; block_call likewise.
    write       how y enters the residual: "additive" (exit state = … + factor · y), "normed" (… + factor · norm(y),
                by the norm at path `post_norm`), or "not additive", with `write_reason`.
    direct      whether what the block writes reaches the head unchanged, by addition alone.
    """

    index: int
    found: Found
    model: nn.Module = dataclasses.field(repr=False)
    block: str
    call: int = 0
    block_call: int = 0
    write: str = "not additive"
    write_reason: str = ""
    factor: float = 1.0
    post_norm: str | None = None
    direct: bool = False

    @property
    def path(self) -> str:
        return self.found.path

    @property
    def spec(self) -> Spec:
        assert self.found.spec is not None
        return self.found.spec

    def weights(self) -> Weights:
        """Keys, values and biases as float32 CPU tensors: gate, up [F, D], down [D, F].

        Views of the model's own memory where that is float32 on the CPU: do not write to them. Packed matrices are
        dequantized anew in each call. A constant factor on the module's output (`found.scale`) is multiplied into down
        and its bias, so that Σ coefficient · value + bias is what the module gives.
        Raises ValueError if the linears are no longer what was found.
        """
        spec, scale = self.spec, self.found.scale
        linears: dict[str, Any] = {r: self.model.get_submodule(p) for r, p in self.found.projections.items()}
        for role, linear in linears.items():
            if not is_linear(linear):
                raise ValueError(
                    f"{self.found.projections[role]} is a {type(linear).__name__}: an adapter came after find"
                )
        arrays: dict[str, Any] = {"down": plain_matrix(linears["down"])}
        if spec.down_bias:
            arrays["down_bias"] = self.down_bias()
        assert self.found.layout is not None
        order = self.found.layout.order
        if order != SEPARATE:
            rows = Layout(order=order)  # matrices are [out, in] here, so halves are rows, of a Conv1D too
            arrays["gate"], arrays["up"] = rows.split(plain_matrix(linears["gate_up"]))
            bias = _bias(linears["gate_up"])
            if bias is not None:
                arrays["gate_bias"], arrays["up_bias"] = rows.split(bias)
        else:
            for role in ("gate", "up") if spec.gated else ("up",):
                arrays[role], arrays[f"{role}_bias"] = plain_matrix(linears[role]), _bias(linears[role])
        if scale != 1.0:
            arrays["down"] = arrays["down"] * scale
        return Weights(spec, **arrays)

    def down_bias(self) -> Tensor | None:
        """[D] float32, what the layer gives where all coefficients are 0; None if it has no such bias."""
        if not self.spec.down_bias:
            return None
        bias = _bias(self.model.get_submodule(self.found.projections["down"]))
        return bias if bias is None or self.found.scale == 1.0 else bias * self.found.scale


@dataclasses.dataclass(frozen=True)
class Coefficients:
    """What the channels do with x, each [..., F] float32.

    gate         act(gate pre-activation), after the spec's clamp; None without a gate.
    content      gated: what the gate lets through, the up pre-activation (clamped and offset where the spec says so);
                 ungated: the pre-activation.
    coefficient  what each channel multiplies its value by: gate · content, or act(content). Signed.
    """

    gate: Tensor | None
    content: Tensor
    coefficient: Tensor


@torch.no_grad()
def coefficients(weights: Weights, x: Tensor) -> Coefficients:
    """Gate, content and coefficient of every channel for x [..., D], computed in float32 from float32 weights."""
    spec = weights.spec
    x = x.float()
    content = nn.functional.linear(x, weights.up, weights.up_bias)
    if not spec.gated:
        return Coefficients(None, content, torch_ops.coefficients(spec, content, None))
    pre = nn.functional.linear(x, weights.gate, weights.gate_bias)
    if spec.up_limit is not None:
        content = content.clamp(-spec.up_limit, spec.up_limit)
    if spec.up_offset:
        content = content + spec.up_offset
    # with a content of one, the coefficient is the gate
    gate = torch_ops.coefficients(dataclasses.replace(spec, up_limit=None, up_offset=0.0), torch.ones_like(pre), pre)
    return Coefficients(gate, content, gate * content)


def plain_matrix(linear: Any) -> Tensor:
    """The matrix [out, in] of a linear as float32 on the CPU: dequantized if packed, else the model's own memory."""
    state = linear.__dict__.get("_fanfold")
    if isinstance(state, PackedLinearState) and state.holds(linear):
        table = state.table()
        if table is None:
            return state.weight.matrix(torch.float32)
        return (table.t() if is_conv1d(linear) else table).detach().to("cpu", torch.float32)
    return matrix(linear).detach().to("cpu", torch.float32)


def _bias(linear: Any) -> Tensor | None:
    bias = linear.bias
    return None if bias is None else bias.detach().to("cpu", torch.float32)
