"""`--edit 12:345=0`: the changes of `memory.edit` as one types them."""

from __future__ import annotations

import math
import re
from typing import Any

FORM = "LAYER:CHANNEL=FACTOR (12:345=0 silences), or := to set the coefficient (12:345:=8)"
_EDIT = re.compile(r"(?P<layer>\d+):(?P<channels>\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)(?P<how>:?=)(?P<number>.+)")
_MOST = 1 << 20  # channels in one edit: no FFN has more, and a typing error makes no list that fills the memory


def parse(given: list[str]) -> dict[tuple[int, int], Any]:
    """{(layer, channel): change} from LAYER:CHANNELS=FACTOR or LAYER:CHANNELS:=COEFFICIENT, where CHANNELS may list
    several, and ranges: 12:3,7-9=0. Raises ValueError for anything else, and for a channel given twice."""
    from ..memory.changes import fixed

    out: dict[tuple[int, int], Any] = {}
    for text in given:
        match = _EDIT.fullmatch(text.strip())
        number = _number(match["number"]) if match else None
        if match is None or number is None:
            raise ValueError(f"--edit {text!r} is not understood; expected {FORM}")
        layer = int(match["layer"])
        for channel in _channels(text, match["channels"]):
            if (layer, channel) in out:
                raise ValueError(f"--edit changes channel {layer}:{channel} twice: give each channel one change")
            out[(layer, channel)] = number if match["how"] == "=" else fixed(number)
    return out


def place(text: str) -> tuple[int, int]:
    """(layer, channel) from 12:345. Raises ValueError."""
    match = re.fullmatch(r"(\d+):(\d+)", text.strip())
    if match is None:
        raise ValueError(f"--channel {text!r} is not understood; expected LAYER:CHANNEL, as in 12:345")
    return int(match[1]), int(match[2])


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _channels(text: str, listed: str) -> list[int]:
    out: list[int] = []
    for part in listed.split(","):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if high < low or high - low >= _MOST:
            raise ValueError(f"--edit {text!r}: {part} is no range of channels; give the lower one first")
        out += range(low, high + 1)
    return out
