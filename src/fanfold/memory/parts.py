"""What a reading answers with: predictions, shares of a logit, channels, the tokens of a direction."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A token that the model gives probability p; logit as the model gives it."""

    id: int
    text: str
    p: float
    logit: float


@dataclasses.dataclass(frozen=True)
class LayerShare:
    """What one block adds to a token's logit: by attention (all of the block but the FFN) and by the FFN, of which
    `bias` is what no channel writes."""

    layer: int
    attention: float
    ffn: float
    bias: float


@dataclasses.dataclass(frozen=True)
class Shares:
    """The parts of a token's logit at a position.

    embedding  what the residual held before the first block;  constant  the biases of the final norm and the head.
    logit      the model's own (before a soft cap; less the mean of all if centred);  remainder  logit - sum: rounding.
    """

    position: int
    token: int
    text: str
    embedding: float
    layers: list[LayerShare]
    constant: float
    logit: float

    @property
    def sum(self) -> float:
        parts = [part for row in self.layers for part in (row.attention, row.ffn)]
        return math.fsum([self.embedding, self.constant, *parts])

    @property
    def remainder(self) -> float:
        return self.logit - self.sum


@dataclasses.dataclass(frozen=True)
class Channel:
    """One channel at a position: gate (None without one) · content gives coefficient m, where it is gated; size
    |m| · ‖v‖; effect on the logit, None where there is none."""

    layer: int
    channel: int
    coefficient: float
    gate: float | None
    content: float
    size: float
    effect: float | None


@dataclasses.dataclass(frozen=True)
class Tokens:
    """(text, score) of the tokens that a direction promotes and suppresses most, the strongest first."""

    promoted: list[tuple[str, float]]
    suppressed: list[tuple[str, float]]
    promoted_ids: list[int]
    suppressed_ids: list[int]
