"""The experiment of `check` on one prompt: what happens to a prediction when channels write less at its last token.

F d_ff, B variants of the model run as one batch, N channels that any of them changes.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .anatomy import Anatomy
from .edit import edit
from .reading import Reading
from .taps import evaluating, logits_of, run

Place = tuple[int, int]  # index into the layers that have effects, channel

NEAREST = 10  # a control is drawn among so many channels of the same layer, those nearest in size
ALIKE = 2.0  # of sizes within this factor: taking as much then leaves a coefficient between -1 and 1/2 of itself
_CANDIDATES = 3  # times `top`: where promoters with controls are looked for, and no control is drawn from


@dataclasses.dataclass(frozen=True)
class Row:
    """What one prompt showed; changes are of the predicted token's log-probability, in nats.

    token, p   the model's prediction and its probability.
    promoting  the change with the promoters silenced, the `top` channels of the largest direct effects on the token,
               which are `channels` (layer, channel);  p_after  its probability then.
    matched    the change with those promoters silenced that have controls, the `top` first of them, matched_channels;
               None where there are none.
    random     for each seed, the change when as much is taken from their controls.
    """

    prompt: str
    token: str
    p: float
    promoting: float
    p_after: float
    channels: list[tuple[int, int]]
    matched: float | None
    matched_channels: list[tuple[int, int]]
    random: list[float]

    @property
    def difference(self) -> float | None:
        return None if self.matched is None else self.matched - statistics.fmean(self.random)


def silence(model: nn.Module, anatomy: Anatomy, reading: Reading, top: int, seeds: list[int]) -> Row:
    """Run a prompt's variants: the model as it is, promoters silenced, those that have controls, each seed's controls.

    A control of a promoter is a random channel of its layer that is about as large (`ALIKE`). Its coefficient loses the
    share that makes the loss as large as the promoter, by the sizes in the model as it is.
    """
    token = reading.explained(-1)
    able = [r for r in reading.layers if reading.has_effects(r.layer)]
    sizes = [r.size[-1].double() for r in able]
    candidates = _promoters([r.effect(token, -1) for r in able], _CANDIDATES * top)
    promoters = candidates[:top]
    pools = {place: _alike(sizes[place[0]], place, candidates) for place in candidates}
    matched = [place for place in candidates if len(pools[place]) >= max(NEAREST, top)][:top]
    variants = 3 + len(seeds)
    factors: dict[Place, Tensor] = {}

    def take(variant: int, place: Place, share: float = 1.0) -> None:
        factors.setdefault(place, torch.ones(variants))[variant] -= share

    for place in promoters:
        take(1, place)
    for place in matched:
        take(2, place)
    for variant, seed in enumerate(seeds, 3):
        for place, control in _controls(matched, pools, seed):
            i, channel = place
            take(variant, (i, control), float(sizes[i][channel] / sizes[i][control]))
    ids = torch.tensor([list(reading.ids)] * variants)
    changes = []
    for i, r in enumerate(able):
        some = {channel: f for (layer, channel), f in factors.items() if layer == i}
        if some:
            changes.append(((r.layer.index, tuple(some)), _at_the_end(torch.stack(list(some.values()), 1))))
    with evaluating(model), edit(model, changes, anatomy=anatomy):
        logits = logits_of(run(model, ids))
    assert logits is not None
    p_B = logits[:, -1].double().log_softmax(-1)[:, token]
    change = (p_B - p_B[0]).tolist()
    return Row(
        prompt=reading.text,
        token=reading.vocabulary.text(token),
        p=float(p_B[0].exp()),
        promoting=change[1],
        p_after=float(p_B[1].exp()),
        channels=[(able[i].layer.index, c) for i, c in promoters],
        matched=change[2] if matched else None,
        matched_channels=[(able[i].layer.index, c) for i, c in matched],
        random=change[3:],
    )


def _promoters(effects: list[Tensor], n: int) -> list[Place]:
    """The n channels with the largest effects above 0, the largest first."""
    best = [(e, i, c) for i, effect in enumerate(effects) for e, c in zip(*_largest(effect, n)) if e > 0]
    return [(i, c) for _, i, c in sorted(best, key=lambda entry: -entry[0])[:n]]


def _largest(effect_F: Tensor, n: int) -> tuple[list[float], list[int]]:
    found = effect_F.topk(min(n, len(effect_F)))
    return found.values.tolist(), found.indices.tolist()


def _alike(size_F: Tensor, place: Place, candidates: list[Place]) -> list[int]:
    """Channels of the same layer about as large as one, the nearest first; none that promotes the token itself."""
    i, channel = place
    own = float(size_F[channel])
    promoting = {c for j, c in candidates if j == i}
    order = (size_F - own).abs().argsort(stable=True).tolist()
    return [c for c in order if c not in promoting and own / ALIKE <= float(size_F[c]) <= own * ALIKE]


def _controls(matched: list[Place], pools: dict[Place, list[int]], seed: int) -> list[tuple[Place, int]]:
    """A control for each promoter, no channel twice: pools are at least as many as the promoters."""
    generator = torch.Generator().manual_seed(seed)
    out: list[tuple[Place, int]] = []
    for place in matched:
        drawn = {c for (i, _), c in out if i == place[0]}
        near = [c for c in pools[place] if c not in drawn][:NEAREST]
        out.append((place, near[int(torch.randint(len(near), (), generator=generator))]))
    return out


def _at_the_end(factors_BN: Tensor) -> Callable[[Tensor], Tensor]:
    """The change that multiplies coefficients [B, T, N] (or [B·T, N], as some code has them) at the last token."""

    def change(m: Tensor) -> Tensor:
        by_row = m.reshape(len(factors_BN), -1, m.shape[-1])
        by_row[:, -1] = by_row[:, -1] * factors_BN.to(m)
        return by_row.reshape(m.shape)

    return change
