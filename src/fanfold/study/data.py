"""The text of a study: files cut into training and validation, as tokens."""

from __future__ import annotations

import hashlib
import math
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
SPLIT_FROM = 20  # files from which whole files are set apart; below, the end of each
PART = 10  # one file in so many, or a tenth of a file
LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Text:
    """Training and validation text, apart.

    rule  how they were divided, in words;  skipped  files that are not UTF-8 text, or empty.
    fingerprint  of both, in order.
    """

    train: list[bytes]
    validation: list[bytes]
    rule: str
    skipped: list[str]
    fingerprint: str


def standard_library() -> list[Path]:
    """The sources of Python's own standard library, without its tests and what was installed beside it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [p for p in sorted(root.rglob("*.py")) if not LEFT_OUT & set(p.relative_to(root).parts[:-1])]


def files(paths: Iterable[Path]) -> list[Path]:
    """The files that paths mean: themselves, or all in a folder, in the order of their names. Raises ValueError."""
    out: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path} does not exist")
        out += sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return out


def read(paths: Sequence[Path] = ()) -> Text:
    """The text of files and folders; none: the standard library. The same content is taken once, so that nothing can
    be in both parts. Raises ValueError where there is too little."""
    chosen = files(paths) if paths else standard_library()
    kept: dict[bytes, bytes] = {}
    skipped = []
    for path in chosen:
        content = path.read_bytes()
        if not content.strip() or not _is_text(content):
            skipped.append(str(path))
            continue
        kept.setdefault(hashlib.sha256(content).digest(), content)
    if not kept:
        raise ValueError(f"no text found: {len(chosen)} files, none of them UTF-8 text")
    if len(kept) >= SPLIT_FROM:
        # by content: the same wherever the files lie
        apart = {digest for digest in kept if digest[0] % PART == 0} or {max(kept)}
        train = [c for d, c in kept.items() if d not in apart]
        validation = [c for d, c in kept.items() if d in apart]
        rule = f"{len(validation)} of {len(kept)} files, chosen by their content, are for validation"
    else:
        cuts = [(c, _cut(c)) for c in kept.values()]
        train, validation = [c[:n] for c, n in cuts], [c[n:] for c, n in cuts]
        rule = f"the last tenth of each of {len(kept)} files is for validation"
    digest = hashlib.sha256()
    for part in (train, validation):
        digest.update(b"%d;" % len(part))
        for content in part:
            digest.update(b"%d;" % len(content) + content)
    return Text(train, validation, rule, skipped, digest.hexdigest())


def _is_text(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return b"\0" not in content


def _cut(content: bytes) -> int:
    """Where the last tenth begins, not inside a character."""
    n = len(content) - max(1, len(content) // PART)
    while n < len(content) and content[n] & 0xC0 == 0x80:
        n += 1
    return n


@dataclass(frozen=True)
class Corpus:
    """Tokens of both parts, documents joined by the token 0 (`\\0` as a byte).

    train, validation  [n] token ids;  bytes_of  [V] bytes that each token stands for: losses are told for each byte.
    """

    train: Tokens
    validation: Tokens
    bytes_of: NDArray[np.int64]

    def batch(self, seed: int, step: int, batch: int, sequence: int) -> Tokens:
        """[batch, sequence + 1] random pieces of the training text: of the seed and step alone, whatever the model."""
        last = len(self.train) - sequence - 1
        starts = np.random.default_rng([seed, step]).integers(0, last + 1, batch)
        return np.stack([self.train[s : s + sequence + 1] for s in starts])

    def windows(self, tokens: int, sequence: int) -> Tokens:
        """[n, sequence + 1] pieces of the validation text that do not overlap, evenly spread, about `tokens` in all."""
        most = (len(self.validation) - 1) // sequence
        n = max(1, min(most, math.ceil(tokens / sequence)))
        starts = np.linspace(0, most - 1, n).astype(np.int64) * sequence
        return np.stack([self.validation[s : s + sequence + 1] for s in starts])


def corpus(text: Text, vocabulary: int, sequence: int) -> Corpus:
    """The text in tokens: bytes, or a byte-level BPE of the training text. Raises ValueError where it is too short."""
    if vocabulary == 256:
        parts = [np.frombuffer(b"\0".join(p), np.uint8).astype(np.int32) for p in (text.train, text.validation)]
        made = Corpus(parts[0], parts[1], np.ones(256, np.int64))
    else:
        made = _bpe(text, vocabulary)
    for name, tokens in (("training", made.train), ("validation", made.validation)):
        if len(tokens) < sequence + 2:
            raise ValueError(f"the {name} text has {len(tokens)} tokens, a sequence {sequence}: give more text")
    return made


def _bpe(text: Text, vocabulary: int) -> Corpus:
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ModuleNotFoundError:
        raise ValueError(
            "a BPE vocabulary needs the package tokenizers: pip install tokenizers; 256 is bytes"
        ) from None
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["\0"], initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator((c.decode() for c in text.train), trainer)
    size = tokenizer.get_vocab_size()
    if size > vocabulary:
        raise ValueError(f"vocabulary={vocabulary} is too small for a byte-level BPE: it has at least {size} tokens")
    lengths = [1] + [len(tokenizer.id_to_token(i)) for i in range(1, size)]  # one character for each byte

    def tokens(part: list[bytes]) -> Tokens:
        out: list[int] = []
        for content in part:
            out += [*tokenizer.encode(content.decode(), add_special_tokens=False).ids, 0]
        return np.array(out[:-1], np.int32)

    return Corpus(tokens(text.train), tokens(text.validation), np.array(lengths + [0] * (vocabulary - size), np.int64))
