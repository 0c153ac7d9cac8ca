"""The tables of `fanfold cost`, for people."""

from __future__ import annotations

import itertools
from typing import Any

from ..count import ffn, formats, plan
from ..count.cost import Cost
from ..count.figures import Figure
from ..count.sweep import Sweep
from .cost import FACTOR
from .output import number, table


def show(document: dict[str, Any]) -> None:
    """Print a document for people."""
    found: Cost = document["_cost"]
    s = found.settings
    place = f" on {s.device.slug}" if s.device else ""
    ranks = f", tp {s.tp}" if s.tp > 1 else ""
    context = f", context {s.context} tokens" if "attention" in found.sections else ""
    print(found.what)
    print(f"{_tokens(s.tokens)}{context}, weights in {s.form.name}, activations in {s.dtype}{place}{ranks}\n")
    _show_sections(found)
    if s.device is not None and found.bound != "unknown":
        print(f"bound: {found.bound}\n")
    _show_ffn(found)
    if "widened" in document:
        _show_widened(document["widened"], s.context)
    if "_sweep" in document:
        _show_sweep(document["_sweep"])
    if "plot" in document:
        print(f"plot written to {document['plot']}\n")
    if "_plan" in document:
        show_plan(document["_plan"])
    for note in found.notes:
        print(f"note: {note}")


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count:,} tokens"


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return ""
    if figure.value is None:
        return "–"
    if figure.unit == "s":
        return number(figure.value * 1e6)
    if figure.key.startswith("ffn_share"):
        return number(100 * figure.value)
    return f"{figure.value:,.0f}" if figure.unit in ("", "B", "FLOP") else number(figure.value)


def _unit(figure: Figure) -> str:
    return "%" if figure.key.startswith("ffn_share") else "µs" if figure.unit == "s" else figure.unit


def _show_sections(found: Cost) -> None:
    names = list(found.sections)
    keys = _merged([list(figures) for figures in found.sections.values()])
    rows, missing = [], []
    for key in keys:
        having = [found.sections[n].get(key) for n in names]
        first = next(f for f in having if f is not None)
        if key.startswith("saved_") or all(f is None or f.value is None for f in having):
            missing += [f"{first.label}: {first.note}"] if not key.startswith("saved_") else []
            continue
        rows.append([first.label, _unit(first), *(_cell(f) for f in having)])
    heads = {"ffn": "FFN", "attention": "attention", "head": "head", "block": "block", "model": "model"}
    per = " of one layer" if "model" in names else ""
    table("", ["figure", "unit", *(heads[n] + (per if n in ("ffn", "attention") else "") for n in names)], rows)
    for line in dict.fromkeys(missing):
        print(f"not known: {line}")


def _merged(lists: list[list[str]]) -> list[str]:
    """All keys once; one that a list adds comes after the key before it there."""
    out: list[str] = []
    for keys in lists:
        place = 0
        for key in keys:
            if key not in out:
                out.insert(place, key)
            place = out.index(key) + 1
    return out


def _show_ffn(found: Cost) -> None:
    rows = [
        [name, f"{8 * n / found.spec.n_params:.5g}", f"{n:,}", formats.get(name).layout]
        for name, n in found.bytes_by_format.items()
    ]
    table("weights of one FFN", ["format", "bits per weight", "bytes, B", "layout"], rows)
    rows = [["PyTorch's own ops", f"{found.saved_bytes['autograd']:,}", "0"]]
    rows += [[save, f"{found.saved_bytes[save]:,}", f"{found.recompute_flop[save]:,}"] for save in ffn.SAVES]
    table(f"kept from forward to backward by one FFN, {_tokens(found.settings.tokens)}",
          ["save", "bytes, B", "recomputed, FLOP"], rows)  # fmt: skip


_WIDENED = (
    ("d_model", "d_model", "channels"),
    ("d_ff", "d_ff", "channels"),
    ("params", "parameters", ""),
    ("flop_per_token", "FLOPs per token", "FLOP"),
    ("score_flop_per_token", "of these, scores", "FLOP"),
    ("cache_bytes_per_position", "cache per position", "B"),
    ("residual_bytes_per_token", "residual, all-reduce per token", "B"),
    ("saved_bytes_per_token", "kept for backward per token, save=all", "B"),
)


def _show_widened(rows: list[dict[str, Any]], context: int) -> None:
    title = f"one layer with {FACTOR} x the parameters, by d_ff or by d_model; {context} positions attended to"
    table(title, ["figure", "unit", *(r["way"] for r in rows)],
          [[label, unit, *(f"{r[key]:,.0f}" for r in rows)] for key, label, unit in _WIDENED])  # fmt: skip


_SWEPT = (
    ("params", "parameters"),
    ("weight_bytes", "weights, B"),
    ("forward_flop", "forward, FLOP"),
    ("moved_bytes", "moved, B"),
    ("intensity_flop_per_byte", "intensity, FLOP/B"),
    ("floor_s", "floor, µs"),
    ("step_s", "step, µs"),
    ("tokens_per_s", "tokens/s"),
)


def _show_sweep(curves: Sweep) -> None:
    having = [(k, head) for k, head in _SWEPT if k in curves.costs[0].whole]
    fixed = {"params", "weight_bytes"} if curves.name == "tokens" else set()
    having = [(k, head) for k, head in having if k not in fixed]
    unit = "" if curves.name == "tokens" else ", channels"
    timed = "floor_s" in curves.costs[0].whole
    rows = [
        [f"{value:,}", *(_cell(c.whole[k]) for k, _ in having), *([c.bound] if timed else [])]
        for value, c in zip(curves.values, curves.costs, strict=True)
    ]
    table(
        f"over {curves.name}",
        [f"{curves.name}{unit}", *(head for _, head in having), *(["bound"] if timed else [])],
        rows,
    )


def show_plan(made: plan.Plan) -> None:
    """Print the best tp at each latency target; device counts with the same answer in one row."""
    rows = []
    for target_s in made.targets:
        points = [p for n in made.devices if (p := made.at(target_s, n)) is not None]
        for (tp, tokens), same in itertools.groupby(points, key=lambda p: (p.tp, p.tokens)):
            run = list(same)
            span = f"{run[0].devices:,}" + (f" – {run[-1].devices:,}" if len(run) > 1 else "")
            rate = run[0].tokens_per_s
            total = number(rate) + (f" – {number(run[-1].tokens_per_s)}" if run[1:] else "")
            rows.append(
                [number(target_s * 1e3), span, str(tp), f"{tokens:,}", number(run[0].step_s * 1e3),
                 number(rate / run[0].devices), total,
                 number(run[0].memory_bytes / 1e9)]
            )  # fmt: skip
        if not points:
            rows.append([number(target_s * 1e3), "none meets it", *[""] * 6])
    heads = ["step at most, ms", "devices", "best tp", "tokens per replica", "step, ms", "tokens/s per device",
             "tokens/s of all", "weights and cache per device, GB"]  # fmt: skip
    if rows:
        table("best tensor parallelism at each latency target", heads, rows)
    for note in made.notes:
        print(f"plan: {note}")
