"""The pictures of a study: loss curves with the spread over seeds, and what each variant ends at. Needs Matplotlib."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from .statistics import difference

# Okabe & Ito's colours, which colour-blind readers can tell apart, then line styles.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLES = ("-", "--", ":")


def _figure(inches: tuple[float, float]) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ValueError("a plot needs Matplotlib, which is not installed: pip install 'fanfold[plots]'") from None
    made = Figure(figsize=inches, layout="constrained")
    FigureCanvasAgg(made)
    return made


def _look(i: int) -> dict[str, Any]:
    return {"color": _COLOURS[i % len(_COLOURS)], "linestyle": _STYLES[i // len(_COLOURS) % len(_STYLES)]}


def _plain(ax: Any, title: str, x: str, y: str) -> None:
    ax.set_title(title, fontsize=10, loc="left")
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.grid(True, color="#e3e3e3", linewidth=0.6)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def curves(found: dict[str, Any]) -> Any:
    """Validation loss over steps: the mean over seeds, and the band from the lowest to the highest seed."""
    made = _figure((8.2, 5.2))
    ax = made.subplots()
    ended = [v for v in found["variants"] if v["curves"]]
    for i, variant in enumerate(ended):
        steps = np.array(variant["curves"][0]["step"])
        losses = np.array([c["validation"] for c in variant["curves"]])
        line = _look(i)
        label = f"{variant['name']}  {variant['validation']:.3f}"
        ax.plot(steps[1:], losses.mean(0)[1:], linewidth=1.5, label=label, **line)
        ax.fill_between(steps[1:], losses.min(0)[1:], losses.max(0)[1:], color=line["color"], alpha=0.12, linewidth=0)
    _plain(ax, "Validation loss; line: mean over seeds, band: all seeds", "steps", "bits per byte")
    ax.legend(fontsize=8, frameon=False, title="lowest at the end first", title_fontsize=8, loc="upper right")
    return made


def ends(found: dict[str, Any]) -> Any:
    """Each seed's last loss for each variant, and the paired differences from one of them with 95 % intervals."""
    ended = [v for v in found["variants"] if v["runs"]]
    losses = {v["name"]: {r["seed"]: r["validation"] for r in v["runs"]} for v in ended}
    base = reference(found)
    made = _figure((10.4, 0.34 * len(ended) + 1.7))
    left, right = made.subplots(1, 2, sharey=True)
    for i, variant in enumerate(ended):
        colour = "#0072B2" if variant["gated"] else "#D55E00"
        seeds = list(losses[variant["name"]].values())
        left.plot(seeds, [i] * len(seeds), "o", color=colour, alpha=0.35, markersize=4)
        left.plot([np.mean(seeds)], [i], "|", color=colour, markersize=13, markeredgewidth=2)
        gap = difference(variant["name"], base, losses[variant["name"]], losses[base])
        if gap is None or variant["name"] == base:
            continue
        half = gap.half if np.isfinite(gap.half) else 0.0
        right.errorbar([gap.mean], [i], xerr=[half], fmt="o", color=colour, markersize=4, capsize=3, linewidth=1.3)
    names = [v["name"] for v in ended]
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    right.axvline(0.0, color="#777777", linewidth=0.9)
    _plain(left, "Loss at the end: seeds and their mean", "bits per byte", "")
    _plain(right, f"Difference from {base} in the same seed, 95 % interval", "bits per byte (left: better)", "")
    marks = [left.plot([], [], "o", color=c, markersize=4)[0] for c in ("#0072B2", "#D55E00")]
    left.legend(marks, ["gated", "not gated"], fontsize=8, frameon=False, loc="best")
    return made


def reference(found: dict[str, Any]) -> str:
    """The variant that the others are drawn against: gelu_erf, relu, or the last of those that have ended."""
    names = [v["name"] for v in found["variants"] if v["runs"]]
    return next((n for n in ("gelu_erf", "relu") if n in names), names[-1])


def svg(figure: Any) -> str:
    """A figure as one <svg> element."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def save(found: dict[str, Any], folder: Path) -> list[Path]:
    """Write curves.png and ends.png into `folder`. -> their paths."""
    paths = []
    for name, draw in (("curves", curves), ("ends", ends)):
        path, beside = folder / f"{name}.png", folder / f".{name}.part"
        draw(found).savefig(beside, format="png", dpi=130)
        beside.replace(path)
        paths.append(path)
    return paths
