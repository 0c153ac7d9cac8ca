"""The index as one SQLite file: its schema, and the transactions by which it grows.

A checkpoint writes the accumulators, the place in the stream and the sequences that triggers refer to in one
transaction, so a process killed at any moment leaves the state of one checkpoint, whole. The last transaction turns
the accumulators into tables to ask.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

FILE = "index.sqlite"
VERSION = 1
SAMPLE = 4000  # sequences kept as a random sample of the text, for what is measured on prefixes: the paper's number
_APPLICATION = 0x46464958  # "FFIX": says in the file's header whose it is
_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE layers (layer INTEGER PRIMARY KEY, path TEXT, ffn TEXT, d_model INTEGER, d_ff INTEGER, signed INTEGER,
  threshold REAL);
CREATE TABLE state (layer INTEGER, name TEXT, data BLOB, PRIMARY KEY (layer, name)) WITHOUT ROWID;
CREATE TABLE sequences (id INTEGER PRIMARY KEY, source TEXT, first INTEGER, ids BLOB, pieces TEXT, following INTEGER,
  following_text TEXT, priority INTEGER);
CREATE TABLE skipped (source TEXT, reason TEXT);
CREATE TABLE channels (layer INTEGER, channel INTEGER, value_norm REAL, frequency REAL, mean REAL, variance REAL,
  positive REAL, zero REAL, negative REAL, histogram BLOB, PRIMARY KEY (layer, channel)) WITHOUT ROWID;
CREATE TABLE ends (layer INTEGER, channel INTEGER, sign INTEGER, triggers INTEGER, strength REAL,
  PRIMARY KEY (layer, channel, sign)) WITHOUT ROWID;
CREATE TABLE triggers (layer INTEGER, channel INTEGER, sign INTEGER, rank INTEGER, passage INTEGER, coefficient REAL,
  PRIMARY KEY (layer, channel, sign, rank)) WITHOUT ROWID;
CREATE TABLE passages (id INTEGER PRIMARY KEY, sequence INTEGER, position INTEGER, token INTEGER, piece TEXT,
  next_token INTEGER, next_piece TEXT);
CREATE TABLE measurements (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE VIRTUAL TABLE passages_text USING fts5(peak, context, content='', tokenize='unicode61 remove_diacritics 2');
"""
_INDEXES = """
CREATE INDEX triggers_by_passage ON triggers (passage);
CREATE INDEX passages_by_token ON passages (token);
"""


