"""What tells one model and one tokenizer from another: hashes that an unfinished index is held against."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor, nn


def of_model(model: nn.Module) -> str:
    """sha256 of every tensor of the model under its name, and of its config: what it computes, wherever it lies."""
    digest = hashlib.sha256()
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_json_string"):
        said = json.loads(config.to_json_string())
        said.pop("transformers_version", None)
        said.pop("_name_or_path", None)
        digest.update(json.dumps(said, sort_keys=True).encode())
    for name, value in sorted(model.state_dict().items()):
        if isinstance(value, Tensor):
            digest.update(f"\n{name} {value.dtype} {tuple(value.shape)}\n".encode())
            plain = value.detach().cpu().contiguous()
            digest.update(plain.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def of_tokenizer(tokenizer: Any) -> str:
    """sha256 of what a fast tokenizer is made of, or of a slow one's class and vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return hashlib.sha256(backend.to_str().encode()).hexdigest()
    said = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()
