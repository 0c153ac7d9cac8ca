"""`size`: which d_ff to take, given a budget and what the width has to suit."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..spec import Spec
from . import ffn, formats, hardware
from .candidates import Budget, Candidate, Sizing, factors
from .formats import ffn_bytes
from .hardware import Hardware
from .like import Width
from .like import like as published_width
from .rules import SUPER_BLOCK, Constraints, rules, utilisation
from .settings import positive

_STEPS = (1, 2, 8, 16, 32, 64, 128, 256, 512, 1024)
_PER_PERCENT = 4.0  # points of the score for each percent off the budget
_FAR = 0.25  # deviation beyond which widths are not listed
_FOR_UTILISATION = 20.0  # points for a device that would be idle all the time


def size(
    d_model: int,
    *,
    variant: str = "swiglu",
    bias: bool = False,
    budget: Spec | None = None,
    params: float | None = None,
    flop_per_token: float | None = None,
    n_bytes: float | None = None,
    tp: int = 1,
    format: str = "bf16",
    group: int | None = None,
    hardware: str | Hardware | None = None,
    multiple_of: int | None = None,
    tokens: int | Sequence[int] = 2048,
    like: str | None = None,
    multiplier: float | None = None,
    limit: int = 12,
) -> Sizing:
    """List widths near the one that spends a budget exactly, with every rule they keep or break, and recommend one.

    Classic budget: n_matrices d_model d_ff = 2 d_model 4 d_model, so that d_ff = 8/3 d_model with a gate.

    d_model      width of a token.       variant   swiglu, geglu, gelu, relu, …; bias: on every projection.
    budget       another FFN whose parameters are to be matched; or give one of
    params       weights and biases,  flop_per_token  forward,  n_bytes  of the weights in `format`.
    tp           ranks that share the width;  format, group  of the weights: a rank gets whole groups.
    hardware     a device's name: its matrix unit, and for GPUs its tiles and waves at each of `tokens`.
    multiple_of  a multiple that the width has to be of.
    like         a published rule (llama, llama3, palm, gpt2, …), whose width is taken as the budget and listed;
                 multiplier and multiple_of then are the rule's.
    limit        most candidates listed.
    The hard rules (tp, group, multiple_of; fp8_16 in fp8) are never broken by the recommendation.

    Raises ValueError, naming the known values, for a count below 1, an unknown name, more than one budget, or a
    budget that is too small for one channel per rank. Sources: Shazeer 2020, arXiv:2002.05202; Anthony 2024,
    arXiv:2401.14489.
    """
    positive("d_model", d_model)
    positive("limit", limit)
    published = None
    if like is not None:
        published = published_width(like, d_model, multiplier, multiple_of)
        variant, multiple_of = published.variant, None
    elif multiplier is not None:
        raise ValueError(f"multiplier={multiplier!r} belongs to a published rule: name it with like=")
    unit = _unit_spec(variant, d_model, bias)
    c = constraints(tp=tp, format=format, group=group, device=hardware, multiple_of=multiple_of, tokens=tokens)
    spent = _budget(unit, c, budget, params, flop_per_token, n_bytes, published)
    widths = _widths(spent.exact, c)
    if published is not None:
        widths.add(published.d_ff)
    found = sorted((candidate(unit, d_ff, spent, c) for d_ff in widths), key=_order)
    recommended = found[0]
    notes = []
    if c.form.group and d_model % c.form.group:
        notes.append(f"d_model={d_model} is no multiple of {c.form.group}: rows of gate and up end in part of a group")
    if d_model % SUPER_BLOCK:
        notes.append(
            f"d_model={d_model} is no multiple of {SUPER_BLOCK}: gate and up cannot be k-quants, whatever d_ff is"
        )
    listed = _listed(found, limit, spent.exact, published)
    return Sizing(
        spec=_at(unit, recommended.d_ff),
        budget=spent,
        constraints=c,
        candidates=listed,
        recommended=recommended,
        reason=reason(recommended, found, spent, published),
        round_width=_round_width(unit, spent, c),
        like=published,
        notes=notes,
    )


def _unit_spec(variant: str, d_model: int, bias: bool) -> Spec:
    """The variant with one channel, as a stand-in while the width is sought."""
    spec = Spec.parse(variant, d_model=d_model, d_ff=1, up_bias=bias, down_bias=bias)
    return Spec.from_dict({**spec.to_dict(), "gate_bias": bias and spec.gated})


def _at(spec: Spec, d_ff: int) -> Spec:
    return Spec.from_dict({**spec.to_dict(), "d_ff": d_ff})


def constraints(
    *,
    tp: int = 1,
    format: str = "bf16",
    group: int | None = None,
    device: str | Hardware | None = None,
    multiple_of: int | None = None,
    tokens: int | Sequence[int] = 2048,
) -> Constraints:
    """What a width has to suit, checked. The arguments are those of `size`. Raises ValueError."""
    positive("tp", tp)
    if multiple_of is not None:
        positive("multiple_of", multiple_of)
    counts = (tokens,) if isinstance(tokens, int) else tuple(tokens)
    for count in counts:
        positive("tokens", count)
    found = hardware.get(device) if isinstance(device, str) else device
    return Constraints(
        tp=tp, form=formats.get(format, group), device=found, tokens=counts, multiple_of=multiple_of
    )  # fmt: skip


def _budget(
    unit: Spec,
    c: Constraints,
    spec: Spec | None,
    params: float | None,
    flop_per_token: float | None,
    n_bytes: float | None,
    published: Width | None,
) -> Budget:
    given = {"budget": spec, "params": params, "flop_per_token": flop_per_token, "n_bytes": n_bytes, "like": published}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ValueError(f"{' and '.join(named)} were given: expected one budget")
    for name in ("params", "flop_per_token", "n_bytes"):
        value = given[name]
        if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
            raise ValueError(f"{name}={value!r}: expected a positive number")
    if spec is not None:
        params, origin = spec.n_params, f"as many parameters as {spec.describe()}"
    elif published is not None:
        params, origin = _at(unit, published.d_ff).n_params, f"the rule of {published.rule}: d_ff={published.d_ff}"
    elif params is not None:
        origin = f"{params:,.0f} parameters"
    elif flop_per_token is not None:
        exact = ffn.width_for_flops(unit, flop_per_token)
        return _checked(flop_per_token, "flop_per_token", f"{flop_per_token:,.0f} FLOPs per token", exact, c)
    elif n_bytes is not None:
        exact = ffn.width_for_bytes(unit, n_bytes, c.form.name)
        return _checked(n_bytes, "bytes", f"{n_bytes:,.0f} bytes in {c.form.name}", exact, c)
    else:
        exact = ffn.classic_width(unit)
        amount = 2 * unit.d_model * ffn.CLASSIC_RATIO * unit.d_model
        return _checked(amount, "weights", f"the classic 2 * d_model * 4 d_model = {amount:,} weights", exact, c)
    return _checked(params, "params", origin, ffn.width_for_params(unit, params), c)


def _checked(amount: float, unit: str, origin: str, exact: float, c: Constraints) -> Budget:
    if exact < c.tp:
        raise ValueError(
            f"{origin}: that is d_ff={max(exact, 0.0):.6g}, expected at least one channel for each of tp={c.tp} ranks; "
            "give a larger budget"
        )
    return Budget(amount=amount, unit=unit, origin=origin, exact=exact)


def _widths(exact: float, c: Constraints) -> set[int]:
    """Widths next to the exact one: by what is hard, and by ever larger powers of two, per rank and whole."""
    found = {math.floor(exact), math.ceil(exact)}
    for step in _STEPS:
        for whole in {math.lcm(step, c.step), math.lcm(step * c.tp, c.step)}:
            below = math.floor(exact / whole) * whole
            found |= {below, below + whole}
            if step in (64, 128, 256):
                found |= {below - whole, below + 2 * whole}
    return {w for w in found if w >= 1} if any(w >= 1 for w in found) else {c.step}


def candidate(unit: Spec, d_ff: int, budget: Budget, c: Constraints) -> Candidate:
    """One width, judged."""
    spec = _at(unit, d_ff)
    amounts = {
        "params": spec.n_params,
        "weights": ffn.n_matrices(spec) * spec.d_model * d_ff,
        "flop_per_token": ffn.flops_per_token(spec),
        "bytes": ffn_bytes(spec, c.form.name),
    }
    amount = amounts[budget.unit]
    deviation = amount / budget.amount - 1
    found = tuple(rules(spec, c))
    used = utilisation(spec, c)
    score = 100 - _PER_PERCENT * 100 * abs(deviation) - sum(r.cost for r in found)
    score -= 0.0 if used is None else _FOR_UTILISATION * (1 - used)
    return Candidate(
        d_ff=d_ff, deviation=deviation, amount=amount, params=spec.n_params, rules=found, utilisation=used, score=score
    )  # fmt: skip


def _order(x: Candidate) -> tuple[bool, float, int]:
    return not x.usable, -x.score, x.d_ff


def _listed(found: list[Candidate], limit: int, exact: float, published: Width | None) -> list[Candidate]:
    """The best, and whatever the score: the exact solution's neighbours and the published width."""
    must = {math.floor(exact), math.ceil(exact)} | ({published.d_ff} if published else set())
    near = [x for x in found if abs(x.deviation) <= _FAR]
    first = (near if near and near[0] is found[0] else [found[0], *near])[:limit]
    found = [x for x in found if x not in first]
    return first + [x for x in found if x.d_ff in must]