class Store:
    """The database file of an index."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self.db, self.path = connection, path

    @classmethod
    def create(cls, directory: Path) -> Store:
        """Open DIRECTORY/index.sqlite to build on, or make it; no other process can open it until this one ends."""
        directory.mkdir(parents=True, exist_ok=True)
        store = cls._connect(directory / FILE, "rwc")
        try:
            store.db.execute("PRAGMA locking_mode=EXCLUSIVE")
            store.db.execute("BEGIN EXCLUSIVE")
            if store.db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
                store.db.execute(f"PRAGMA application_id={_APPLICATION}")
                store.db.execute(f"PRAGMA user_version={VERSION}")
                for statement in _TABLES.split(";\n"):
                    store.db.execute(statement)
            else:
                store._check()
            store.db.execute("COMMIT")
        except sqlite3.Error as error:
            store.db.close()
            raise _not_ours(store.path, error) from None
        return store

    @classmethod
    def open(cls, directory: Path) -> Store:
        """Open a finished index to read. Raises ValueError if there is none, or one that is not finished."""
        path = directory / FILE
        if not path.is_file():
            raise ValueError(f"{directory} holds no index ({FILE}): make one with `fanfold index MODEL FILES… -o DIR`")
        store = cls._connect(path, "rw")
        try:
            store._check()
            if not store.meta("finished"):
                done = store.meta("tokens") or 0
                raise ValueError(
                    f"the index in {directory} is not finished ({done:,} tokens read): give the same command "
                    "again, and it goes on from there"
                )
        except sqlite3.Error as error:
            store.db.close()
            raise _not_ours(path, error) from None
        except ValueError:
            store.db.close()
            raise
        return store

    @classmethod
    def _connect(cls, path: Path, mode: str) -> Store:
        try:
            # URI form, for its mode; isolation_level None: transactions begin and end where we say
            uri = f"{path.absolute().as_uri()}?mode={mode}"
            return cls(sqlite3.connect(uri, uri=True, isolation_level=None, timeout=0.2), path)
        except sqlite3.Error as error:
            raise ValueError(f"{path} cannot be opened: {error}") from None

    def _check(self) -> None:
        marks = [self.db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
        if marks[0] != _APPLICATION:
            raise sqlite3.DatabaseError("it is another program's database")
        if marks[1] != VERSION:
            raise sqlite3.DatabaseError(f"it has version {marks[1]} of the schema, this fanfold reads {VERSION}")

    def close(self) -> None:
        self.db.close()

    def meta(self, key: str) -> Any:
        """A value that was set, or None."""
        row = self.db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def set_meta(self, **values: Any) -> None:
        rows = [(key, json.dumps(value, ensure_ascii=False)) for key, value in values.items()]
        self.db.executemany("REPLACE INTO meta VALUES (?, ?)", rows)

    def state(self, layer: int) -> dict[str, bytes]:
        return dict(self.db.execute("SELECT name, data FROM state WHERE layer = ?", (layer,)))

    def set_state(self, layer: int, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        rows = [(layer, name, np.ascontiguousarray(a).tobytes()) for name, a in arrays.items()]
        self.db.executemany("REPLACE INTO state VALUES (?, ?, ?)", rows)

    def keep_sequences(self, wanted: np.ndarray[Any, Any], sample: int) -> None:
        """Forget the sequences that no trigger refers to, but for the `sample` of lowest priority number."""
        self.db.execute("CREATE TEMP TABLE wanted (id INTEGER PRIMARY KEY)")
        self.db.executemany("INSERT INTO wanted VALUES (?)", ((int(i),) for i in wanted))
        self.db.execute(
            "INSERT OR IGNORE INTO wanted SELECT id FROM sequences ORDER BY priority, id LIMIT ?", (sample,)
        )
        self.db.execute("DELETE FROM sequences WHERE id NOT IN (SELECT id FROM wanted)")
        self.db.execute("DROP TABLE wanted")

    def add(self, table: str, rows: Iterable[tuple[Any, ...]], columns: int) -> None:
        self.db.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * columns)})", rows)

    def add_texts(self, rows: Iterable[tuple[int, str, str]]) -> None:
        self.db.executemany("INSERT INTO passages_text (rowid, peak, context) VALUES (?, ?, ?)", rows)

    def add_indexes(self) -> None:
        for statement in _INDEXES.strip().split(";\n"):
            self.db.execute(statement)

    def __enter__(self) -> Store:
        """A transaction: all of it or nothing. Raises ValueError where the file cannot be written (a full disk)."""
        try:
            self.db.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            raise ValueError(f"{self.path} cannot be written: {error}") from None
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        try:
            if kind is None:
                self.db.execute("COMMIT")
        except sqlite3.Error as failure:
            error = failure
        if self.db.in_transaction:
            self.db.execute("ROLLBACK")
        if isinstance(error, sqlite3.Error):
            raise ValueError(f"{self.path} cannot be written: {error}") from None


def packed(counts: np.ndarray[Any, Any]) -> bytes:
    """A histogram as it is stored: int64 counts, compressed."""
    return zlib.compress(counts.astype("<i8").tobytes(), 1)


def unpacked(data: bytes) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.frombuffer(zlib.decompress(data), "<i8").astype(np.int64)


def _not_ours(path: Path, error: sqlite3.Error) -> ValueError:
    if "locked" in str(error):
        return ValueError(f"{path} is in use: another process is building or changing this index")
    return ValueError(f"{path} is not an index: {error}")
