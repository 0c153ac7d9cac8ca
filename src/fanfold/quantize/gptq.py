"""GPTQ: codes chosen one input after another, each one's rounding error made good by the inputs still to come.

Frantar 2022, arXiv:2210.17323. It minimises the error of the outputs on calibration inputs, |(W - Q) X|, instead of
that of the weights. N outputs, K inputs of a matrix, T tokens, G groups of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Prepared:
    """What GPTQ needs to know of the inputs, made once for all matrices that read them.

    groups  the inputs of each group, both in the order in which they are taken: by falling mean square. The small ones,
            last, have few errors to pass on.
    factor  [K, K]: `inverse_factor` of the Hessian in that order.
    """

    format: str
    groups: list[Tensor]
    factor: Tensor

    @property
    def order(self) -> Tensor:
        return torch.cat(self.groups)


def prepare(h_KK: Tensor, format: str) -> Prepared:
    """The inputs behind `hessian` made ready for matrices in an integer format. Raises HessianError."""
    form = stored.get(format)
    groups = _order(h_KK.diagonal(), form.group or len(h_KK))
    order = torch.cat(groups)
    return Prepared(form.name, groups, inverse_factor(h_KK[order][:, order]))


def inverse_factor(h_KK: Tensor) -> Tensor:
    """[K, K] float32: the upper triangle U with U'U = (H + damping)^-1. Raises HessianError.

    Inputs that were always zero have zero rows in H: damping alone keeps them, so their weights are rounded to nearest
    and no error is passed on to them or from them.
    """
    h_KK = h_KK.to(torch.float64, copy=True)
    mean = float(h_KK.diagonal().mean())
    if not np.isfinite(mean) or not bool(torch.isfinite(h_KK).all()):
        raise HessianError("the calibration inputs are not finite")
    if mean <= 0:
        raise HessianError("all calibration inputs are zero")
    h_KK.diagonal().add_(DAMPING * mean)
    lower, fault = torch.linalg.cholesky_ex(h_KK)
    del h_KK  # for 11008 inputs 1 GB
    if int(fault) == 0:
        upper, fault = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if int(fault) == 0:
            return upper.float()
    raise HessianError(f"the Hessian is not positive definite at input {int(fault) - 1}, even with damping {DAMPING}")


def gptq(w_NK: Tensor, inputs: Prepared) -> formats.Quantized:
    """The matrix [N, K] float32 in the integer format of `prepare`, its output error made small on those inputs.

    A group's scale and minimum are fitted when it is reached, to the weights as they are by then, the squared error of
    input k weighted by 1 / U[k, k]^2: its cost after all later ones have made up for it.
    Raises ValueError as `formats.quantize_matrix` does.
    """
    form, order, u_KK = stored.get(inputs.format), inputs.order, inputs.factor
    n, k = w_NK.shape
    # refuses what cannot be stored; where a row has one scale, that is the one
    found = formats.quantize_matrix(w_NK.numpy(), form.name, scales="plain" if form.group else "search")
    table = _Table(form.name, found, (1 / u_KK.diagonal().square()).numpy())
    w_NK = w_NK[:, order]  # a copy, in that order
    codes_NK = torch.empty(n, k)
    for block in _blocks(inputs.groups):
        first, last = block[0][0], block[-1][1]
        errors = torch.zeros(n, last - first)
        for begin, end, group in block:
            scale, minimum = table.fit(w_NK, begin, end, group)
            for i in range(begin, end):
                codes_NK[:, i], rounded = table.round(w_NK[:, i], scale, minimum)
                error = (w_NK[:, i] - rounded) / u_KK[i, i]
                errors[:, i - first] = error
                w_NK[:, i + 1 : last].addr_(error, u_KK[i, i + 1 : last], alpha=-1)
        w_NK[:, last:].addmm_(errors, u_KK[first:last, last:], alpha=-1)
    codes = torch.empty(n, k)
    codes[:, order] = codes_NK
    integers = (codes + formats.offset(form.name)).numpy().astype(formats.code_dtype(form.name))
    return formats.Quantized(format=form.name, codes=integers, scale=table.scale, minimum=table.minimum)


def _order(size_K: Tensor, width: int) -> list[Tensor]:
    """The groups' inputs, both in falling order of `size_K`; equal ones stay in the order of the file."""
    groups = [torch.arange(first, min(first + width, len(size_K))) for first in range(0, len(size_K), width)]
    groups = [inputs[torch.argsort(size_K[inputs], descending=True, stable=True)] for inputs in groups]
    return sorted(groups, key=lambda inputs: -float(size_K[inputs].mean()))


def _blocks(groups: list[Tensor]) -> list[list[tuple[int, int, int]]]:
    """[(first, end, number of the group)] in the new order, whole groups of together at most BLOCK inputs.

    One group that is longer than that (a whole row) makes several entries, with the same number.
    """
    width = max(len(inputs) for inputs in groups)
    out: list[list[tuple[int, int, int]]] = []
    at = 0
    for inputs in groups:
        number = int(inputs.min()) // width
        for first in range(at, at + len(inputs), BLOCK):
            entry = (first, min(first + BLOCK, at + len(inputs)), number)
            if not out or entry[1] - out[-1][0][0] > BLOCK:
                out.append([])
            out[-1].append(entry)
        at += len(inputs)
    return out


class _Table:
    """The scales and minima of a matrix while they are being chosen; `found` has the first ones."""

    def __init__(self, format: str, found: formats.Quantized, weight_K: np.ndarray) -> None:
        self.format, self.weight_K = format, weight_K
        self.scale, self.minimum = found.scale, found.minimum
        four = stored.get(format).code_bits == 4
        self.low, self.high = (-8, 7) if format == "q4_0" else (0, 15) if four else (-127, 127)

    def fit(self, w_NK: Tensor, begin: int, end: int, group: int) -> tuple[Tensor, Tensor | None]:
        """(scale, minimum) [N] float32 of a group whose weights are now w_NK[:, begin:end]."""
        if stored.get(self.format).group:
            w = np.ascontiguousarray(w_NK[:, begin:end].numpy())
            try:
                self.scale[:, group], minimum = formats.fit_groups(w, self.format, self.weight_K[begin:end])
            except ValueError as error:  # the weights have taken over others' errors, and their inputs another order
                raise ValueError(f"group {group}, while gptq was at work: {error}") from None
            if self.minimum is not None:
                self.minimum[:, group] = minimum
        scale, minimum = self.scale[:, group], None if self.minimum is None else self.minimum[:, group]
        single = np.float32
        return (
            torch.from_numpy(scale.astype(single)),
            None if minimum is None else torch.from_numpy(minimum.astype(single)),
        )

    def round(self, w_N: Tensor, scale: Tensor, minimum: Tensor | None) -> tuple[Tensor, Tensor]:
        """(codes without offset, the weights that they mean) of one input."""
        q = w_N if minimum is None else w_N - minimum
        q = torch.where(scale == 0, torch.zeros_like(q), (q / scale).round_().clamp_(self.low, self.high))
        return q, q * scale if minimum is None else q * scale + minimum
