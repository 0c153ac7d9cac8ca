"""The outlier guard: what int8 activations would cost one packed matrix, and whether that is worth it.

Some models have massive channels: in their group of activations one value is so large that the step of an int8 code
is larger than everything beside it, which is then lost. Sun 2024, arXiv:2402.17762; Dettmers 2022, arXiv:2208.07339.
T tokens, N outputs, K inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .. import formats
from ..count import formats as stored
from ..kernels.packed import PackedMatrix

LIMIT = 0.03  # relative output error that int8 activations may always add: see `decide`
MASSIVE = 20.0  # times the median channel's largest activation: such a channel is called massive
_MAX_TOKENS = 4096  # more tokens do not change the decision, only what it costs


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Which activations a matrix should meet, and why.

    activations    "int8" or "float".
    error          relative output error of int8 activations: root mean square over tokens of |W dx| / |W x|.
    reason         one sentence with the numbers.
    worst_token    the largest |W dx| / |W x| of a token.
    weights_error  the same measure for the rounding of the weights, as their scales let one expect it, massive inputs
                   left out: what goes wrong there is no licence for more.
    massive        inputs whose largest activation is over `MASSIVE` times the median input's.
    massive_share  share of the squared output error that comes from the groups in which they lie.
    """

    activations: str
    error: float
    reason: str
    worst_token: float = 0.0
    weights_error: float = 0.0
    massive: int = 0
    massive_share: float = 0.0


def decide(matrix: PackedMatrix, inputs: Tensor) -> Decision:
    """Choose the activations of `matrix` from calibration inputs [T, n_in].

    Rule: int8 if its error is at most max(LIMIT, weights_error / 2): it may cost 3 % of the output, or half of what the
    rounding of the weights costs anyway, which lengthens their joint error by an eighth; else float. (SmolLM2 and
    all-MiniLM: 0.3 to 1.6 % in groups of 32, at most 2.6 % in groups of 128; all layers together raise SmolLM2's
    perplexity by less than 0.05 %.) Tokens that are not finite are left out, for the kernels run those calls as float.
    Without any token nothing is known, and the answer is float.
    Raises ValueError if inputs are not [T, n_in].
    """
    return decide_together([matrix], inputs)


def decide_together(matrices: Sequence[PackedMatrix], inputs: Tensor) -> Decision:
    """`decide` for matrices that read the same inputs and must agree (gate and up): the worst of them decides."""
    return max((_judge(matrix, inputs) for matrix in matrices), key=lambda d: (d.activations == "float", d.error))


def _judge(matrix: PackedMatrix, inputs: Tensor) -> Decision:
    if matrix.format not in formats.INTEGER:
        return Decision(activations="float", error=0.0, reason=f"{matrix.format} has float activations")
    x_TK = _tokens(inputs, matrix.shape[1])
    if not len(x_TK):
        return Decision(
            activations="float", error=math.inf, reason="no finite calibration token: int8 was not measured"
        )
    found = measure(matrix, x_TK)
    allowed = max(LIMIT, found.weights_error / 2)
    int8 = found.error <= allowed
    reason = f"int8 activations change the output by {found.error:.2%}, {allowed:.2%} is allowed"
    if allowed > LIMIT:
        reason += " (half of what the rounding of the weights costs)"
    if found.massive:
        reason += f"; {found.massive_share:.0%} of it from {found.massive} massive channel{'s' * (found.massive > 1)}"
    return Decision(**{**found.__dict__, "activations": "int8" if int8 else "float", "reason": reason})


def measure(matrix: PackedMatrix, x_TK: Tensor) -> Decision:
    """The numbers of a Decision for finite float32 inputs; its activations and reason are not filled in."""
    quantized = matrix.quantized()
    w_NK = torch.from_numpy(quantized.dequantize())
    codes, scale = formats.quantize_activations(x_TK.numpy(), matrix.format)
    width = formats.activation_group(matrix.format)
    spread = np.arange(x_TK.shape[1]) // width
    dx_TK = torch.from_numpy(codes.astype(np.float32) * scale[:, spread]) - x_TK
    y_T, dy_T = (x_TK @ w_NK.T).norm(dim=1), (dx_TK @ w_NK.T).norm(dim=1)
    error_T = _ratio(dy_T, y_T)
    top_K = x_TK.abs().amax(0)
    massive_K = top_K > MASSIVE * float(top_K.median())
    share = 0.0
    if bool(massive_K.any()):
        groups = torch.from_numpy(spread)
        beside_K = torch.isin(groups, groups[massive_K])
        part_T = (dx_TK[:, beside_K] @ w_NK[:, beside_K].T).norm(dim=1)
        share = min(1.0, float(_ratio(part_T.square().sum(), dy_T.square().sum())))
    return Decision(
        activations="",
        error=float(error_T.square().mean().sqrt()),
        reason="",
        worst_token=float(error_T.max()),
        weights_error=float(_ratio(_rounding(quantized, x_TK * ~massive_K), y_T).square().mean().sqrt()),
        massive=int(massive_K.sum()),
        massive_share=share,
    )


def _rounding(q: formats.Quantized, x_TK: Tensor) -> Tensor:
    """[T]: the |dW x| to expect if each weight is off by a uniform error within half a step: step^2 / 12 each."""
    k = q.shape[1]
    step_GK = np.square(q.scale.astype(np.float64)).sum(axis=0) / 12  # summed over outputs
    group = stored.get(q.format).group or max(k, 1)
    variance_K = torch.from_numpy(step_GK[np.arange(k) // group]).float()
    return (x_TK.square() @ variance_K).sqrt()


def _tokens(inputs: Tensor, k: int) -> Tensor:
    """The finite tokens [T, K] of `inputs` as float32, evenly thinned out to `_MAX_TOKENS`."""
    if inputs.ndim != 2 or inputs.shape[1] != k:
        raise ValueError(f"inputs have shape {tuple(inputs.shape)}, expected [tokens, {k}]")
    x = inputs.detach().to("cpu", torch.float32)
    x = x[torch.isfinite(x).all(1)]
    if len(x) > _MAX_TOKENS:
        x = x[torch.linspace(0, len(x) - 1, _MAX_TOKENS).long()]
    return x.contiguous()


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, where 0 / 0 is 0."""
    return torch.where(a == 0, torch.zeros_like(a), a / b)
