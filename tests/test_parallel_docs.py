"""docs/parallel.md: every number under a command is what the command prints; its Python runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fanfold.show.cli import app

TEXT = (Path(__file__).parents[1] / "docs" / "parallel.md").read_text(encoding="utf-8")


def commands():
    """(command, the lines under it) of every console block."""
    for block in re.findall(r"^```console\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL):
        for part in block.split("$ ")[1:]:
            command, *lines = part.splitlines()
            yield command, lines


@pytest.mark.parametrize(("command", "lines"), list(commands()))
def test_commands_print_what_is_shown(command, lines):
    verb, _, filter_ = command.partition(" | ")
    done = CliRunner().invoke(app, shlex.split(verb)[1:])
    assert done.exit_code == 0, done.output
    pattern = shlex.split(filter_)[2]
    printed = [line for line in done.stdout.splitlines() if re.search(pattern, line)]
    # the width of columns may change with lines that are not shown
    assert [line.split() for line in printed] == [line.split() for line in lines]


def test_python_runs():
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    exec(compile(blocks[0], "docs/parallel.md", "exec"), {})


def test_what_the_text_concludes():
    """Where tp stops paying, from the numbers shown: fastest at 16, and 32 no faster."""
    steps = {}
    for command, lines in commands():
        found = re.search(r"8192x28672 .*--tokens 1(?: --tp (\d+))? \|", command)
        if found:
            steps[int(found.group(1) or 1)] = float(lines[-1].split()[-1])
    assert sorted(steps) == [1, 2, 4, 8, 16, 32]
    assert min(steps, key=steps.get) == 16
    assert f"{steps[1] / steps[8]:.1f}" == "5.7"
