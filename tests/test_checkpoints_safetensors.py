"""safetensors headers: aligned or not, and files that are not what they say."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fanfold.checkpoints import CheckpointError, load

D, F = 4, 6
_PATH_IS_SHARED = [HealthCheck.function_scoped_fixture]  # each example writes its file anew
SHAPES = {"gate": (F, D), "up": (F, D), "down": (D, F)}


def _tensors(layer: int = 0, root: str = "model.", dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(layer)
    return {
        f"{root}layers.{layer}.mlp.{p}_proj.weight": torch.randn(s, generator=generator).to(dtype)
        for p, s in SHAPES.items()
    }


def _up(layer: int = 0) -> str:
    return f"model.layers.{layer}.mlp.up_proj.weight"


def _raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def _entries(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, Any], bytes]:
    """A valid header and its data."""
    names = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}
    header: dict[str, Any] = {}
    data = b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        dtype = names[str(tensor.dtype).removeprefix("torch.")]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return header, data


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shift", range(9))
def test_data_may_begin_anywhere(shift: int, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = _tensors(dtype=dtype)
    header, data = _entries(tensors)
    text = json.dumps(header).encode()
    path = _raw(tmp_path / "x.safetensors", text + b" " * shift, data)
    weights = load(path, activation="silu").ffns[0]
    assert weights.up.dtype == dtype
    assert all(value.data_ptr() % dtype.itemsize == 0 for _, value in weights.items())
    assert _equal(weights, tensors)


def test_data_at_byte_69(tmp_path: Path) -> None:
    """A header of 61 bytes: bfloat16 data on odd addresses."""
    tensor = torch.arange(1, 7, dtype=torch.bfloat16).reshape(2, 3)
    text = b'{"w":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}}'.ljust(61)
    path = _raw(tmp_path / "x.safetensors", text, tensor.view(torch.uint8).numpy().tobytes())
    from fanfold.checkpoints.safetensors import read_header

    ref = read_header(path)["w"]
    assert (len(text), ref.start) == (61, 69)
    assert torch.equal(ref.read(), tensor)


_GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        (b"{", b"", ("not valid JSON",)),
        (b"[]", b"", ("expected a JSON object",)),
        (b"", b"", ("begins with b''",)),
        (b' {"a":1}', b"", ("begins with b' '",)),
        (b'{"\xff":1}', b"", ("not UTF-8",)),
        (b'{"a":' * 10**5, b"", ("nested too deeply",)),
        (b'{"w":%s,"w":%s}' % ((json.dumps(_GOOD).encode(),) * 2), bytes(8), ("'w' occurs twice",)),
        (b'{"w":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8), ("'dtype' occurs twice",)),
        ({"w": {**_GOOD, "dtype": "F31"}}, bytes(8), ("tensor 'w'", "'F31' is not known", "BF16")),
        ({"w": {**_GOOD, "dtype": ["F32"]}}, bytes(8), ("tensor 'w'", "dtype ['F32']")),
        ({"w": 3}, b"", ("tensor 'w'", "expected an object")),
        ({"w": {"dtype": "F32", "shape": [2]}}, bytes(8), ("tensor 'w'", "data_offsets")),
        ({"w": {**_GOOD, "shape": [-2]}}, bytes(8), ("tensor 'w'", "shape [-2]")),
        ({"w": {**_GOOD, "shape": [-1, -2]}}, bytes(8), ("tensor 'w'", "shape [-1, -2]")),
        ({"w": {**_GOOD, "shape": [2.0]}}, bytes(8), ("tensor 'w'", "shape [2.0]")),
        ({"w": {**_GOOD, "shape": [True, 2]}}, bytes(8), ("tensor 'w'", "shape [True, 2]")),
        ({"w": {**_GOOD, "shape": "2"}}, bytes(8), ("tensor 'w'", "shape '2'")),
        ({"w": {**_GOOD, "shape": [2**62 + 2, 4]}}, bytes(8), ("tensor 'w'", "2^63")),  # 4 * this is 8 modulo 2^64
        ({"w": {**_GOOD, "shape": [2**70]}}, bytes(8), ("tensor 'w'", "2^63")),
        ({"w": {**_GOOD, "shape": [2**60] * 40000}}, bytes(8), ("tensor 'w'", "2^63")),
        ({"w": {**_GOOD, "shape": [1]}}, bytes(8), ("tensor 'w'", "hold 8 bytes, expected 4")),
        ({"w": {**_GOOD, "shape": [3]}}, bytes(8), ("tensor 'w'", "hold 8 bytes, expected 12")),
        ({"w": {**_GOOD, "data_offsets": [0, 9]}}, bytes(8), ("tensor 'w'", "[0, 9]", "<= 8")),
        ({"w": {**_GOOD, "data_offsets": [8, 0]}}, bytes(8), ("tensor 'w'", "[8, 0]")),
        ({"w": {**_GOOD, "data_offsets": [-8, 0]}}, bytes(8), ("tensor 'w'", "[-8, 0]")),
        ({"w": {**_GOOD, "data_offsets": [0]}}, bytes(8), ("tensor 'w'", "[0]")),
        ({"w": {**_GOOD, "data_offsets": [2**64 - 8, 2**64]}}, bytes(8), ("tensor 'w'", "data_offsets")),
        ({"v": _GOOD, "w": {**_GOOD, "data_offsets": [4, 12]}}, bytes(12), ("tensor 'w'", "overlaps 'v'")),
        ({"v": _GOOD, "w": _GOOD}, bytes(8), ("overlaps",)),
        ({"v": _GOOD, "w": {**_GOOD, "data_offsets": [12, 20]}}, bytes(20), ("tensor 'w'", "4 unused bytes after 'v'")),
        ({"w": {**_GOOD, "data_offsets": [4, 12]}}, bytes(12), ("tensor 'w'", "4 unused bytes after the header")),
        ({"w": _GOOD}, bytes(9), ("end at byte", "but the file has")),
        ({}, bytes(1), ("end at byte", "but the file has")),
        ({"w": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, bytes(1), ("expected 1.5",)),
        ({"__metadata__": [1], "w": _GOOD}, bytes(8), ("__metadata__", "expected an object of strings")),
        ({"w" * 2000: _GOOD}, bytes(8), ("2000 characters",)),
        ({"w\n": {**_GOOD, "shape": [3]}}, bytes(8), ("tensor 'w\\n'",)),
        ({}, b"", ("none of its 0 tensors",)),
        ({"w": _GOOD}, bytes(8), ("none of its 1 tensors", "'w'")),
    ],
)
def test_damaged_header(header: Any, data: bytes, words: tuple[str, ...], tmp_path: Path) -> None:
    path = _raw(tmp_path / "x.safetensors", header, data)
    _refused(path, str(path), *words)


@pytest.mark.parametrize("length", [2, 3, 10**8, 10**8 + 1, 2**63, 2**64 - 1])
def test_header_length_beyond_the_file(length: int, tmp_path: Path) -> None:
    _refused(_raw(tmp_path / "x.safetensors", b"{", length=length), f"header length {length}", "expected at most 1 ")


def test_header_length_has_a_limit(tmp_path: Path) -> None:
    path = _raw(tmp_path / "x.safetensors", b"{", length=200_000_000)
    os.truncate(path, 300_000_000)  # sparse: no disk space
    _refused(path, "header length 200000000", "expected at most 100000000")


@pytest.mark.parametrize("size", [0, 1, 7])
def test_tiny_files(size: int, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(bytes(size))
    _refused(tmp_path / "x.safetensors", f"{size} bytes")


def test_truncated_file(tmp_path: Path) -> None:
    header, data = _entries(_tensors())
    _refused(_raw(tmp_path / "x.safetensors", header, data[:-1]), "data_offsets", "<= 287")


def test_zero_size_tensors(tmp_path: Path) -> None:
    save_file({**_tensors(), "other": torch.empty(0, 5)}, tmp_path / "a.safetensors")
    assert len(load(tmp_path / "a.safetensors", activation="silu").ffns) == 1
    empty = {k: torch.empty(0, D) if "down" not in k else torch.empty(D, 0) for k in _tensors()}
    save_file(empty, tmp_path / "b.safetensors")
    _refused(tmp_path / "b.safetensors", "down_proj", "[4, 0]")


def test_file_that_shrinks_while_it_is_open(tmp_path: Path) -> None:
    save_file(_tensors(), tmp_path / "x.safetensors")
    checkpoint = load(tmp_path / "x.safetensors", activation="silu")
    os.truncate(tmp_path / "x.safetensors", 100)
    with pytest.raises(CheckpointError, match="now has 100"):
        checkpoint.ffns[0]


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
@given(data=st.data())
def test_any_damage_is_a_checkpoint_error(data: st.DataObject, tmp_path: Path) -> None:
    header, body = _entries(_tensors(dtype=torch.bfloat16))
    whole = bytearray(_raw(tmp_path / "x.safetensors", header, body).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - len(body)))] = data.draw(st.integers(0, 255))
    (tmp_path / "x.safetensors").write_bytes(whole[: data.draw(st.sampled_from([None, *range(0, len(whole), 7)]))])
    try:
        checkpoint = load(tmp_path / "x.safetensors", activation="silu")
    except CheckpointError:
        return
    assert all(weights.nbytes for weights in checkpoint.ffns.values())
