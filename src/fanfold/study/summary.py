"""What a study has found so far: its runs collected, compared, and said in words."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Any

from . import training
from .budget import Planned, spread
from .plan import TEXT, Study
from .statistics import Difference, comparisons


def collect(study: Study) -> dict[str, Any]:
    """The whole study as plain JSON values: variants with their sizes and results, curves, comparisons, verdicts.

    Runs that have not ended are counted and left out. Raises ValueError if none has.
    """
    planned = study.planned()
    variants = [_variant(study, p) for p in planned]
    if not any(v["seeds"] for v in variants):
        raise ValueError(f"no run of {study.folder} has ended yet")
    losses = {v["name"]: {run["seed"]: run["validation"] for run in v["runs"]} for v in variants}
    found = comparisons({name: seeds for name, seeds in losses.items() if seeds})
    return {
        "setup": study.setup.to_dict(),
        "paths": list(study.paths),
        "text": _text(study),
        "seeds": study.seeds,
        "missing": sum(study.seeds - len(v["seeds"]) for v in variants),
        "budget_spread": spread(planned),
        "variants": sorted(variants, key=lambda v: (v["validation"] is None, v["validation"])),
        "comparisons": [d.to_dict() for d in found],
        "verdicts": verdicts(found, variants),
        "rates": {v.name: _trials(study, v) for v in study.variants},
    }


def _text(study: Study) -> dict[str, Any] | None:
    path = study.folder / TEXT
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _variant(study: Study, p: Planned) -> dict[str, Any]:
    folders = [study.folder / study.place(p.variant, seed) for seed in range(study.seeds)]
    ended = [found for folder in folders if (found := training.result(folder)) is not None]
    bits = [run["validation"] for run in ended]
    return {
        **p.to_dict(),
        "name": p.variant.name,
        "ffn": "none" if p.spec is None else p.spec.describe(),
        "gated": p.spec is not None and p.spec.gated,
        "seeds": [run["seed"] for run in ended],
        "rate": ended[0]["rate"] if ended else None,
        "steps": ended[0]["steps"] if ended else None,
        "validation": statistics.fmean(bits) if bits else None,
        "deviation_over_seeds": statistics.stdev(bits) if len(bits) > 1 else None,
        "seconds": statistics.median(run["seconds"] for run in ended) if ended else None,
        "tokens_per_s": statistics.median(run["tokens_per_s"] for run in ended) if ended else None,
        "training_flops": 3 * p.flops * ended[0]["tokens"] if ended else None,
        "channels": _channels(ended),
        "runs": [{"seed": run["seed"], "validation": run["validation"], "seconds": run["seconds"]} for run in ended],
        "curves": [_curve(study, p, run["seed"]) for run in ended],
    }


def _channels(ended: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """For each layer the mean over seeds of what `channels.measure` says."""
    if not ended or not ended[0]["layers"]:
        return []
    return [
        {key: statistics.fmean(run["layers"][i][key] for run in ended) for key in layer}
        for i, layer in enumerate(ended[0]["layers"])
    ]


def _curve(study: Study, p: Planned, seed: int) -> dict[str, list[float]]:
    path = study.folder / study.place(p.variant, seed) / training.METRICS
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    checks = [line for line in lines if "validation" in line]
    trained = [line for line in lines if "loss" in line]
    return {
        "step": [line["step"] for line in checks],
        "validation": [line["validation"] for line in checks],
        "train_step": [line["step"] for line in trained],
        "loss": [line["loss"] for line in trained],
        "gradient_norm": [line["gradient_norm"] for line in trained],
    }


def _trials(study: Study, variant: Any) -> list[dict[str, float]]:
    out = []
    for rate in study.setup.rates:
        found = training.result(study.folder / "rates" / variant.folder / f"{rate:g}")
        if found is not None:
            out.append({"rate": rate, "validation": found["validation"]})
    return out


def verdicts(found: Sequence[Difference], variants: Sequence[dict[str, Any]]) -> list[str]:
    """The sentences that a reader wants first: the best against the others, gated against ungated, the controls."""
    out = []
    ended = sorted((v for v in variants if v["validation"] is not None), key=lambda v: v["validation"])
    if len(ended) > 1:
        best = ended[0]["name"]
        equal = [d.b if d.a == best else d.a for d in found if best in (d.a, d.b) and not d.separated]
        out.append(
            f"Lowest: {best}, {ended[0]['validation']:.4f} bits/byte"
            + (f"; not separated from it: {', '.join(equal)}" if equal else "; separated from all others")
        )
    gated = [v["name"] for v in ended if v["gated"]]
    plain = [v["name"] for v in ended if not v["gated"] and v["spec"] and v["spec"]["activation"] != "identity"]
    cross = [d for d in found if (d.a in gated and d.b in plain) or (d.a in plain and d.b in gated)]
    if cross:
        ahead = sum(d.separated and (d.a in gated) == (d.mean < 0) for d in cross)
        behind = sum(d.separated and (d.a in gated) != (d.mean < 0) for d in cross)
        together = sum(d.firmly and (d.a in gated) == (d.mean < 0) for d in cross)
        out.append(
            f"Gated against ungated, {len(cross)} pairs: the gated one better in {ahead}, worse in {behind}, not "
            f"separated in {len(cross) - ahead - behind}; {together} of those better hold when all comparisons count "
            "together"
        )
    out += [d.words() for d in found]
    return out
