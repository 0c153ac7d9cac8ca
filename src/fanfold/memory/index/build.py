"""`index`: the job that streams text through a model and keeps what triggers each channel; killed, it goes on.

B sequences, T tokens, D d_model, F d_ff.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...weights import Weights
from ..anatomy import Anatomy
from ..anatomy import anatomy as anatomy_of
from ..layers import Layer
from . import fingerprint
from .accumulate import Accumulator, NotFiniteError, is_signed, threshold
from .finish import finish
from .query import Index
from .sources import Sources
from .store import SAMPLE, VERSION, Store
from .stream import NONE, Sequence, Stream, chain
from .watch import Watch

Progress = Callable[[int, int], None]
_SEQUENCE, _BATCH, _TOP = 128, 8, 20
_EVERY, _SPARE = 20.0, 20.0  # seconds between checkpoints, and at least so many times what the last one took


def index(
    model: nn.Module,
    tokenizer: Any,
    texts: Any,
    directory: str | os.PathLike[str],
    *,
    top: int = _TOP,
    sequence: int | None = None,
    batch: int = _BATCH,
    name: str = "",
    anatomy: Anatomy | None = None,
    progress: Progress | None = None,
) -> Index:
    """Stream texts through a model and keep, for every channel of every layer, its triggers and its statistics.

    texts      strings, Paths of files and folders, Path("-") for standard input, {name: text}, an open file, or any
               iterable of those (a str is a text, not a path).
    directory  where DIRECTORY/index.sqlite goes; one that is not finished is gone on with.
    top        triggers kept for each end of each channel: that many sequences, one maximum position in each.
    sequence   tokens that the model reads at once; default 128, or what the model can if less.
    batch      sequences that run together;  name  of the model, remembered in the index.
    anatomy    what `memory.anatomy(model)` gave, to spare finding again.
    progress   called with (bytes of text done, bytes of all texts); the second is 0 where it is not known ahead.
    -> Index. Both ends are kept, separately, of channels whose coefficient is signed (gated FFNs). Special tokens that
    the tokenizer adds are read by the model and not counted; where it adds none in front, neither is the first token of
    a sequence, which models use as an attention sink (the sequences of a text overlap by it). Coefficients are computed
    in float32 from what the FFN reads. The same call with the same number of threads gives the same index, however
    often it was killed between.
    Raises ValueError for texts without text, a model or settings that do not fit, or a directory with another job's
    index. Source of the triggers: Geva et al. 2021, arXiv:2012.14913.
    """
    sources = Sources(texts)
    sequence = _checked(model, tokenizer, sequence, top, batch)
    found = anatomy if anatomy is not None else anatomy_of(model)
    job = {
        "schema": VERSION,
        "model": fingerprint.of_model(model),
        "tokenizer": fingerprint.of_tokenizer(tokenizer),
        "top": top,
        "sequence": sequence,
        "batch": batch,
    }
    store = Store.create(Path(directory))
    try:
        work = _Work(store, model, found, Stream(sources, tokenizer, sequence, batch), job, name)
        work.run(progress)
    finally:
        store.close()
    return Index.open(directory)


def _checked(model: nn.Module, tokenizer: Any, sequence: int | None, top: int, batch: int) -> int:
    """The length of a sequence, every setting held against what is possible."""
    if tokenizer is None:
        raise ValueError(f"{type(model).__name__} comes without a tokenizer: an index is made from text")
    config: Any = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__} reads two texts, one to encode and one to decode; an index needs one")
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    known = [getattr(config, key, None) for key in ("max_position_embeddings", "n_positions")]
    limits = [n for n in (*known, getattr(tokenizer, "model_max_length", None)) if isinstance(n, int) and n > 0]
    limit = min(limits, default=1 << 62)
    for key, value in (("top", top), ("batch", batch), ("sequence", sequence)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{key}={value!r}: expected a positive whole number")
    if sequence is not None and sequence > limit:
        raise ValueError(f"sequence={sequence}: the model reads at most {limit} tokens at once")
    return min(_SEQUENCE, limit) if sequence is None else sequence


class _Work:
    """The accumulators of all layers, and the place in the stream that they have come to."""

    def __init__(
        self,
        store: Store,
        model: nn.Module,
        anatomy: Anatomy,
        stream: Stream,
        job: dict[str, Any],
        name: str,
    ) -> None:
        self.store, self.anatomy, self.stream, self.job, self.name = store, anatomy, stream, job, name
        self.pieces = stream.pieces
        self.watch = Watch(model, anatomy, self._take)
        self.layers: dict[int, Accumulator] = {}
        self.new: list[Sequence] = []
        self.position, self.chain, self.tokens = 0, "", 0
        self.batch = torch.empty(0, dtype=torch.int64)
        before = store.meta("job")
        position = store.meta("position") or 0
        if position and before != job:
            raise ValueError(f"{store.path} {_other(before, job)}: give that again, or another directory")
        self.resumed, self.resumed_chain = position, store.meta("chain") or ""
        self.finished = bool(store.meta("finished"))

    def run(self, progress: Progress | None) -> None:
        """Skip what is counted already, hold it against what was counted, take in the rest, and finish."""
        sources, at = self.stream.sources, time.monotonic()
        wait = _EVERY
        if not self.resumed:
            with self.store:
                self.store.set_meta(job=self.job)
        for batch in self.stream.batches():
            if self.position == self.resumed and self.finished:
                raise self._another_text("the text given goes on after it")
            self.chain = chain(self.chain, batch)
            self.position += 1
            self.tokens += sum(len(s.ids) - self.stream.uncounted for s in batch)
            if self.position > self.resumed:
                self._read(batch)
                if time.monotonic() - at > wait:
                    at = time.monotonic()
                    self._checkpoint()
                    wait = max(_EVERY, _SPARE * (time.monotonic() - at))
                    at = time.monotonic()
            elif self.position == self.resumed:
                self._resume()
            if progress is not None:
                progress(sources.done, sources.total)
        if self.position < self.resumed:
            raise self._another_text("the text given is shorter")
        if not self.position:
            raise ValueError(sources.why_nothing())
        if not self.finished:
            self._checkpoint()
            finish(self.store, self.anatomy, self.layers)
        if progress is not None:
            progress(sources.done, sources.done)

    def _read(self, batch: list[Sequence]) -> None:
        self.batch = torch.tensor([s.id for s in batch])
        try:
            self.watch.run(self.stream.inputs(batch))
        except NotFiniteError as error:
            s = next(s for s in batch if s.id == error.sequence)
            raise ValueError(
                f"tokens {s.offset} to {s.offset + len(s.ids) - 1} of {s.source} give coefficients that are not finite "
                "numbers: the model is damaged, or overflows in its dtype"
            ) from None
        self.new += batch

    def _take(self, layer: Layer, weights: Weights, m_BTF: Tensor) -> None:
        """One layer's share of a batch, while the model runs."""
        first = self.stream.uncounted
        m_BTF = m_BTF[:, len(self.stream.prefix) + first : m_BTF.shape[1] - len(self.stream.suffix)]
        if layer.index not in self.layers:
            above = threshold(weights, m_BTF.flatten(0, 1)) / weights.down.norm(dim=0)
            # a value of zero has no contribution, whatever its coefficient
            above = above.where(weights.down.norm(dim=0) > 0, torch.inf)
            self.layers[layer.index] = self._accumulator(layer, above)
        self.layers[layer.index].update(m_BTF, self.batch, first)

    def _accumulator(self, layer: Layer, active_above: Tensor) -> Accumulator:
        return Accumulator(layer.spec.d_ff, self.job["top"], is_signed(layer.spec), active_above)

    def _resume(self) -> None:
        if self.chain != self.resumed_chain:
            raise self._another_text("the text given differs from it")
        if self.finished:
            return
        for layer in self.anatomy.layers:
            self.layers[layer.index] = self._accumulator(layer, torch.zeros(layer.spec.d_ff))
            self.layers[layer.index].restore(self.store.state(layer.index))

    def _another_text(self, how: str) -> ValueError:
        tokens = self.store.meta("tokens") or 0
        return ValueError(
            f"{self.store.path} holds an index of other text: {tokens:,} tokens are in it, and {how}; give the same "
            "text again, or another directory"
        )

    def _checkpoint(self) -> None:
        """Everything up to here, in one transaction."""
        referred = [top.sequence for layer in self.layers.values() for top in layer.ends.values()]
        wanted = np.unique(torch.cat([r.flatten() for r in referred]).numpy()) if referred else np.empty(0, np.int64)
        with self.store as store:
            for i, layer in self.layers.items():
                store.set_state(i, layer.arrays())
            store.add("sequences", (self._row(s) for s in self.new), 8)
            store.keep_sequences(wanted[wanted >= 0], SAMPLE)
            store.db.execute("DELETE FROM skipped")
            store.add("skipped", self.stream.sources.skipped, 2)
            store.set_meta(position=self.position, chain=self.chain, tokens=self.tokens, name=self.name)
            store.set_meta(sequences=self.stream.sequences, prefix=self.stream.prefix, uncounted=self.stream.uncounted)
        self.new = []

    def _row(self, s: Sequence) -> tuple[Any, ...]:
        ids = s.ids.tolist()
        priority = int.from_bytes(hashlib.blake2b(str(s.id).encode(), digest_size=7).digest(), "big")
        following = "" if s.following == NONE else self.pieces.one(s.following)
        text = json.dumps(self.pieces(ids), ensure_ascii=False)
        return s.id, s.source, s.offset, s.ids.astype("<i4").tobytes(), text, s.following, following, priority


def _other(before: dict[str, Any], job: dict[str, Any]) -> str:
    """How another job differs, in words."""
    words = {"model": "another model", "tokenizer": "another tokenizer", "schema": "another version of fanfold"}
    if before is None:
        return "holds no description of its job"
    differ = [key for key in job if before.get(key) != job[key]]
    said = [words.get(key) or f"{key}={before.get(key)} instead of {job[key]}" for key in differ]
    return f"holds an index made with {', '.join(said)}"
