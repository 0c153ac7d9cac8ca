"""Curves as PNG or SVG: roofline, decode to prefill, wider d_ff against wider d_model. Needs Matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..canvas import axes, figure, save
from ..count.block import Widened
from ..count.sweep import Sweep

SUFFIXES = (".png", ".svg")
_BLUE, _ORANGE, _GREY, _GREEN = "#2166ac", "#d6604d", "#888888", "#4d9221"


def check(path: Path) -> None:
    """Raise ValueError unless a plot can be written there: a .png or .svg in a folder that exists."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{str(path)!r}: a plot is written to a file that ends in {' or '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{str(path)!r}: there is no folder {str(path.absolute().parent)!r}")


def draw(path: Path, sweep: Sweep, title: str, widths: dict[float, list[Widened]] | None = None) -> None:
    """Draw a sweep into `path`, PNG or SVG by its suffix.

    tokens  with hardware, the roofline and the times of decode to prefill; without, FLOPs and bytes.
    d_ff    the floor (without hardware the bytes) over d_ff; with `widths`, wider d_ff against wider d_model.
    Raises ValueError for another suffix, and without Matplotlib. Written whole or not at all.
    """
    check(path)
    timed = "floor_s" in sweep.costs[0].whole
    drawn = figure((11, 4.6))
    left, right = drawn.subplots(1, 2)
    if sweep.name == "tokens":
        (_roofline if timed else _counts)(left, sweep)
        (_crossover if timed else _bytes)(right, sweep)
    else:
        (_over_width if timed else _counts)(left, sweep)
        if widths:
            _widening(right, widths)
        else:
            _bytes(right, sweep)
    drawn.suptitle(title, fontsize=11)
    save(drawn, path)


def _values(sweep: Sweep, key: str) -> list[float]:
    return [float(c.whole.value(key)) for c in sweep.costs]


