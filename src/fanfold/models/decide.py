"""The verdict: exactly one description that agrees to rounding, with the evidence; else the nearest, as a reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from .description import Description
from .laboratory import ALLOWED, SCALES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the experiment saw.

    error           largest relative error over the scales of the best description, against float64.
    allowed         the largest that counts as agreement.
    gradient_error  the same for the gradient of the input (None if not reached).
    runner_up, runner_up_error  the nearest different description.
    candidates      how many descriptions were compared; scales: pre-activation std of the inputs.
    """

    error: float
    allowed: float
    gradient_error: float | None
    runner_up: str
    runner_up_error: float
    candidates: int
    scales: tuple[float, ...] = SCALES

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity:
    """The outcome: a description with its evidence, or the reason why there is none.

    token_wise  True if the code was seen to map each token on its own, False if it was seen to mix tokens (then it is
                no FFN), None if that was not reached.
    dropout     whether the outputs differ in training mode.
    """

    description: Description | None
    reason: str
    evidence: Evidence | None
    token_wise: bool | None = None
    dropout: bool = False


def decide(
    options: list[Description], errors: list[float], gradient_error: Callable[[Description], float], tried: int
) -> Identity:
    """Exactly one description within ALLOWED, in values and gradients; else the nearest ones, as a reason."""
    order = sorted(range(len(options)), key=lambda i: errors[i])
    best = options[order[0]]
    rest = [i for i in order[1:] if options[i] != best]
    runner = rest[0] if rest else order[0]
    evidence = Evidence(
        error=errors[order[0]],
        allowed=ALLOWED,
        gradient_error=None,
        runner_up=options[runner].name(),
        runner_up_error=errors[runner] if rest else float("inf"),
        candidates=tried,
    )
    nearest = "; ".join(f"{options[i].name()} {errors[i]:.1e}" for i in order[:3])
    if evidence.error > ALLOWED:
        reason = f"no description matches (allowed {ALLOWED:.1e}); nearest: {nearest}"
        return Identity(description=None, reason=reason, evidence=evidence, token_wise=True)
    if evidence.runner_up_error <= ALLOWED:
        reason = f"two descriptions match (allowed {ALLOWED:.1e}): {nearest}"
        return Identity(description=None, reason=reason, evidence=evidence, token_wise=True)
    slope = gradient_error(best)
    evidence = dataclasses.replace(evidence, gradient_error=slope)
    if slope > ALLOWED:
        reason = f"outputs match {best.name()}, but input gradients differ by {slope:.1e} (allowed {ALLOWED:.1e})"
        return Identity(description=None, reason=reason, evidence=evidence, token_wise=True)
    notes = [f"output scaled by {best.scale:g}"] if best.scale != 1.0 else []
    if options[0].spec.down_bias and not best.spec.down_bias:
        notes.append("the bias of down is there, but the module's code does not use it")
    return Identity(description=best, reason="; ".join(notes), evidence=evidence, token_wise=True)
