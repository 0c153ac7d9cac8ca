"""A prompt as the inputs of a model, and which of the model's layers read it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .anatomy import Anatomy, Layer
from .vocabulary import Vocabulary

_TWO = "the prompt is read by the encoder, whose layers reach the logits through the decoder alone"


@dataclasses.dataclass
class Prompt:
    """text, and ids [T] as the model reads them; inputs  of the model; name  of the model."""

    text: str
    ids: list[int]
    vocabulary: Vocabulary
    inputs: dict[str, Any]
    name: str
    notes: list[str]
    effects_why_not: str | None = None

    @classmethod
    def of(cls, model: nn.Module, tokenizer: Any, prompt: Any) -> Prompt:
        """Raises ValueError if the prompt has no token, does not fit the model, or is text without a tokenizer."""
        reads = getattr(model, "main_input_name", "input_ids")
        if reads != "input_ids":
            raise ValueError(f"{type(model).__name__} reads {reads}, not tokens: memory.capture takes any inputs")
        vocabulary = Vocabulary(tokenizer)
        if isinstance(prompt, str):
            if tokenizer is None:
                raise ValueError("the prompt is text, and there is no tokenizer: give token ids")
            ids = list(tokenizer(prompt, verbose=False)["input_ids"])
        else:
            ids = _ids(prompt)
        if not ids:
            raise ValueError("the prompt has no tokens: give at least one")
        config: Any = getattr(model, "config", None)
        longest = getattr(config, "max_position_embeddings", None)
        if isinstance(longest, int) and len(ids) > longest:
            raise ValueError(f"the prompt has {len(ids)} tokens, the model reads up to {longest}")
        text = prompt if isinstance(prompt, str) else "".join(vocabulary.texts(ids))
        inputs: dict[str, Any] = {"input_ids": torch.tensor([ids])}
        folder = os.path.basename(os.path.normpath(str(getattr(config, "_name_or_path", "") or "")))
        name = folder if folder not in ("", ".") else type(model).__name__
        out = cls(text, ids, vocabulary, inputs, name, [])
        if getattr(config, "is_encoder_decoder", False):
            start = getattr(config, "decoder_start_token_id", None)
            inputs["decoder_input_ids"] = torch.tensor([[0 if start is None else start]])
            out.effects_why_not = _TWO
        return out

    def reached(self, anatomy: Anatomy, layers: Iterable[int] | None) -> list[Layer]:
        """The layers asked for that read the prompt. Raises ValueError if one of `layers` does not."""
        chosen = anatomy.choose(layers)
        if self.effects_why_not is None:
            return chosen
        out = [layer for layer in chosen if layer not in anatomy.stream]
        if layers is not None and len(out) < len(chosen):
            wrong = next(layer for layer in chosen if layer in anatomy.stream)
            raise ValueError(f"layer {wrong.index} ({wrong.path}) is the decoder's: {_TWO}")
        self.notes.append(f"{len(chosen) - len(out)} layers of the decoder are left out: {_TWO}.")
        return out


def _ids(prompt: Any) -> list[int]:
    given = prompt if isinstance(prompt, Tensor) else torch.as_tensor(prompt)
    if given.dim() == 2 and len(given) == 1:
        given = given[0]
    if given.dim() != 1 or (given.is_floating_point() and given.numel()):
        shape = tuple(given.shape)
        raise ValueError(f"the prompt has shape {shape}, {given.dtype}: expected a text or token ids [tokens]")
    return [int(i) for i in given]
