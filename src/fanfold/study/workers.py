"""Who does the runs: this process, several local ones, or a Ray cluster. A run that is killed goes on elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import training
from .plan import Study, to_do
from .training import Job

Progress = Callable[[float, float], None]
TRIES = 3  # of a run whose process dies
LOOK = 0.5  # seconds between looks at the others' progress


class RunsFailedError(ValueError):
    """Some runs did not end."""


def here(study: Study, jobs: Sequence[Job], progress: Progress) -> None:
    """One after the other in this process."""
    _, corpus = study.read_text()
    failed, total, done = [], sum(job.steps for job in jobs), 0
    for job in to_do(jobs):
        before = sum(j.steps for j in jobs if training.result(j.folder) is not None)
        try:
            training.work(job, corpus, lambda i, _all, before=before: progress(before + i, total))
        except training.DivergedError as error:
            failed.append(str(error))
        done += job.steps
    _end(failed)


def local(study: Study, jobs: Sequence[Job], processes: int, progress: Progress) -> None:
    """In `processes` processes at a time."""
    waiting, running, failed = [(job, 1) for job in to_do(jobs)], {}, []
    total = sum(job.steps for job in jobs)
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                job, attempt = waiting.pop(0)
                command = [sys.executable, "-m", "fanfold.study.worker", str(study.folder), _place(study, job),
                           str(os.getpid())]  # fmt: skip
                running[subprocess.Popen(command, stderr=subprocess.PIPE, text=True)] = (job, attempt)
            time.sleep(LOOK)
            for process in [p for p in running if p.poll() is not None]:
                job, attempt = running.pop(process)
                said = (process.stderr.read() if process.stderr else "").strip()
                if training.result(job.folder) is not None:
                    continue
                if process.returncode == 1 or attempt >= TRIES:  # 1: it said why; else it was killed
                    failed.append(said.splitlines()[-1] if said else f"{job.folder}: died {attempt} times")
                else:
                    waiting.insert(0, (job, attempt + 1))
            progress(sum(_done(job) for job in jobs), total)
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
    _end(failed)


def on_ray(study: Study, jobs: Sequence[Job], address: str, progress: Progress) -> None:
    """As tasks of a Ray cluster, whose machines must see the study's folder at the same path. A task that dies is
    given to another worker, which goes on from the checkpoint.

    address  of the cluster; "auto" the one that this machine belongs to, "local" one for this call.
    Raises ValueError if Ray is not installed, or the cluster cannot be reached.
    """
    try:
        import ray  # pyright: ignore[reportMissingImports]
        from ray.exceptions import RayError  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise ValueError("Ray is not installed: pip install ray") from None
    try:
        ray.init(address=None if address == "local" else address, log_to_driver=False, ignore_reinit_error=True)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ValueError(f"no Ray cluster at {address!r}: {str(error).splitlines()[0]}") from None

    def task(folder: str, place: str) -> str | None:
        from fanfold.study.worker import do

        return do(Path(folder), place)

    remote: Any = ray.remote(max_retries=TRIES - 1, num_cpus=study.setup.threads)(task)
    folder, total = str(study.folder.resolve()), sum(job.steps for job in jobs)
    left = [remote.remote(folder, _place(study, job)) for job in to_do(jobs)]
    failed: list[str] = []
    while left:
        ready, left = ray.wait(left, num_returns=1, timeout=LOOK)
        for one in ready:
            try:
                said = ray.get(one)
            except RayError as error:
                said = str(error).strip().splitlines()[-1]
            failed += [said] if said else []
        progress(sum(_done(job) for job in jobs), total)
    _end(failed)


def _place(study: Study, job: Job) -> str:
    return job.folder.relative_to(study.folder).as_posix()


def _end(failed: list[str]) -> None:
    if failed:
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise RunsFailedError(f"{failed[0]}{more}; what has ended is kept, the same command tries the others again")


def _done(job: Job) -> int:
    """Steps that a run has done, by its last line of metrics."""
    if training.result(job.folder) is not None:
        return job.steps
    path = job.folder / training.METRICS
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 400))
        lines = file.read().decode(errors="replace").splitlines()
    for line in reversed(lines):
        try:
            found: Any = json.loads(line)
            return int(found["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0
