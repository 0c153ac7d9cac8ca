"""`fanfold study`: does the gate pay, at an equal budget, on your own text?"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from .failures import guarded, usage
from .output import emit, number, progress, size, stdout_kept, table


@guarded
def study(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Text files or folders; none: Python's own standard library.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder of the study; continued if it is one.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Show a study that is there, and write its pages again.")] = None,
    variants: Annotated[str | None, typer.Option(help="By commas: relu,swiglu,swiglu:layers=6,linear,none, …")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of each variant; default 5, with --quick 2.")] = None,
    budget: Annotated[str | None, typer.Option(help="What is equal: params, flops or time.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps of a run.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Another setting: --set d_model=192; again for more.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A small model and few steps: two minutes.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, in processes of their own.")] = 1,
    ray: Annotated[str | None, typer.Option(help="Run on a Ray cluster: its address, auto, or local.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout, nothing else there.")
    ] = False,
) -> None:
    """Train small language models that differ in the FFN alone, and say what the evidence supports."""
    with stdout_kept(json):
        from .. import study as studies
        from ..study import page

        if report is not None:
            found, folder = studies.collect(studies.Study.open(report)), report
        else:
            with usage():
                asked = _study(studies, files or [], out, variants, seeds, budget, steps, settings or [], quick)
                plan = _plan(studies, asked)
            if dry_run:
                emit(plan) if json else _show_plan(plan)
                return
            if out is None:
                with usage():
                    raise ValueError("-o DIR is missing: where the study goes (--dry-run needs none)")
            folder = out
            speaks = os.environ.get("RANK", "0") == "0"  # of torchrun's processes the first
            if not json and speaks:
                _show_plan(plan)
            with progress("training") as step:
                found = studies.carry_out(asked, jobs, ray, lambda done, total: step(int(done), int(total)))
            if not speaks:
                return
        written = page.save(found, folder, _title(found))
    emit({**found, "written": [str(p) for p in written]}) if json else _show(found, written)


def _study(
    studies: Any, files: list[Path], out: Path | None, variants: str | None, seeds: int | None, budget: str | None,
    steps: int | None, settings: list[str], quick: bool,
) -> Any:  # fmt: skip
    """The Study that the arguments mean; one that is in `out` already, where they say nothing else."""
    existing = studies.Study.open(out) if out is not None and (out / "study.json").exists() else None
    given = {
        **({"budget": budget} if budget else {}),
        **({"steps": steps} if steps else {}),
        **_settings(studies, settings),
    }
    if existing is not None and not given and not quick and not files:
        setup, paths = existing.setup, existing.paths
    else:
        setup = studies.Setup(**{**(studies.QUICK if quick else {}), **given})
        from ..study import data

        data.files(files)  # a wrong path is reported before anything is timed
        paths = tuple(str(p.resolve()) for p in files)
    if variants is not None:
        names: tuple[str, ...] = tuple(v.strip() for v in variants.split(",") if v.strip())
    elif existing is not None:
        names = tuple(v.name for v in existing.variants)
    else:
        names = studies.QUICK_VARIANTS if quick else studies.DEFAULT_VARIANTS
    count = seeds or (existing.seeds if existing is not None else 2 if quick else 5)
    parsed = tuple(studies.Variant.parse(name) for name in names)
    return studies.Study(folder=out or Path("study"), setup=setup, variants=parsed, seeds=count, paths=paths)


def _settings(studies: Any, texts: list[str]) -> dict[str, Any]:
    defaults = studies.Setup().to_dict()
    out: dict[str, Any] = {}
    for text in texts:
        key, mark, value = text.partition("=")
        if not mark or key not in defaults:
            raise ValueError(f"--set {text!r}: expected NAME=VALUE with NAME one of {', '.join(defaults)}")
        try:
            if key == "rates":
                out[key] = tuple(float(v) for v in value.split("/"))
            else:
                out[key] = type(defaults[key])(value)
        except ValueError:
            raise ValueError(f"--set {text!r}: expected a value like {defaults[key]!r}") from None
    return out


def _plan(studies: Any, asked: Any) -> dict[str, Any]:
    from ..study.plan import work_in

    planned = asked.planned()
    flops = work_in(planned, asked.setup, asked.seeds)
    largest = max(p.params for p in planned)
    setup = asked.setup
    return {
        "setup": setup.to_dict(),
        "seeds": asked.seeds,
        "variants": [p.to_dict() | {"ffn": "none" if p.spec is None else p.spec.describe()} for p in planned],
        "runs": len(planned) * asked.seeds,
        "trials": len(planned) * len(setup.rates) if len(setup.rates) > 1 else 0,
        "tokens_per_run": setup.steps * setup.batch * setup.sequence,
        "training_flops": flops["runs"] + flops["trials"],
        "seconds_of_one_process": _seconds(asked, planned),
        "state_bytes_of_one_run": 16 * largest,
    }


def _seconds(asked: Any, planned: list[Any]) -> float:
    """What the whole takes one process, by a few steps of the first variant timed here."""
    import tempfile
    import time

    import numpy as np

    from ..study import training
    from ..study.data import Corpus

    setup = asked.setup
    tokens = np.random.default_rng(0).integers(0, 256, 4 * setup.sequence).astype(np.int32)
    corpus = Corpus(tokens, tokens, np.ones(setup.vocabulary, np.int64))
    steps = 3
    with tempfile.TemporaryDirectory() as place:
        job = training.Job(
            folder=Path(place), setup=setup, planned=planned[0], seed=0, rate=1e-3, steps=steps, text="timing"
        )
        timed = training.Timing(job, corpus)
        timed.step()
        begin = time.perf_counter()
        for _ in range(steps):
            timed.step()
        each = (time.perf_counter() - begin) / steps
    trial = len(setup.rates) * setup.rate_share if len(setup.rates) > 1 else 0.0
    return each * setup.steps * (asked.seeds + trial) * sum(p.flops for p in planned) / planned[0].flops


def _show_plan(plan: dict[str, Any]) -> None:
    rows = [
        [v["variant"], v["ffn"].replace("->", "→"), str(v["n_layers"]), f"{v['params']:,}", f"{v['flops_per_token']:,}",
         f"{100 * v['deviation']:+.2f} %"]
        for v in plan["variants"]
    ]  # fmt: skip
    table("", ["variant", "FFN", "blocks", "parameters", "FLOPs/token", "off the budget"], rows)
    setup = plan["setup"]
    trials = f" and {plan['trials']} trials of learning rates" if plan["trials"] else ""
    print(
        f"equal {setup['budget']}; {plan['runs']} runs{trials}, {plan['tokens_per_run']:,} tokens each, "
        f"{plan['training_flops']:.2e} FLOPs in all"
    )
    print(
        f"about {_time(plan['seconds_of_one_process'])} for one process on this machine (more processes share its "
        f"cores); weights, gradients and optimizer of a run: {size(plan['state_bytes_of_one_run'])}"
    )


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def _title(found: dict[str, Any]) -> str:
    names = [v["name"] for v in found["variants"] if v["runs"]]
    more = ", …" if len(names) > 4 else ""
    equal = {"params": "parameters", "flops": "FLOPs"}.get(found["setup"]["budget"], found["setup"]["budget"])
    return f"{len(names)} FFNs at equal {equal}: {', '.join(names[:4])}{more}"


def _show(found: dict[str, Any], written: list[Path]) -> None:
    rows = []
    for v in found["variants"]:
        if v["validation"] is None:
            rows.append([v["name"], v["ffn"], f"{v['params']:,}", "–", "–", "–", "no run has ended"])
            continue
        spread = v["deviation_over_seeds"]
        dead = sum(c["dead"] for c in v["channels"])
        rows.append([
            v["name"], v["ffn"].replace("->", "→"), f"{v['params']:,}", f"{v['rate']:g}", f"{v['validation']:.4f}",
            "–" if spread is None or not math.isfinite(spread) else f"{spread:.4f}",
            f"{len(v['seeds'])} seeds, {number(v['tokens_per_s'])} tokens/s, dead channels {number(dead)}",
        ])  # fmt: skip
    table("", ["variant", "FFN", "parameters", "rate", "bits/byte", "± seeds", ""], rows)
    for line in found["verdicts"]:
        print(line)
    if found["missing"]:
        print(f"{found['missing']} runs have not ended: the same command continues")
    print(f"written: {', '.join(str(p) for p in written)}")
