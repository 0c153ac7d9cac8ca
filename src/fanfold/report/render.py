"""One self-contained HTML page: template, styles, scripts and data in a single string that needs no network.

A page is `base.html.j2` extended by a template of its own; `style.css` and `base.js` come first on every page.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

# `<`, `>` and `&` could end the <script> that holds the data; U+2028/2029 end a line in old JavaScript; a lone
# surrogate (half a character, as byte-level tokens produce) cannot be written as UTF-8.
_UNSAFE = re.compile("[<>&\u2028\u2029\ud800-\udfff]")
_HALF = re.compile("[\ud800-\udfff]")


def render(
    template: str,
    *,
    title: str,
    data: Any,
    styles: Sequence[str] = (),
    scripts: Sequence[str] = (),
    images: bool = False,
    **context: Any,
) -> str:
    """The page `template` (a file of this package) as HTML that opens from disk.

    title    text of <title>; escaped, as is everything in `context`.
    data     anything of JSON, for the scripts: `data()` in base.js reads it.
    styles, scripts  files of this package, after style.css and base.js. The scripts share one function scope.
    images   whether the page holds pictures, as data: addresses.
    The page forbids itself every request and every script but its own (Content-Security-Policy with hashes).
    Raises as `as_json`.
    """
    style = "\n".join(_read(name) for name in ("style.css", *styles))
    script = '(() => {\n"use strict";\n' + "\n".join(_read(name) for name in ("base.js", *scripts)) + "\n})();"
    html = _environment().get_template(template).render(
        title=printable(title),
        policy=f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'"
        + ("; img-src data:" if images else ""),
        style=Markup(style),
        script=Markup(script),
        data=Markup(as_json(data)),
        **context,
    )  # fmt: skip
    return _HALF.sub("\ufffd", html)  # in a model's name, say; in the data they are escaped, and stay what they are


def printable(text: str) -> str:
    """`text` on one line: no controls, no half characters, no marks that turn the text around them."""
    return "".join(character if character.isprintable() else " " for character in text)


def as_json(data: Any) -> str:
    """JSON that may stand inside a <script> element: no markup, no line separators, no half characters.

    Raises TypeError for what JSON does not know, ValueError for numbers that are not finite: see `finite`.
    """
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return _UNSAFE.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def finite(data: Any) -> tuple[Any, int]:
    """`data` with null for every number that is nan or infinite, which JSON lacks, and how many there were."""
    try:
        json.dumps(data, allow_nan=False)  # finds out far sooner than the walk below, which is hardly ever needed
    except ValueError:
        lost: list[float] = []
        return _finite(data, lost), len(lost)
    return data, 0


def _finite(data: Any, lost: list[float]) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value, lost) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value, lost) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        lost.append(data)
        return None
    return data


def _environment() -> Environment:
    return Environment(
        loader=FunctionLoader(_read), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def _read(name: str) -> str:
    return (resources.files("fanfold.report") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
