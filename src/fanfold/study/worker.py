"""One run of a study in a process of its own: python -m fanfold.study.worker FOLDER runs/swiglu/0 [PARENT]

With the number of its parent process it ends when that one has, whatever killed it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from . import training
from .plan import Study

ORPHANED = 3  # exit status of a worker whose parent is gone


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


def _end_with(parent: int) -> None:
    """End this process soon after its parent has; what is on disk is whole at any moment."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(ORPHANED)


if __name__ == "__main__":
    if sys.argv[3:]:
        threading.Thread(target=_end_with, args=[int(sys.argv[3])], daemon=True).start()
    failure = do(Path(sys.argv[1]), sys.argv[2])
    if failure is not None:
        sys.exit(failure)
