"""What an index answers with: a trigger, a channel, a match."""

from __future__ import annotations

import dataclasses
import re
from typing import Any


@dataclasses.dataclass(frozen=True)
class Trigger:
    """One of the sequences in which a channel's coefficient was largest, at its maximum.

    coefficient  with its sign;  token, next_token  ids at the peak and after it (None at the end of a text).
    source, position  which text, and how many of its tokens came before;  sequence  the index's number of it.
    before, peak, after  the text around and at the peak;  next  the text of the next token.
    """

    coefficient: float
    source: str
    sequence: int
    position: int
    token: int
    next_token: int | None
    before: str
    peak: str
    after: str
    next: str

    def text(self, left: str = "[", right: str = "]") -> str:
        """The context on one line, the peak between marks."""
        peak = self.peak.strip()
        at = self.peak.find(peak) if peak else 0
        marked = f"{self.peak[:at]}{left}{peak or self.peak}{right}{self.peak[at + len(peak or self.peak) :]}"
        return re.sub(r"\s+", " ", f"{self.before}{marked}{self.after}").strip()

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Channel:
    """What the index knows of one channel.

    value_norm  ‖v‖;  mean, variance  of the coefficient over all tokens;  positive, zero, negative  share of tokens.
    frequency   share of tokens at which it is active: |m|·‖v‖ above the layer's `threshold` (see `Index.layers`).
    histogram   {lower end of |m|, with the sign of m: tokens}: bins [2^e, 2^(e+1)), exact zeros at 0; empty bins are
                left out, the outermost (2^-14 and 2^9) hold all that is beyond.
    triggers_positive, triggers_negative  strongest first; the second is empty where coefficients are not signed.
    """

    layer: int
    channel: int
    value_norm: float
    frequency: float
    mean: float
    variance: float
    positive: float
    zero: float
    negative: float
    threshold: float
    histogram: dict[float, int]
    triggers_positive: list[Trigger]
    triggers_negative: list[Trigger]

    def to_dict(self) -> dict[str, Any]:
        out = dataclasses.asdict(self)
        return out | {"histogram": [[low, n] for low, n in self.histogram.items()]}


@dataclasses.dataclass(frozen=True)
class Match:
    """One end of a channel whose triggers match a search.

    score     share of the end's summed strength that lies in matching triggers, counted twice where the match is the
              very word (or token) at the peak: 0 to 2.
    matches, at_peak  how many of the `triggers` that are kept match, and of those how many at the peak.
    examples  the strongest that match.
    """

    layer: int
    channel: int
    sign: int
    score: float
    matches: int
    at_peak: int
    triggers: int
    examples: list[Trigger]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
