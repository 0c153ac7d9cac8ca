"""The FFN in NumPy float64, forward and all gradients: the truth that every backend answers to.

Shapes: T tokens (any leading dimensions), D d_model, F d_ff.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import activations
from .weights import Weights, to_float64

Array = np.ndarray[Any, np.dtype[np.float64]]


def _dense(x: Array, weight: Array, bias: Array | None) -> Array:
    y = x @ weight.T
    return y if bias is None else y + bias


def _parts(x_TD: Array, weights: Weights) -> dict[str, Any]:
    """Every intermediate of the forward pass, by name, in float64."""
    spec = weights.spec
    w: dict[str, Any] = {name: to_float64(value) for name, value in weights.items()}
    act = activations.get(spec.activation)
    up_TF = _dense(x_TD, w["up"], w.get("up_bias"))
    out: dict[str, Any] = {"w": w, "up": up_TF}
    if not spec.gated:
        out["pre"], out["content"] = up_TF, None
        out["m"] = act.numpy(up_TF, spec.params)
        return out
    gate_TF = _dense(x_TD, w["gate"], w.get("gate_bias"))
    out["gate"] = gate_TF
    out["pre"] = gate_TF if spec.gate_limit is None else np.minimum(gate_TF, spec.gate_limit)
    content = up_TF if spec.up_limit is None else np.clip(up_TF, -spec.up_limit, spec.up_limit)
    out["content"] = content + spec.up_offset
    out["m"] = act.numpy(out["pre"], spec.params) * out["content"]
    return out


def _tokens(x: Any, d_model: int, what: str = "x") -> Array:
    x = to_float64(x)
    if x.ndim < 1 or x.shape[-1] != d_model:
        raise ValueError(f"{what} has shape {x.shape}, expected (…, {d_model})")
    return x


def coefficients(x: Any, weights: Weights) -> Array:
    """What each channel multiplies its value by: act(gate x) * (up x), or act(up x).  [..., D] -> [..., F] float64."""
    return _parts(_tokens(x, weights.spec.d_model), weights)["m"]


def forward(x: Any, weights: Weights) -> Array:
    """y = down @ (act(gate @ x) * (up @ x)), or down @ act(up @ x) without a gate, in float64.

    x  [..., d_model] array or tensor of any float dtype  ->  [..., d_model] float64.
    Dropout is not applied. Raises ValueError if x's last dimension is not d_model.
    """
    p = _parts(_tokens(x, weights.spec.d_model), weights)
    return _dense(p["m"], p["w"]["down"], p["w"].get("down_bias"))


def backward(x: Any, weights: Weights, grad_y: Any) -> dict[str, Array]:
    """Gradients of sum(forward(x, weights) * grad_y), in float64.

    x, grad_y  [..., d_model].  ->  {"x": [..., d_model], "up": [d_ff, d_model], …}: one entry for x and for each
    matrix and bias of `weights`, under its name. With zero tokens they are exactly zero.
    At a clamp's edge, and at 0 for ReLU, the derivative is the one of the clamped (zero) side.
    """
    spec = weights.spec
    x64, g64 = _tokens(x, spec.d_model), _tokens(grad_y, spec.d_model, "grad_y")
    if x64.shape != g64.shape:
        raise ValueError(f"grad_y has shape {g64.shape}, expected x's {x64.shape}")
    shape = x64.shape
    x_TD, g_TD = x64.reshape(-1, spec.d_model), g64.reshape(-1, spec.d_model)
    p = _parts(x_TD, weights)
    w, act = p["w"], activations.get(spec.activation)
    dm_TF = g_TD @ w["down"]
    grads: dict[str, Array] = {"down": g_TD.T @ p["m"]}
    slope = act.derivative(p["pre"], spec.params)
    if spec.gated:
        dgate = dm_TF * p["content"] * slope
        dup = dm_TF * act.numpy(p["pre"], spec.params)
        if spec.gate_limit is not None:
            dgate = dgate * (p["gate"] < spec.gate_limit)
        if spec.up_limit is not None:
            dup = dup * (np.abs(p["up"]) < spec.up_limit)
        grads["gate"] = dgate.T @ x_TD
        dx_TD = dgate @ w["gate"] + dup @ w["up"]
        if spec.gate_bias:
            grads["gate_bias"] = dgate.sum(0)
    else:
        dup = dm_TF * slope
        dx_TD = dup @ w["up"]
    grads["up"] = dup.T @ x_TD
    if spec.up_bias:
        grads["up_bias"] = dup.sum(0)
    if spec.down_bias:
        grads["down_bias"] = g_TD.sum(0)
    return {"x": dx_TD.reshape(shape), **{name: grads[name] for name, _ in weights.items()}}