def reason(best: Candidate, found: list[Candidate], budget: Budget, published: Width | None) -> str:
    """Why `best` is recommended among `found`, in one sentence."""
    kept = ", ".join(best.kept)
    text = (
        f"d_ff={best.d_ff} = {factors(best.d_ff)}, {100 * best.deviation:+.2f} % off the budget, keeps {kept or 'none'}"
    )
    if best.broken:
        text += f", breaks {', '.join(best.broken)}"
    nearest = min(found, key=lambda x: abs(x.d_ff - budget.exact))
    if nearest.d_ff != best.d_ff:
        text += f"; the nearest width, {nearest.d_ff}, breaks {', '.join(nearest.broken) or 'no rule'}"
    if published is not None:
        text += f"; {published.rule} itself gives {published.d_ff}"
    return text


def _round_width(unit: Spec, budget: Budget, c: Constraints) -> str:
    """The nearest multiple of the largest power of two that is at most a quarter of the width, and what it breaks."""
    step = 1 << max(0, math.floor(math.log2(max(budget.exact, 1))) - 2)
    d_ff = max(step, round(budget.exact / step) * step)
    found = candidate(unit, d_ff, budget, c)
    broken = [f"{r.name} ({r.detail})" for r in found.rules if not r.kept]
    return (
        f"the nearest round width, {d_ff} = {factors(d_ff)}, is {100 * found.deviation:+.2f} % off and breaks "
        f"{'; '.join(broken) or 'no rule'}"
    )
