"""What every test needs: no network, quiet libraries, random numbers of its own."""

from __future__ import annotations

import os
import random
import zlib

import numpy as np
import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

from browser import chromium, opened  # noqa: F401

# Added to every seed: FANFOLD_TEST_SEED=1 runs the same tests on other numbers.
_SEED = os.environ.get("FANFOLD_TEST_SEED", "")


def _seed(name: str) -> None:
    """The numbers that a test draws depend on its name alone, not on which tests this worker ran before it."""
    seed = zlib.crc32((name + _SEED).encode())
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef, request):
    _seed(f"{request.node.nodeid}::{fixturedef.argname}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    _seed(item.nodeid)
