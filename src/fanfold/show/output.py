"""What a verb prints and where: results on stdout, progress on a terminal's stderr, one JSON document with --json."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

Progress = Callable[[int, int], None]
LOG_SECONDS = 30.0  # between lines of a log


@contextlib.contextmanager
def progress(text: str) -> Iterator[Progress]:
    """A bar labelled `text` on stderr while the block runs; yields f(done, total). Not on a terminal: a line every
    LOG_SECONDS, none if it takes no longer."""
    if not sys.stderr.isatty():
        yield _log(text)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _log(text: str) -> Progress:
    said = time.monotonic()

    def log(done: int, total: int) -> None:
        nonlocal said
        if done < total and time.monotonic() - said >= LOG_SECONDS:
            said = time.monotonic()
            print(f"fanfold: {text}: {100 * done // total} %", file=sys.stderr, flush=True)

    return log


@contextlib.contextmanager
def stdout_kept(json_only: bool) -> Iterator[None]:
    """While the work runs, whatever a library prints goes to stderr: stdout is for the result alone."""
    if not json_only:
        yield
        return
    with contextlib.redirect_stdout(sys.stderr):
        yield


def emit(document: dict[str, Any]) -> None:
    """Write one JSON document to stdout, in one piece."""
    sys.stdout.write(json.dumps(plain(document), allow_nan=False, indent=2, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def plain(value: Any) -> Any:
    """`value` with JSON's types only: numbers that are not finite become null, tuples lists, keys strings."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, bool, int)):
        return value
    return str(value)


def table(title: str, header: list[str], rows: list[list[str]], numbers: bool = True) -> None:
    """Print a table to stdout: full width on a terminal, never cut when written to a file or pipe.

    numbers  all columns but the first are numbers, set to the right. They are never broken: a table too wide for the
             terminal is turned, a line for each column; if that is too wide as well, the terminal breaks the lines.
    """
    from rich.console import Console

    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else _ENDLESS)
    if title:
        console.print(title, soft_wrap=True)
    out, width = _grid(header, rows, numbers)
    if numbers and width > console.width and rows:
        lines = [[name, *(row[i] for row in rows)] for i, name in enumerate(header) if i]
        turned, narrow = _grid([header[0], *(row[0] for row in rows)], lines, numbers)
        if narrow <= console.width:
            out = turned
        else:
            console = Console(highlight=False, markup=False, width=width)
    console.print(out)


_ENDLESS = 1000


def _grid(header: list[str], rows: list[list[str]], numbers: bool) -> tuple[Any, int]:
    """(the table, its full width)."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    out = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(header):
        out.add_column(name, justify="right" if i and numbers else "left", overflow="fold")
    for row in rows:
        out.add_row(*row)
    return out, Console(width=_ENDLESS).measure(out).maximum


def number(value: float) -> str:
    """Three significant digits, thousands separated: 12,300; 0.0123; 1.23e-07."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(value)))
    if digits > 5:
        return f"{value:.2e}"
    return f"{round(value, digits):,.{max(digits, 0)}f}"


def size(n_bytes: float) -> str:
    """Bytes in kB, MB or GB (10^3, 10^6, 10^9)."""
    if n_bytes >= 1e9:
        return f"{n_bytes / 1e9:.2f} GB"
    return f"{n_bytes / 1e6:.1f} MB" if n_bytes >= 1e6 else f"{n_bytes / 1e3:.1f} kB"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"
