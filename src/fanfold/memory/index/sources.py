"""What `texts` means: files, folders, standard input, strings; read in blocks, in a fixed order."""

from __future__ import annotations

import codecs
import os
import stat
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

BLOCK = 1 << 18  # characters read at a time; a text is cut at the end of a line, or between words, where it has those


class Sources:
    """The texts, one after another: iterating gives (name, blocks of the text).

    texts  a str is one text; a Path a file, a folder (every file in it, in order of their paths, but for hidden ones),
           or "-" for standard input; anything with `read` is read; a mapping gives {name: text}; or an iterable of
           those.
    total  bytes of all texts, 0 where that is not known ahead;  done  bytes handed out so far.
    skipped  (name, reason) of what had no text in it.
    Raises ValueError for what is none of these, and for a path that does not exist or cannot be read.
    """

    def __init__(self, texts: Any) -> None:
        self.skipped: list[tuple[str, str]] = []
        self.done = 0
        self.given = 0
        single = isinstance(texts, (str, os.PathLike)) or hasattr(texts, "read")
        items = [texts] if single else texts.items() if isinstance(texts, Mapping) else texts
        if not isinstance(items, Iterable) or isinstance(items, bytes):
            raise ValueError(f"texts is a {type(texts).__name__}, expected strings, paths, or an iterable of those")
        self._named = isinstance(texts, Mapping)
        self._items: Iterable[Any] = items
        self.total = 0
        if isinstance(items, Collection):
            self._items = [place for item in items for place in self._places(item)]
            sizes = [_size(item[1] if self._named else item) for item in self._items]
            self.total = 0 if None in sizes else sum(s for s in sizes if s)

    def __iter__(self) -> Iterator[tuple[str, Iterator[str]]]:
        for item in self._items:
            for place in self._places(item):
                self.given += 1
                name, value = place if self._named else (_name(place, self.given), place)
                reason = _why_not(str(name), value)
                if reason is None:
                    yield str(name), self._counted(_blocks(_parts(str(name), value)))
                else:
                    self.skip(str(name), reason)

    def skip(self, name: str, reason: str) -> None:
        self.skipped.append((name, reason))

    def _counted(self, blocks: Iterator[str]) -> Iterator[str]:
        for block in blocks:
            self.done += len(block.encode())
            yield block

    def _places(self, item: Any) -> list[Any]:
        """A folder's files; anything else is one place itself."""
        if isinstance(item, os.PathLike) and os.path.isdir(item):
            out = []
            for folder, folders, files in os.walk(item):
                folders[:] = [f for f in folders if not f.startswith(".")]
                out += [Path(folder, f) for f in files if not f.startswith(".")]
            return sorted(out)
        return [item]

    def why_nothing(self) -> str:
        """One sentence for when no text came out of all this."""
        if not self.given:
            return "no text was given"
        listed = "; ".join(f"{name}: {reason}" for name, reason in self.skipped[:3])
        more = f"; and {len(self.skipped) - 3} more" if len(self.skipped) > 3 else ""
        return f"there is no text in the {self.given} given ({listed}{more})"


def _name(place: Any, number: int) -> str:
    if isinstance(place, os.PathLike):
        return os.fspath(place) if os.fspath(place) != "-" else "standard input"
    return getattr(place, "name", None) or f"text {number}"


def _size(value: Any) -> int | None:
    if isinstance(value, str):
        return len(value.encode(errors="replace"))
    if isinstance(value, os.PathLike) and os.path.isfile(value):
        return os.path.getsize(value)
    return None


def _why_not(name: str, value: Any) -> str | None:
    """Why there is no text in `value`, or None. Raises ValueError if it is nothing that could hold text."""
    if isinstance(value, str):
        if not value.strip():
            return "it is empty"
        try:
            value.encode()
        except UnicodeEncodeError:
            return "it holds half a surrogate pair, which is no character"
        return None
    if hasattr(value, "read") or _is_stdin(value):
        return None
    if not isinstance(value, os.PathLike):
        raise ValueError(f"{name} is a {type(value).__name__}, expected a string or a path")
    try:
        return _why_not_file(value) if stat.S_ISREG(os.stat(value).st_mode) else "it is not a regular file"
    except FileNotFoundError:
        raise ValueError(f"{name} does not exist: expected text files or folders, or - for standard input") from None
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}") from None


def _why_not_file(path: Any) -> str | None:
    """Why a file is not text, from a first pass over it."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    blank = True
    with open(path, "rb") as file:
        while data := file.read(BLOCK):
            if b"\0" in data:
                return "it is not text (it holds a NUL byte)"
            try:
                blank = not decoder.decode(data).strip("\ufeff \t\r\n\f\v") and blank
            except UnicodeDecodeError:
                return "it is not UTF-8 text"
    if decoder.getstate()[0]:
        return "it is not UTF-8 text (it ends within a character)"
    return "it is empty" if blank else None


def _parts(name: str, value: Any) -> Iterator[str]:
    """The text as it comes: a string or a file in pieces of BLOCK characters."""
    if isinstance(value, str):
        yield from (value[i : i + BLOCK] for i in range(0, len(value), BLOCK))
        return
    if isinstance(value, os.PathLike) and not _is_stdin(value):
        with open(value, encoding="utf-8-sig") as file:
            while text := file.read(BLOCK):
                yield text
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    file: Any = value if hasattr(value, "read") else sys.stdin.buffer
    try:
        while data := file.read(BLOCK):
            yield data if isinstance(data, str) else decoder.decode(data)
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: {error.reason}") from None


def _is_stdin(value: Any) -> bool:
    return isinstance(value, os.PathLike) and os.fspath(value) == "-"


def _blocks(parts: Iterable[str]) -> Iterator[str]:
    """The same text, cut where a line ends, else before a space, else (one huge word) anywhere."""
    rest = ""
    for part in parts:
        text = rest + part
        tail = max(len(text) - BLOCK, 1)  # never more than a block is left waiting
        at = text.rfind("\n", tail - 1) + 1 or max(text.rfind(" ", tail), 0) or len(text)
        rest = text[at:]
        yield text[:at]
    if rest:
        yield rest
