"""Pictures of the toy models, from the plain results that studies/superposition writes. Each needs no caption."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..canvas import axes, figure
from . import closed, geometry, measures

BLUE, ORANGE, PURPLE, GREY = "#1b62a5", "#b04a08", "#6a4a9c", "#8a857c"
Result = dict[str, Any]


def gram_matrices(result: Result) -> Any:
    """WᵀW of the n=20, m=5 sweep at some densities, and below each the norms, coloured by interference."""
    density = np.array(result["density"])
    gram, norms, between = (np.array(result[k]) for k in ("gram", "norms", "interference"))
    shown = np.unique(np.linspace(0, len(density) - 1, 5).round().astype(int))
    made = figure((13, 5.2))
    panels = made.subplots(2, len(shown), height_ratios=[2, 1.1])
    image = bars = None
    for column, i in enumerate(shown):
        top, low = panels[:, column]
        image = top.imshow(gram[i], cmap="RdBu", vmin=-1.2, vmax=1.2)
        top.set_title(f"active with probability {density[i]:.2g}", fontsize=10)
        top.set_xticks([0, 9, 19], ["1", "10", "20"])
        top.set_yticks([0, 9, 19], ["1", "10", "20"])
        top.set_xlabel("feature")
        bars = low.barh(np.arange(norms.shape[1]), norms[i], color=_map(between[i]), height=0.85)
        low.set(xlim=(0, 1.35), xlabel="length ‖W$_i$‖", ylim=(19.6, -0.6))
        low.set_yticks([0, 9, 19], ["1", "10", "20"])
        learned = int((norms[i] > geometry.LEARNED).sum())
        low.text(0.97, 0.05, f"{learned} represented", transform=low.transAxes, ha="right", fontsize=9)
        if not column:
            top.set_ylabel("feature, most important first")
            low.set_ylabel("feature")
    assert image is not None
    assert bars is not None
    made.colorbar(image, ax=panels[0, :], label="WᵀW", fraction=0.03, pad=0.01)
    made.colorbar(_scale(), ax=panels[1, :], label="interference (≥ 1: yellow)", fraction=0.03, pad=0.01)
    made.suptitle(
        "20 features in 5 dimensions: sparse features share dimensions   (x' = relu(WᵀWx + b), importance 0.7$^i$)"
    )
    return made


def _scale() -> Any:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    return ScalarMappable(Normalize(0, 1), "viridis")


def _map(values: Any) -> Any:
    return _scale().to_rgba(np.asarray(values))


def polygons(result: Result) -> Any:
    """The five features of n=5, m=2 as arrows in the plane, at each density."""
    density, weights = np.array(result["density"]), np.array(result["weights"])
    made = figure((13, 3.4))
    panels = made.subplots(1, len(density))
    for panel, p, w, d, parts in zip(panels, density, weights, result["dimensionality"], result["shapes"]):
        _arrows(panel, w)
        names: dict[str, int] = {}
        for name, _ in parts:
            names[name] = names.get(name, 0) + 1
        said = [f"{k} {name}s" if k > 1 and name != "alone" else f"{k} {name}" for name, k in names.items()]
        short = int((np.linalg.norm(w, axis=0) <= geometry.LEARNED).sum())
        words = ", ".join(said + ([f"{short} not represented"] if short else []))
        panel.set_title(f"active with probability {p:.2g}\n{words}", fontsize=10)
        learned = [v for v, length in zip(d, np.linalg.norm(w, axis=0)) if length > geometry.LEARNED]
        panel.set_xlabel(f"D$_i$ = {', '.join(sorted({f'{v:.2f}' for v in learned}))}")
    made.suptitle("5 features in 2 dimensions: where the model puts them (equal importance)")
    return made


def _arrows(panel: Any, w: Any) -> None:
    for i in range(w.shape[1]):
        panel.plot([0, w[0, i]], [0, w[1, i]], color=BLUE, linewidth=1.6)
        panel.plot(w[0, i], w[1, i], "o", color=BLUE, markersize=6)
    panel.axhline(0, color="#dddddd", linewidth=0.7, zorder=0)
    panel.axvline(0, color="#dddddd", linewidth=0.7, zorder=0)
    panel.set(xlim=(-1.4, 1.4), ylim=(-1.4, 1.4), aspect="equal", xticks=[-1, 0, 1], yticks=[-1, 0, 1])


_PHASES = ("not represented", "a dimension to itself", "in superposition")
_COLORS = ("#ece8df", "#9ec4e6", "#e9a26b")


def phase_diagrams(two_one: Result, three_two: Result) -> Any:
    """What becomes of the extra feature, over density and importance; the closed form's boundary on the first."""
    made = figure((12, 5))
    left, right = made.subplots(1, 2)
    _phases(left, two_one, "2 features in 1 dimension")
    p = np.geomspace(0.01, 4 / 7, 200)
    lower, upper = closed.boundaries(p)
    left.plot(p, lower, color="black", linewidth=1.6)
    left.plot(p, upper, color="black", linewidth=1.6, label="closed form")
    left.plot([4 / 7, 1], [1, 1], color="black", linewidth=1.6)
    left.plot(*closed.TRIPLE_POINT, "o", color="black", markersize=5, label="triple point, p = 4/7")
    share, points = two_one["agreement"][0][1:]
    left.legend(loc="lower right", fontsize=9)
    left.set_xlabel(left.get_xlabel() + f"\n{share:.1%} of {points} points as the closed form says")
    _phases(right, three_two, "3 features in 2 dimensions")
    from matplotlib.patches import Patch

    legend = [Patch(color=c, label=name) for c, name in zip(_COLORS, _PHASES)]
    made.legend(handles=legend, loc="outside lower center", ncols=3, frameon=False)
    made.suptitle("Phase diagrams: what the trained model does with the extra feature")
    return made


