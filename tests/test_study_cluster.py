"""A study on several processes: FSDP2 under torchrun, and a Ray cluster whose worker is killed in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from fanfold import study
from fanfold.study import training
from fanfold.study.settings import Setup
from test_study import TINY, make, tensors, text  # noqa: F401  (text: a fixture)


def test_two_processes_under_torchrun_train_as_one(tmp_path, text):  # noqa: F811
    alone = make(tmp_path / "alone", text, ("swiglu",))
    study.carry_out(alone)
    settings = [f"{k}={v}" for k, v in TINY.to_dict().items() if k not in ("rates", "budget")]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29631",
        "-m", "fanfold", "study", str(text), "-o", str(tmp_path / "two"), "--variants", "swiglu", "--seeds", "1",
        *[part for s in settings for part in ("--set", s)], "--set", "rates=0.003",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    place = "runs/swiglu/0"
    one, two = training.result(tmp_path / "alone" / place), training.result(tmp_path / "two" / place)
    # not bit by bit: the batch is summed in another order
    assert two["validation"] == pytest.approx(one["validation"], rel=2e-4)
    a, b = tensors(tmp_path / "alone" / place), tensors(tmp_path / "two" / place)
    assert a.keys() == b.keys()
    assert {n: t.shape for n, t in a.items()} == {n: t.shape for n, t in b.items()}
    assert done.stdout.count("written:") == 1  # one process speaks


def test_a_ray_task_that_is_killed_goes_on_elsewhere(tmp_path, text, monkeypatch):  # noqa: F811
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    setup = Setup(**{**TINY.to_dict(), "steps": 400})
    whole = make(tmp_path / "whole", text, ("relu",), setup=setup)
    study.carry_out(whole)
    cluster = make(tmp_path / "ray", text, ("relu",), seeds=2, setup=setup)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    killed = []

    def watch(_done, _all):
        """Kills the process that holds the lock of the first run, once it has a checkpoint."""
        folder = cluster.folder / "runs" / "relu" / "0"
        if killed or not (folder / "checkpoint.safetensors").exists() or training.result(folder):
            return
        holder = _holder(folder / "lock")
        if holder:
            os.kill(holder, signal.SIGKILL)
            killed.append(holder)

    try:
        monkeypatch.setattr("fanfold.study.workers.LOOK", 0.02)
        out = study.carry_out(cluster, ray="local", progress=watch)
    finally:
        ray.shutdown()
    assert killed
    assert out["missing"] == 0
    a, b = (tensors(s.folder / "runs" / "relu" / "0") for s in (whole, cluster))
    assert all((a[n] == b[n]).all() for n in a)
    lines = (cluster.folder / "runs" / "relu" / "0" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == sorted(steps)


def _holder(lock):
    """The process that has the file open."""
    for _ in range(50):
        for entry in os.listdir("/proc"):
            if not entry.isdecimal() or int(entry) == os.getpid():
                continue
            try:
                links = {os.readlink(f"/proc/{entry}/fd/{fd}") for fd in os.listdir(f"/proc/{entry}/fd")}
            except OSError:
                continue
            if str(lock) in links:
                return int(entry)
        time.sleep(0.02)
    return None
