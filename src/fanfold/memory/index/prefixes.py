"""What is measured at one random position of each sequence: which states and updates agree on a token.

N prefixes, D d_model, F d_ff, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..anatomy import Anatomy
from ..capture import Captured, capture
from ..layers import Layer, coefficients

_ROWS = 256  # vectors read against the vocabulary at a time: 256 · V floats
_BATCH = 8  # prefixes run together


class Reader:
    """Reads vectors as tokens, the way the model's head does.

    raw  whether the final norm's gain is left out, as in the paper, whose model has no final norm.
    """

    def __init__(self, anatomy: Anatomy, raw: bool = False) -> None:
        e_VD, norm = anatomy.unembedding(), anatomy.head.norm
        assert e_VD is not None, "a model without a head is refused before"
        assert norm is not None
        self.e_VD, self.norm, self.raw = e_VD, norm, raw
        self.bias, self.scale = anatomy.head_bias, anatomy.head.input_scale

    def logits(self, part_ND: Tensor) -> Tensor:
        """E · gain · (v, centred if the norm centres): what a part of a state adds to the logits, but for a factor."""
        if not self.raw:
            part_ND = self.norm.gain.float() * self.norm.centred(part_ND)
        return nn.functional.linear(part_ND, self.e_VD)

    def top(self, part_ND: Tensor) -> Tensor:
        """[N] the token that each part of a state promotes most."""
        return torch.cat([self.logits(rows).argmax(-1) for rows in part_ND.split(_ROWS)])

    def top_of_state(self, h_ND: Tensor) -> Tensor:
        """[N] the token that the model's head reads in each state: argmax of E · norm(h) + bias."""
        out = []
        for rows in h_ND.split(_ROWS):
            normed = (self.norm.apply(rows) * self.scale).float()
            out.append(nn.functional.linear(normed, self.e_VD, self.bias).argmax(-1))
        return torch.cat(out)


@dataclasses.dataclass
class Values:
    """What each value of a layer promotes: {sign: [F]}, the top token of sign · v and its probability in softmax.

    agrees  whether that token follows one of the channel's triggers.
    """

    token: dict[int, Tensor]
    probability: dict[int, Tensor]
    agrees: dict[int, Tensor] = dataclasses.field(default_factory=dict)


def values(reader: Reader, down_DF: Tensor, signs: tuple[int, ...]) -> Values:
    """Read every value, coefficient 1 (and -1)."""
    token: dict[int, list[Tensor]] = {s: [] for s in signs}
    probability: dict[int, list[Tensor]] = {s: [] for s in signs}
    for rows in down_DF.t().split(_ROWS):
        logits = reader.logits(rows)
        for sign in signs:
            best, at = (sign * logits).max(-1)
            token[sign].append(at)
            probability[sign].append((best - (sign * logits).logsumexp(-1)).exp())
    return Values({s: torch.cat(t) for s, t in token.items()}, {s: torch.cat(p) for s, p in probability.items()})


def prefixes(
    sample: list[tuple[int, np.ndarray[Any, Any]]], seed: int, special: list[int], uncounted: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """(token ids [B, T], position of each prefix's end [B]): one random position per sequence, in batches.

    special  tokens before each sequence;  uncounted  first positions of a sequence that are not drawn.
    Tokens after a prefix's end are there where another of the batch is longer; a causal model does not see them.
    """
    ends = [(int(np.random.default_rng([seed, i]).integers(uncounted, len(ids))), i, ids) for i, ids in sample]
    ends.sort(key=lambda e: e[:2])
    for at in range(0, len(ends), _BATCH):
        some = ends[at : at + _BATCH]
        length = some[-1][0] + 1
        rows = [[*special, *ids[:length].tolist(), *[int(ids[0])] * (length - len(ids))] for _, _, ids in some]
        yield torch.tensor(rows), torch.tensor([len(special) + end for end, _, _ in some])


class Counts:
    """Sums over prefixes, per layer and in all; `row` gives a layer's shares."""

    NAMES = ("active", "nonzero", "zero_agreement", "zero_agreement_active", "residual_final", "residual", "ffn",
             "all_agree", "composition", "top10_share")  # fmt: skip

    def __init__(self, anatomy: Anatomy, thresholds: dict[int, float], tops: dict[int, Values]) -> None:
        self.anatomy, self.thresholds, self.tops = anatomy, thresholds, tops
        self.reader = Reader(anatomy)
        self.prefixes = 0
        self.sums: dict[int, dict[str, float]] = {i.index: dict.fromkeys(self.NAMES, 0.0) for i in anatomy.stream}

    def add(self, model: nn.Module, ids_BT: Tensor, ends_B: Tensor) -> None:
        """Run a batch of prefixes and count."""
        seen = capture(model, self.anatomy, ids_BT, [layer.index for layer in self.anatomy.stream])
        assert seen.logits is not None
        rows = torch.arange(len(ends_B))
        final = seen.logits[rows, ends_B].argmax(-1)
        self.prefixes += len(rows)
        for layer in self.anatomy.stream:
            found = self._layer(layer, seen, rows, ends_B, final)
            for name, value in found.items():
                self.sums[layer.index][name] += float(value.double().sum())

    def row(self, layer: int) -> dict[str, float]:
        return {name: value / self.prefixes for name, value in self.sums[layer].items()}

    def _layer(self, layer: Layer, seen: Captured, rows: Tensor, ends: Tensor, final: Tensor) -> dict[str, Tensor]:
        """{name: [N]} of one layer."""
        x, y, o = (states[layer.index][rows, ends] for states in (seen.x, seen.y, seen.after))
        update = self._update(layer, y)
        top_r, top_y, top_o = self._tops(o - update, update, o)
        weights, tops = layer.weights(), self.tops[layer.index]
        m = coefficients(weights, x).coefficient
        size = m.abs() * weights.down.norm(dim=0)
        # of signed coefficients the negative ones write -v
        token = torch.where(m < 0, tops.token[-1], tops.token[1]) if -1 in tops.token else tops.token[1].expand(m.shape)
        active, same = size > self.thresholds[layer.index], token == top_y[:, None]
        same_ro, same_yo = top_r == top_o, top_y == top_o
        return {
            "active": active.double().mean(-1),
            "nonzero": (m != 0).double().mean(-1),
            "zero_agreement": ~same.any(-1),
            "zero_agreement_active": ~(same & active).any(-1),
            "residual_final": top_r == final,
            "residual": same_ro & ~same_yo,
            "ffn": same_yo & ~same_ro,
            "all_agree": same_ro & same_yo,
            "composition": ~same_ro & ~same_yo,
            "top10_share": size.topk(min(10, size.shape[-1])).values.sum(-1) / size.sum(-1).clamp_min(1e-30),
        }

    def _update(self, layer: Layer, y: Tensor) -> Tensor:
        """What y adds to the residual."""
        norm = self.anatomy.post_norm(layer)
        return layer.factor * (y if norm is None else norm.apply(y).float())

    def _tops(self, r: Tensor, update: Tensor, o: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.reader.top_of_state(r), self.reader.top(update), self.reader.top_of_state(o)
