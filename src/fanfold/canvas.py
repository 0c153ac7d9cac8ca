"""A Matplotlib figure of the house: made without a window, axes with a faint grid, written whole or not at all."""

from __future__ import annotations

import io
import os
import tempfile
from pathlib import Path
from typing import Any


def figure(inches: tuple[float, float]) -> Any:
    """An empty Matplotlib figure with a canvas of its own. Raises ValueError without Matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ValueError("a plot needs Matplotlib, which is not installed: pip install 'fanfold[plots]'") from None
    made = Figure(figsize=inches, layout="constrained")
    FigureCanvasAgg(made)
    return made


def save(figure: Any, path: Path) -> None:
    """Write a figure into `path`, PNG or SVG by its suffix, whole or not at all."""
    import matplotlib

    kind = path.suffix.lower().removeprefix(".")
    handle, temporary = tempfile.mkstemp(dir=path.absolute().parent, suffix=path.suffix)
    os.close(handle)
    try:
        # no date, no random ids: the same figure is the same file
        with matplotlib.rc_context({"svg.hashsalt": path.stem}):
            figure.savefig(temporary, format=kind, dpi=120, metadata={"Date": None} if kind == "svg" else None)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def axes(ax: Any, title: str, x: str, y: str, log: bool = True) -> None:
    """Title, labels and a faint grid; both axes logarithmic if `log`."""
    ax.set_title(title, fontsize=10)
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    if log:
        ax.set_xscale("log")
        ax.set_yscale("log")
    ax.grid(True, which="major", color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)


def svg(figure: Any, salt: str) -> str:
    """A figure as SVG text, the same for the same figure; `salt` keeps the ids of several on one page apart."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()
