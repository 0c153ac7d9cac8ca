"""How selectively a layer responds: how many of its channels matter to a token, and what is left without the others.

T tokens, D d_model, F d_ff.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .anatomy import Anatomy
from .anatomy import anatomy as anatomy_of
from .edit import edit
from .layers import Layer
from .taps import evaluating, logits_of, run
from .vocabulary import Vocabulary

TAIL = 0.2  # share of the output's norm that the channels left out may come to: ReLU² Wins, arXiv:2402.03804


@dataclasses.dataclass(frozen=True)
class Selective:
    """Means over the tokens of a reading. size = |m| · ‖v‖, a channel's contribution.

    nonzero        fraction of channels with m ≠ 0.
    above_cett     fraction left when a token's smallest contributions are dropped, as many as together come to at most
                   `tail` of its output: ‖Σ dropped m_i v_i‖ <= tail · ‖Σ m_i v_i‖ (CETT, cumulative error of tail
                   truncation), found by bisection;  threshold  the mean size at which they are cut.
    participation  (Σ size²)² / Σ size⁴, how many equal channels would be as spread out: 1 to F.
    top_share      share of the `top` largest contributions in Σ size;  top_norm  ‖Σ of those m_i v_i‖ / ‖Σ m_i v_i‖.
    """

    layer: int
    nonzero: float
    above_cett: float
    threshold: float
    participation: float
    top_share: float
    top_norm: float
    top: int
    tail: float


@torch.no_grad()
def selective(layer: int, m_TF: Tensor, down_DF: Tensor, top: int = 10, tail: float = TAIL) -> Selective:
    """Measure one layer's response from its coefficients and values, float32. Raises ValueError without tokens."""
    if not len(m_TF):
        raise ValueError("no tokens to measure a selective response on")
    size_TF = m_TF.abs() * down_DF.norm(dim=0)
    top = min(top, m_TF.shape[1])
    order_TF = size_TF.argsort(dim=1, stable=True)
    rank_TF = order_TF.argsort(dim=1)  # 0 for the smallest contribution of a token
    f = m_TF.shape[1]

    def norm(which_TF: Tensor) -> Tensor:
        return nn.functional.linear(m_TF * which_TF, down_DF).norm(dim=1)

    whole_T = norm(torch.ones_like(m_TF))
    few_T, many_T = torch.zeros(len(m_TF), dtype=torch.long), torch.full((len(m_TF),), f)
    for _ in range(f.bit_length()):  # bisection between 0 dropped, which is within, and all, which is not
        middle_T = (few_T + many_T) // 2
        within_T = norm(rank_TF < middle_T[:, None]) <= tail * whole_T
        few_T, many_T = torch.where(within_T, middle_T, few_T), torch.where(within_T, many_T, middle_T)
    dropped_T = torch.where(whole_T > 0, few_T, f)
    cut_T = size_TF.gather(1, order_TF).gather(1, dropped_T[:, None].clamp(max=f - 1))[:, 0] * (dropped_T < f)
    top_T = norm(rank_TF >= f - top) / whole_T.clamp_min(1e-30)
    square = size_TF.double().square()
    spread = square.sum(1).square() / square.square().sum(1).clamp_min(1e-300)
    largest = size_TF.gather(1, order_TF[:, -top:]).sum(1) / size_TF.sum(1).clamp_min(1e-30)
    return Selective(
        layer=layer,
        nonzero=float((m_TF != 0).float().mean()),
        above_cett=float((1 - dropped_T / f).mean()),
        threshold=float(cut_T.mean()),
        participation=float(spread.mean()),
        top_share=float(largest.mean()),
        top_norm=float(top_T.mean()),
        top=top,
        tail=tail,
    )


@dataclasses.dataclass(frozen=True)
class Survival:
    """What is left of a model when each token keeps only its largest contributions in every layer.

    keep        fraction of channels kept per token and layer, 1 being the model as it is.
    agreement   fraction of positions with the same most likely next token;  perplexity  of the texts.
    positions   how many were compared.
    """

    keep: float
    agreement: float
    perplexity: float
    positions: int


