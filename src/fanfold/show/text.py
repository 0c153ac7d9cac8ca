"""Text to measure with, and what a model makes of it: perplexity, greedy continuation, sentence embeddings."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

PROMPT = "The feed-forward network of a Transformer is"
WINDOW = 512  # tokens that a model sees at once
CALIBRATION_TOKENS = 512  # on which `swap` chooses activations


def default_text() -> str:
    """The English prose of Python's own manual, as every Python carries it (pydoc_data.topics), in a fixed order."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics))


def read_text(path: Path | None) -> str:
    """The text of a UTF-8 file, or the default text. Raises ValueError when there is nothing in it."""
    if path is None:
        return default_text()
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}: expected a UTF-8 text file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    if not text.strip():
        raise ValueError(f"{path} is empty: expected some text")
    return text


def token_ids(loaded: Any, text: str, n_tokens: int) -> Any:
    """The first `n_tokens` token ids of `text` [1, tokens]. Without a tokenizer: fixed random ids of the vocabulary."""
    import torch

    if loaded.tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        config = loaded.model.config.get_text_config()
        return torch.randint(0, config.vocab_size, (1, n_tokens), generator=generator)
    # about 4 characters make a token; 16 each is plenty, and keeps a whole manual out of the tokenizer
    ids = loaded.tokenizer(text[: 16 * n_tokens], add_special_tokens=False)["input_ids"][:n_tokens]
    if len(ids) < 2:
        raise ValueError(f"the text has {len(ids)} tokens; expected 2 or more")
    return torch.tensor([ids])


def calibration_ids(loaded: Any, path: Path | None, n_tokens: int) -> Any:
    """Token ids [1, tokens] for `swap`'s calibration, within the model's context; None for a model that reads no text,
    and for 0 tokens. The default text's middle is taken, for its beginning is what perplexity is measured on."""
    if not n_tokens or loaded.kind == "other" or loaded.tokenizer is None:
        return None
    read = read_text(path)
    start = 0 if path is not None else len(read) // 2
    return token_ids(loaded, read[start:], max(2, min(n_tokens, context(loaded.model) - 2)))


def context(model: Any) -> int:
    """How many tokens `model` can see at once, by its config; WINDOW if the config does not say."""
    config = model.config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 1:
            return value
    return WINDOW


def perplexity(model: Any, ids: Any) -> float:
    """exp of the mean negative log-likelihood of each token of `ids` [1, tokens] but the first.

    Windows of at most 512 tokens slide by half of that; each token is scored once, with all of its window before it.
    """
    import torch

    window = min(WINDOW, context(model))
    stride = max(window // 2, 1)
    total, scored, done = 0.0, 0, 1
    with torch.inference_mode():
        for start in range(0, ids.shape[1], stride):
            part = ids[:, start : start + window]
            end = start + part.shape[1]
            if end <= done:
                break
            logits = model(input_ids=part, use_cache=False).logits[0, :-1].float()
            fresh = end - done
            loss = torch.nn.functional.cross_entropy(logits[-fresh:], part[0, -fresh:], reduction="sum")
            total, scored, done = total + float(loss), scored + fresh, end
    try:
        return math.exp(total / scored)
    except OverflowError:
        return math.inf


def greedy(model: Any, ids: Any, n_tokens: int) -> list[int]:
    """The `n_tokens` tokens (fewer if the model ends its text) that a greedy reader adds to `ids` [1, tokens]."""
    import torch

    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=1,
            max_new_tokens=n_tokens,
            pad_token_id=_pad(model),
        )
    return out[0, ids.shape[1] :].tolist()


def _pad(model: Any) -> int:
    end = model.generation_config.eos_token_id
    end = end[0] if isinstance(end, list) and end else end
    return end if isinstance(end, int) else 0


def sentences(text: str, n: int) -> list[str]:
    """The first `n` sentences of the prose in `text`: lines that are indented (code, grammar) are left out."""
    prose = " ".join(line for line in text.splitlines() if line and not line[0].isspace() and not line.startswith("*"))
    parts = [p.strip() for p in prose.replace("? ", ". ").split(". ")]
    return [p for p in parts if len(p.split()) >= 4][:n]


def embeddings(loaded: Any, model: Any, texts: list[str]) -> Any:
    """One vector of length 1 for each text [texts, d_model]: the mean over its tokens, as all-MiniLM does it.

    model  reads what the tokenizer of `loaded` makes of the texts.
    """
    import torch

    limit = min(WINDOW, context(model))
    batch = loaded.tokenizer(texts, padding=True, truncation=True, max_length=limit, return_tensors="pt")
    with torch.inference_mode():
        states = model(**batch).last_hidden_state.float()
    mask = batch["attention_mask"][..., None].float()
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)
