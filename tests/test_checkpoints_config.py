"""What config.json says, and how layers, widths and orientations are read, without a model around them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fanfold import Spec
from fanfold.checkpoints import CheckpointError, load

D, F = 12, 20
_SHAPES = {"gate": (F, D), "up": (F, D), "down": (D, F)}


def _llama_file(folder: Path, config: dict[str, Any] | None, gated: bool = True, n_layers: int = 1) -> Path:
    tensors = {
        f"model.layers.{i}.mlp.{p}_proj.weight": torch.randn(s)
        for i in range(n_layers)
        for p, s in _SHAPES.items()
        if gated or p != "gate"
    }
    save_file(tensors, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": None}, "gelu_tanh"),
        ({"model_type": "gemma", "hidden_act": "gelu"}, "gelu_tanh"),
        ({"model_type": "gemma"}, "gelu_tanh"),
        ({"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": "gelu"}, "gelu_erf"),
        ({"model_type": "gemma", "hidden_act": "relu"}, "relu"),
        ({"model_type": "gemma2", "hidden_act": "gelu"}, "gelu_tanh"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "gelu_erf"),
        ({"model_type": "llama", "hidden_act": "swish"}, "silu"),
        ({"model_type": "llama"}, "silu"),
    ],
)
def test_activation_precedence(config: dict[str, Any], activation: str, tmp_path: Path) -> None:
    checkpoint = load(_llama_file(tmp_path, config))
    assert checkpoint.spec(0).activation == activation
    assert checkpoint.notes[0].startswith(f"activation {activation}: ")


def test_gemma_reports_the_legacy_value(tmp_path: Path) -> None:
    config = {"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": None}
    assert "hidden_act='gelu', a legacy value" in load(_llama_file(tmp_path, config)).notes[0]


def test_given_activation_wins_and_is_noted(tmp_path: Path) -> None:
    _llama_file(tmp_path, {"model_type": "llama", "hidden_act": "silu"})
    checkpoint = load(tmp_path, activation="quick_gelu")
    assert checkpoint.spec(0).activation == "gelu_sigmoid"
    assert "activation='quick_gelu' was passed" in checkpoint.notes[0]
    assert load(tmp_path, activation="geglu").spec(0) == Spec(d_model=D, d_ff=F, activation="gelu_erf", gated=True)
    assert load(tmp_path, activation="swiglu_oai").spec(0).up_offset == 1.0


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, ("no config.json", "activation=")),
        ({}, ("no model_type", "activation=")),
        ({"model_type": "llama4_text"}, ("model_type 'llama4_text'", "qwen2", "activation=")),
        ({"model_type": ["llama"]}, ("model_type ['llama']", "activation=")),
        ({"model_type": "llama", "hidden_act": "gelu_10"}, ("'gelu_10' is not known", "silu", "activation=")),
        ({"model_type": "llama", "hidden_act": {"a": 1}}, ("hidden_act={'a': 1}", "expected a string")),
        ({"model_type": "llama", "hidden_size": D + 1}, ("down_proj.weight", f"[{D}, {F}]", f"[{D + 1}, {F}]")),
        ({"model_type": "llama", "intermediate_size": 32}, ("down_proj.weight", f"[{D}, {F}]", f"[{D}, 32]")),
        ({"model_type": "llama", "intermediate_size": "20"}, ("intermediate_size='20'", "expected a positive int")),
        ({"model_type": "llama", "hidden_size": True}, ("hidden_size=True", "expected a positive int")),
        ({"model_type": "llama", "intermediate_size": []}, ("intermediate_size=[]",)),
        ({"model_type": "llama", "num_hidden_layers": 2}, ("num_hidden_layers=2", "layers 0 to 0")),
        ({"model_type": "llama", "num_local_experts": 8}, ("num_local_experts=8", "mixture of experts")),
        ({"model_type": "bert"}, ("has a gate", "expected none")),
        ({"model_type": "t5", "feed_forward_proj": "relu"}, ("has a gate", "expected none")),
    ],
)
def test_config_is_refused(config: dict[str, Any] | None, words: tuple[str, ...], tmp_path: Path) -> None:
    _llama_file(tmp_path, config)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert all(word in str(caught.value) for word in (*words, str(tmp_path)))
    assert "\n" not in str(caught.value)


def test_keys_of_the_same_width_must_agree(tmp_path: Path) -> None:
    tensors = {"h.0.mlp.dense_h_to_4h.weight": torch.randn(F, D), "h.0.mlp.dense_4h_to_h.weight": torch.randn(D, F)}
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"model_type": "bloom", "hidden_size": 64, "n_embed": D}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="hidden_size=64, n_embed=12 disagree"):
        load(tmp_path)


@pytest.mark.parametrize(
    "text", ["{", "[]", "null", "\xff\xfe", '{"a":1,"a":2}', "[" * 10**5, '{"a":' + "9" * 5000 + "}"]
)
def test_malformed_config_is_refused(text: str, tmp_path: Path) -> None:
    _llama_file(tmp_path, None)
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json: "):
        load(tmp_path, activation="silu")


@pytest.mark.parametrize("name", ["", "swi", "none of these", 3, ["silu"]])
def test_unknown_activation_argument(name: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"known: relu, .*swiglu"):
        load(_llama_file(tmp_path, {"model_type": "llama"}), activation=name)


def test_gated_variant_needs_a_gate(tmp_path: Path) -> None:
    _llama_file(tmp_path, None, gated=False)
    with pytest.raises(
        CheckpointError, match=r"no gate projection; expected 'model\.layers\.0\.mlp\.gate_proj\.weight'"
    ):
        load(tmp_path, activation="swiglu")
    assert not load(tmp_path, activation="silu").spec(0).gated


def test_unknown_model_type_with_activation_is_read(tmp_path: Path) -> None:
    config = {"model_type": "new", "num_hidden_layers": 5, "d_model": 3, "hidden_size": D}
    checkpoint = load(_llama_file(tmp_path, config), activation="silu")
    assert checkpoint.spec(0).gated
    assert any("num_hidden_layers=5" in note for note in checkpoint.notes)


def test_width_per_layer(tmp_path: Path) -> None:
    widths = (5504, 20, 1)
    tensors = {}
    for i, width in enumerate(widths):
        shapes = {"gate": (width, 2), "up": (width, 2), "down": (2, width)}
        tensors |= {f"layers.{i}.mlp.{p}_proj.weight": torch.randn(s) for p, s in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert [load(tmp_path, "silu").spec(i).d_ff for i in range(3)] == list(widths)
    config = {"model_type": "llama", "intermediate_size": list(widths)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert [load(tmp_path).spec(i).d_ff for i in range(3)] == list(widths)
    for wrong in ([5504, 20], [5504, 20, 2], [5632, 20, 1]):
        (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": wrong}))
        with pytest.raises(CheckpointError, match=r"has 2 values|has shape \[2, (?:5504|1)\], expected"):
            load(tmp_path)


def test_single_file_uses_the_config_beside_it(tmp_path: Path) -> None:
    _llama_file(tmp_path, {"model_type": "llama", "num_hidden_layers": 4})
    file = tmp_path / "model.safetensors"
    checkpoint = load(str(file))
    assert checkpoint.spec(0).activation == "silu"
    assert any("num_hidden_layers=4" in note for note in checkpoint.notes)  # it may be one shard
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load(file)
    assert load(file, activation="silu").config == {}


@pytest.mark.parametrize("transposed", [True, False])
def test_orientation_without_config_comes_from_the_bias(transposed: bool, tmp_path: Path) -> None:
    up, down = torch.randn(F, D), torch.randn(D, F)
    tensors = {"up": up.T.contiguous() if transposed else up, "down": down.T.contiguous() if transposed else down}
    named = {"h.0.mlp.c_fc.weight": tensors["up"], "h.0.mlp.c_proj.weight": tensors["down"]}
    save_file(named, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"may be \[in,out\]"):
        load(tmp_path / "a.safetensors", activation="gelu_new")
    save_file({**named, "h.0.mlp.c_fc.bias": torch.randn(F)}, tmp_path / "b.safetensors")
    checkpoint = load(tmp_path / "b.safetensors", activation="gelu_new")
    assert checkpoint.layouts[0].transposed == transposed
    assert torch.equal(checkpoint.ffns[0].up, up)
    assert torch.equal(checkpoint.ffns[0].down, down)


def test_mapping_of_layers(tmp_path: Path) -> None:
    ffns = load(_llama_file(tmp_path, {"model_type": "llama"}, n_layers=11)).ffns
    assert list(ffns) == list(range(11))
    assert len(ffns) == 11
    assert 10 in ffns
    assert 11 not in ffns
    with pytest.raises(KeyError):
        ffns[11]


def test_fused_bias_is_split(tmp_path: Path) -> None:
    bias = torch.arange(2.0 * F)
    tensors = {
        "gate_up_proj.weight": torch.randn(2 * F, D),
        "gate_up_proj.bias": bias,
        "down_proj.weight": torch.randn(D, F),
    }
    save_file({f"model.layers.0.mlp.{k}": v for k, v in tensors.items()}, tmp_path / "x.safetensors")
    weights = load(tmp_path / "x.safetensors", activation="silu").ffns[0]
    assert np.array_equal(weights.gate_bias, bias[:F])
    assert np.array_equal(weights.up_bias, bias[F:])
    assert torch.equal(weights.gate, tensors["gate_up_proj.weight"][:F])
