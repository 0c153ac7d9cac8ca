"""`fanfold demo`: the main job on two real models, SmolLM2-135M and all-MiniLM-L6-v2, and a look into the first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import bench, card, outcome, reading
from .models import Loaded, load
from .output import number, progress

FORMATS: dict[str, tuple[str | None, ...]] = {"smollm2": (None, "bf16"), "minilm": (None, "bf16")}


def demo(settings: bench.Settings, show: bool, report: Path) -> dict[str, Any]:
    """Card, swap and bench of both models, printed on the way if `show`, and the report of a reading of the one that
    writes text, as the file `report`; -> everything as plain values."""
    reading.check_report(report)
    out: dict[str, Any] = {"models": []}
    writers: list[tuple[Loaded, list[Any]]] = []
    for name, formats in FORMATS.items():
        with progress(f"loading {name}"):
            loaded = load(name, copies=2.0)
        found = identify(loaded)
        sheet = card.card(loaded.model, found, name)
        if show:
            card.show(sheet)
            print()
        runs = []
        for format in formats:
            runs.append(bench.bench(loaded, format, settings, found))
            if show:
                bench.show(runs[-1])
                print()
        out["models"].append({"card": sheet, "runs": runs})
        if loaded.kind == "causal":
            writers.append((loaded, found))
    out["verified"] = [line for entry in out["models"] for run in entry["runs"] for line in verified(run)]
    if show:
        print("Verified in this run:")
        for line in out["verified"]:
            print(f"- {line}")
    for loaded, found in writers[:1]:
        out["reading"] = reading.look(loaded, found, report)
        if show:
            print()
            print(reading.words(out["reading"]))
    return out


def identify(loaded: Loaded) -> list[Any]:
    """`fanfold.find` on a loaded model, with a bar."""
    from ..models.find import find

    with progress("identifying by experiment") as step:
        return find(loaded.model, progress=step)


def verified(run: dict[str, Any]) -> list[str]:
    """What one bench run has shown, a sentence each, from its own numbers."""
    what = f"{run['model']}, format {run['format'] or 'none'}"
    out = [f"{what}: {line}" for line in (outcome.headline(run["swap"]), *outcome.errors(run["swap"]))]
    results = run["results"]
    if "greedy" in results:
        g = results["greedy"]
        out.append(
            f"{what}: greedy text of {g['tokens']} tokens {bench.greedy_words(g)}; logits differ by "
            f"{number(results['logits']['relative_difference'])}"
        )
        p = results["perplexity"]
        out.append(f"{what}: perplexity {p['before']:.4f} before, {p['after']:.4f} after")
    if "embeddings" in results:
        e = results["embeddings"]
        out.append(f"{what}: lowest cosine of {e['sentences']} sentence embeddings {e['cosine_min']:.7f}")
    return out
