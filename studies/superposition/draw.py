"""Figures, the README's tables and the page, from results/*.json alone."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fanfold import canvas
from fanfold.superposition import closed, figures, figures_ffn, geometry, measures, page, product

Results = dict[str, dict[str, Any]]


def draw(here: Path) -> None:
    """Write figures/*.png and *.svg, the tables between the README's marks, and index.html."""
    found: Results = {p.stem: json.loads(p.read_text()) for p in sorted((here / "results").glob("*.json"))}
    (here / "figures").mkdir(exist_ok=True)
    pictures = {name: make() for name, make in _figures(found).items()}
    for name, figure in pictures.items():
        for suffix in (".png", ".svg"):
            canvas.save(figure, here / "figures" / f"{name}{suffix}")
    tables = {"checks": checks(found), "times": times(found), "products": products(found["products"]),
              "shapes": shapes(found["uniform"])}  # fmt: skip
    _into_readme(here / "README.md", tables)
    (here / "index.html").write_text(_page(found, pictures, tables), encoding="utf-8")


def _figures(found: Results) -> dict[str, Any]:
    separable = found["separable"]
    made = {
        "gram": lambda: figures.gram_matrices(found["sweep"]),
        "polygons": lambda: figures.polygons(found["polygons"]),
        "phases": lambda: figures.phase_diagrams(found["phase_2_1"], found["phase_3_2"]),
        "star": lambda: figures.star(found["uniform"], found["sweep"]),
        "dimensionality": lambda: figures.scatter(found["uniform"]),
        "absolute_value": lambda: figures.absolute_value(found["hidden_abs"]),
        "read_out": lambda: figures_ffn.recovery(found["read_out"]["rows"], found["read_out"]["d_model"]),
        "separability": lambda: figures_ffn.separability(separable["rows"], separable["linear"]),
        "products": lambda: figures_ffn.products(found["products"]),
    }
    for name, document in found["real_models"].items():
        if name != "seconds":
            made[f"crowding_{name}"] = lambda d=document, n=name: figures_ffn.crowding(d, n)
            made[f"classes_{name}"] = lambda d=document, n=name: figures_ffn.channel_classes(d, n)
    return made


def checks(found: Results) -> page.Table:
    """What the paper says, what the closed form says, and what came out."""
    rows = [_dense(found["sweep"]), _linear(found["sweep"]), *_plateaus(found["uniform"]), _clusters(found["uniform"])]
    rows += [*_phase_rows(found["phase_2_1"]), _pentagon(found["polygons"]), *_absolute(found["hidden_abs"])]
    rows += _merged(found["separable"])
    return page.Table(header=["check", "paper", "closed form", "ours"], rows=rows)


def _dense(r: dict[str, Any]) -> list[str]:
    norms = np.array(r["norms"][0])
    ours = f"5 of length {norms[:5].min():.3f} to {norms[:5].max():.3f}, the others at most {norms[5:].max():.3f}"
    return ["n=20, m=5, dense: features represented", "the 5 most important", "5", ours]


def _linear(r: dict[str, Any]) -> list[str]:
    learned = {int((np.array(n) > geometry.LEARNED).sum()) for n in r["linear_norms"]}
    ratio = np.array(r["linear_loss"]) / np.array(r["linear_closed"])
    gain = np.array(r["linear_loss"]) / np.array(r["loss"])
    words = f"{sorted(learned)} at every density; loss × {ratio.min():.3f} to {ratio.max():.3f} of the closed form"
    return [
        "linear baseline: features represented",
        "never more than m",
        "5; Σ of I (p/3 − p²/4) over the rest",
        f"{words}; with ReLU up to {gain.max():.0f} times less loss".replace("[5]", "5"),
    ]


def _plateaus(r: dict[str, Any]) -> list[list[str]]:
    x, star = np.array(r["inverse_density"]), np.array(r["star"])
    out = []
    for level, near in ((1.0, 0.05), (0.5, 0.03)):
        on = x[np.abs(star - level) <= near]
        words = f"within {near:g} for 1/(1−S) from {on.min():.2f} to {on.max():.2f}" if len(on) else "nowhere"
        out.append([f"n=400, m=30: D* = m/‖W‖² at {level:g}", f"sticky at {level:g}", "–", words])
    return out


def _clusters(r: dict[str, Any]) -> list[str]:
    d = np.array(r["dimensionality"])
    x = np.array(r["inverse_density"])
    mid = d[(x > 1.5) & (x < 5)]
    learned = mid[mid > 0.05]
    on = np.mean([geometry.line_of(float(v)) is not None for v in learned])
    lines = sum(2 * geometry.TOLERANCE_D for _ in geometry.SHAPES) / 0.95
    words = f"{on:.0%} of D_i > 0.05 within ±{geometry.TOLERANCE_D:g} of a line, 1/(1−S) from 1.5 to 5"
    return ["n=400, m=30: D_i", "cluster at 1, 3/4, 2/3, 1/2, 2/5, 3/8", "D = m/k of tight frames",
            f"{words} ({lines:.0%} if spread evenly)"]  # fmt: skip


def _phase_rows(r: dict[str, Any]) -> list[list[str]]:
    by_margin = {round(m, 2): (share, points) for m, share, points in r["agreement"]}
    share, points = by_margin[1.0]
    far, far_points = by_margin[1.1]
    p, r_grid = np.meshgrid(r["density"], r["importance"], indexing="ij")
    shared = np.array(r["phase"]) == 2
    ratio = np.array(r["loss_over_closed"])
    strip = shared & (p > 4 / 7)
    words = f"r between {r_grid[strip].min():.2f} and {r_grid[strip].max():.2f}" if strip.any() else "nowhere"
    wrong = np.array(r["phase"]) != np.array(r["closed"])
    early = int((wrong & shared).sum())
    return [
        ["n=2, m=1: boundary of superposition", "drawn for three fixed weights", "2p/(4−5p) < r < (4−5p)/(2p)",
         f"{share:.1%} of {points} points agree; {far:.1%} of the {far_points} a tenth or more away in r; "
         f"of the {int(wrong.sum())} others {early} are shared where the form says not yet"],
        ["n=2, m=1: loss of the best model", "–", "the lowest of three", f"× {ratio.min():.2f} to {ratio.max():.2f}: "
         "trained weights are free, and do best next to the boundaries"],
        ["n=2, m=1: above the triple point p = 4/7", "W₁ ≈ W₂ ≈ 1/√2 when dense (comment to the paper)",
         "no superposition", f"shared at {int(strip.sum())} of {int((p > 4 / 7).sum())} points, {words}"],
    ]  # fmt: skip


def _pentagon(r: dict[str, Any]) -> list[str]:
    name = [[n for n, _ in parts] for parts in r["shapes"]]
    i = len(name) - 1
    w, b = np.array(r["weights"][i]), np.array(r["bias"][i])
    length = np.linalg.norm(w, axis=0)
    d = np.array(r["dimensionality"][i])
    return ["n=5, m=2, p = 0.05", "pentagon; ‖W‖ = 1/(1−b), b slightly negative (as quoted to us)", "D = 2/5",
            f"{name[i][0]}, D = {d.mean():.4f}, ‖W‖ = {length.mean():.3f}, b = {b.mean():+.3f}; 1/(1−b) would be "
            f"{(1 / (1 - b)).mean():.3f}, √(1−b) {np.sqrt(1 - b).mean():.3f}"]  # fmt: skip


def _absolute(r: dict[str, Any]) -> list[list[str]]:
    rows = [["|x|, n=3, m=6: two coefficients a feature", "one for each sign", "loss 0 is possible",
             f"loss {r['small_loss'][0]:.1e}"]]  # fmt: skip
    opposite, pairs = measures.asymmetry(np.array(r["motif_in"]), np.array(r["motif_out"]))
    ratio = r["motif_loss"] / r["motif_nothing"]
    rows.append(
        [
            "|x|, n=3, m=4, S = 0.99: asymmetric superposition",
            "read strongly, written weakly, and the reverse; a third feature inhibited",
            "–",
            f"{opposite} of {pairs} pairs that share a coefficient; {ratio:.1%} of the loss of doing nothing",
        ]
    )
    w, out = np.array(r["in"]), np.array(r["out"])
    share = [figures.polysemantic(a, b) for a, b in zip(w, out)]
    words = ", ".join(f"{v:.0%} at S = {s:g}" for v, s in zip(share, r["sparsity"]))
    rows.append(
        ["|x|, n=100, m=40: coefficients that serve several features", "more as features get sparser", "–", words]
    )
    counts = [measures.asymmetry(a, b) for a, b in zip(w, out)]
    opposite, pairs = sum(c[0] for c in counts), sum(c[1] for c in counts)
    rows.append(["|x|, n=100, m=40: asymmetric pairs", "–", "about 67% for random weights",
                 f"{opposite / pairs:.0%} of {pairs}: no more than by chance"
                 if opposite / pairs < 0.72 else f"{opposite / pairs:.0%} of {pairs}"])  # fmt: skip
    return rows


def _merged(r: dict[str, Any]) -> list[list[str]]:
    worst = max(v["max_difference"] for v in r["merged"].values())
    over = min(v["error"] / v["linear_error"] - 1 for v in r["merged"].values())
    return [["FFN without its activation", "–", "is the merged matrix",
             f"largest relative difference {worst:.1e}; (error / best linear error) − 1 ≥ {over:.0e}"]]  # fmt: skip


def shapes(r: dict[str, Any]) -> page.Table:
    """Parts of the feature graph by name, over sparsity."""
    names = [s.name for s in geometry.SHAPES]
    rows = []
    for x, star, learned, counts in zip(r["inverse_density"], r["star"], r["learned"], r["shapes"]):
        others = ", ".join(f"{v} × {k}" for k, v in counts.items() if k not in names) or "–"
        rows.append([f"{x:.2f}", f"{star:.3f}", str(learned), *(str(counts.get(n, 0)) for n in names), others])
    return page.Table(header=["1/(1−S)", "D*", "represented", *names, "other parts (k in r dimensions)"], rows=rows)


def products(r: dict[str, Any]) -> page.Table:
    """Error of one SwiGLU channel on each target, and the channels that other kinds need for as little."""
    rows = []
    for target in product.TARGETS:
        one = r[target]["swiglu"][0]
        needed = {k: product.channels_needed(r["widths"], r[target][k], one) for k in ("reglu", "relu", "gelu_erf")}
        rows.append([target, f"{one:.3f}", *(str(v) if v else f"> {r['widths'][-1]}" for v in needed.values())])
    header = ["target", "error of 1 SwiGLU channel", "ReGLU channels needed", "ReLU", "GELU"]
    return page.Table(header=header, rows=rows)


def times(found: Results) -> page.Table:
    """What each part took."""
    rows = []
    for name, r in found.items():
        s = r["seconds"]
        rows.append([name, f"{s['cpu']:.0f}", f"{s['wall']:.0f}", str(s["threads"]), f"{s['load_average']:.0f}"])
    header = ["part", "seconds of CPU", "seconds of wall clock", "threads", "load average (2 cores)"]
    return page.Table(header=header, rows=rows)


def _markdown(table: page.Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"

    return "\n".join([line(table.header), line(["---"] * len(table.header)), *map(line, table.rows)])


def _into_readme(path: Path, tables: dict[str, page.Table]) -> None:
    text = path.read_text(encoding="utf-8")
    for name, table in tables.items():
        mark = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", re.DOTALL)
        assert mark.search(text), f"README.md has no place for the table {name}"
        text = mark.sub(lambda m, t=table: m.group(1) + _markdown(t) + m.group(2), text)
    path.write_text(text, encoding="utf-8")


def _page(found: Results, pictures: dict[str, Any], tables: dict[str, page.Table]) -> str:
    share, points = found["phase_2_1"]["agreement"][0][1:]
    sections = [
        page.Section(title="Paper, closed form, ours", table=tables["checks"]),
        page.Section(
            title="Sparse features share dimensions",
            text=["With every feature active the five most important get a dimension each. The sparser they are, the "
                  "more features are represented, first as antipodal pairs, then in larger shapes."],
            figure=pictures["gram"],
            alt="WᵀW of 20 features in 5 dimensions at five densities, and the length and interference of each feature",
        ),
        page.Section(
            title="Polygons",
            figure=pictures["polygons"],
            alt="Five features in the plane: two antipodal pairs when dense, a pentagon when sparse",
        ),
        page.Section(
            title="Phase diagrams",
            text=[f"{share:.1%} of {points} points are in the phase that the closed form gives. It compares three "
                  "fixed weights; trained ones are free, which shows where features are dense and equally important."],
            figure=pictures["phases"],
            alt="Phases of the extra feature over density and importance, with the closed form's boundary",
        ),
        page.Section(
            title="Dimensions per feature",
            figure=pictures["star"],
            alt="D* over sparsity, with plateaus at 1 and one half",
        ),
        page.Section(
            title="Dimensionality of each feature",
            figure=pictures["dimensionality"],
            alt="D of each of 400 features over sparsity, with the lines of the shapes",
            table=tables["shapes"],
        ),
        page.Section(
            title="Computing in superposition: |x|",
            figure=pictures["absolute_value"],
            alt="Keys of the model that computes absolute values, alone and in superposition",
        ),
        page.Section(
            title="Room to read: recovery of superposed features",
            text=["A linear read-out of d_model dimensions explains d_model features' worth of variance at most. After "
                  "up and an activation the bound is d_ff. Gated channels are compared at equal parameters: they are "
                  "2/3 as many."],
            figure=pictures["read_out"],
            alt="Features' worth recovered over parameters, gated and not, trained and random keys",
        ),
        page.Section(
            title="Room to separate: what no linear read-out tells apart",
            figure=pictures["separability"],
            alt="Accuracy of up, activation and linear read-out on parity, shells and XOR, by activation and width",
        ),
        page.Section(
            title="A and B, then C",
            text=["One gated channel multiplies what two keys read. Two of them write a·b exactly: "
                  "act(a)·b + act(−a)·(−b)."],
            figure=pictures["products"],
            alt="Error on a product over channels, gated and not",
            table=tables["products"],
        ),
    ]  # fmt: skip
    for name, document in found["real_models"].items():
        if name != "seconds":
            sections += page.model_sections(document, name)
    facts = [("Toy models", "Elhage et al. 2022"), ("Triple point", f"p = {closed.TRIPLE_POINT[0]:.4f}, r = 1")]
    return page.page("Superposition: more features than dimensions, measured", facts, sections)
