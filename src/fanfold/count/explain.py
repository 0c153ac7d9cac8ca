"""Why a released model has the width that it has: its ratio, its rules, its nearest alternatives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import ffn, like, models
from .candidates import factors
from .formats import FORMATS, GROUPS
from .models import Model
from .rules import SUPER_BLOCK, Constraints, Rule, rules
from .sizing import constraints

_MULTIPLIERS = (None, 1.3, 1.2, 1.5, 1.0)
_MULTIPLES = (256, 1024, 4096)
_MOST_RANKS = 64


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What `explain` found about a model's d_ff; widths are the file's, never rounded.

    ratio          d_ff / d_model.
    classic        d_ff of the classic budget for its kind, and the deviation of its own from that, as a share.
    other_kind     d_ff at which the other kind (gated or not) has as many weights.
    published      the published rules that give exactly this width, in words.
    rules          each kept or broken.
    ranks          tp up to 64 that split it whole; ranks_by_group: in whole groups of 32, 64, 128.
    """

    model: Model
    ratio: float
    classic: float
    deviation: float
    other_kind: float
    published: tuple[str, ...]
    rules: tuple[Rule, ...]
    ranks: tuple[int, ...]
    ranks_by_group: dict[int, tuple[int, ...]]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, units in the keys."""
        m = self.model
        return {
            "model": m.name,
            "spec": m.ffn.to_dict(),
            "d_ff": m.ffn.d_ff,
            "factors": factors(m.ffn.d_ff),
            "d_ff_over_d_model": self.ratio,
            "classic_d_ff": self.classic,
            "deviation_percent": 100 * self.deviation,
            "other_kind_d_ff": self.other_kind,
            "published_rules": list(self.published),
            "rules": {r.name: {"kept": r.kept, "detail": r.detail} for r in self.rules},
            "tp_whole": list(self.ranks),
            "tp_whole_by_group": {str(g): list(r) for g, r in self.ranks_by_group.items()},
            "n_experts": m.n_experts,
            "experts_per_token": m.experts_per_token,
            "note": m.note,
            "source": m.source,
            "verified": m.verified,
        }

    def sentences(self) -> list[str]:
        """The explanation in words."""
        m, spec = self.model, self.model.ffn
        kind = "gated" if spec.gated else "ungated"
        budget = "8/3" if spec.gated else "4"
        out = [
            f"d_ff = {spec.d_ff} = {factors(spec.d_ff)} = {self.ratio:.6g} d_model, {kind} {spec.activation}",
            f"the classic budget, {budget} d_model, is {self.classic:.2f}: this is {100 * self.deviation:+.2f} % off",
            f"{'an ungated' if spec.gated else 'a gated'} FFN has as many weights at d_ff = {self.other_kind:g}",
        ]
        out.append(
            f"given exactly by {'; '.join(self.published)}"
            if self.published
            else "given by none of the published rules here"
        )
        if m.n_experts:
            used = m.experts_per_token * spec.d_ff
            out.append(
                f"one of {m.n_experts} experts, {m.experts_per_token} per token: {used} channels a token, "
                f"{used / spec.d_model:.4g} d_model"
            )
        kept = [r.name for r in self.rules if r.kept]
        broken = [f"{r.name} ({r.detail})" for r in self.rules if not r.kept]
        out.append(f"keeps {', '.join(kept) or 'no rule'}; breaks {'; '.join(broken) or 'none'}")
        if spec.d_model % SUPER_BLOCK:
            blocks = spec.d_model / SUPER_BLOCK
            out.append(f"rows of gate and up, d_model = {spec.d_model}, are {blocks:g} super-blocks: no k-quants there")
        out.append(f"whole over tp = {_some(self.ranks)}")
        out += [f"whole groups of {g} over tp = {_some(r)}" for g, r in self.ranks_by_group.items()]
        if m.note:
            out.append(f"note of the table: {m.note}")
        seen = "seen in" if m.verified else "not verified; from"
        out.append(f"shapes {seen} {m.source}")
        return out


def _some(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks)) or "none"


def explain(name: str, c: Constraints | None = None) -> Explanation:
    """The width of a released model, explained. Raises ValueError, naming the nearest ones, for an unknown name."""
    return explain_model(models.get(name), c)


def explain_model(model: Model, c: Constraints | None = None) -> Explanation:
    """The width of any model, explained."""
    spec = model.ffn
    classic = ffn.classic_width(spec)
    whole = tuple(n for n in range(1, _MOST_RANKS + 1) if spec.d_ff % n == 0)
    return Explanation(
        model=model,
        ratio=spec.d_ff / spec.d_model,
        classic=classic,
        deviation=spec.d_ff / classic - 1,
        other_kind=ffn.equal_budget_width(spec),
        published=tuple(_published(model)),
        rules=tuple(rules(spec, c or constraints())),
        ranks=whole,
        ranks_by_group={g: tuple(n for n in whole if spec.d_ff % (n * g) == 0) for g in GROUPS},
    )


def _published(model: Model) -> list[str]:
    """Each published rule that gives this width for this d_model and kind."""
    spec = model.ffn
    out = []
    if spec.d_ff == 4 * spec.d_model:
        out.append("4 d_model")
    if not spec.gated:
        return out
    if spec.d_ff * 3 == 8 * spec.d_model:
        out.append("8/3 d_model")
    for multiplier in _MULTIPLIERS:  # the plainest one that does it
        fitting = [k for k in _MULTIPLES if like.like("llama", spec.d_model, multiplier, k).d_ff == spec.d_ff]
        if fitting:
            said = "no multiplier" if multiplier is None else f"multiplier {multiplier}"
            out.append(f"the LLaMA rule with {said}, multiple_of {' or '.join(map(str, fitting))}")
            break
    return out


def listing() -> list[dict[str, Any]]:
    """A row for each model of the table: name to call it by, widths, ratio, kind."""
    return [
        {
            "name": slug,
            "d_model": m.ffn.d_model,
            "d_ff": m.ffn.d_ff,
            "d_ff_over_d_model": m.ffn.d_ff / m.ffn.d_model,
            "gated": m.ffn.gated,
            "activation": m.ffn.activation,
            "n_layers": m.n_layers,
            "n_experts": m.n_experts,
            "verified": m.verified,
        }
        for slug, m in models.table().items()
    ]


def format_listing() -> list[dict[str, Any]]:
    """A row for each format: bits per weight and layout."""
    return [
        {
            "name": name,
            "bits_per_weight": f.bits_per_weight,
            "layout": f.layout,
            "compute": f.compute,
            "source": f.source,
        }
        for name, f in FORMATS.items()
    ]