@torch.no_grad()
def survive(
    model: nn.Module,
    tokenizer: Any,
    texts: Iterable[str],
    keep: Iterable[float] = (0.5, 0.3, 0.1),
    *,
    sequence: int = 128,
    tokens: int = 2048,
    anatomy: Anatomy | None = None,
) -> list[Survival]:
    """Measure how a causal language model does with only the largest |m| · ‖v‖ of each token in each layer.

    The question of CATS (arXiv:2404.08763) and TEAL (arXiv:2408.14690), without their approximations: the choice is
    made with all coefficients known, so it bounds what a predictor of them can reach.
    texts     cut into sequences of `sequence` tokens, at most `tokens` in all;  keep  fractions in (0, 1].
    -> [Survival] for 1.0 (the model itself) and each of `keep`. Raises ValueError if the model does not give logits
    that depend on earlier tokens alone, or for a fraction outside (0, 1].
    """
    fractions = list(keep)
    wrong = [k for k in fractions if not 0 < k <= 1]
    if wrong:
        raise ValueError(f"keep={wrong[0]!r}: expected fractions above 0, up to 1")
    found = anatomy_of(model) if anatomy is None else anatomy
    batches = list(_sequences(Vocabulary(tokenizer), texts, sequence, tokens))
    if not batches:
        raise ValueError("the texts have fewer than two tokens: there is no next token to predict")
    with evaluating(model):
        _check_causal(model, batches[0])
        whole = [_predictions(model, ids) for ids in batches]
        out = [_survival(1.0, whole, whole)]
        for k in fractions:
            changes = [((layer.index, range(layer.spec.d_ff)), _keeping(layer, k)) for layer in found.layers]
            with edit(model, changes, anatomy=found):
                out.append(_survival(k, whole, [_predictions(model, ids) for ids in batches]))
    return out


def _keeping(layer: Layer, fraction: float) -> Callable[[Tensor], Tensor]:
    norm_F = layer.weights().down.norm(dim=0)
    n = max(1, math.ceil(fraction * len(norm_F)))

    def kept(m: Tensor) -> Tensor:
        least = (m.abs() * norm_F.to(m)).topk(n, dim=-1).indices
        return torch.zeros_like(m).scatter(-1, least, m.gather(-1, least))

    return kept


def _sequences(vocabulary: Vocabulary, texts: Iterable[str], sequence: int, tokens: int) -> Iterator[Tensor]:
    left = tokens
    for text in texts:
        ids = vocabulary.encode(text)[:left]
        for at in range(0, len(ids) - 1, sequence):
            piece = ids[at : at + sequence]
            if len(piece) > 1:
                left -= len(piece)
                yield torch.tensor([piece])


def _check_causal(model: nn.Module, ids: Tensor) -> None:
    logits = logits_of(run(model, ids))
    if logits is None:
        raise ValueError(f"{type(model).__name__} gives no logits per token: there is no next token to predict")
    other = ids.clone()
    other[:, -1] = other[:, 0] if other[0, -1] != other[0, 0] else (other[:, -1] + 1) % logits.shape[-1]
    changed = logits_of(run(model, other))
    if changed is None or not torch.allclose(changed[:, :-1], logits[:, :-1], rtol=1e-3, atol=1e-3):
        raise ValueError(f"{type(model).__name__} reads later tokens too: next-token figures would say nothing")


def _predictions(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(most likely next tokens, negative log-likelihoods) [T - 1]."""
    logits = logits_of(run(model, ids))
    assert logits is not None
    loss = nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="none")
    return logits[0, :-1].argmax(-1), loss


def _survival(keep: float, whole: list[tuple[Tensor, Tensor]], now: list[tuple[Tensor, Tensor]]) -> Survival:
    same = torch.cat([a == b for (a, _), (b, _) in zip(whole, now)])
    loss = torch.cat([loss for _, loss in now])
    return Survival(keep, float(same.float().mean()), float(loss.double().mean().exp()), len(same))
