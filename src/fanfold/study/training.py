"""One training run: a folder with its config, its metrics as they come, a checkpoint, and at the end the result.

Everything that is random is drawn from the seed and the step, so a run that was killed goes on from its checkpoint as
if nothing had happened, bit by bit. B batch, S sequence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from . import channels
from .budget import Planned
from .checkpoint import Checkpoint
from .data import Corpus
from .model import LanguageModel, initialize, number
from .settings import Setup
from .sharded import Group
from .sharded import number as plain_number

METRICS, RESULT, CONFIG = "metrics.jsonl", "result.json", "config.json"
LEAST_RATE = 0.1  # of the largest, at the end of the cosine
BETAS = (0.9, 0.95)

Step = Callable[[int, int], None]


class DivergedError(ValueError):
    """The loss is no number any more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One run.

    folder  its place;  steps  of this run: a trial of a rate has fewer, "time" gives each variant its own.
    """

    folder: Path
    setup: Setup
    planned: Planned
    seed: int
    rate: float
    steps: int
    text: str  # fingerprint

    def config(self) -> dict[str, Any]:
        """What decides the outcome, as JSON."""
        return {
            **self.planned.to_dict(),
            "seed": self.seed,
            "rate": self.rate,
            "steps": self.steps,
            "setup": self.setup.to_dict(),
            "text": self.text,
        }


def learning_rate(job: Job, step: int) -> float:
    """Rising over `warmup` steps, then a cosine down to a tenth; `step` counts from 1."""
    warmup = min(job.setup.warmup, max(1, job.steps // 4))
    if step <= warmup:
        return job.rate * step / warmup
    along = (step - warmup) / max(1, job.steps - warmup)
    return job.rate * (LEAST_RATE + (1 - LEAST_RATE) * (1 + math.cos(math.pi * along)) / 2)


def result(folder: Path) -> dict[str, Any] | None:
    """What a run came to, if it has ended."""
    path = folder / RESULT
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Nobody else may work in the folder meanwhile; a killed process lets go of it. Raises BlockingIOError."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BlockingIOError(f"{folder} is being worked in by another process") from None
        yield


def write(path: Path, document: dict[str, Any]) -> None:
    """A JSON file, whole or not at all."""
    beside = path.with_suffix(path.suffix + f".{os.getpid()}")
    with open(beside, "w", encoding="utf-8") as out:
        out.write(json.dumps(document, indent=1, allow_nan=False) + "\n")
        out.flush()
        os.fsync(out.fileno())
    beside.replace(path)


def work(job: Job, corpus: Corpus, step: Step | None = None) -> dict[str, Any]:
    """Do a run, or what is left of it. -> its result, which is also in its folder.

    step  called with (steps done, all). Raises ValueError if the folder holds a run of another config, DivergedError.
    """
    torch.set_num_threads(job.setup.threads)
    group = Group()
    if job.setup.batch % group.size:
        raise ValueError(f"batch={job.setup.batch} cannot be divided among {group.size} processes")
    with alone(job.folder) if group.first else contextlib.nullcontext():
        if group.first:
            _claim(job)
        group.wait()
        done = result(job.folder)
        group.wait()
        return done if done is not None else _Run(job, corpus, group).go(step or (lambda _done, _all: None))


def _claim(job: Job) -> None:
    path, config = job.folder / CONFIG, json.loads(json.dumps(job.config()))
    if not path.exists():
        write(path, config)
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    changed = [key for key in config if before.get(key) != config[key]]
    if changed:
        raise ValueError(f"{job.folder} holds a run with another {', '.join(changed)}: use another folder")


class Timing:
    """Steps of a run that is never saved, to see how long they take."""

    def __init__(self, job: Job, corpus: Corpus) -> None:
        torch.set_num_threads(job.setup.threads)
        self._run, self._done = _Run(job, corpus, Group()), 0

    def step(self) -> None:
        """One training step."""
        self._done += 1
        self._run.train(self._done)


class _Run:
    def __init__(self, job: Job, corpus: Corpus, group: Group) -> None:
        self.job, self.corpus, self.setup, self.group = job, corpus, job.setup, group
        self.model = LanguageModel(job.setup, job.planned)
        initialize(self.model, job.setup, job.seed)
        group.cut(self.model, self.model.blocks)
        matrices = [p for n, p in self.model.named_parameters() if p.dim() > 1 and n != "embedding.weight"]
        rest = [p for n, p in self.model.named_parameters() if p.dim() < 2 or n == "embedding.weight"]
        groups = [{"params": matrices, "weight_decay": job.setup.decay}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=job.rate, betas=BETAS, fused=group.size == 1)
        self.windows = torch.from_numpy(corpus.windows(job.setup.check_tokens, job.setup.sequence)).long()
        self.bytes_of = torch.from_numpy(corpus.bytes_of)
        self.checkpoint = Checkpoint(job.folder, self.model, self.optimizer, group)
        self.done, self.seconds = self.checkpoint.load()
        if group.first:
            self._cut_metrics()
        group.wait()
        self.last: float | None = None  # validation after the last step
        self.losses: list[float] = []
        self.norms: list[float] = []

    def _cut_metrics(self) -> None:
        """Lines later than the checkpoint are written again."""
        path = self.job.folder / METRICS
        if not path.exists():
            return
        kept = []
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # the last line may be cut
                if 0 < self.done >= json.loads(line)["step"]:
                    kept.append(line)
        beside = path.with_suffix(".part")
        beside.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        beside.replace(path)

    def go(self, step: Step) -> dict[str, Any]:
        job, setup = self.job, self.setup
        if self.done == 0:
            self._note(0, validation=self.validate())
        begin = time.monotonic()
        for i in range(self.done + 1, job.steps + 1):
            rate = self.train(i)
            last = i == job.steps
            if i % setup.log_every == 0 or last:
                self._note(i, loss=float(np.mean(self.losses)), gradient_norm=float(np.mean(self.norms)), rate=rate)
                self.losses, self.norms = [], []
            if i % setup.check_every == 0 or last:
                passed = self.seconds + time.monotonic() - begin  # without validation: for every variant the same
                before = time.monotonic()
                self.last = self.validate()
                self._note(i, validation=self.last)
                self.checkpoint.save(i, passed)
                begin += time.monotonic() - before
            step(i, job.steps)
        passed = self.seconds + time.monotonic() - begin
        return self._finish(passed)

    def train(self, i: int) -> float:
        """Step `i`, counted from 1. -> its learning rate."""
        setup = self.setup
        rate = learning_rate(self.job, i)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        pieces = torch.from_numpy(self.corpus.batch(self.job.seed, i, setup.batch, setup.sequence)).long()
        pieces = self.group.own(pieces)
        torch.manual_seed(number(self.job.seed, "dropout", i))
        loss = self._loss(pieces).mean()
        told = float(self.group.sum(loss.detach().clone()) / self.group.size)
        if not math.isfinite(told):
            raise DivergedError(f"{self.job.folder}: the loss is {told} at step {i}, rate {rate:g}")
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), setup.clip)
        self.optimizer.step()
        self.losses.append(told)
        self.norms.append(plain_number(norm))
        return rate

    def _loss(self, pieces: Tensor) -> Tensor:
        """[B, S + 1] -> the cross entropy of each token after the first, [B, S] in nats."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.setup.dtype == "bf16"):
            logits = self.model(pieces[:, :-1])
        return nn.functional.cross_entropy(logits.float().transpose(1, 2), pieces[:, 1:], reduction="none")

    @torch.no_grad()
    def validate(self) -> float:
        """Bits per byte on the validation windows."""
        self.model.eval()
        own, nats = self.group.own(self.windows), torch.zeros((), dtype=torch.float64)
        for some in own.split(2 * self.setup.batch):
            nats += self._loss(some).double().sum()
        self.model.train()
        self.group.settle(self.model)
        n_bytes = self.group.sum(self.bytes_of[own[:, 1:]].sum())
        return float(self.group.sum(nats) / math.log(2) / n_bytes)

    def _note(self, step: int, **values: float) -> None:
        if not self.group.first:
            return
        with open(self.job.folder / METRICS, "a", encoding="utf-8") as out:
            out.write(json.dumps({"step": step, **values}) + "\n")

    def _finish(self, seconds: float) -> dict[str, Any]:
        job, setup = self.job, self.setup
        tokens = job.steps * setup.batch * setup.sequence
        document = {
            **job.config(),
            "validation": self.validate() if self.last is None else self.last,
            "seconds": seconds,
            "tokens": tokens,
            "tokens_per_s": tokens / seconds if seconds else None,
            "layers": channels.measure(self.model, self.windows[:, :-1], 2 * setup.batch),
        }
        if self.group.first:
            write(job.folder / RESULT, document)
        self.group.wait()
        return document
