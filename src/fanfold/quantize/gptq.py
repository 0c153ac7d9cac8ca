"""GPTQ: codes chosen one input after another, each one's rounding error made good by the inputs still to come.

Frantar 2022, arXiv:2210.17323. It minimises the error of the outputs on calibration inputs, |(W - Q) X|, instead of
that of the weights. N outputs, K inputs of a matrix, T tokens, G groups of a row.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .. import formats
from ..count import formats as stored

DAMPING = 0.01  # of the Hessian's mean diagonal, added to it: the paper's value
BLOCK = 128  # inputs whose errors are passed on at once; a multiple of every group


class HessianError(ValueError):
    """The calibration inputs do not give a positive definite Hessian; the message says why."""


def hessian(x_TK: Tensor) -> Tensor:
    """[K, K] float32: X'X / T of the inputs, the second derivative of the squared output error (but for a factor)."""
    x_TK = x_TK.float()
    return x_TK.T @ x_TK / max(len(x_TK), 1)


def inverse_factor(h_KK: Tensor) -> Tensor:
    """[K, K] float32: the upper triangle U with U'U = (H + damping)^-1. Raises HessianError.

    Inputs that were always zero have zero rows in H: damping alone keeps them, so their weights are rounded to nearest
    and no error is passed on to them or from them.
    """
    h_KK = h_KK.double()
    mean = float(h_KK.diagonal().mean())
    if not np.isfinite(mean) or not bool(torch.isfinite(h_KK).all()):
        raise HessianError("the calibration inputs are not finite")
    if mean <= 0:
        raise HessianError("all calibration inputs are zero")
    damped = h_KK + torch.eye(len(h_KK), dtype=torch.float64) * (DAMPING * mean)
    lower, fault = torch.linalg.cholesky_ex(damped)
    if int(fault) == 0:
        upper, fault = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if int(fault) == 0:
            return upper.float()
    raise HessianError(f"the Hessian is not positive definite at input {int(fault) - 1}, even with damping {DAMPING}")


def gptq(w_NK: Tensor, u_KK: Tensor, format: str) -> formats.Quantized:
    """The matrix [N, K] float32 in an integer format, its output error made small on the inputs behind `u_KK`.

    Each group's scale and minimum are fitted when its first input is reached, to the weights as they are by then, the
    squared error of input k weighted by 1 / U[k, k]^2, which is what it costs after all others have made up for it.
    u_KK is `inverse_factor(hessian(inputs))`. Raises ValueError as `formats.quantize_matrix` does.
    """
    form = stored.get(format)
    n, k = w_NK.shape
    # refuses what cannot be stored; where a row has one scale, that is the one
    plain = formats.quantize_matrix(w_NK.numpy(), format, scales="plain" if form.group else "search")
    weight_K = (1 / u_KK.diagonal().square()).numpy()
    w_NK = w_NK.clone()
    codes = torch.empty(n, k)
    scale_NG, minimum_NG = plain.scale.copy(), None if plain.minimum is None else plain.minimum.copy()
    group = form.group or k
    low, high = (-8, 7) if form.name == "q4_0" else (0, 15) if form.code_bits == 4 else (-127, 127)
    scale, minimum = torch.from_numpy(scale_NG[:, 0].astype(np.float32)), None
    for first in range(0, k, BLOCK):
        last = min(first + BLOCK, k)
        errors = torch.zeros(n, last - first)
        for i in range(first, last):
            if form.group and i % group == 0:
                end = min(i + group, k)
                scale, minimum = _fit(w_NK[:, i:end], form.name, weight_K[i:end], scale_NG, minimum_NG, i // group)
            column = w_NK[:, i]
            q = column if minimum is None else column - minimum
            q = torch.where(scale == 0, torch.zeros_like(q), (q / scale).round_().clamp_(low, high))
            codes[:, i] = q
            rounded = q * scale if minimum is None else q * scale + minimum
            error = (column - rounded) / u_KK[i, i]
            errors[:, i - first] = error
            w_NK[:, i + 1 : last].addr_(error, u_KK[i, i + 1 : last], alpha=-1)
        w_NK[:, last:].addmm_(errors, u_KK[first:last, last:], alpha=-1)
    return formats.Quantized(
        format=form.name,
        codes=(codes + formats.offset(form.name)).numpy().astype(formats.code_dtype(form.name)),
        scale=scale_NG,
        minimum=minimum_NG,
    )


def _fit(
    w_Ng: Tensor,
    format: str,
    weight_g: np.ndarray,
    scale_NG: np.ndarray,
    minimum_NG: np.ndarray | None,
    at: int,
) -> tuple[Tensor, Tensor | None]:
    """Fit group `at` of every row, write its scale and minimum into the tables, and return them as float32."""
    _, scale, minimum = formats.fit_groups(np.ascontiguousarray(w_Ng.numpy()), format, weight_g)
    scale_NG[:, at] = scale
    if minimum_NG is None or minimum is None:
        return torch.from_numpy(scale.astype(np.float32)), None
    minimum_NG[:, at] = minimum
    return torch.from_numpy(scale.astype(np.float32)), torch.from_numpy(minimum.astype(np.float32))
