"""The report of a study: one HTML page, and its pictures as PNG."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

from ..report.render import render
from . import figures
from .published import TABLES

_SHOWN = 12  # of the verdicts; the rest is folded


def page(found: dict[str, Any], title: str) -> str:
    """The page of what `collect` gave."""
    ended = [v for v in found["variants"] if v["runs"]]
    return render(
        "study.html.j2",
        title=title,
        data={},
        styles=("study.css",),
        found=found,
        ended=ended,
        shown=_SHOWN,
        curves=_picture(figures.curves(found)),
        ends=_picture(figures.ends(found)),
        tables=[{"source": t.source, "what": t.what, "losses": t.losses} for t in TABLES],
        compared=[v["name"] for v in ended if any(v["name"] in t.losses for t in TABLES)],
        images=True,
    )


def _picture(figure: Any) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(figures.svg(figure).encode()).decode()


def save(found: dict[str, Any], folder: Path, title: str) -> list[Path]:
    """Write report.html, curves.png and ends.png into `folder`. -> their paths."""
    path, beside = folder / "report.html", folder / f".report.{os.getpid()}"
    beside.write_text(page(found, title), encoding="utf-8")
    beside.replace(path)
    return [path, *figures.save(found, folder)]
