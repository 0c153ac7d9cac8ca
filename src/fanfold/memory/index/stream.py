"""From texts to sequences of token ids with their origin, in batches of one length, always in the same order."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..vocabulary import Vocabulary
from .sources import Sources

NONE = -1  # "no token follows"


@dataclasses.dataclass(frozen=True)
class Sequence:
    """Consecutive tokens of one text: what the model reads at once, less the special tokens around it.

    id      0, 1, … in order of appearance;  source  name of the text;  offset  tokens of it before the first one here.
    ids     [tokens] int32;  following  the token after the last one, or -1 at the end of the text.
    """

    id: int
    source: str
    offset: int
    ids: np.ndarray[Any, np.dtype[np.int32]]
    following: int


class Stream:
    """The sequences of all texts.

    sources    see `Sources`;  tokenizer  of the model.
    length     tokens that the model reads at once, special tokens included; the last sequence of a text is shorter.
    size       sequences in a batch. All of a batch have one length, so that nothing is padded.

    uncounted  tokens at the start of each sequence that are read and not counted: models make a special case of the
               first token they read, whatever it is (in SmolLM2's layer 11 its update is 800 times as large as others:
               an attention sink), and it would be the trigger of whole layers. 0 where the tokenizer puts a special
               token there; else 1, the last token of the sequence before, so that only a text's first token is lost.
    """

    def __init__(self, sources: Sources, tokenizer: Any, length: int, size: int) -> None:
        self.sources, self.tokenizer, self.size = sources, tokenizer, size
        self.pieces = Pieces(tokenizer)
        self.prefix, self.suffix = special_tokens(tokenizer)
        self.uncounted = 0 if self.prefix else 1
        self.content = length - len(self.prefix) - len(self.suffix)
        if self.content <= self.uncounted:
            raise ValueError(
                f"sequence={length} is too short: {length - self.content + self.uncounted} tokens of it are "
                "not counted (special ones, or the first)"
            )
        self.sequences = 0

    def batches(self) -> Iterator[list[Sequence]]:
        """Batches in a fixed order: each as soon as it is full, at the end the ones that are not, longest first."""
        waiting: dict[int, list[Sequence]] = {}
        for sequence in self._cut():
            batch = waiting.setdefault(len(sequence.ids), [])
            batch.append(sequence)
            if len(batch) == self.size:
                yield waiting.pop(len(sequence.ids))
        for n in sorted(waiting, reverse=True):
            yield waiting[n]

    def inputs(self, batch: list[Sequence]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """[B, T] token ids for the model, special tokens at both ends."""
        rows = [[*self.prefix, *sequence.ids.tolist(), *self.suffix] for sequence in batch]
        return np.array(rows, np.int64)

    def _cut(self) -> Iterator[Sequence]:
        for name, blocks in self.sources:
            waiting: list[int] = []
            offset, reason = 0, "the tokenizer finds no token in it"
            for block in blocks:
                waiting += self.pieces.encode(block)
                if offset == 0 and self._unknown(waiting):
                    waiting, reason = [], "the tokenizer knows nothing of it"
                    break
                while len(waiting) > self.content:
                    yield self._sequence(name, offset, waiting[: self.content], waiting[self.content])
                    offset += self.content - self.uncounted
                    waiting = waiting[self.content - self.uncounted :]
            if len(waiting) > self.uncounted:
                yield self._sequence(name, offset, waiting, NONE)
            elif not offset:
                self.sources.skip(name, "it has one token, which alone is not counted" if waiting else reason)

    def _unknown(self, ids: list[int]) -> bool:
        unknown = getattr(self.tokenizer, "unk_token_id", None)
        return bool(ids) and unknown is not None and set(ids) == {unknown}

    def _sequence(self, source: str, offset: int, ids: list[int], following: int) -> Sequence:
        out = Sequence(self.sequences, source, offset, np.array(ids, np.int32), following)
        self.sequences += 1
        return out


def chain(before: str, batch: list[Sequence]) -> str:
    """A hash of every token of every batch so far, from the one before this batch: says whether a text is the same."""
    digest = hashlib.sha256(before.encode())
    for sequence in batch:
        digest.update(f"\n{sequence.id} {sequence.offset} {sequence.following} {sequence.source}\n".encode())
        digest.update(sequence.ids.tobytes())
    return digest.hexdigest()


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer itself puts before and after a text."""
    bare, full = Vocabulary(tokenizer).encode("a"), list(tokenizer("a")["input_ids"])
    for at in range(len(full) - len(bare) + 1):
        if bare and full[at : at + len(bare)] == bare:
            return full[:at], full[at + len(bare) :]
    return [], []


class Pieces(Vocabulary):
    """The text of each token as it stands in a text, such that all of them together are the text."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self._known: dict[int, str] = {}

    def __call__(self, ids: list[int]) -> list[str]:
        """One string per token. A character that is spread over several tokens stands at the last of them."""
        out = [self.one(i) for i in ids]
        at = 0
        while at < len(out):
            end = at
            while end < len(out) and "\ufffd" in out[end]:
                end += 1
            if end > at:
                out[at:end] = [""] * (end - at - 1) + [self._decode(ids[at:end])[self._start :]]
            at = end + 1
        return out

    def one(self, token: int) -> str:
        """The text of one token; � for a part of a character."""
        if token not in self._known:
            self._known[token] = self._decode([token])[self._start :]
        return self._known[token]