def _phases(panel: Any, result: Result, title: str) -> None:
    from matplotlib.colors import ListedColormap

    p, r = np.array(result["density"]), np.array(result["importance"])
    panel.pcolormesh(p, r, np.array(result["phase"]).T, cmap=ListedColormap(_COLORS), vmin=0, vmax=2, shading="nearest")
    axes(panel, title, "probability that a feature is active", "importance of the extra feature, relative")
    panel.grid(False)
    panel.set(xlim=(p.max(), p.min()), ylim=(r.min(), r.max()))


def star(uniform: Result, sweep: Result) -> Any:
    """D* = m / ‖W‖_F² over sparsity, with its plateaus."""
    made = figure((8, 4.8))
    panel = made.subplots()
    x = np.array(uniform["inverse_density"])
    panel.plot(x, uniform["star"], "o-", color=BLUE, markersize=5, label="400 features in 30, equal importance")
    inverse = 1 / np.array(sweep["density"])
    near = inverse <= x.max()
    panel.plot(inverse[near], np.array(sweep["star"])[near], "s--", color=ORANGE, markersize=4,
               label="20 in 5, importance 0.7$^i$")  # fmt: skip
    for level, name in ((1.0, "one dimension per feature"), (0.5, "antipodal pairs")):
        panel.axhline(level, color=GREY, linewidth=0.9, linestyle=":")
        panel.text(1, level - 0.015, f"{level:g}: {name}", va="top", color=GREY, fontsize=9)
    axes(panel, "Dimensions per feature fall in steps as features get sparser", "sparsity 1 / (1 − S)",
         "D* = m / ‖W‖$_F^2$", log=False)  # fmt: skip
    panel.set_xscale("log")
    panel.set_xticks([1, 2, 3, 5, 10], ["1", "2", "3", "5", "10"])
    panel.minorticks_off()
    panel.set_ylim(0, 1.12)
    panel.legend(loc="lower left", fontsize=9, frameon=False)
    return made


