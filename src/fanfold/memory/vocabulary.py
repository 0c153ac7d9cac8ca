"""Token ids as text, each as it stands in a text: with its leading space, and told apart where it is part of one."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any


class Vocabulary:
    """The texts of a tokenizer's tokens; without a tokenizer, their ids in angle brackets."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.text = functools.lru_cache(maxsize=None)(self._text)
        self._special = set(getattr(tokenizer, "all_special_ids", ()))
        self._anchor: list[int] = [] if tokenizer is None else self.encode("a")[-1:]
        self._start = 0 if tokenizer is None else len(self._decode([]))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        if self.tokenizer is None:
            raise ValueError(f"{text!r} is text, and there is no tokenizer: give token ids")
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def texts(self, ids: Iterable[int]) -> list[str]:
        return [self.text(int(i)) for i in ids]

    def id(self, token: int | str, size: int) -> int:
        """The id of a token given as id or as text. Raises ValueError if it is not one token of `size`."""
        if isinstance(token, str):
            ids = self.encode(token)
            if len(ids) != 1:
                parts = ", ".join(repr(t) for t in self.texts(ids)) or "nothing"
                raise ValueError(f"{token!r} is {len(ids)} tokens ({parts}), expected one; mind the leading space")
            return ids[0]
        if isinstance(token, bool) or not 0 <= int(token) < size:
            raise ValueError(f"token {token!r} does not exist: the vocabulary has ids 0 to {size - 1}")
        return int(token)

    def _text(self, token: int) -> str:
        if self.tokenizer is None:
            return f"<{token}>"
        text = "" if token in self._special else self._decode([token])[self._start :]
        if "\ufffd" in text or not text:  # special, part of a character, or a token that decodes to nothing
            piece = self.tokenizer.convert_ids_to_tokens(token)
            return _bytes(str(piece)) if piece else f"<{token}>"
        return text

    def _decode(self, ids: list[int]) -> str:
        # behind an anchor, for some tokenizers drop the space at the start of a text
        return self.tokenizer.decode([*self._anchor, *ids], clean_up_tokenization_spaces=False)


def _bytes(piece: str) -> str:
    """A piece of a byte-level vocabulary with what is no whole character as \\xe6; any other piece as it is."""
    known = _byte_of()
    if not all(c in known for c in piece):
        return piece
    return bytes(known[c] for c in piece).decode("utf-8", "backslashreplace")


@functools.cache
def _byte_of() -> dict[str, int]:
    """{character: byte}, as GPT-2's vocabulary writes bytes: printable ones as themselves, the others from U+0100."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}
