"""The last transaction of the job: accumulators become tables that can be asked, and their bytes go."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..anatomy import Anatomy
from .accumulate import OCTAVES, Accumulator
from .store import Store, packed
from .stream import NONE

BEFORE, AFTER = 16, 8  # tokens around a peak that belong to its context: what is searched and what is shown
_SHIFT = 1 << 32  # sequence · _SHIFT + position names a passage; positions are smaller by far


def finish(store: Store, anatomy: Anatomy, layers: dict[int, Accumulator]) -> None:
    """Write channels, triggers, passages and their texts, all or nothing."""
    keys = [_keys(top) for i in sorted(layers) for top in layers[i].ends.values()]
    passages = np.unique(np.concatenate([k[k >= 0] for k in keys]))
    with store:
        store.db.execute("DELETE FROM state")
        for layer in anatomy.layers:
            accumulator, weights = layers[layer.index], layer.weights()
            norms = weights.down.norm(dim=0).numpy()
            # the threshold as it was: any channel with a value gives it back
            above = (accumulator.active_above.numpy() * norms)[norms > 0]
            spec, threshold = layer.spec, float(np.median(above)) if len(above) else 0.0
            signed = -1 in accumulator.ends
            row = (layer.index, layer.path, spec.describe(), spec.d_model, spec.d_ff, signed, threshold)
            store.add("layers", [row], 7)
            store.add("channels", _channels(layer.index, accumulator, norms), 10)
            for sign, top in accumulator.ends.items():
                store.add("triggers", _triggers(layer.index, sign, top, passages), 6)
                filled, strength = (top.sequence >= 0).sum(1).tolist(), top.coefficient.double().sum(1).tolist()
                ends = ((layer.index, c, sign, n, s) for c, (n, s) in enumerate(zip(filled, strength)))
                store.add("ends", ends, 5)
        for rows, texts in _passages(store, passages):
            store.add("passages", rows, 7)
            store.add_texts(texts)
        store.add_indexes()
        store.set_meta(finished=True, d_model=anatomy.d_model)


def _keys(top: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """[F, K] the number of each trigger's passage, negative where there is none."""
    return top.sequence.numpy() * _SHIFT + top.position.numpy()


def _channels(layer: int, a: Accumulator, norms: np.ndarray[Any, Any]) -> Iterator[tuple[Any, ...]]:
    histogram, n = a.histogram.numpy(), a.tokens
    negative, zero = histogram[:, :OCTAVES].sum(1) / n, histogram[:, OCTAVES] / n
    positive = histogram[:, OCTAVES + 1 :].sum(1) / n
    columns = (norms, a.active.numpy() / n, a.mean.numpy(), a.squares.numpy() / n, positive, zero, negative)
    for c, values in enumerate(zip(*(column.tolist() for column in columns))):
        yield (layer, c, *values, packed(histogram[c]))


def _triggers(layer: int, sign: int, top: Any, passages: np.ndarray[Any, Any]) -> Iterator[tuple[Any, ...]]:
    keys = _keys(top)
    numbers = np.searchsorted(passages, keys) + 1
    coefficients = (sign * top.coefficient).numpy()
    for channel, rank in zip(*np.nonzero(keys >= 0)):
        value = float(coefficients[channel, rank])
        yield layer, int(channel), sign, int(rank), int(numbers[channel, rank]), value


def _passages(store: Store, passages: np.ndarray[Any, Any]) -> Iterator[tuple[list[Any], list[Any]]]:
    """(rows of passages, rows of their texts), a sequence at a time."""
    sequences, starts = np.unique(passages // _SHIFT, return_index=True)
    ends = [*starts[1:], len(passages)]
    for sequence, start, end in zip(sequences.tolist(), starts, ends):
        query = "SELECT ids, pieces, following, following_text FROM sequences WHERE id = ?"
        data, text, following, following_text = store.db.execute(query, (sequence,)).fetchone()
        ids, pieces = [*np.frombuffer(data, "<i4").tolist(), following], [*json.loads(text), following_text]
        rows, texts = [], []
        for i in range(start, end):
            at = int(passages[i] % _SHIFT)
            after = ids[at + 1]
            rows.append((i + 1, sequence, at, ids[at], pieces[at], after if after != NONE else None, pieces[at + 1]))
            before, peak, behind = split(pieces[:-1], at)
            texts.append((i + 1, _word(before, peak, behind), before + peak + behind))
        yield rows, texts


def split(pieces: list[str], at: int, before: int = BEFORE, after: int = AFTER) -> tuple[str, str, str]:
    """The text before a token, its own, and the one after it. A part of a character stands for the whole."""
    end = at
    while not pieces[end] and end + 1 < len(pieces):
        end += 1
    return "".join(pieces[max(at - before, 0) : at]), pieces[end], "".join(pieces[end + 1 : end + 1 + after])


def _word(before: str, peak: str, after: str) -> str:
    """The whole word, or words, that a token is in."""
    left = re.search(r"\w*$", before) if re.match(r"\w", peak) else None
    right = re.match(r"\w*", after) if re.search(r"\w$", peak) else None
    return (left[0] if left else "") + peak + (right[0] if right else "")
