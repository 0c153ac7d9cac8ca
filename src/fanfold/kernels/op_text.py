"""JSON as an argument of a PyTorch operator: without double quotes, which Inductor's cpp_wrapper writes into C++ as
they are (torch 2.13): its code then does not compile. No name in our descriptions has an apostrophe."""

from __future__ import annotations

import json
from typing import Any


def from_json(text: str) -> str:
    return text.replace('"', "'")


def read(text: str) -> Any:
    """What `from_json` was given, or JSON itself: operators of a program exported earlier."""
    return json.loads(text.replace("'", '"'))
