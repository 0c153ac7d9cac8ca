"""The candidate descriptions that identification compares a module with.

T tokens, D d_model, F d_ff.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .. import activations
from ..kernels import torch as torch_ops
from ..layout import FUSED, SEPARATE, Layout
from ..spec import Spec
from .structure import Site

_LIMITS = (7.0, 10.0)  # gpt-oss, DeepSeek-V4: the clamps that public models use


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """A candidate: everything needed to compute it from the first linears' outputs."""

    spec: Spec
    order: str  # of the fused matrix, or SEPARATE
    gate_first: bool  # separate gated: the first-registered linear is the gate
    scale: float = 1.0
    residual: bool = False

    def name(self) -> str:
        s = self.spec
        text = ("gated " if s.gated else "") + s.activation
        text += "".join(f" {k}={v:g}" for k, v in s.params.items() if v != activations.get(s.activation).params[k])
        text += f" limit {s.gate_limit:g}" if s.gate_limit else ""
        text += f" up+{s.up_offset:g}" if s.up_offset else ""
        if s.gated and self.order == SEPARATE:
            text += "" if self.gate_first else ", second linear gates"
        elif s.gated:
            text += f", {self.order}"
        return text


def _variants(act_names: list[str], gated: bool, params: dict[str, dict[str, float]]) -> Iterator[dict[str, Any]]:
    for name in act_names:
        yield {"activation": name, "activation_params": tuple(params.get(name, {}).items())}
    if not gated:
        return
    for name in ("silu", "gelu_sigmoid", "gelu_erf", "gelu_tanh"):
        for limit in _LIMITS:
            for offset in (0.0, 1.0):
                fields: dict[str, Any] = {"activation": name, "gate_limit": limit, "up_limit": limit}
                if name == "gelu_sigmoid":  # the same function; gpt-oss calls it silu with beta 1.702
                    fields |= {"activation": "silu", "beta": 1.702}
                yield fields | {"up_offset": offset}


def candidates(site: Site, biases: dict[str, bool], params: dict[str, dict[str, float]]) -> list[Description]:
    """Every description that the site's shapes allow.

    biases  {"first": …, "last": …} whether the linears have one; params  {activation: parameters read from modules}.
    """
    gated = site.fused or len(site.first) == 2
    orders = FUSED if site.fused else (SEPARATE,)
    out = []
    for fields in _variants(list(activations.ACTIVATIONS), gated, params):
        base = {"d_model": site.d_model, "d_ff": site.d_ff, "gated": gated, "up_bias": biases["first"]}
        spec = Spec(**base, gate_bias=gated and biases["first"], down_bias=biases["last"], **fields)
        for order in orders:
            flips = (True, False) if gated and order == SEPARATE else (True,)
            if spec.activation == "identity" and gated and not (spec.gate_limit or spec.up_offset):
                # Bilinear is symmetric: only the pairing of rows can be told, not which half is the gate.
                if order in (FUSED[1], FUSED[3]):
                    continue
                flips = (True,)
            out += [Description(spec=spec, order=order, gate_first=g) for g in flips]
    return out


def coefficients(d: Description, firsts: list[Tensor]) -> Tensor:
    """[T,F] coefficients of a description from the outputs of the first linears, in their dtype."""
    if not d.spec.gated:
        return torch_ops.coefficients(d.spec, firsts[0], None)
    if d.order != SEPARATE:
        gate, up = Layout(order=d.order, transposed=True).split(firsts[0])  # channels are the last dimension here
    else:
        gate, up = firsts if d.gate_first else firsts[::-1]
    return torch_ops.coefficients(d.spec, up, gate)


def activation_params(module: nn.Module) -> dict[str, dict[str, float]]:
    """Parameters of activations that carry their own (LeakyReLU's slope, ELU's alpha, xIELU's four), read from the
    modules below `module`."""
    out: dict[str, dict[str, float]] = {}
    for child in module.modules():
        if isinstance(child, nn.LeakyReLU):
            out["leaky_relu"] = {"slope": float(child.negative_slope)}
        elif isinstance(child, nn.ELU):
            out["elu"] = {"alpha": float(child.alpha)}
        elif all(hasattr(child, n) for n in ("alpha_p", "alpha_n", "beta", "eps")):
            xielu: Any = child
            with torch.no_grad():
                beta, eps = float(xielu.beta), float(xielu.eps)
                alpha_p, alpha_n = (float(nn.functional.softplus(t.float())) for t in (xielu.alpha_p, xielu.alpha_n))
            out["xielu"] = {"alpha_p": alpha_p, "alpha_n": alpha_n + beta, "beta": beta, "eps": eps}
    return out
