"""`check`: whether what `read` says of a model is so. Sums that have to come out, and an experiment on prompts.

The experiment (`silencing`): take away what the channels write that, by their direct effects, promote the predicted
token most; and, as a control, take equally much (the same norm, in the same layers, at the same token) from channels
drawn at random. If direct effects mean anything, the first lowers the token's probability and the second does not.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from ..numerics import UNIT_ROUNDOFF, dtype_name
from .anatomy import Anatomy
from .anatomy import anatomy as anatomy_of
from .reading import Reading, read
from .silencing import Row, silence

# Short, plain, and about different things; what comes next is a name, a word of grammar, a number, punctuation, …
# Chosen before anything was measured on them: the control's limit of size was set on another twenty.
PROMPTS = (
    "The river Thames flows through",
    "Two plus two equals",
    "A spider has eight",
    "The children were playing in the",
    "Shakespeare was born in Stratford-upon-",
    "He put the key in the lock and",
    "Monday, Tuesday, Wednesday,",
    "The Earth moves around the",
    "A baby cow is called a",
    "In winter, the lake was covered with",
    "The train was late, so we",
    "Gold is a precious",
    "For breakfast they had eggs and",
    "The doctor told her to take the medicine twice a",
    "London is the capital of",
    "The king and his",
    "Birds can fly because they have",
    "After dinner, he washed the",
    "The first month of the year is",
    "We can see the stars at",
)
SEEDS = (0, 1, 2, 3, 4)
QUARTER = 0.25  # of the promoters' effect: less than that, with either sign, is "does not lower it"
ROUNDINGS = 8  # of Σ |part|: an FFN's output, a norm and a logit are rounded on the way, in the model's dtype


@dataclasses.dataclass(frozen=True)
class Mean:
    """A mean over prompts with its 95 % interval (Student's t); without one where there is a single prompt."""

    mean: float
    low: float | None
    high: float | None

    @property
    def below_zero(self) -> bool:
        return self.mean < 0 and (self.high is None or self.high < 0)

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:+.3f}"
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def mean_of(values: Sequence[float]) -> Mean:
    """The mean of independent values and its 95 % interval."""
    n, mean = len(values), statistics.fmean(values)
    if n < 2:
        return Mean(mean, None, None)
    half = t_quantile(n - 1) * statistics.stdev(values) / math.sqrt(n)
    return Mean(mean, mean - half, mean + half)


def t_quantile(freedom: int) -> float:
    """The two-sided 95 % quantile of Student's t, by the expansion of Abramowitz and Stegun 26.7.5 (to 0.3 %)."""
    z, n = statistics.NormalDist().inv_cdf(0.975), freedom
    if n <= 4:
        return (12.706, 4.303, 3.182, 2.776)[n - 1]
    terms = (
        z,
        (z**3 + z) / 4 / n,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96 / n**2,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384 / n**3,
    )
    return math.fsum(terms)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was checked, in words: holds is None where it could not be."""

    name: str
    holds: bool | None
    words: str


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """What `check` found on a model, with a Row per prompt.

    promoting, matched, random, difference  means over the rows of what they say; None where none says it.
    """

    model: str
    top: int
    prompts: int
    rows: list[Row]
    findings: list[Finding]
    promoting: Mean | None
    matched: Mean | None
    random: Mean | None
    difference: Mean | None

    @property
    def ok(self) -> bool:
        return all(f.holds is not False for f in self.findings)

    @property
    def verdict(self) -> str:
        failed = [f.name for f in self.findings if f.holds is False]
        unknown = [f.name for f in self.findings if f.holds is None]
        out = f"does not hold: {', '.join(failed)}" if failed else "holds"
        return out + (f" (could not be checked: {', '.join(unknown)})" if unknown else "")

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "ok": self.ok, "verdict": self.verdict}

    def __str__(self) -> str:
        said = {None: "not checked", True: "yes", False: "NO"}
        lines = [f"{said[f.holds]}: {f.words}" for f in self.findings]
        return "\n".join([*lines, f"{self.model}: {self.verdict}"])


def check(
    model: nn.Module,
    tokenizer: Any,
    prompts: Iterable[Any] | None = None,
    top: int = 10,
    seeds: Iterable[int] = SEEDS,
    *,
    anatomy: Anatomy | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> CheckReport:
    """Check on a model what the memory view says of it.

    - Sum rule: in every layer, Σ m_i v_i + bias is what the layer gave, to `numerics`' tolerance rule.
    - Direct effects: those of embedding, attention, channels and biases add up to the predicted token's logit.
    - Silencing: with coefficient 0 at the last token, the `top` channels of the largest direct effects on the predicted
      token lower its log-probability.
    - Control: taking as much (equal ‖Δ‖, layer by layer) from random channels does not: it changes it less than a
      quarter as much, and the paired difference is below 0. Of promoters that channels of their layer equal in size
      (within a factor of 2): the few massive ones of some layers have no equal.
    The last two with 95 % intervals over the prompts.

    prompts  texts, or token ids each; default: 20 short English ones;  seeds  one random draw of controls for each.
    anatomy  what `anatomy(model)` gave;  progress  called with (done, total).
    -> CheckReport, with `ok` and a `verdict`; what a model without a head (or without direct effects) does not allow is
    said to be not checked. Raises ValueError for no prompts, no seeds, or top < 1.
    """
    texts, draws = list(PROMPTS if prompts is None else prompts), list(seeds)
    if not texts or not draws or top < 1:
        given = f"{len(texts)} prompts, {len(draws)} seeds, top={top}"
        raise ValueError(f"nothing to check with: {given}; expected at least 1 of each")
    found = anatomy if anatomy is not None else anatomy_of(model)
    rows: list[Row] = []
    sums: list[tuple[int, float, float]] = []  # layer, error over what is allowed, error
    off: list[float] = []
    name, why_not = "", ""
    for i, text in enumerate(texts):
        reading = read(model, tokenizer, text, anatomy=found)
        name, why_not = reading.name, reading.effects_why_not or ""
        for rule in reading.sum_rule:
            over = max(_ratio(rule.error, rule.allowed), _ratio(rule.worst, rule.worst_allowed))
            sums.append((rule.layer, over, rule.error))
        if not why_not:
            off.append(_off(reading))
            rows.append(silence(model, found, reading, top, draws))
        if progress is not None:
            progress(i + 1, len(texts))
    paired = [row for row in rows if row.matched is not None]
    columns = (
        [row.promoting for row in rows],
        [row.matched for row in rows if row.matched is not None],
        [statistics.fmean(row.random) for row in paired],
        [row.difference for row in rows if row.difference is not None],
    )
    promoting, matched, random, difference = (mean_of(column) if column else None for column in columns)
    findings = [
        _sum_finding(sums),
        _parts_finding(off, why_not),
        _silencing_finding(promoting, top, len(rows), why_not),
        _control_finding(matched, random, difference, rows, paired, why_not),
    ]
    return CheckReport(name, top, len(texts), rows, findings, promoting, matched, random, difference)


def _off(reading: Reading) -> float:
    """How far the parts of the predicted token's logit, FFNs by channels, are from it, over what rounding explains."""
    token = reading.explained(-1)
    shares = reading.shares(-1, token)
    channels = {r.layer.index: float(r.effect(token, -1).sum()) for r in reading.layers if r.layer.direct}
    parts = [shares.embedding, shares.constant]
    for row in shares.layers:
        parts += [row.attention, channels[row.layer] + row.bias]
    coarsest = max(UNIT_ROUNDOFF[dtype_name(d)] for d in reading.captured.dtype.values())
    return _ratio(abs(shares.logit - math.fsum(parts)), ROUNDINGS * coarsest * math.fsum(map(abs, parts)))


