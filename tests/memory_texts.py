"""Small tokenizers and texts for the tests of the memory index: everything made here, nothing read from a network."""

from __future__ import annotations

import functools
import random

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from families import VOCAB

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "the",
    "dog",
    "ran",
    "to",
    "paris",
    "from",
    "rome",
    "where",
    "it",
    "was",
    "warm",
]


def texts(count: int = 24, longest: int = 70, seed: int = 1) -> dict[str, str]:
    """{name: words}, of very different lengths."""
    rng = random.Random(seed)
    return {f"text {i}": " ".join(rng.choices(WORDS, k=rng.randint(1, longest))) for i in range(count)}


@functools.cache
def tokenizer(marks: bool = False, size: int = VOCAB) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE of the words above, at most `size` tokens; with marks, <s> … </s> around each text."""
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    bpe.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    bpe.train_from_iterator(texts(60).values(), trainers.BpeTrainer(vocab_size=size, special_tokens=special))
    if marks:
        ends = [(token, bpe.token_to_id(token)) for token in ("<s>", "</s>")]
        bpe.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)  # type: ignore
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", unk_token="<unk>")


@functools.cache
def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token a byte: most characters are several tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    bpe.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator([], trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe)
