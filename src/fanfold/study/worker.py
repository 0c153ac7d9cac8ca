"""One run of a study in a process of its own: python -m fanfold.study.worker FOLDER runs/swiglu/0"""

from __future__ import annotations

import sys
from pathlib import Path

from . import training
from .plan import Study


def do(folder: Path, place: str) -> str | None:
    """Do the run at `place` of the study in `folder`. -> why it failed, or None."""
    study = Study.open(folder)
    try:
        text, corpus = study.read_text()
        every = study.trials(text.fingerprint)
        if place.startswith("runs/"):
            every = study.jobs(text.fingerprint)
        job = next(j for j in every if j.folder == study.folder / place)
        training.work(job, corpus)
    except (ValueError, BlockingIOError) as error:
        return str(error)
    return None


if __name__ == "__main__":
    failure = do(Path(sys.argv[1]), sys.argv[2])
    if failure is not None:
        sys.exit(failure)
