"""What `size` gives back: the budget, the candidate widths and the recommendation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..spec import Spec
from .like import Width
from .rules import Constraints, Rule


def factors(value: int) -> str:
    """2^8 * 43: the power of two in a width and the rest."""
    power = value & -value
    two = f"2^{power.bit_length() - 1}"
    return two if power == value else str(value) if power == 1 else f"{two} * {value // power}"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What is to be spent: an amount in a unit, and where it comes from. `exact` is the width that spends it all."""

    amount: float
    unit: str  # "params", "flop_per_token" or "bytes"
    origin: str
    exact: float


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One width.

    deviation    of its cost from the budget, as a share: 0.01 is 1 % above.
    rules        each kept or broken; usable: no hard rule is broken.
    utilisation  predicted of a GPU by tiles and waves, None without one.
    score        100 - 4 per % of deviation - points of broken rules - 20 (1 - utilisation).
    tokens_per_s, flop_per_s   measured on this machine, where that was asked for.
    """

    d_ff: int
    deviation: float
    amount: float
    params: int
    rules: tuple[Rule, ...]
    utilisation: float | None
    score: float
    measured: dict[str, float] = field(default_factory=dict)

    @property
    def usable(self) -> bool:
        """Whether every hard rule is kept."""
        return all(r.kept for r in self.rules if r.hard)

    @property
    def broken(self) -> list[str]:
        """Names of the rules that it breaks."""
        return [r.name for r in self.rules if not r.kept]

    @property
    def kept(self) -> list[str]:
        """Names of the rules that it keeps."""
        return [r.name for r in self.rules if r.kept]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, units in the keys."""
        return {
            "d_ff": self.d_ff,
            "factors": factors(self.d_ff),
            "deviation_percent": 100 * self.deviation,
            "params": self.params,
            "usable": self.usable,
            "score_points": self.score,
            "utilisation_percent": None if self.utilisation is None else 100 * self.utilisation,
            "rules": {r.name: {"kept": r.kept, "hard": r.hard, "detail": r.detail} for r in self.rules},
            **self.measured,
        }


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """What `size` found; made by `size`.

    spec         the variant, at the recommended width.      budget   what was to be spent.
    candidates   best first: those that can be used by score, then those that cannot.
    recommended  the first of them; reason: why, in a sentence.
    round_width  the nearest multiple of a large power of two, and what it breaks.
    notes        what else to know about d_model.
    like         the width of a published rule, where one was asked for.
    """

    spec: Spec
    budget: Budget
    constraints: Constraints
    candidates: list[Candidate]
    recommended: Candidate
    reason: str
    round_width: str
    notes: list[str] = field(default_factory=list)
    like: Width | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, units in the keys."""
        c = self.constraints
        return {
            "spec": self.spec.to_dict(),
            "budget": {
                "amount": self.budget.amount,
                "unit": self.budget.unit,
                "origin": self.budget.origin,
                "exact_d_ff": self.budget.exact,
            },
            "constraints": {
                "tp": c.tp,
                "format": c.form.name,
                "group": c.form.group,
                "hardware": c.device.slug if c.device else None,
                "tokens": list(c.tokens),
                "multiple_of": c.multiple_of,
                "step_channels": c.step,
            },
            "recommended_d_ff": self.recommended.d_ff,
            "reason": self.reason,
            "round_width": self.round_width,
            "notes": list(self.notes),
            "like": None if self.like is None else {"rule": self.like.rule, "d_ff": self.like.d_ff,
                                                    "steps": list(self.like.steps), "source": self.like.source},
            "candidates": [x.to_dict() for x in self.candidates],
        }  # fmt: skip

    def __str__(self) -> str:
        return f"{self.spec.describe()}: {self.reason}"
