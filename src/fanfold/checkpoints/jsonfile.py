"""JSON objects from files nobody vouches for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import CheckpointError, show
from .tensors import MappedFile

_MAX_BYTES = 100_000_000


class _DuplicateError(ValueError):
    pass


def parse(text: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `text` (UTF-8). Raises CheckpointError, beginning with `where`, on anything else.

    Duplicate keys are refused: readers differ on which one counts.
    """
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{where}: not valid JSON: {error.msg} at character {error.pos}") from None
    except _DuplicateError as error:
        raise CheckpointError(f"{where}: the key {error} occurs twice") from None
    except RecursionError:
        raise CheckpointError(f"{where}: nested too deeply") from None
    except ValueError:  # Python refuses to convert an int of more than 4300 digits
        raise CheckpointError(f"{where}: holds a number that is too long") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def read(path: Path) -> dict[str, Any]:
    """The JSON object in the file `path`. Raises CheckpointError."""
    file = MappedFile(path)
    if file.size > _MAX_BYTES:
        raise CheckpointError(f"{path}: has {file.size} bytes, expected at most {_MAX_BYTES}")
    return parse(file.data[:], str(path))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateError(show(key))
            seen.add(key)
    return made
