"""One FFN's matrices in a format: rounded or calibrated, packed, and told which activations they meet.

T tokens, D d_model, F d_ff.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import formats
from ..count import formats as stored
from ..kernels import torch as torch_ops
from ..kernels.packed import ACTIVATIONS, FORMATS, PackedMatrix
from ..weights import PROJECTIONS, Weights
from . import gptq
from .guard import Decision, decide_together

METHODS = ("rtn", "gptq")


@dataclass
class Result:
    """What became of one FFN.

    weights    its packed matrices.
    decisions  {"gate and up" or "up": …, "down": …}: what the guard measured; empty if nothing was to be decided.
    notes      what is not as it was asked for, one sentence each.
    """

    weights: Weights
    decisions: dict[str, Decision] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def quantize(
    weights: Weights,
    format: str = "int4",
    method: str = "rtn",
    inputs: Tensor | None = None,
    activations: str = "auto",
) -> Weights:
    """The FFN with its matrices packed in `format`, for the kernels: see `fanfold.ffn`, `nn.FeedForward.from_weights`.

    weights      arrays, tensors or packed matrices. Those that are packed in `format` already keep their codes.
    format       fp32, bf16, fp16, int8, int8_g32 … int8_g128, int4_g32 … int4_g128 (int4: groups of 32), q8_0, q4_0,
                 q4_1. Biases stay float32. A row's last group may be short.
    method       "rtn": each weight to its nearest code, scales chosen for the least squared error of the weights;
                 "gptq": for the least squared error of the outputs on `inputs` (Frantar 2022, arXiv:2210.17323).
    inputs       [T, d_model]: what this FFN reads in its model, for gptq and for activations="auto". Tokens that are
                 not finite are left out.
    activations  what meets integer codes: "int8", "float", or "auto": the guard measures what int8 costs on `inputs`
                 (`quantize.guard.decide`); without inputs int8.
    -> Weights of `kernels.packed.PackedMatrix`. A gptq that cannot be done (a Hessian that is not positive definite)
    becomes rtn with a warning that says why.
    Raises ValueError: unknown names, inputs missing or of another width, weights that are not finite or too large.
    """
    result = quantize_ffn(weights, format, method, inputs, activations)
    for note in result.notes:
        warnings.warn(f"fanfold: {note}", stacklevel=3)  # the caller of `fanfold.quantize`
    return result.weights


def quantize_ffn(
    weights: Weights, format: str, method: str = "rtn", inputs: Tensor | None = None, activations: str = "auto"
) -> Result:
    """`quantize`, with everything that was decided on the way."""
    format = check(format, method, activations)
    x_TD = None if inputs is None else _tokens(inputs, weights.spec.d_model)
    if method == "gptq" and x_TD is None:
        raise ValueError('method "gptq" needs inputs=: what this FFN reads in its model, [tokens, d_model]')
    maker = _Maker(format, method, activations, [])
    biases = {n: _bias(v) for n, v in weights.items() if n not in PROJECTIONS}
    first = {n: v for n, v in weights.items() if n in ("gate", "up")}
    decisions: dict[str, Decision] = {}
    packed = maker.make(first, x_TD, decisions)
    coefficients = None
    if x_TD is not None and maker.wants_inputs:
        coefficients = _coefficients(weights, packed, biases, x_TD)
    packed |= maker.make({"down": weights.down}, coefficients, decisions)
    return Result(Weights(weights.spec, **packed, **biases), decisions, maker.notes)


def check(format: str, method: str, activations: str) -> str:
    """The format's full name. Raises ValueError on a name that is not known, or two that do not go together."""
    name = stored.ALIASES.get(format, format)
    if name not in FORMATS:
        raise ValueError(f"format {format!r} is not known; known: {', '.join([*FORMATS, *stored.ALIASES][:-1])}")
    if method not in METHODS:
        raise ValueError(f"method {method!r} is not known; known: {', '.join(METHODS)}")
    if activations not in ("auto", *ACTIVATIONS):
        raise ValueError(f"activations={activations!r} is not known; known: auto, {', '.join(ACTIVATIONS)}")
    if name in formats.FLOAT and (method != "rtn" or activations == "int8"):
        asked = f"method {method!r}" if method != "rtn" else "activations='int8'"
        raise ValueError(f"{asked} is for formats with integer codes ({', '.join(formats.INTEGER)}), not for {name}")
    return name