def _roofline(ax: Any, sweep: Sweep) -> None:
    """FLOP/s that the device allows over the arithmetic intensity, and where each token count lies."""
    settings = sweep.costs[0].settings
    device = settings.device
    assert device is not None
    peak = device.peak(settings.compute)
    x = [c.whole.value("forward_flop") / settings.tp / c.whole.value("moved_bytes") for c in sweep.costs]
    flops = [c.whole.value("forward_flop") / settings.tp / c.whole.value("floor_s") / 1e12 for c in sweep.costs]
    rate = device.bytes_per_s / 1e12
    span = [min(x) / 2, max(x) * 2]
    if peak is not None:
        ridge = peak / 1e12 / rate
        span = [min(span[0], ridge / 4), max(span[1], ridge * 4)]
        ax.plot([span[0], ridge, span[1]], [span[0] * rate, peak / 1e12, peak / 1e12], color=_GREY, linewidth=1.5)
        ax.annotate(f"peak {peak / 1e12:.4g} TFLOP/s in {settings.compute}", (span[1], peak / 1e12), fontsize=8,
                    ha="right", va="bottom", color=_GREY, xytext=(0, 4), textcoords="offset points")  # fmt: skip
    else:
        ax.plot(span, [v * rate for v in span], color=_GREY, linewidth=1.5)
    ax.annotate(f"{rate * 1e3:.4g} GB/s", (span[0] * 1.2, span[0] * 1.2 * rate), fontsize=8, va="top", ha="left",
                color=_GREY, xytext=(14, 0), textcoords="offset points")  # fmt: skip
    ax.plot(x, flops, "o", color=_BLUE, markersize=4)
    every = max(1, len(x) // 7)
    for i, (xi, yi, value) in enumerate(zip(x, flops, sweep.values, strict=True)):
        if i % every == 0 or i == len(x) - 1:
            ax.annotate(f"{value:,}", (xi, yi), fontsize=7, xytext=(2, -4), textcoords="offset points", rotation=-45,
                        rotation_mode="anchor", va="top")  # fmt: skip
    axes(ax, f"Roofline of {device.slug}; labels: tokens", "arithmetic intensity, FLOP/B", "TFLOP/s")


def _crossover(ax: Any, sweep: Sweep) -> None:
    """Time to read and time to multiply over tokens; where they cross, decode turns into prefill."""
    unit, scale = _time_unit(sweep)
    memory = [v * scale for v in _values(sweep, "memory_s")]
    ax.plot(sweep.values, memory, color=_BLUE, label="time to move the bytes")
    if sweep.costs[0].whole["compute_s"].value is not None:
        compute = [v * scale for v in _values(sweep, "compute_s")]
        ax.plot(sweep.values, compute, color=_ORANGE, label="time to multiply")
    ax.plot(sweep.values, [v * scale for v in _values(sweep, "floor_s")], color="black", linewidth=2.4, alpha=0.35,
            label="floor")  # fmt: skip
    ridge = sweep.costs[0].whole["ridge_tokens"].value if "ridge_tokens" in sweep.costs[0].whole else None
    if ridge is not None and sweep.values[0] < ridge < sweep.values[-1]:
        ax.axvline(ridge, color=_GREY, linewidth=1, linestyle="--")
        ax.annotate(f" {ridge:.0f} tokens", (ridge, 0.03), xycoords=("data", "axes fraction"), fontsize=8, color=_GREY)
    if "step_s" in sweep.costs[0].whole and sweep.costs[0].settings.tp > 1:
        steps = [c.whole["step_s"].value for c in sweep.costs]
        if all(v is not None for v in steps):
            ax.plot(sweep.values, [v * scale for v in steps if v is not None], color=_GREEN, linestyle=":",
                    label="with all-reduce")  # fmt: skip
    axes(ax, "Decode to prefill", "tokens", unit)
    ax.legend(fontsize=8, frameon=False)


def _time_unit(sweep: Sweep) -> tuple[str, float]:
    """A unit in which the longest floor has few digits, and its factor."""
    return ("µs", 1e6) if max(_values(sweep, "floor_s")) < 0.01 else ("ms", 1e3)


def _over_width(ax: Any, sweep: Sweep) -> None:
    unit, scale = _time_unit(sweep)
    ax.plot(sweep.values, [v * scale for v in _values(sweep, "floor_s")], "o-", color=_BLUE, markersize=3)
    axes(ax, f"Floor, tokens: {sweep.costs[0].settings.tokens}", "d_ff, channels", unit, log=False)
    ax.set_ylim(bottom=0)


def _counts(ax: Any, sweep: Sweep) -> None:
    ax.plot(sweep.values, [v / 1e9 for v in _values(sweep, "forward_flop")], "o-", color=_ORANGE, markersize=3)
    axes(ax, "FLOPs forward", f"{sweep.name}", "GFLOP", log=sweep.name == "tokens")


def _bytes(ax: Any, sweep: Sweep) -> None:
    key, label = ("moved_bytes", "bytes moved") if sweep.name == "tokens" else ("weight_bytes", "weights")
    ax.plot(sweep.values, [v / 1e6 for v in _values(sweep, key)], "o-", color=_BLUE, markersize=3)
    form = sweep.costs[0].settings.form.name
    axes(ax, f"{label} in {form}", f"{sweep.name}", "MB", log=sweep.name == "tokens")


def _widening(ax: Any, widths: dict[float, list[Widened]]) -> None:
    """What grows with the parameters, by way of widening: FLOPs, the cache, what is kept for backward."""
    factors = [1.0, *widths]
    measures = (
        ("flop_per_token", "FLOPs", "-"),
        ("cache_bytes_per_position", "cache, residual", "--"),
        ("saved_bytes_per_token", "kept for backward", ":"),
    )
    for row, (way, color) in enumerate((("wider d_ff", _BLUE), ("wider d_model", _ORANGE))):
        for key, label, style in measures:
            base = getattr(next(iter(widths.values()))[0], key)
            values = [1.0, *(getattr(found[row + 1], key) / base for found in widths.values())]
            ax.plot(factors, values, style, color=color, label=f"{way}: {label}")
    axes(ax, "At equal parameters, per layer", "times the parameters", "times as much", log=False)
    ax.legend(fontsize=7, frameon=False)
