"""How a verb ends when something goes wrong: 1 the work failed, 130 interrupted; one line on stderr, no traceback."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import typer

F = TypeVar("F", bound=Callable[..., Any])
USAGE = 2
INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
_OPTIONAL = ("transformers", "accelerate")  # what `fanfold[models]` adds
# what torch's allocators say, each in its own words
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "DefaultCPUAllocator")


class NotEnoughMemoryError(MemoryError):
    """Something would not fit; the message says how much it needs and how much there is."""


def forget_interrupt() -> None:
    """Once a KeyboardInterrupt is caught: let our exit code be what the process ends with.

    One that left an exec of text (dataclasses run some while they are imported) makes `python -m` end by the signal
    itself; the next exec takes that back.
    """
    exec("")


def guarded(verb: F) -> F:
    """The verb, with its expected failures turned into an exit code and one line."""

    @functools.wraps(verb)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return verb(*args, **kwargs)
        except KeyboardInterrupt:
            forget_interrupt()
            raise _failed("interrupted", INTERRUPTED) from None
        except BrokenPipeError:  # the reader of our output went away (`| head`): nobody is left to tell
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except MemoryError as error:
            raise _failed(str(error) or f"not enough memory: {_available()}") from None
        except OSError as error:
            named = error.filename is not None and error.strerror
            raise _failed(f"{error.filename}: {error.strerror}" if named else str(error)) from None
        except ValueError as error:
            raise _failed(str(error)) from None
        except ModuleNotFoundError as error:
            if error.name not in _OPTIONAL:
                raise
            raise _failed(f"{error.name} is not installed; install it with: pip install 'fanfold[models]'") from None
        except RuntimeError as error:
            if any(words in str(error) for words in _OUT_OF_MEMORY):
                raise _failed(f"not enough memory: {first_line(error)}; {_available()}") from None
            raise

    return run  # type: ignore[return-value]


@contextlib.contextmanager
def usage() -> Iterator[None]:
    """While arguments are read and looked up: a ValueError is wrong usage, exit code 2 with its one line on stderr."""
    try:
        yield
    except ValueError as error:
        raise _failed(first_line(error), USAGE) from None


def _failed(message: str, code: int = 1) -> typer.Exit:
    print(f"fanfold: {message}", file=sys.stderr)
    return typer.Exit(code)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type's name when it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _available() -> str:
    from .machine import available_memory
    from .output import size

    free = available_memory()
    return "available memory is not known here" if free is None else f"{size(free)} are available"