@dataclass
class _Maker:
    format: str
    method: str
    activations: str
    notes: list[str]

    @property
    def wants_inputs(self) -> bool:
        return self.format in formats.INTEGER and (self.method == "gptq" or self.activations == "auto")

    def make(
        self, matrices: dict[str, Any], inputs: Tensor | None, decisions: dict[str, Decision]
    ) -> dict[str, PackedMatrix]:
        """Matrices that read the same inputs, packed, with the same activations."""
        prepared = None
        if self.method == "gptq" and inputs is not None and not all(self._kept(m) for m in matrices.values()):
            prepared = self._prepared(inputs, " and ".join(matrices))
        packed = {name: self._pack(matrix, name, prepared) for name, matrix in matrices.items()}
        if self.format in formats.FLOAT:
            return packed
        chosen = self.activations
        if chosen == "auto" and inputs is not None:
            decision = decide_together(list(packed.values()), inputs)
            decisions[" and ".join(matrices)] = decision
            chosen = decision.activations
        for matrix in packed.values():
            matrix.activations = "int8" if chosen == "auto" else chosen
        return packed

    def _kept(self, matrix: Any) -> bool:
        return isinstance(matrix, PackedMatrix) and matrix.format == self.format

    def _prepared(self, inputs: Tensor, what: str) -> gptq.Prepared | None:
        try:
            return gptq.prepare(gptq.hessian(inputs), self.format)
        except gptq.HessianError as error:
            self.notes.append(f"{what}: {error}: rounded to nearest instead of gptq")
            return None

    def _pack(self, matrix: Any, name: str, inputs: gptq.Prepared | None) -> PackedMatrix:
        if self._kept(matrix):
            return PackedMatrix(matrix.format, (matrix.shape[0], matrix.shape[1]), matrix.data)  # shared
        if self.format in formats.FLOAT:
            return PackedMatrix.pack(matrix.dequantize() if isinstance(matrix, PackedMatrix) else matrix, self.format)
        w = to_float32(matrix)
        try:
            q = formats.quantize_matrix(w.numpy(), self.format) if inputs is None else gptq.gptq(w, inputs)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return PackedMatrix.pack(q)


def to_float32(matrix: Any) -> Tensor:
    """A matrix of any kind as a contiguous float32 tensor on the CPU."""
    if isinstance(matrix, PackedMatrix):
        matrix = matrix.dequantize()
    if not isinstance(matrix, Tensor):
        return torch.from_numpy(np.array(matrix, np.float32, order="C"))
    return matrix.detach().to("cpu", torch.float32).contiguous()


def _bias(value: Any) -> Tensor:
    return to_float32(value).clone()


def _tokens(inputs: Tensor, d_model: int) -> Tensor:
    """Finite calibration tokens [T, D] float32. Raises ValueError if there is none, or the width is another."""
    if not isinstance(inputs, Tensor) or inputs.ndim < 2 or inputs.shape[-1] != d_model:
        shape = tuple(getattr(inputs, "shape", ())) or type(inputs).__name__
        raise ValueError(f"inputs are {shape}, expected a tensor [tokens, d_model={d_model}]")
    x = to_float32(inputs).reshape(-1, d_model)
    finite = x[torch.isfinite(x).all(1)]
    if not len(finite):
        raise ValueError(f"inputs have {len(x)} tokens, none of them finite: expected calibration tokens")
    return finite


def _coefficients(weights: Weights, packed: dict[str, Any], biases: dict[str, Tensor], x_TD: Tensor) -> Tensor:
    """[T, F]: what `down` reads when gate and up are as packed."""
    made: dict[str, Tensor] = {}
    for name, matrix in packed.items():
        made[name] = torch.nn.functional.linear(x_TD, to_float32(matrix), biases.get(f"{name}_bias"))
    return torch_ops.coefficients(weights.spec, made["up"], made.get("gate"))
