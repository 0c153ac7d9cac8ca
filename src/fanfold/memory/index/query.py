"""`Index`: questions to a finished index, by layer, channel, token or text."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from .accumulate import edges
from .answers import Channel, Match, Trigger
from .finish import AFTER, BEFORE, split
from .geva import Geva
from .geva import geva as measure
from .store import SAMPLE, Store, unpacked

_END = {1: "positive", -1: "negative"}
_COLUMNS = ("value_norm", "frequency", "mean", "variance", "positive", "zero", "negative")


class Index:
    """A finished index; `Index.open(directory)`. Close it, or use it in a `with`.

    meta    "name" of the model, "job" (settings and hashes), "tokens" counted, "sequences", "d_model",
            "prefix" (special tokens before each sequence), "uncounted" (tokens at its start that are not counted).
    layers  a dict each: "layer", "path", "ffn", "d_model", "d_ff", "signed", and "threshold", the contribution size
            |m|·‖v‖ above which a channel counts as active: 0 where the activation has exact zeros, else such that all
            smaller contributions add up to 20 % of the output's norm, on the first tokens of the text.
    skipped [(name, reason)] of texts that had nothing to read.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._db = store, store.db
        keys = ("name", "job", "tokens", "sequences", "d_model", "prefix", "uncounted")
        self.meta: dict[str, Any] = {key: store.meta(key) for key in keys}
        columns = ("layer", "path", "ffn", "d_model", "d_ff", "signed", "threshold")
        rows = self._db.execute(f"SELECT {', '.join(columns)} FROM layers ORDER BY layer")
        self.layers = [dict(zip(columns, row)) | {"signed": bool(row[5])} for row in rows]
        self.skipped: list[tuple[str, str]] = self._db.execute("SELECT source, reason FROM skipped").fetchall()

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> Index:
        """Open the index in a directory. Raises ValueError if there is none, or if it is not finished."""
        return cls(Store.open(Path(directory)))

    @property
    def path(self) -> Path:
        """The database file; any SQLite tool reads it."""
        return self._store.path

    def close(self) -> None:
        self._store.close()

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Index({str(self.path)!r}, {self.meta['name'] or 'model'}, {self.meta['tokens']:,} tokens)"

    def channel(self, layer: int, channel: int, top: int | None = None) -> Channel:
        """Statistics and triggers of one channel, the `top` strongest of each end (default all that are kept)."""
        self._known(layer, channel)
        row = self._db.execute(
            f"SELECT {', '.join(_COLUMNS)}, histogram FROM channels WHERE layer = ? AND channel = ?", (layer, channel)
        ).fetchone()
        return Channel(
            layer=layer,
            channel=channel,
            **dict(zip(_COLUMNS, row)),
            threshold=self.layers[layer]["threshold"],
            histogram=_bins(unpacked(row[-1])),
            triggers_positive=self._triggers(layer, channel, 1, top),
            triggers_negative=self._triggers(layer, channel, -1, top),
        )

    def statistics(self, layer: int) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
        """{"value_norm", "frequency", "mean", "variance", "positive", "zero", "negative": [d_ff]} of one layer."""
        self._known(layer, 0)
        query = f"SELECT {', '.join(_COLUMNS)} FROM channels WHERE layer = ? ORDER BY channel"
        table = np.array(self._db.execute(query, (layer,)).fetchall())
        return {name: table[:, i].copy() for i, name in enumerate(_COLUMNS)}

    def triggers(self, layer: int, channel: int, top: int = 3, before: int = 8, after: int = 3) -> dict[str, Any]:
        """What the report shows of a channel: {"frequency", "mean", "positive": […], "negative": […]}, each trigger
        {"coefficient", "text": [[text, is it the peak], …]} with that many tokens before and after the peak."""
        known = self.channel(layer, channel, 0)
        out: dict[str, Any] = {"frequency": known.frequency, "mean": known.mean}
        for sign, name in _END.items():
            found = self._triggers(layer, channel, sign, top, before, after)
            out[name] = [
                {"coefficient": t.coefficient, "text": [p for p in _spans(t.before, t.peak, t.after) if p[0]]}
                for t in found
            ]
        return out

    def search(
        self,
        text: str | None = None,
        *,
        token: str | int | None = None,
        layer: int | None = None,
        limit: int = 20,
        examples: int = 3,
    ) -> list[Match]:
        """Channels whose triggers contain a text, or peak at a token, the most devoted to it first.

        text   words, all of which must be in the context (16 tokens before the peak to 8 after); "in quotes" they must
               follow each other; word* means a beginning. Case and accents do not count.
        token  an id, or the text of a token; without a leading space both forms are meant.
        -> at most `limit` matches, see `Match.score`. Raises ValueError if both or neither are given, or a text
        has no word in it.
        """
        if (text is None) == (token is None):
            raise ValueError("search for a text or for a token, one of the two")
        if layer is not None:
            self._known(layer, 0)
        hits, values = _words(text) if text is not None else self._tokens(token)
        self._db.execute("CREATE TEMP TABLE IF NOT EXISTS hit (passage INTEGER PRIMARY KEY, at_peak INTEGER)")
        self._db.execute("DELETE FROM temp.hit")
        self._db.execute(f"INSERT INTO temp.hit {hits}", values)
        rows = self._db.execute(
            f"""SELECT t.layer, t.channel, t.sign, sum(abs(t.coefficient) * (1 + hit.at_peak)) / e.strength AS score,
              count(*) AS matches, sum(hit.at_peak), e.triggers
            FROM temp.hit JOIN triggers t ON t.passage = hit.passage
              JOIN ends e ON e.layer = t.layer AND e.channel = t.channel AND e.sign = t.sign
            {"" if layer is None else "WHERE t.layer = :layer"}
            GROUP BY t.layer, t.channel, t.sign ORDER BY score DESC, matches DESC, t.layer, t.channel, t.sign
            LIMIT :limit""",
            {"layer": layer, "limit": limit},
        ).fetchall()
        names = ("layer", "channel", "sign", "score", "matches", "at_peak", "triggers")
        only = "AND t.passage IN (SELECT passage FROM temp.hit)"

        def shown(layer: int, channel: int, sign: int, *_: Any) -> list[Trigger]:
            return self._triggers(layer, channel, sign, examples, where=only)

        return [Match(**dict(zip(names, row)), examples=shown(*row)) for row in rows]

    def geva(self, model: nn.Module | None = None, **settings: Any) -> Geva:
        """The measurements of Geva et al. 2021 and 2022: those kept from before, or with a model, taken now and kept.

        settings  of `memory.index.geva`. Raises ValueError if there are none yet and no model is given.
        """
        if model is not None:
            return measure(model, self, **settings)
        row = self._db.execute("SELECT value FROM measurements WHERE name = 'geva'").fetchone()
        if row is None:
            raise ValueError(f"{self.path} holds no measurements yet: they need the model, index.geva(model)")
        return Geva.from_dict(json.loads(row[0]))

    def sample(self, size: int) -> list[tuple[int, np.ndarray[Any, np.dtype[np.int32]]]]:
        """(number, token ids) of up to `size` (at most 4,000) sequences, drawn from all of the text at random."""
        query = "SELECT id, ids FROM sequences ORDER BY priority, id LIMIT ?"
        return [(i, np.frombuffer(ids, "<i4")) for i, ids in self._db.execute(query, (min(size, SAMPLE),))]

    def next_tokens(self, layer: int, sign: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """[N, 3] channel, rank, and the token after the peak, of one end's triggers in a layer; not those at the end of
        a text, which nothing follows."""
        query = """SELECT channel, rank, next_token FROM triggers JOIN passages ON passages.id = passage
                   WHERE layer = ? AND sign = ? AND next_token IS NOT NULL ORDER BY channel, rank"""
        return np.array(self._db.execute(query, (layer, sign)).fetchall(), np.int64).reshape(-1, 3)

    def keep(self, name: str, value: dict[str, Any]) -> None:
        """Store a measurement in the index."""
        with self._store as store:
            store.db.execute("REPLACE INTO measurements VALUES (?, ?)", (name, json.dumps(value)))

    def _known(self, layer: int, channel: int) -> None:
        if not 0 <= layer < len(self.layers):
            raise ValueError(f"layer {layer} does not exist: the index has layers 0 to {len(self.layers) - 1}")
        d_ff = self.layers[layer]["d_ff"]
        if not 0 <= channel < d_ff:
            raise ValueError(f"channel {channel} does not exist: layer {layer} has channels 0 to {d_ff - 1}")

    def _triggers(
        self,
        layer: int,
        channel: int,
        sign: int,
        top: int | None,
        before: int = BEFORE,
        after: int = AFTER,
        where: str = "",
    ) -> list[Trigger]:
        rows = self._db.execute(
            f"""SELECT t.coefficient, s.source, s.first, s.id, s.pieces, p.position, p.token, p.next_token, p.next_piece
            FROM triggers t JOIN passages p ON p.id = t.passage JOIN sequences s ON s.id = p.sequence
            WHERE t.layer = ? AND t.channel = ? AND t.sign = ? {where} ORDER BY t.rank LIMIT ?""",
            (layer, channel, sign, -1 if top is None else top),
        )
        out = []
        for coefficient, source, first, sequence, pieces, position, token, next_token, next_piece in rows:
            around = split(json.loads(pieces), position, before, after)
            place = first + position
            out.append(Trigger(coefficient, source, sequence, place, token, next_token, *around, next_piece))
        return out

    def _tokens(self, token: str | int | None) -> tuple[str, dict[str, Any]]:
        if isinstance(token, int):
            return "SELECT id, 1 FROM passages WHERE token = :token", {"token": token}
        return "SELECT id, 1 FROM passages WHERE piece IN (:token, ' ' || :token)", {"token": token}


def _words(text: str) -> tuple[str, dict[str, Any]]:
    """The query for passages with all words and phrases of a text; whether their peak's word is one of the words."""
    parts = [quoted or word for quoted, word in re.findall(r'"([^"]*)"|([^\s"]+)', text)]
    parts = [part for part in parts if re.search(r"\w", part)]
    if not parts:
        raise ValueError(f"there is no word in {text!r} to search for; token= finds any token")
    every = " AND ".join(_quoted(part) for part in parts)
    some = " OR ".join(_quoted(word) for part in parts for word in part.split() if re.search(r"\w", word))
    query = """SELECT rowid, rowid IN (SELECT rowid FROM passages_text WHERE passages_text MATCH :some)
               FROM passages_text WHERE passages_text MATCH :every"""
    return query, {"every": f"context : ({every})", "some": f"peak : ({some})"}


def _quoted(part: str) -> str:
    star = "*" if part.endswith("*") else ""
    return '"' + part.rstrip("*").replace('"', '""') + '"' + star


def _spans(before: str, peak: str, after: str) -> list[list[Any]]:
    return [[before, False], [peak, True], [after, False]]


def _bins(counts: np.ndarray[Any, np.dtype[np.int64]]) -> dict[float, int]:
    lows = edges()
    names = [-low for low in reversed(lows)] + [0.0] + lows
    return {low: int(n) for low, n in zip(names, counts) if n}
