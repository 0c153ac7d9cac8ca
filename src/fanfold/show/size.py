"""`fanfold size`: candidate widths with the rules they keep and break, and the width of a released model explained."""

from __future__ import annotations

import re
from typing import Any

from ..count import explain, models
from ..count.candidates import Candidate, Sizing
from ..count.cost import resolve
from ..count.explain import Explanation
from ..spec import Spec
from .models import TABLED
from .output import number, table

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmgbt]?)", re.IGNORECASE)
_BUDGET = re.compile(r"(\w+):(\d+)x(\d+)")


def amount(name: str, text: str | None) -> float | None:
    """A number as typed: 135266304, 135e6, 135M, 1.2B (k, M, G or B, T). Raises ValueError."""
    if text is None:
        return None
    found = _AMOUNT.fullmatch(text.strip())
    if found is None or float(found.group(1)) == 0:
        raise ValueError(f"{name}={text!r}: expected a positive number such as 135266304, 135e6, 135M or 1.2B")
    return float(found.group(1)) * _UNITS[found.group(2).lower()]


def budget(text: str | None) -> Spec | None:
    """An FFN as typed: gelu:768x3072. Raises ValueError."""
    if text is None:
        return None
    found = _BUDGET.fullmatch(text)
    if found is None:
        raise ValueError(f"budget={text!r}: expected VARIANT:D_MODELxD_FF, such as gelu:768x3072")
    return Spec.parse(found.group(1), d_model=int(found.group(2)), d_ff=int(found.group(3)))


def explained(name: str, constraints: Any) -> Explanation:
    """The explanation of a model of the table, of a config.json, or of a folder with one. Raises ValueError."""
    return explain.explain_model(resolve(TABLED.get(name, name)), constraints)  # type: ignore[arg-type]


def show_explanation(found: Explanation) -> None:
    """Print an explanation for people."""
    print(f"{found.model.name}: {found.model.ffn.describe()}, {found.model.n_layers} layers\n")
    for sentence in found.sentences():
        print(f"- {sentence}")


def show(found: Sizing, why: bool = False) -> None:
    """Print a sizing for people; `why` adds for each candidate its formulas with the numbers put in."""
    b, c = found.budget, found.constraints
    print(f"{found.spec.activation}{' gated' if found.spec.gated else ''}, d_model = {found.spec.d_model}; "
          f"budget: {b.origin}: d_ff = {b.exact:.2f}")  # fmt: skip
    asked = [f"format {c.form.name}"] + ([f"tp {c.tp}"] if c.tp > 1 else [])
    if c.device is not None:
        asked.append(f"{c.device.slug}, products of {', '.join(map(str, c.tokens))} tokens")
    print(f"{'; '.join(asked)}; {'any width' if c.step == 1 else f'multiples of {c.step}'}\n")
    if found.like is not None:
        print(f"{found.like.rule}: {'; '.join(found.like.steps)} ({found.like.source})\n")
    _table(found)
    print(f"recommended: {found.reason}")
    print(f"round width: {found.round_width}")
    for note in found.notes:
        print(f"note: {note}")
    if why:
        print()
        for x in found.candidates:
            for line in reasons(x, found):
                print(line)


def _table(found: Sizing) -> None:
    utilisation = any(x.utilisation is not None for x in found.candidates)
    timed = [k for k in found.candidates[0].measured if k.startswith("seconds_at")]
    heads = ["d_ff, channels", "factors", "off budget, %", "parameters", "score, points"]
    heads += ["utilisation, %"] if utilisation else []
    counts = [k.removeprefix("seconds_at_").removesuffix("_tokens_s") for k in timed]
    heads += [f"{n} token{'s' * (n != '1')}, ms" for n in counts]
    heads += ["speed, % of best"] if timed else []
    rows = []
    for x in found.candidates:
        row = [str(x.d_ff), factors_of(x), f"{100 * x.deviation:+.2f}", f"{x.params:,}"]
        row.append(f"{x.score:.1f}" if x.usable else "excluded")
        if utilisation:
            row.append("–" if x.utilisation is None else f"{100 * x.utilisation:.1f}")
        row += [number(1e3 * x.measured[k]) if k in x.measured else "–" for k in timed]
        row += [f"{x.measured['speed_percent_of_best']:.1f}" if x.measured else "–"] if timed else []
        rows.append([*row, ", ".join(x.broken) or "none"])
    names = dict.fromkeys(r.name + (" (hard)" if r.hard else "") for x in found.candidates for r in x.rules)
    print(f"rules: {', '.join(names)}; those not named under `breaks` are kept (--why: the numbers)")
    table("", [*heads, "breaks"], rows)


def factors_of(x: Candidate) -> str:
    """The width as a power of two and the rest."""
    from ..count.candidates import factors

    return factors(x.d_ff)


def reasons(x: Candidate, found: Sizing) -> list[str]:
    """For one candidate: deviation, score and rules, with the numbers put in."""
    b = found.budget
    lines = [
        f"{x.d_ff}: deviation = {b.unit} / budget - 1 = {x.amount:g} / {b.amount:g} - 1 = {100 * x.deviation:+.4f} %"
    ]
    points = " - ".join(f"{r.cost:g} ({r.name})" for r in x.rules if r.cost)
    used = "" if x.utilisation is None else f" - 20 * (1 - {x.utilisation:.4f})"
    if x.measured:
        lines.append(f"{x.d_ff}: score by measurement = {x.score:.2f}")
    else:
        off = f"100 - 4 * {100 * abs(x.deviation):.4f}"
        lines.append(f"{x.d_ff}: score = {off}{f' - {points}' if points else ''}{used} = {x.score:.2f}")
    lines += [
        f"{x.d_ff}: {r.name} {'kept' if r.kept else 'BROKEN'}{' (hard)' if r.hard else ''}: {r.detail}" for r in x.rules
    ]
    return lines


def show_models() -> None:
    """Print the table of models."""
    rows = [
        [r["name"], str(r["d_model"]), str(r["d_ff"]), number(r["d_ff_over_d_model"]),
         ("gated " if r["gated"] else "") + r["activation"], str(r["n_layers"]), "yes" if r["verified"] else "no"]
        for r in explain.listing()
    ]  # fmt: skip
    heads = [
        "model",
        "d_model, channels",
        "d_ff, channels",
        "d_ff / d_model",
        "kind",
        "layers",
        "shapes seen in a source",
    ]
    table(f"{len(models.table())} released models", heads, rows)
