"""The superposition study: every number and figure of this folder.

    python studies/superposition/run.py            every part, then the figures, the page and the README's tables
    python studies/superposition/run.py sweep draw only the named parts

Parts write results/PART.json, with the seconds they took; `draw` reads those files and nothing else.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fanfold as ff
from fanfold.superposition import closed, geometry, measures, phase, product, readout, real, separability

HERE = Path(__file__).parent
RESULTS = HERE / "results"


def sweep(progress: Any) -> dict[str, Any]:
    """n=20, m=5, I = 0.7^i, over density."""
    density = np.geomspace(1, 0.01, 9)
    found = ff.superposition.train(20, 5, 1 - density, 0.7, seeds=5, steps=4000, batch=512, progress=progress)
    linear = ff.superposition.train(20, 5, 1 - density, 0.7, activation="identity", seeds=2, steps=2000, batch=512)
    return {
        "density": density,
        "gram": np.swapaxes(found.weights, 1, 2) @ found.weights,
        "bias": found.bias,
        "norms": found.norms(),
        "interference": found.interference(),
        "star": found.dimensions_per_feature(),
        "loss": found.loss,
        "linear_loss": linear.loss,
        "linear_norms": linear.norms(),
        "linear_closed": [closed.loss_linear(p, 0.7 ** np.arange(20), 5) for p in density],
    }


def uniform(progress: Any) -> dict[str, Any]:
    """n=400, m=30, I = 1, over density: D*, D_i and the shapes that features form."""
    inverse = np.array([1, 1.5, 1.75, 1.9, 2, 2.1, 2.2, 2.35, 2.5, 2.8, 3.2, 3.7, 4.2, 4.7, 5.3, 6.2, 8, 12])
    found = ff.superposition.train(
        400, 30, 1 - 1 / inverse, 1.0, seeds=1, steps=2500, batch=512, learning_rate=1e-2, progress=progress
    )
    return describe(inverse, found.weights)


def describe(inverse: Any, weights: Any) -> dict[str, Any]:
    """D*, D_i, features represented and shapes of W [P, m, n] over 1 / (1 - S) [P]."""
    shapes = []
    for w in weights:
        names: dict[str, int] = {}
        for part in geometry.parts(w):
            names[part.name] = names.get(part.name, 0) + 1
        shapes.append(names)
    return {
        "inverse_density": inverse,
        "star": measures.dimensions_per_feature(weights),
        "dimensionality": np.round(measures.dimensionality(weights), 4),
        "learned": (measures.norms(weights) > geometry.LEARNED).sum(1),
        "shapes": shapes,
    }


def polygons(progress: Any) -> dict[str, Any]:
    """n=5, m=2, I = 1, over density: the polygons that five features form in the plane."""
    density = np.array([1.0, 0.5, 0.2, 0.1, 0.05])
    found = ff.superposition.train(5, 2, 1 - density, 1.0, seeds=16, steps=3000, batch=512, progress=progress)
    return {
        "density": density,
        "weights": found.weights,
        "bias": found.bias,
        "dimensionality": found.dimensionality(),
        "shapes": [[(p.name, p.features) for p in geometry.parts(w)] for w in found.weights],
    }


def _diagram(n: int, m: int, points: int, seeds: int, steps: int, progress: Any) -> dict[str, Any]:
    density, importance = np.geomspace(1, 0.01, points), np.geomspace(0.1, 10, points)
    found = phase.diagram(n, m, density, importance, seeds=seeds, steps=steps, batch=64, progress=progress)
    out = {name: getattr(found, name) for name in ("density", "importance", "norm", "interference", "phase")}
    if found.closed is not None:
        grid_p, grid_r = np.meshgrid(density, importance, indexing="ij")
        ratio = found.trained.loss.reshape(found.phase.shape) / closed.best_loss(grid_p, grid_r)
        margins = (1.0, 1.05, 1.1, 1.25)
        out |= {
            "closed": found.closed,
            "loss_over_closed": ratio,
            "agreement": [(margin, *found.agreement(margin)) for margin in margins],
            "weights": found.trained.weights.reshape(*found.phase.shape, n),
        }
    return out


def phase_2_1(progress: Any) -> dict[str, Any]:
    """Phase diagram n=2, m=1."""
    return _diagram(2, 1, 41, 8, 1000, progress)


def phase_3_2(progress: Any) -> dict[str, Any]:
    """Phase diagram n=3, m=2."""
    return _diagram(3, 2, 25, 5, 700, progress)


def hidden_abs(progress: Any) -> dict[str, Any]:
    """y = |x| through a layer of ReLU: n=3 with m=6 and m=4, and n=100, m=40 with I = 0.8^i."""
    small = ff.superposition.train(3, 6, 0.5, hidden="abs", seeds=10, steps=2000, batch=256)
    motif = ff.superposition.train(3, 4, 0.99, hidden="abs", seeds=48, steps=1500, batch=128)
    sparsity = np.array([0.0, 0.9, 0.97, 0.99])
    large = ff.superposition.train(
        100, 40, sparsity, 0.8, hidden="abs", seeds=1, steps=2500, learning_rate=3e-3, progress=progress
    )
    assert small.out is not None
    assert motif.out is not None
    return {
        "small_in": small.weights[0],
        "small_out": small.out[0],
        "small_loss": small.loss,
        "motif_in": motif.weights[0],
        "motif_out": motif.out[0],
        "motif_loss": motif.loss[0],
        "motif_nothing": 3 * closed.mean_square_left(0.01),
        "sparsity": sparsity,
        "in": large.weights,
        "out": large.out,
        "loss": large.loss,
    }


def privileged(progress: Any) -> dict[str, Any]:
    """x' = relu(Wᵀ relu(W x) + b), n=10, m=5, I = 0.75^i: the best of 60 seeds."""
    sparsity = np.array([0.0, 0.7, 0.9, 0.99])
    found = ff.superposition.train(
        10, 5, sparsity, 0.75, hidden="relu", seeds=60, steps=1000, batch=128, progress=progress
    )
    return {"sparsity": sparsity, "weights": found.weights, "loss": found.loss, "seed": found.seed}


