"""Pictures of what an FFN's wider space does: read-outs, separability, products, and the FFNs of a real model."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..canvas import axes, figure
from . import classes
from .figures import BLUE, GREY, ORANGE, PURPLE
from .product import TARGETS

Rows = list[dict[str, Any]]
_KIND_COLORS = {"relu": BLUE, "silu": PURPLE, "reglu": ORANGE, "swiglu": "#c9920e", "gelu_erf": "#3b7d4f"}


def recovery(rows: Rows, d_model: int) -> Any:
    """Features' worth explained by a sparse linear read-out, over the FFN's parameters; one panel a feature count."""
    counts = sorted({r["features"] for r in rows})
    made = figure((13.5, 4.6))
    panels = np.atleast_1d(made.subplots(1, len(counts), sharex=True))
    for panel, n in zip(panels, counts):
        mine = [r for r in rows if r["features"] == n]
        before = next(r for r in mine if r["kind"] == "residual")
        panel.axhline(before["explained"], color="black", linewidth=1.3, label="residual, no FFN")
        panel.axhline(d_model, color=GREY, linewidth=0.9, linestyle=":", label=f"d_model = {d_model}: linear bound")
        for kind in ("relu", "silu", "reglu", "swiglu"):
            for trained, style in ((True, "o-"), (False, "o--")):
                line = [r for r in mine if r["kind"] == kind and r["trained"] == trained]
                panel.plot([r["parameters"] for r in line], [r["explained"] for r in line], style, markersize=4,
                           color=_KIND_COLORS[kind], linewidth=1.6 if trained else 0.9,
                           markerfacecolor=_KIND_COLORS[kind] if trained else "white",
                           label=f"{kind}, {'trained' if trained else 'random'} keys")  # fmt: skip
        axes(panel, f"{n} features in {d_model} dimensions", "parameters of up, gate, down", "", log=False)
        panel.set_xscale("log", base=2)
        at = sorted({r["parameters"] for r in mine if r["parameters"]})
        panel.set_xticks(at, [f"{v:,}\n{r}·d" for v, r in zip(at, sorted({r["ratio"] for r in mine if r["ratio"]}))])
        panel.minorticks_off()
        panel.set_ylim(0, None)
    panels[0].set_ylabel("features' worth explained, Σ R²$_i$")
    handles, labels = panels[0].get_legend_handles_labels()
    made.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8.5, frameon=False)
    made.suptitle("Superposed features read by a sparse linear read-out, before and after up and activation "
                  "(below the counts: d_ff without a gate; with one, 2/3 of it)")  # fmt: skip
    return made


def separability(rows: Rows, linear: dict[str, float]) -> Any:
    """Accuracy by activation and width for each task, random and trained keys."""
    tasks = list(linear)
    names = list(dict.fromkeys(r["activation"] for r in rows))
    widths = sorted({r["d_ff"] for r in rows})
    made = figure((13.5, 0.27 * 2 * len(names) + 2.6))
    panels = made.subplots(1, 2 * len(tasks), sharey=True)
    image = None
    labels = [(n, g) for n in names for g in (False, True)]
    for k, (task, trained) in enumerate((t, r) for t in tasks for r in (False, True)):
        value = {
            (r["activation"], r["gated"], r["d_ff"]): r["accuracy"]
            for r in rows
            if r["task"] == task and r["trained"] == trained
        }
        table = np.array([[value[(n, g, w)] for w in widths] for n, g in labels])
        image = panels[k].imshow(table, cmap="viridis", vmin=0.5, vmax=1, aspect="auto")
        for (i, j), v in np.ndenumerate(table):
            panels[k].text(j, i, f"{100 * v:.0f}", ha="center", va="center", fontsize=7,
                           color="black" if v > 0.75 else "white")  # fmt: skip
        panels[k].set_xticks(range(len(widths)), [f"{w}" for w in widths])
        panels[k].set_xlabel("d_ff")
        keys = "trained" if trained else "random"
        panels[k].set_title(f"{task}\n{keys} keys; linear {linear[task]:.0%}", fontsize=8.5)
    panels[0].set_yticks(range(len(labels)), [f"{n} gated" if g else n for n, g in labels], fontsize=8)
    assert image is not None
    made.colorbar(image, ax=panels, label="accuracy (0.5: chance)", fraction=0.02, pad=0.01)
    made.suptitle("Up, activation, linear read-out: accuracy in %, d_model = 8. identity, ungated: the FFN without its "
                  "activation, a linear model")  # fmt: skip
    return made


def products(result: dict[str, Any]) -> Any:
    """Error on a·b over channels, gated and not."""
    made = figure((12, 4.8))
    panels = made.subplots(1, 2, sharey=True)
    for panel, target in zip(panels, TARGETS):
        for kind, values in result[target].items():
            gated = kind.endswith("glu")
            panel.plot(result["widths"], np.maximum(values, 1e-5), "o-" if gated else "s--", markersize=4.5,
                       color=_KIND_COLORS[kind], label=f"{kind}{' (gated)' if gated else ''}")  # fmt: skip
        one = result[target]["swiglu"][0]
        panel.axhline(one, color=GREY, linewidth=1.1, linestyle=":", label="error of one SwiGLU channel")
        axes(panel, target, "channels", "error / standard deviation of the target")
        panel.set_xscale("log", base=2)
        panel.set_xticks([1, 2, 4, 8, 16, 24], ["1", "2", "4", "8", "16", "24"])
        panel.minorticks_off()
    panels[1].set_ylabel("")
    panels[0].legend(fontsize=9, frameon=False, loc="lower left")
    made.suptitle("A and B, then C: channels that it takes to write a product (best of several trainings)")
    return made


def crowding(document: dict[str, Any], name: str) -> Any:
    """Interference and nearest neighbours of keys and values by layer, beside random directions."""
    rows = document["layers"]
    x = [r["layer"] for r in rows]
    made = figure((13, 4.2))
    panels = made.subplots(1, 3)
    parts = [p for p in ("gate", "up", "value") if p in rows[0]]
    words = {"gate": "keys: gate", "up": "keys: up", "value": "values: down"}
    looks = {"gate": (ORANGE, "o-"), "up": (BLUE, "s-"), "value": (PURPLE, "^-")}
    for panel, key, title, unit in (
        (panels[0], "interference", "Interference: what all others read\nin one direction", "Σ cos², others"),
        (panels[1], "nearest", "Nearest neighbour", "largest |cos| to another, mean"),
        (panels[2], "effective_rank", "Effective rank", "dimensions in use"),
    ):
        for part in parts:
            color, style = looks[part]
            panel.plot(x, [r[part][key] for r in rows], style, color=color, markersize=4, label=words[part])
        panel.plot(x, [r["random"][key] for r in rows], "--", color=GREY, label="random directions")
        if key == "interference":
            panel.plot(x, [r["welch"] for r in rows], ":", color="black", linewidth=1, label="least possible (Welch)")
        axes(panel, title, "layer", unit, log=False)
        panel.set_ylim(0, None)
    handles, labels = panels[0].get_legend_handles_labels()
    made.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    shape = f"{rows[0]['d_ff']:,} channels in {rows[0]['d_model']:,} dimensions"
    made.suptitle(f"{name}: how crowded the directions of its FFNs are ({shape})")
    return made


_CLASS_COLORS = ("#1b62a5", "#b04a08", "#74b3ee", "#f2b38a", "#8d6fc0")


def channel_classes(document: dict[str, Any], name: str) -> Any:
    """Share of channels in each input-output class by layer, and the mean cosine of up and value."""
    rows = document["layers"]
    x = [r["layer"] for r in rows]
    made = figure((12, 4.6))
    left, right = made.subplots(1, 2, width_ratios=[1.7, 1])
    base = np.zeros(len(rows))
    for kind, color in zip(classes.CLASSES[:-1], _CLASS_COLORS):
        share = np.array([r["channels"]["classes"][kind] / r["d_ff"] for r in rows])
        if share.any():
            left.bar(x, share, bottom=base, color=color, width=0.9, label=kind)
        base += share
    threshold = document["threshold"]
    axes(left, f"Share of channels with |cos| ≥ {threshold:g}; the rest: orthogonal output", "layer", "", False)
    left.set_ylim(0, max(0.05, 1.1 * float(base.max())))
    left.yaxis.set_major_formatter(lambda v, _: f"{v:.0%}")
    for key, color in (("up, value", BLUE), ("gate, value", ORANGE), ("gate, up", GREY)):
        values = [r["channels"]["cosines"].get(key) for r in rows]
        if all(v is not None for v in values):
            right.plot(x, [v["mean"] for v in values], "o-", color=color, markersize=3.5, label=f"cos({key})")
            low, high = [v["p1"] for v in values], [v["p99"] for v in values]
            right.fill_between(x, low, high, color=color, alpha=0.12, linewidth=0)
    axes(right, "Cosines: mean, and 1st to 99th percentile", "layer", "cosine", False)
    right.set_ylim(-1, 1)
    right.legend(fontsize=8.5, frameon=False, loc="lower left")
    made.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8.5, frameon=False)
    made.suptitle(f"{name}: what each channel does with what it reads")
    return made