def _ratio(error: float, allowed: float) -> float:
    return error / allowed if allowed > 0 else (0.0 if error == 0 else math.inf)


def _sum_finding(sums: list[tuple[int, float, float]]) -> Finding:
    worst, layers = max(sums, key=lambda s: s[1]), len({layer for layer, *_ in sums})
    bad = sorted({layer for layer, over, _ in sums if not over <= 1})
    held = f"in all {layers} layers" if not bad else f"not in layer {', '.join(map(str, bad))} of {layers}"
    return Finding(
        "sum rule",
        not bad,
        f"Σ coefficient · value + bias is what the layer gave, {held}: off by at most {worst[1]:.2f} of the tolerance "
        f"(layer {worst[0]}, relative error {worst[2]:.1e})",
    )


def _parts_finding(off: list[float], why_not: str) -> Finding:
    if not off:
        return Finding("direct effects", None, f"whether direct effects add up to a logit: {why_not}")
    return Finding(
        "direct effects",
        max(off) <= 1,
        "embedding, attention, channels and biases add up to the predicted token's logit: off by at most "
        f"{max(off):.2f} of what rounding explains",
    )


def _silencing_finding(promoting: Mean | None, top: int, n: int, why_not: str) -> Finding:
    if promoting is None:
        return Finding("silencing", None, f"whether channels that promote a token matter to it: {why_not}")
    return Finding(
        "silencing",
        promoting.below_zero,
        f"silencing the {top} channels that promote the predicted token most changes its log-probability by "
        f"{promoting}, mean of {n} prompts (probability × {math.exp(promoting.mean):.2f})",
    )


def _control_finding(
    matched: Mean | None,
    random: Mean | None,
    difference: Mean | None,
    rows: list[Row],
    paired: list[Row],
    why_not: str,
) -> Finding:
    if matched is None or random is None or difference is None:
        reason = why_not or "no channel of the layers equals a promoting one in size"
        return Finding("control", None, f"whether random channels of equal size matter less: {reason}")
    alone = sum(len({*row.channels} - {*row.matched_channels}) for row in rows)
    every = sum(len(row.channels) for row in rows)
    spared = f" ({alone} of {every} promoting channels have no equals: left out here)" if alone else ""
    return Finding(
        "control",
        difference.below_zero and abs(random.mean) < QUARTER * abs(matched.mean),
        f"taking as much from random channels of equal size in the same layers changes it by {random} (probability × "
        f"{math.exp(random.mean):.2f}), silencing the promoting ones by {matched}{spared}; paired difference "
        f"{difference}, {len(paired)} prompts",
    )
