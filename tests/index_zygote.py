"""Run by test_memory_index: builds an index in children that are killed at random moments, until one
comes through; and again.

One process imports and builds the model; each child is a fork of it, so that a kill costs milliseconds.
Usage: index_zygote.py OUT seed  ->  prints how many indexes were made, and how many children were killed at a random
moment and at a random statement of the database.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from families import FAMILIES, build
from fanfold.memory import anatomy
from fanfold.memory.index import build as job
from memory_texts import texts, tokenizer

KILLS, OF_EACH = 14, 3  # in all; at least so many at a moment, and at a statement
CREATE = job.Store.create


def main(out: Path, seed: int) -> None:
    torch.set_num_threads(1)
    model = build(next(f for f in FAMILIES if f.name == "llama"))
    found, tok, given = anatomy(model), tokenizer(), texts(14)
    job._EVERY = job._SPARE = -1.0  # a checkpoint after every batch

    def work(directory: Path) -> None:
        job.index(model, tok, given, directory, top=3, sequence=24, batch=4, anatomy=found).close()

    _prepare()
    start = time.monotonic()
    work(out / "whole")
    whole = time.monotonic() - start
    rng, kills, rounds = random.Random(seed), {"time": 0, "statement": 0}, 0
    while sum(kills.values()) < KILLS or min(kills.values()) < OF_EACH:
        directory, ended = out / f"killed {rounds}", False
        rounds += 1
        while not ended:
            # at a moment, or at a statement that writes: between two parts of a transaction, the last one too
            how = rng.choice(list(kills))
            moment, statement = rng.uniform(0.0, 1.2 * whole), int(2 ** rng.uniform(0, 12))
            child = os.fork()
            if child == 0:
                _prepare(statement if how == "statement" else 0)
                work(directory)
                os._exit(0)
            begin = time.monotonic()
            status = _wait(child, moment if how == "time" else 60.0)
            kills[how] += os.WIFSIGNALED(status)
            ended = os.WIFEXITED(status)
            if ended and how == "time":  # the first run, which was timed, met a busier machine than this one
                whole = min(whole, time.monotonic() - begin)
            assert not ended or os.WEXITSTATUS(status) == 0, "a child failed"
    print(rounds, *kills.values())


def _wait(child: int, seconds: float) -> int:
    """The status of a child that is killed if it runs longer than this."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def _prepare(die_at: int = 0) -> None:
    """Build without waiting for the disk, which only a power failure needs; and, if asked, kill this process at its
    `die_at`-th statement that writes."""
    create, left = CREATE, [die_at]

    def trace(statement: str) -> None:
        if not statement.startswith(("SELECT", "PRAGMA", "--")):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def created(directory: Path) -> job.Store:
        store = create(directory)
        store.db.execute("PRAGMA synchronous=OFF")
        store.db.set_trace_callback(trace)
        return store

    job.Store.create = staticmethod(created)  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