def scatter(uniform: Result) -> Any:
    """D_i of every feature by sparsity, with the lines of the shapes."""
    made = figure((11, 6))
    panel = made.subplots()
    rng = np.random.default_rng(0)
    x = np.array(uniform["inverse_density"])
    for at, d in zip(np.log(x), uniform["dimensionality"]):
        spread = at + rng.uniform(-0.045, 0.045, len(d))
        panel.plot(np.exp(spread), d, ".", color=BLUE, markersize=2.6, alpha=0.55)
    words = {"alone": "1  alone", "tetrahedron": "3/4  tetrahedron", "triangle": "2/3  triangle",
             "antipodal pair": "1/2  antipodal pair", "pentagon": "2/5  pentagon",
             "square antiprism": "3/8  square antiprism"}  # fmt: skip
    for shape in geometry.SHAPES:
        low = shape.name == "square antiprism"
        panel.axhline(shape.dimensionality, color=ORANGE, linewidth=0.8, zorder=0)
        panel.text(x.max() * 1.09, shape.dimensionality - (0.012 if low else -0.004), words[shape.name], fontsize=9,
                   va="top" if low else "bottom", color=ORANGE)  # fmt: skip
    axes(panel, "The share of a dimension that each of 400 features has, 30 dimensions in all", "sparsity 1 / (1 − S)",
         "dimensionality D$_i$", log=False)  # fmt: skip
    panel.set_xscale("log")
    panel.set_xticks([1, 2, 3, 5, 10], ["1", "2", "3", "5", "10"])
    panel.minorticks_off()
    panel.set(xlim=(0.93, x.max() * 1.75), ylim=(-0.03, 1.06))
    return made


def absolute_value(result: Result) -> Any:
    """The |x| model: a coefficient for either sign of each feature; four for three features; forty for a hundred."""
    made = figure((14, 5))
    panels = made.subplots(1, 5, width_ratios=[1, 0.8, 0.8, 1.6, 1.6])
    _weights(panels[0], np.array(result["small_in"]), "3 features, 6 coefficients:\nread")
    _weights(panels[1], np.array(result["motif_in"]), "3 features, 4 coefficients,\nS = 0.99: read")
    _weights(panels[2], np.array(result["motif_out"]).T, "the same four:\nwritten")
    sparsity = result["sparsity"]
    for panel, i in zip(panels[3:], (0, len(sparsity) - 1)):
        w, out = np.array(result["in"][i]), np.array(result["out"][i])  # [m, n], [n, m]
        order = np.argsort(np.abs(w).argmax(1), kind="stable")
        top = np.abs(w).max()
        panel.imshow(w[order][:, :40], cmap="RdBu", vmin=-top, vmax=top, aspect="auto", interpolation="nearest")
        panel.set_title(f"100 features, 40 coefficients, S = {sparsity[i]:g}: read\n"
                        f"{polysemantic(w, out):.0%} of those used serve several", fontsize=9)  # fmt: skip
        panel.set(xlabel="feature, most important first (40 of 100)", ylabel="coefficient (ordered)")
    made.suptitle("Computing |x| through a layer of ReLU: weights in blue (+) and red (−)\nWith four coefficients each "
                  "reads one feature strongly and writes it weakly, another the other way round")  # fmt: skip
    return made


def _weights(panel: Any, w: Any, title: str) -> None:
    """A small matrix [m, n] with its numbers, one row a coefficient."""
    limit = np.abs(w).max()
    panel.imshow(w, cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto")
    for (i, j), v in np.ndenumerate(w):
        if abs(v) > 0.03:
            words = f"{v:.2f}".replace("-", "−")
            panel.text(
                j, i, words, ha="center", va="center", fontsize=8, color="white" if abs(v) > 0.6 * limit else "black"
            )
    panel.set_title(title, fontsize=9)
    panel.set(xlabel="feature", ylabel="coefficient")
    panel.set_xticks(range(w.shape[1]), [str(i + 1) for i in range(w.shape[1])])
    panel.set_yticks(range(w.shape[0]), [str(i + 1) for i in range(w.shape[0])])


def polysemantic(read: Any, written: Any) -> float:
    """Share of the coefficients in use that serve more than one feature (`measures.served`)."""
    features = measures.served(read, written).sum(1)
    return float((features[features > 0] > 1).mean())
