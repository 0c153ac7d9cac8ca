"""Small language models that differ in the FFN alone, at an equal budget, and what the evidence says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from . import workers
from .plan import TEXT, Study, to_do
from .settings import DEFAULT_VARIANTS, QUICK, QUICK_VARIANTS, Setup, Variant
from .sharded import Group
from .summary import collect
from .training import write

__all__ = ["DEFAULT_VARIANTS", "QUICK", "QUICK_VARIANTS", "Setup", "Study", "Variant", "collect", "run"]

Progress = Callable[[float, float], None]


def run(
    folder: str | Path,
    variants: Iterable[str] = DEFAULT_VARIANTS,
    seeds: int = 5,
    setup: Setup | None = None,
    text: Sequence[str | Path] = (),
    jobs: int = 1,
    ray: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Train one small language model for each variant of the FFN and each seed, and compare them.

    folder    of the study: a run that was stopped is continued by the same call, bit by bit.
    variants  names of `Spec.parse`, "linear" (no activation), "none" (no FFN); "swiglu:layers=6" and the like.
    seeds     runs of each variant; data and, where shapes agree, first weights are those of the seed alone, so that
              variants are compared in pairs.
    setup     model, budget, steps (`Setup`);  text  files and folders, none: Python's standard library.
    jobs      local processes;  ray  address of a Ray cluster instead. torchrun cuts each run over its processes.
    progress  called with (steps done, all).
    -> what `collect` gives: losses in bits per byte, paired differences with 95 % intervals, verdicts in words.

    The learning rate of each variant is the one of `setup.rates` whose shorter trial, with a seed of its own, has the
    lowest validation loss. Raises ValueError for a folder of another study, unmeetable budgets, too little text;
    RunsFailedError for runs that did not end.
    """
    paths = tuple(str(Path(p).resolve()) for p in text)
    parsed = tuple(Variant.parse(name) for name in variants)
    study = Study(folder=Path(folder), setup=setup or Setup(), variants=parsed, seeds=seeds, paths=paths)
    return carry_out(study, jobs, ray, progress)


def carry_out(study: Study, jobs: int = 1, ray: str | None = None, progress: Progress | None = None) -> dict[str, Any]:
    """`run` on a Study."""
    if jobs < 1:
        raise ValueError(f"jobs={jobs}: expected at least 1")
    study.planned()  # an unmeetable budget is said before anything is written
    text, corpus = study.read_text()
    group = Group()
    about = {
        "rule": text.rule,
        "skipped": len(text.skipped),
        "fingerprint": text.fingerprint,
        "train_tokens": len(corpus.train),
        "validation_tokens": len(corpus.validation),
    }
    if group.first:
        study.claim(text.fingerprint)
        write(study.folder / TEXT, about)
    group.wait()
    trials = study.trials(text.fingerprint)
    # the runs take about so many steps more: their rates are not known yet, their number is
    later = len(study.variants) * study.seeds * study.setup.steps
    told = progress or (lambda _done, _all: None)
    ahead = sum(job.steps for job in trials)
    if to_do(trials):
        _work(study, trials, jobs, ray, lambda done, _all: told(done, ahead + later))
    runs = study.jobs(text.fingerprint)
    whole = ahead + sum(job.steps for job in runs)
    if to_do(runs):
        _work(study, runs, jobs, ray, lambda done, _all: told(ahead + done, whole))
    return collect(study)


def _work(study: Study, todo: Sequence[Any], jobs: int, ray: str | None, progress: Progress) -> None:
    if ray is not None:
        workers.on_ray(study, todo, ray, progress)
    elif jobs > 1:
        workers.local(study, todo, jobs, progress)
    else:
        workers.here(study, todo, progress)
