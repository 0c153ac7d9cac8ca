"""The page of a memory reading: what each FFN wrote at each token of a prompt, and what that did to the prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from .render import finite, printable, render

_NEEDED = ("title", "model", "tokens", "positions", "heat")
_STYLES = ("reading.css",)
_SCRIPTS = ("layers.js", "channels.js", "card.js", "heat.js", "search.js", "reading.js")
_MOST_TRIGGERS, _ALL_TRIGGERS = 5, 6000  # of one end of a channel; of one end over all channels
_BEFORE, _AFTER = 90, 45  # characters of a trigger's context beside its peak token


def page(document: Mapping[str, Any]) -> str:
    """The report of a reading as one HTML page: no server, no network, opens from disk.

    document  what `Reading.to_dict()` gives: title, model, tokens, positions, values, heat, sum_rule, triggers, …
    Result: HTML text, to be written as UTF-8. Every token in it is data: markup in a prompt stays text. Of the
    triggers, each end of a channel keeps its strongest, fewer where there are many channels.
    Raises ValueError when the document lacks what the page shows, TypeError when it holds more than JSON.
    """
    missing = [name for name in _NEEDED if name not in document]
    if missing:
        raise ValueError(f"the document of a reading needs {', '.join(_NEEDED)}; {', '.join(missing)} missing")
    if not document["positions"]:
        raise ValueError("the document of a reading explains no position: give at least one in 'positions'")
    data, lost = finite(_small(document))
    if lost:
        note = f"{lost} {'number was' if lost == 1 else 'numbers were'} not finite (nan or inf); shown as “–”."
        data["notes"] = [*data.get("notes", []), note]
    return render(
        "reading.html.j2", title=document["title"], data=data, styles=_STYLES, scripts=_SCRIPTS, model=document["model"]
    )


def fragment(document: Mapping[str, Any], height: int = 860) -> str:
    """The same page inside an <iframe>, for a notebook (`_repr_html_`).

    height  pixels. The frame is sandboxed: its script reaches nothing of the notebook around it.
    Raises as `page`.
    """
    framed = escape(page(document))
    return (
        f'<iframe title="{escape(printable(document["title"]))}" sandbox="allow-scripts" loading="lazy" '
        f'style="width:100%;height:{height}px;border:0" srcdoc="{framed}"></iframe>'
    )


def _small(document: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows of the document: below 5 MB for 30 layers and 20 tokens, triggers included."""
    data = dict(document)
    data["values"] = {
        key: {name: value[name] for name in ("norm", "promoted", "suppressed") if name in value}
        for key, value in (data.get("values") or {}).items()
    }
    if data.get("triggers"):
        keep = max(1, min(_MOST_TRIGGERS, _ALL_TRIGGERS // len(data["triggers"])))
        data["triggers"] = {key: _triggers(kept, keep) for key, kept in data["triggers"].items()}
    return data


def _triggers(kept: Mapping[str, Any], keep: int) -> dict[str, Any]:
    ends = {
        end: [{**one, "text": _excerpt(one["text"])} for one in kept.get(end, [])[:keep]]
        for end in ("positive", "negative")
    }
    return {**kept, **ends}


def _excerpt(pieces: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """A trigger's context in at most three pieces, what stands before the peak token, the peak, what follows."""
    peak = next((i for i, (_, is_peak) in enumerate(pieces) if is_peak), len(pieces))
    before, after = ("".join(text for text, _ in part) for part in (pieces[:peak], pieces[peak + 1 :]))
    before = before if len(before) <= _BEFORE else "…" + before[-_BEFORE:]
    after = after if len(after) <= _AFTER else after[:_AFTER] + "…"
    return [[text, is_peak] for text, is_peak in ((before, False), *pieces[peak : peak + 1], (after, False)) if text]
