"""The name table, folders with shards, and paths that are no model."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fanfold.checkpoints import CheckpointError, load

D, F = 4, 6
SHAPES = {"gate": (F, D), "up": (F, D), "down": (D, F)}
CONFIG = {"model_type": "llama", "hidden_act": "silu"}


def _tensors(layer: int = 0, root: str = "model.", dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(layer)
    return {
        f"{root}layers.{layer}.mlp.{p}_proj.weight": torch.randn(s, generator=generator).to(dtype)
        for p, s in SHAPES.items()
    }


def _up(layer: int = 0) -> str:
    return f"model.layers.{layer}.mlp.up_proj.weight"


def _refused(path: Path, *words: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(path, activation="silu")
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1500
    for word in words:
        assert word in message
    return message


def _equal(weights: Any, tensors: dict[str, torch.Tensor]) -> bool:
    return all(
        any(torch.equal(value, t) for n, t in tensors.items() if f".{k}_proj" in n) for k, value in weights.items()
    )


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({f"{_up()}.extra": torch.zeros(1)}, ("up_proj.weight.extra", "lies in an FFN")),
        ({f"{_up()[:-7]}.scales": torch.zeros(1)}, ("up_proj.scales", "lies in an FFN")),
        ({f"{_up()[:-7]}.lora_A.weight": torch.zeros(1)}, ("lora_A", "lies in an FFN")),
        ({"model.layers.0.mlp.norm.weight": torch.zeros(1)}, ("mlp.norm.weight", "lies in an FFN")),
        ({"model.layers.00.mlp.up_proj.weight": torch.zeros(F, D)}, ("layers.00.", "lies in an FFN")),
        ({"model.layers.0.mlp.fc1.weight": torch.zeros(F, D)}, ("both the up weight of layer 0",)),
        ({"model.layers.0.fc1.weight": torch.zeros(F, D)}, ("layer 0 has another FFN",)),
        ({"model.layers.0.mlp.gate_up_proj.weight": torch.zeros(2 * F, D)}, ("both fused and separate",)),
        (
            {"model.layers.1.mlp.experts.0.up_proj.weight": torch.zeros(F, D)},
            ("mixture of experts", "experts.0."),
        ),
        ({"model.layers.0.mlp.shared_expert.up_proj.weight": torch.zeros(F, D)}, ("mixture of experts",)),
        ({"model.layers.0.block_sparse_moe.gate.weight": torch.zeros(F, D)}, ("mixture of experts",)),
        ({"module." + _up(): torch.zeros(F, D)}, ("the same without wrappers",)),
        ({"_orig_mod." + _up(): torch.zeros(F, D)}, ("the same without wrappers",)),
        ({_up(): torch.zeros(F, D, dtype=torch.int8)}, ("up_proj.weight", "format I8", "BF16")),
        ({_up(): torch.zeros(F, D + 1)}, ("up_proj.weight", f"[{F}, {D + 1}]", f"expected [{F}, {D}]", "down_proj")),
        ({_up(): torch.zeros(D, F)}, ("up_proj.weight", f"[{D}, {F}]", f"expected [{F}, {D}]")),
        ({_up(): torch.zeros(F * D)}, ("up_proj.weight", f"[{F * D}]")),
        ({_up()[:-6] + "bias": torch.zeros(D)}, ("up_proj.bias", f"[{D}]", f"expected [{F}]")),
        ({"model.layers.0.mlp.down_proj.bias": torch.zeros(1, D)}, ("down_proj.bias", f"[1, {D}]", f"expected [{D}]")),
        (
            {"model.layers.1.mlp.up_proj.bias": torch.zeros(F)},
            ("layer 1 has no down projection",),
        ),
    ],
)
def test_nothing_in_an_ffn_is_dropped(extra: dict[str, torch.Tensor], words: tuple[str, ...], tmp_path: Path) -> None:
    save_file({**_tensors(), **extra}, tmp_path / "x.safetensors")
    _refused(tmp_path / "x.safetensors", "x.safetensors", *words)


@pytest.mark.parametrize("projection", SHAPES)
def test_missing_projection_is_named(projection: str, tmp_path: Path) -> None:
    tensors = {**_tensors(0), **_tensors(1)}
    gone = f"model.layers.1.mlp.{projection}_proj.weight"
    del tensors[gone]
    save_file(tensors, tmp_path / "x.safetensors")
    _refused(tmp_path / "x.safetensors", f"layer 1 has no {projection} projection", gone)


def test_a_bias_needs_its_weight(tmp_path: Path) -> None:
    tensors = {n.replace("gate_proj.weight", "gate_proj.bias"): t for n, t in _tensors().items()}
    save_file(tensors, tmp_path / "x.safetensors")
    _refused(tmp_path / "x.safetensors", "layer 0 has no gate projection", "mlp.gate_proj.weight")


def test_layers_must_share_d_model(tmp_path: Path) -> None:
    other = {k: torch.zeros(v.shape[0] + 1, v.shape[1] + 1) for k, v in _tensors(1).items()}
    save_file({**_tensors(0), **other}, tmp_path / "x.safetensors")
    _refused(tmp_path / "x.safetensors", "layers.1.mlp.down_proj", "d_model=5", "expected 4")


def test_bias_is_used_though_the_config_is_silent(tmp_path: Path) -> None:
    bias = {n.replace("weight", "bias"): torch.randn(t.shape[0]) for n, t in _tensors().items()}
    save_file({**_tensors(), **bias}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    weights = load(tmp_path).ffns[0]
    assert weights.spec.up_bias
    assert torch.equal(weights.gate_bias, bias["model.layers.0.mlp.gate_proj.bias"])
    assert torch.equal(weights.down_bias, bias["model.layers.0.mlp.down_proj.bias"])


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."])
def test_wrappers_are_stripped(prefix: str, tmp_path: Path) -> None:
    inner = {n.replace(".mlp.", "._orig_mod.mlp."): t for n, t in _tensors().items()}
    save_file({prefix + n: t for n, t in inner.items()}, tmp_path / "x.safetensors")
    checkpoint = load(tmp_path / "x.safetensors", activation="silu")
    assert _equal(checkpoint.ffns[0], _tensors())
    assert any("wrapper" in note for note in checkpoint.notes)


def test_several_stacks(tmp_path: Path) -> None:
    tensors = {**_tensors(root="model.text."), **_tensors(root="model.image.inner.")}
    save_file(tensors, tmp_path / "x.safetensors")
    checkpoint = load(tmp_path / "x.safetensors", activation="silu")
    assert list(checkpoint.ffns) == ["image.inner.0", "text.0"]
    assert any("all 2 stacks" in note for note in checkpoint.notes)


# Folders -------------------------------------------------------------------------------------------------------------


def _sharded(folder: Path, **changes: str) -> Path:
    where = {}
    for i, file in enumerate(("a.safetensors", "b.safetensors")):
        save_file(_tensors(i), folder / file)
        where |= dict.fromkeys(_tensors(i), file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {**where, **changes}}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_shards_and_a_stray_file(tmp_path: Path) -> None:
    save_file({_up(): torch.zeros(1)}, _sharded(tmp_path) / "model.safetensors")
    checkpoint = load(tmp_path)
    assert all(_equal(checkpoint.ffns[i], _tensors(i)) for i in range(2))
    assert any("not read: 'model.safetensors'" in note for note in checkpoint.notes)


@pytest.mark.parametrize(
    "file",
    [
        "../a.safetensors",
        "/a.safetensors",
        "sub/a.safetensors",
        "..",
        "",
        "a\\b.safetensors",
        "a.bin",
        "a\0.safetensors",
    ],
)
def test_index_names_plain_files_only(file: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    inside = tmp_path / "inside"
    inside.mkdir()
    save_file({"stolen": torch.zeros(1)}, outside / "a.safetensors")
    save_file({"stolen": torch.zeros(1)}, tmp_path / "a.safetensors")
    os.symlink(outside, inside / "sub")
    _refused(_sharded(inside, stolen=file), "index.json", "'stolen'", "expected a file name without a path")


def test_shard_may_be_a_symlink(tmp_path: Path) -> None:
    """As the Hugging Face cache stores them."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    _sharded(tmp_path / "snapshot")
    os.rename(tmp_path / "snapshot" / "a.safetensors", tmp_path / "blobs" / "123")
    os.symlink("../blobs/123", tmp_path / "snapshot" / "a.safetensors")
    assert len(load(tmp_path / "snapshot").ffns) == 2


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    _refused(_sharded(tmp_path, missing="c.safetensors"), "'c.safetensors'", "no such file")
    _refused(_sharded(tmp_path, missing="a.safetensors"), "a.safetensors", "lacks 'missing'")
    _refused(_sharded(tmp_path, **{_up(0): "b.safetensors"}), "a.safetensors", _up(0), "puts it into 'b.safetensors'")
    save_file({**_tensors(0), "more": torch.zeros(1)}, _sharded(tmp_path) / "a.safetensors")
    _refused(tmp_path, "a.safetensors", "'more'", "does not list it")
    save_file({**_tensors(0), **_tensors(1)}, _sharded(tmp_path) / "a.safetensors")
    _refused(tmp_path, "a.safetensors", "puts it into 'b.safetensors'")


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map":[]}', '{"weight_map":{}}', '{"weight_map":{"a":3}}', "{"])
def test_malformed_index(text: str, tmp_path: Path) -> None:
    (_sharded(tmp_path) / "model.safetensors.index.json").write_text(text)
    _refused(tmp_path, "model.safetensors.index.json")


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    _refused(tmp_path / "none", "does not exist")
    _refused(tmp_path / ("n" * 300 + ".gguf"), "does not exist")
    _refused(tmp_path, "looked for model.safetensors and model.safetensors.index.json")
    (tmp_path / "x.onnx").write_bytes(b"1")
    _refused(tmp_path / "x.onnx", "'.onnx'", ".safetensors or .gguf")
    (tmp_path / "y.gguf").write_bytes(b"1")
    _refused(tmp_path, "'y.gguf': pass the file itself")
    (tmp_path / "model.safetensors").mkdir()
    _refused(tmp_path, "model.safetensors: expected a regular file")
    os.mkfifo(tmp_path / "pipe.safetensors")
    _refused(tmp_path / "pipe.safetensors", "expected a regular file")


class _Marker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "model.pkl"])
def test_pickles_are_not_opened(name: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (tmp_path / name).write_bytes(pickle.dumps(_Marker(marker)))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for path in (tmp_path / name, tmp_path):
        _refused(path, "pickle", "safetensors")
    os.rename(tmp_path / name, tmp_path / "model.safetensors")
    _refused(tmp_path)
    assert not marker.exists()
