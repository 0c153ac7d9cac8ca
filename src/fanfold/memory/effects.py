"""From the residual to logits: what a part of a state adds to a token's logit, the final norm's scale as it was there.

logit_t = factor · e_t · norm(h) + bias_t, norm(h) = gain * centred(h) · s(h) + b. With s(h) fixed at the state at hand
this is linear in h, so that the parts of h have exact shares. What raises all logits alike changes no probability, so
effects are "centred" unless said otherwise: on logit_t less the mean over the vocabulary, with e_t less the mean row.
N vectors, D d_model, V vocabulary.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from ..models.norms import no_norm
from .anatomy import Anatomy
from .layers import Layer

_SCORES = 1 << 25  # scores in memory at a time: 128 MiB


@dataclasses.dataclass
class Ends:
    """Both ends of E · v for N vectors: ids and scores [N, top], the largest first and the smallest first."""

    promoted: Tensor
    promoted_scores: Tensor
    suppressed: Tensor
    suppressed_scores: Tensor


class Readout:
    """The way from a state to the logits. e_VD is E [V, D] float32. A model without a head, or whose head reads more
    than a norm of the state, is read by E alone."""

    def __init__(self, anatomy: Anatomy) -> None:
        e_VD = anatomy.unembedding()
        if e_VD is None:
            raise ValueError(f"values cannot be read as tokens: {anatomy.head_note}")
        self.e_VD = e_VD
        self.norm = anatomy.head.norm or no_norm(e_VD.shape[1])
        self.factor = anatomy.head.input_scale * anatomy.head.logit_scale
        bias = anatomy.head_bias
        self.bias = torch.zeros(len(e_VD)) if bias is None else bias * anatomy.head.logit_scale
        self.softcap = anatomy.head.softcap
        self.mean_D = self.e_VD.mean(0, dtype=torch.float64)

    def row(self, token: int, centred: bool = True) -> Tensor:
        """[D] float64, e_t, or e_t less the mean row."""
        return self.e_VD[token].double() - self.mean_D if centred else self.e_VD[token].double()

    def direction(self, state: Tensor, token: int, centred: bool = True) -> Tensor:
        """[D] float64: a part c of the final `state` [D] adds c · direction to the token's logit."""
        return self.norm.direction(self.norm.scale(state), self.row(token, centred)) * self.factor

    def constant(self, token: int, centred: bool = True) -> float:
        """What no part of the state adds: the bias of the final norm and of the head."""
        e = self.row(token, centred)
        shift = 0.0 if self.norm.bias is None else float(e @ self.norm.bias) * self.factor
        mean = float(self.bias.mean(dtype=torch.float64)) if centred else 0.0
        return shift + float(self.bias[token]) - mean

    @torch.no_grad()
    def logits(self, states_ND: Tensor) -> Tensor:
        """[N, V] float32, before a soft cap, as if the head read these states."""
        return nn.functional.linear((self.norm.apply(states_ND) * self.factor).float(), self.e_VD, self.bias)

    def capped(self, logits: Tensor) -> Tensor:
        """The logits as the model gives them."""
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def logit(self, logits: Tensor, token: int, centred: bool = True) -> float:
        """A token's logit from all the model's own [V], before a soft cap, less their mean if centred."""
        z = logits.double()
        z = z if self.softcap is None else self.softcap * torch.atanh(z / self.softcap)
        return float(z[token] - z.mean() if centred else z[token])

    @torch.no_grad()
    def ends(self, vectors_ND: Tensor, top: int) -> Ends:
        """The tokens that each vector promotes and suppresses most, by E · v with the final norm's gain on v, as the
        model applies it; scores are logits where the norm's scale of the state is 1, less their mean."""
        part = self.norm.gain.float() * self.norm.centred(vectors_ND.float()) * self.factor
        top = min(top, len(self.e_VD))
        found: list[tuple[Tensor, ...]] = []
        for rows in part.split(max(1, _SCORES // len(self.e_VD))):
            scores = nn.functional.linear(rows, self.e_VD)
            scores -= (rows @ self.mean_D.float())[:, None]
            high, low = scores.topk(top), scores.topk(top, largest=False)
            found.append((high.indices, high.values, low.indices, low.values))
        if not found:
            none = torch.empty(0, top)
            return Ends(none.long(), none, none.long(), none)
        return Ends(*(torch.cat(parts) for parts in zip(*found)))


def through_post_norm(anatomy: Anatomy, layer: Layer, y: Tensor, direction: Tensor) -> tuple[Tensor, float]:
    """(u, constant) so that an output c of the layer, a part of y [D], adds c · u to the logit, and the norm that it
    goes through adds `constant` beside; the norm's scale as it is for y."""
    norm = anatomy.post_norm(layer)
    if norm is None:
        return direction * layer.factor, 0.0
    shift = 0.0 if norm.bias is None else float(norm.bias @ direction) * layer.factor
    return norm.direction(norm.scale(y), direction) * layer.factor, shift


def written(anatomy: Anatomy, layer: Layer, parts: Tensor, y: Tensor | None = None) -> Tensor:
    """What outputs [..., D] of a layer become in the residual, float32. y: the whole output, whose scale a norm on the
    way takes; without it the scale is 1."""
    norm = anatomy.post_norm(layer)
    if norm is None:
        return parts.float() * layer.factor
    scale = 1.0 if y is None else norm.scale(y)
    return (norm.gain * norm.centred(parts.double()) * scale).float() * layer.factor
