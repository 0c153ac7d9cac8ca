"""A study as a whole: its folder, its text, the sizes of its variants, and the runs that are to be done."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from . import budget, data, training
from .data import Corpus
from .settings import Setup, Variant
from .training import Job

STUDY, TEXT = "study.json", "text.json"
TRIAL_SEED = 1_000_003  # of the trials that choose a learning rate; no run that is compared has it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """What a study folder holds.

    paths  of the text, none: Python's standard library;  seeds  how many runs of each variant are compared.
    """

    folder: Path
    setup: Setup
    variants: tuple[Variant, ...]
    seeds: int
    paths: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [v.name for v in self.variants]
        folders = [v.folder for v in self.variants]
        if len(set(folders)) < len(names) or not names:
            raise ValueError(f"variants {', '.join(names) or '(none)'}: expected one or more different ones")
        if self.seeds < 1:
            raise ValueError(f"seeds={self.seeds}: expected at least 1")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; the seeds may grow later."""
        return {
            "setup": self.setup.to_dict(),
            "variants": [v.name for v in self.variants],
            "seeds": self.seeds,
            "paths": list(self.paths),
        }

    @classmethod
    def open(cls, folder: Path) -> Study:
        """The study of a folder. Raises ValueError if there is none."""
        path = folder / STUDY
        if not path.exists():
            raise ValueError(f"{folder} holds no study: {path} does not exist")
        found = json.loads(path.read_text(encoding="utf-8"))
        variants = tuple(Variant.parse(name) for name in found["variants"])
        setup = Setup.from_dict(found["setup"])
        return cls(folder=folder, setup=setup, variants=variants, seeds=found["seeds"], paths=tuple(found["paths"]))

    def claim(self, text: str) -> None:
        """Make the folder this study's. A study that is there may get more variants or seeds; its setup and text stay.

        text  fingerprint. Raises ValueError if it is another study, or its text has changed.
        """
        path, about = self.folder / STUDY, self.folder / TEXT
        if path.exists():
            before = Study.open(self.folder)
            if before.setup != self.setup or before.paths != self.paths:
                a, b = ({**s.setup.to_dict(), "paths": s.paths} for s in (before, self))
                changed = ", ".join(f"{k} {a[k]!r} -> {b[k]!r}" for k in b if a[k] != b[k])
                raise ValueError(f"{self.folder} holds a study with other settings ({changed}): use another folder")
        if about.exists() and json.loads(about.read_text(encoding="utf-8"))["fingerprint"] != text:
            raise ValueError(f"{self.folder} holds a study of another text: its files have changed; use another folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        training.write(path, self.to_dict())

    def read_text(self) -> tuple[data.Text, Corpus]:
        """The text, and its tokens."""
        text = data.read([Path(p) for p in self.paths])
        return text, data.corpus(text, self.setup.vocabulary, self.setup.sequence)

    def planned(self) -> list[budget.Planned]:
        """The sizes of the variants."""
        return budget.plan(self.setup, self.variants)

    # ---- jobs ----

    def trials(self, text: str) -> list[Job]:
        """The short runs that choose each variant's learning rate: one for each of `setup.rates`."""
        steps = max(1, round(self.setup.steps * self.setup.rate_share))
        if len(self.setup.rates) == 1:
            return []
        return [
            self._job(p, TRIAL_SEED, rate, steps, text, f"rates/{p.variant.folder}/{rate:g}")
            for p in self.planned()
            for rate in self.setup.rates
        ]

    def rate(self, variant: Variant) -> float:
        """The rate of the lowest validation loss in the trials. Raises ValueError if they are not all done."""
        if len(self.setup.rates) == 1:
            return self.setup.rates[0]
        losses = {}
        for rate in self.setup.rates:
            folder = self.folder / "rates" / variant.folder / f"{rate:g}"
            found = training.result(folder)
            if found is None:
                raise ValueError(f"{folder} has not ended: the rate of {variant.name} is not chosen yet")
            losses[rate] = found["validation"]
        return min(losses, key=lambda r: (losses[r], r))

    def jobs(self, text: str) -> list[Job]:
        """The runs that are compared, all variants of a seed before the next seed: what is there can be compared."""
        steps = self.steps()
        return [
            self._job(p, seed, self.rate(p.variant), steps[p.variant.name], text, self.place(p.variant, seed))
            for seed in range(self.seeds)
            for p in self.planned()
        ]

    def place(self, variant: Variant, seed: int) -> str:
        return f"runs/{variant.folder}/{seed}"

    def steps(self) -> dict[str, int]:
        """Steps of each variant: the setup's; for equal time those that take as long as the setup's steps of the
        fastest variant, by the seconds of the trials (then kept in the study's folder)."""
        if self.setup.budget != "time":
            return {v.name: self.setup.steps for v in self.variants}
        path = self.folder / "speed.json"
        known: dict[str, float] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        for variant in self.variants:
            if variant.name not in known:
                known[variant.name] = self._seconds_per_step(variant)
                training.write(path, known)
        least = min(known[v.name] for v in self.variants)
        return {v.name: max(1, round(self.setup.steps * least / known[v.name])) for v in self.variants}

    def _seconds_per_step(self, variant: Variant) -> float:
        found = training.result(self.folder / "rates" / variant.folder / f"{self.rate(variant):g}")
        if found is None:
            raise ValueError("equal time needs trials, which tell the speed: give two or more rates")
        return found["seconds"] / found["steps"]

    def _job(self, planned: budget.Planned, seed: int, rate: float, steps: int, text: str, place: str) -> Job:
        return Job(
            folder=self.folder / place,
            setup=self.setup,
            planned=planned,
            seed=seed,
            rate=rate,
            steps=steps,
            text=text,
        )


def to_do(jobs: Iterable[Job]) -> list[Job]:
    """Those without a result."""
    return [job for job in jobs if training.result(job.folder) is None]


def work_in(planned: Sequence[budget.Planned], setup: Setup, seeds: int) -> dict[str, float]:
    """Training FLOPs of the whole study: three times forward for each token (forward, and backward for x and weights),
    the trials of the rates apart."""
    tokens = setup.batch * setup.sequence
    trial_steps = len(setup.rates) * round(setup.steps * setup.rate_share) if len(setup.rates) > 1 else 0
    once = 3.0 * tokens * sum(p.flops for p in planned)
    return {"runs": once * setup.steps * seeds, "trials": once * trial_steps}