def read_out(progress: Any) -> dict[str, Any]:
    """Superposed features read by a sparse linear read-out before and after up and activation, at equal parameters."""
    return {"d_model": 12, "rows": readout.experiment(12, (1, 2, 4, 8), (12, 24, 48, 96), steps=800, progress=progress)}


def separable(progress: Any) -> dict[str, Any]:
    """Parity, shells and XOR through up → activation → linear read-out, every activation, gated and not."""
    rows = separability.experiment(seeds=1, steps=300, progress=progress)
    return {"linear": separability.linear(), "merged": separability.merged(), "rows": rows}


def products(progress: Any) -> dict[str, Any]:
    """Channels that it takes to write a·b, gated and not."""
    a, b = np.random.default_rng(0).standard_normal((2, 10_000)) * 3
    exact = {k: np.abs(product.pair_product(a, b, k) - a * b).max() for k in ("silu", "gelu_erf", "gelu_tanh", "relu")}
    return {"exact_pair": exact, **product.experiment(seeds=4, steps=1000, progress=progress)}


def real_models(progress: Any) -> dict[str, Any]:
    """The FFNs of SmolLM2-135M and all-MiniLM-L6-v2."""
    from fanfold.memory.anatomy import anatomy
    from fanfold.show.models import load

    return {name: real.measure(anatomy(load(name).model), progress=progress) for name in ("smollm2", "minilm")}


PARTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "sweep": sweep,
    "polygons": polygons,
    "phase_2_1": phase_2_1,
    "phase_3_2": phase_3_2,
    "hidden_abs": hidden_abs,
    "privileged": privileged,
    "uniform": uniform,
    "read_out": read_out,
    "separable": separable,
    "products": products,
    "real_models": real_models,
}


def plain(value: Any) -> Any:
    """JSON's types; floats to 6 significant digits."""
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, (float, np.floating)):
        return float(f"{value:.6g}")
    return int(value) if isinstance(value, np.integer) else value


def report(name: str) -> Callable[[int, int], None]:
    last = [0.0]

    def step(done: int, total: int) -> None:
        if time.monotonic() - last[0] > 5 or done == total:
            last[0] = time.monotonic()
            print(f"\r{name}: {done}/{total} steps", end="" if done < total else "\n", file=sys.stderr, flush=True)

    return step


def main(names: list[str]) -> None:
    unknown = [n for n in names if n not in PARTS and n != "draw"]
    if unknown:
        sys.exit(f"part {unknown[0]!r} is not known; known: {', '.join(PARTS)}, draw")
    RESULTS.mkdir(exist_ok=True)
    for name in names or [*PARTS, "draw"]:
        if name == "draw":
            import draw

            draw.draw(HERE)
            continue
        wall, cpu = time.monotonic(), time.process_time()
        out = PARTS[name](report(name))
        out["seconds"] = {
            "wall": time.monotonic() - wall,
            "cpu": time.process_time() - cpu,
            "threads": torch.get_num_threads(),
            "load_average": os.getloadavg()[0],
        }
        (RESULTS / f"{name}.json").write_text(json.dumps(plain(out), separators=(",", ":")) + "\n")
        print(f"{name}: {out['seconds']['wall']:.0f} s, {out['seconds']['cpu']:.0f} s of CPU")


if __name__ == "__main__":
    main(sys.argv[1:])
