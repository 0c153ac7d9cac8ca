"""FFNs cut over real processes (gloo; 2, 3 and 4 ranks): the checks are in parallel_ranks.py, all run by one start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from parallel_ranks import CHECKS


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).with_name("parallel_ranks.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize(("name", "ranks"), [(name, n) for name, (_, sizes) in CHECKS.items() for n in sizes])
def test_ranks(results, name, ranks):
    said = results[f"{name}, {ranks}"]
    assert len(said) == ranks
    for rank, message in enumerate(said):
        assert message == "", f"rank {rank} of {ranks}: {message}"


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_rank_that_dies_ends_all_with_one_message(results, ranks):
    *others, dead = results[f"one_dies, {ranks}"]
    assert dead is None
    said = {other["said"] for other in others}
    assert said == {
        f"the FFN at (root): one of the {ranks} ranks has ended or has not answered within 3 s; every rank ends with "
        "this error. The rank that failed first says why; start them all again"
    }
    assert all(other["seconds"] < 30 for other in others)  # of a timeout of 3; the machine may be busy


def test_a_silent_rank_ends_all_after_the_timeout(results):
    *others, silent = results["one_is_silent, 3"]
    assert silent is None
    assert len({other["said"] for other in others}) == 1
    assert "has not answered within 3 s" in others[0]["said"]
    assert all(other["seconds"] < 30 for other in others)  # of a timeout of 3; the machine may be busy
