"""The roofline of this machine with measured points on it, as PNG or SVG. Needs Matplotlib."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from . import plots

_COLOURS = ("#2166ac", "#d6604d", "#4d9221", "#7b3294", "#b8860b", "#01665e", "#c51b7d", "#543005")
_ROOF = "#777777"
_STYLES = {"fp32": "-", "bf16": "--", "int8": ":"}  # of the ceilings
# Where a label may stand beside its point, best first: right, left, above, below, then at an angle; in points.
_DIRECTIONS = ((1, -0.3), (-1, -0.3), (0, 0.7), (0, -1.4), (0.8, -1.2), (-0.8, 0.7), (0.8, 0.7), (-0.8, -1.2))
_DISTANCES = (8, 14, 22, 34, 50)
_LEADER = 20  # from so far on a thin line leads from the label to its point


def draw(path: Path, blocks: Sequence[dict[str, Any]], title: str) -> None:
    """Draw the rows of `bench_shape` blocks into `path`, PNG or SVG by its suffix.

    Roofs are the largest that the blocks measured. Ours are filled and labelled format@tokens; PyTorch eager is hollow.
    Raises ValueError for another suffix, and without Matplotlib. Written whole or not at all.
    """
    plots.check(path)
    figure = plots.figure((9.5, 6.2))
    ax = figure.subplots()
    rows = [row for block in blocks for row in block["rows"]]
    span = _roofs(ax, [block["roof"] for block in blocks], rows)
    colours = {name: _COLOURS[i % len(_COLOURS)]
               for i, name in enumerate(dict.fromkeys(r["format"] for r in rows if r["ours"]))}  # fmt: skip
    for row in rows:
        if row["name"].startswith("compiled"):
            continue
        colour = colours.get(row["format"], _ROOF)
        face = colour if row["ours"] else "white"
        ax.plot(row["intensity_flop_per_byte"], row["flop_per_s"] / 1e9, "o", markersize=6, color=colour,
                markerfacecolor=face, zorder=4 if row["ours"] else 3)  # fmt: skip
    low = min(row["flop_per_s"] for row in rows) / 1e9
    ax.set_xlim(*span)
    ax.set_ylim(low / 2.5, 2.2 * max(b["roof"]["flops"][k] for b in blocks for k in _STYLES) / 1e9)
    plots.axes(ax, title, "arithmetic intensity, FLOP / byte moved", "GFLOP/s")
    _legend(ax, colours)
    shapes = len({(b["d_model"], b["d_ff"]) for b in blocks}) > 1
    _labels(figure, ax, [(_label(b, row, shapes), row) for b in blocks for row in b["rows"] if row["ours"]], colours)
    plots.save(figure, path)


def _label(block: dict[str, Any], row: dict[str, Any], shapes: bool) -> str:
    name = f"{row['format']}@{row['tokens']}"
    return f"{name} {block['d_model']}x{block['d_ff']}" if shapes else name


def _roofs(ax: Any, roofs: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Draw the slope of the memory and a ceiling for each arithmetic. -> the span of x."""
    rate = max(r["read_bytes_per_s"][-1][1] for r in roofs) / 1e9
    peaks = {kind: max(r["flops"][kind] for r in roofs) / 1e9 for kind in _STYLES}
    estimated = {kind for r in roofs for kind in r["estimated"]}
    xs = [row["intensity_flop_per_byte"] for row in rows]
    first, last = min(xs) / 2.2, max(max(xs), max(peaks.values()) / rate) * 4
    top = max(peaks.values())
    ax.plot([first, top / rate], [first * rate, top], color=_ROOF, linewidth=1.3, zorder=1)
    ax.text(first * 1.3, first * 1.3 * rate * 1.12, f"memory, {rate:.3g} GB/s", fontsize=8, color=_ROOF,
            rotation=math.degrees(math.atan(rate)), rotation_mode="anchor",
            transform_rotates_text=True, va="bottom", ha="left")  # fmt: skip
    shown: list[tuple[float, list[str]]] = []  # arithmetics of one peak share a line of text
    for kind, peak in peaks.items():
        ax.plot([peak / rate, last], [peak, peak], _STYLES[kind], color=_ROOF, linewidth=1.3, zorder=1)
        words = f"{kind}{' (estimated)' if kind in estimated else ''}"
        same = next((s for s in shown if abs(math.log(s[0] / peak)) < 0.05), None)
        if same:
            same[1].append(words)
        else:
            shown.append((peak, [words]))
    for peak, kinds in shown:
        ax.annotate(f"{', '.join(kinds)}: {peak:,.0f} GFLOP/s", (last / 1.1, peak), fontsize=8, color=_ROOF, ha="right",
                    va="bottom", xytext=(0, 2), textcoords="offset points")  # fmt: skip
    return first, last


def _legend(ax: Any, colours: dict[str, str]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], marker="o", linestyle="", color=c, label=name) for name, c in colours.items()]
    handles.append(Line2D([], [], marker="o", linestyle="", color=_ROOF, markerfacecolor="white", label="torch eager"))
    ax.legend(handles=handles, fontsize=8, frameon=False, loc="lower right", title="format; label: format@tokens",
              title_fontsize=8)  # fmt: skip


def _labels(figure: Any, ax: Any, labelled: Sequence[tuple[str, dict[str, Any]]], colours: dict[str, str]) -> None:
    """Write each label at the first place by its point that no label, point, line or legend takes; else at the last."""
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    figure.canvas.draw()
    figure.set_layout_engine("none")  # labels must not move what they were placed by
    renderer = figure.canvas.get_renderer()
    frame = ax.get_window_extent(renderer)
    taken = [ax.get_legend().get_window_extent(renderer)]
    taken += [text.get_window_extent(renderer) for text in ax.texts]
    taken += [line.get_window_extent(renderer).padded(3) for line in ax.lines if line.get_marker() == "o"]
    taken += [Bbox.from_bounds(x - 1, y - 1, 2, 2) for line in ax.lines if line.get_marker() != "o"
              for x, y in _along(ax.transData.transform(line.get_xydata()))]  # fmt: skip
    places = [(distance, dx * distance, dy * distance) for distance in _DISTANCES for dx, dy in _DIRECTIONS]
    for name, row in labelled:
        point = (row["intensity_flop_per_byte"], row["flop_per_s"] / 1e9)
        colour = colours[row["format"]]
        for distance, dx, dy in places:
            side = "left" if dx > 0 else "right" if dx < 0 else "center"
            leader = {"arrowstyle": "-", "color": colour, "linewidth": 0.6} if distance > _LEADER else None
            label = ax.annotate(name, point, xytext=(dx, dy), textcoords="offset points", fontsize=8, ha=side,
                                color=colour, zorder=5, arrowprops=leader)  # fmt: skip
            label.update_positions(renderer)
            box = Text.get_window_extent(label, renderer)  # of the words alone, without the line
            inside = frame.x0 < box.x0 and box.x1 < frame.x1 and frame.y0 < box.y0 and box.y1 < frame.y1
            if (inside and not any(box.overlaps(other) for other in taken)) or (distance, dx, dy) == places[-1]:
                taken.append(box)
                break
            label.remove()


def _along(corners: Any) -> Iterator[tuple[float, float]]:
    """Points every few pixels along a line through `corners` [n, 2]."""
    for (x0, y0), (x1, y1) in pairwise(corners):
        steps = max(1, int(max(abs(x1 - x0), abs(y1 - y0)) / 4))
        for i in range(steps + 1):
            yield x0 + (x1 - x0) * i / steps, y0 + (y1 - y0) * i / steps
