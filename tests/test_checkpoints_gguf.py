"""GGUF: architectures, block formats, and files that are not what they say."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fanfold.checkpoints import CheckpointError, load

D, F = 32, 64
_PATH_IS_SHARED = [HealthCheck.function_scoped_fixture]  # each example writes its file anew
Array = np.ndarray[Any, Any]


def _tensors(prefix: str = "blk.0.", gated: bool = True, bias: bool = False) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    shapes = {"ffn_gate": (F, D), "ffn_up": (F, D), "ffn_down": (D, F)}
    out = {
        f"{prefix}{n}.weight": rng.standard_normal(s, np.float32) for n, s in shapes.items() if gated or "gate" not in n
    }
    if bias:
        out |= {n.replace("weight", "bias"): rng.standard_normal(t.shape[0], np.float32) for n, t in out.items()}
    return out


def _write(
    path: Path,
    tensors: dict[str, Array],
    arch: str = "llama",
    form: Q = Q.F32,
    keys: Callable[[gguf.GGUFWriter], None] | None = None,
    **options: Any,
) -> Path:
    writer = gguf.GGUFWriter(path, arch, **options)
    if keys:
        keys(writer)
    for name, tensor in tensors.items():
        if form in (Q.F32, Q.F16) or tensor.ndim == 1:
            writer.add_tensor(name, tensor.astype(np.float16 if form == Q.F16 and tensor.ndim > 1 else np.float32))
        else:
            stored = tensor if tensor.dtype == np.uint8 else gguf.quants.quantize(tensor, form)
            writer.add_tensor(name, stored, raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _refused(path: Path, *words: str, activation: str | None = None) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(path, activation=activation)
    message = str(caught.value)
    assert "\n" not in message
    for word in (str(path), *words):
        assert word in message, message


@pytest.mark.parametrize("form", [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1])
def test_formats(form: Q, tmp_path: Path) -> None:
    tensors = _tensors(bias=True)
    checkpoint = load(_write(tmp_path / "x.gguf", tensors, form=form))
    weights = checkpoint.ffns[0]
    for name, tensor in tensors.items():
        kind, end = name.split(".")[2][4:], "_bias" if name.endswith("bias") else ""
        found = dict(weights.items())[kind + end]
        if end:
            expected = torch.from_numpy(tensor)
        elif form == Q.BF16:  # gguf rounds to nearest even, as torch does
            expected = torch.from_numpy(tensor).bfloat16()
        elif form == Q.F16:
            expected = torch.from_numpy(tensor).half()
        else:
            stored = tensor if form == Q.F32 else gguf.quants.dequantize(gguf.quants.quantize(tensor, form), form)
            expected = torch.from_numpy(stored)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    decoded = any("decoded to float32" in note and form.name in note for note in checkpoint.notes)
    assert decoded == form.name.startswith("Q")
    assert weights.spec.activation == "silu"


def test_unread_format_is_named(tmp_path: Path) -> None:
    blocks = np.zeros((D, 84), np.uint8)  # one block of 256 weights in each row
    path = _write(tmp_path / "x.gguf", dict.fromkeys(_tensors(), blocks), form=Q.Q2_K)
    _refused(path, "ffn_gate.weight", "format Q2_K", "Q4_1")


@pytest.mark.parametrize(
    ("arch", "gated", "activation"),
    [
        *[(arch, True, "silu") for arch in ("llama", "qwen2", "qwen3")],
        *[(arch, True, "gelu_tanh") for arch in ("gemma", "gemma2", "gemma3")],
        *[(arch, False, "gelu_tanh") for arch in ("gpt2", "phi2", "bloom")],
        *[(arch, False, "gelu_erf") for arch in ("falcon", "bert")],
        ("nemotron", False, "relu2"),
    ],
)
def test_architectures(arch: str, gated: bool, activation: str, tmp_path: Path) -> None:
    spec = load(_write(tmp_path / "x.gguf", _tensors(gated=gated, bias=not gated), arch)).spec(0)
    assert (spec.activation, spec.gated, spec.up_bias) == (activation, gated, not gated)


def test_every_architecture_is_one_of_llama_cpp() -> None:
    from fanfold.checkpoints.config import ARCHITECTURES

    known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    for name, (_, gated, fused) in ARCHITECTURES.items():
        tensors = gguf.MODEL_TENSORS[known[name]]
        assert gguf.MODEL_TENSOR.FFN_UP in tensors
        assert (gguf.MODEL_TENSOR.FFN_GATE in tensors) == (gated and not fused), name


def test_phi3_is_fused_gate_first(tmp_path: Path) -> None:
    tensors = _tensors()
    up = np.concatenate([tensors.pop("blk.0.ffn_gate.weight"), tensors["blk.0.ffn_up.weight"]])
    checkpoint = load(_write(tmp_path / "x.gguf", {**tensors, "blk.0.ffn_up.weight": up}, "phi3"))
    assert checkpoint.layouts[0].order == "[gate;up]"
    assert np.array_equal(checkpoint.ffns[0].gate, up[:F])
    assert np.array_equal(checkpoint.ffns[0].up, up[F:])
    _refused(_write(tmp_path / "y.gguf", _tensors(gated=False), "phi3"), "ffn_up.weight", f"expected [{2 * F}, {D}]")


@pytest.mark.parametrize(("gated", "activation"), [(True, "gelu_tanh"), (False, "relu")])
def test_t5_has_two_stacks(gated: bool, activation: str, tmp_path: Path) -> None:
    tensors = _tensors("enc.blk.0.", gated) | _tensors("dec.blk.0.", gated)
    checkpoint = load(_write(tmp_path / "x.gguf", tensors, "t5"))
    assert set(checkpoint.ffns) == {"encoder.0", "decoder.0"}
    assert checkpoint.spec("encoder.0").activation == activation
    assert checkpoint.ffns["decoder.0"].spec.gated == gated


def test_unknown_architecture(tmp_path: Path) -> None:
    path = _write(tmp_path / "x.gguf", _tensors(), "gptneox")
    _refused(path, "architecture 'gptneox'", "qwen2", "activation=")
    assert load(path, activation="gelu").spec(0).activation == "gelu_erf"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (lambda w: w.add_embedding_length(48), ("ffn_down.weight", "[32, 64]", "expected [48, 64]")),
        (lambda w: w.add_feed_forward_length(128), ("ffn_down.weight", "[32, 64]", "expected [32, 128]")),
        (lambda w: w.add_array("llama.feed_forward_length", [63]), ("ffn_down.weight", "expected [32, 63]")),
        (lambda w: w.add_block_count(2), ("llama.block_count=2", "layers 0 to 0")),
        (lambda w: w.add_expert_count(4), ("llama.expert_count=4", "mixture of experts")),
        (lambda w: w.add_uint16("split.count", 3), ("split.count=3", "merge")),
        (lambda w: w.add_string("llama.embedding_length", "32"), ("embedding_length='32'", "positive int")),
        (lambda w: w.add_uint32("general.alignment", 0), ("general.alignment=0",)),
        (lambda w: w.add_uint32("general.alignment", 12), ("general.alignment=12",)),
        (lambda w: w.add_int32("general.alignment", -32), ("general.alignment=-32",)),
        (lambda w: w.add_uint32("general.alignment", 2**31), ("ffn_gate.weight", "the file has")),
    ],
)
def test_metadata_is_checked(keys: Callable[[gguf.GGUFWriter], None], words: tuple[str, ...], tmp_path: Path) -> None:
    _refused(_write(tmp_path / "x.gguf", _tensors(), keys=keys), *words)


@pytest.mark.parametrize("align", [1, 8, 24, 64, 4096])
def test_alignment_is_used_as_it_stands(align: int, tmp_path: Path) -> None:
    tensors = _tensors()

    def keys(writer: gguf.GGUFWriter) -> None:
        writer.data_alignment = align  # add_custom_alignment refuses 24
        writer.add_uint32("general.alignment", align)

    path = _write(tmp_path / "x.gguf", tensors, keys=keys)
    checkpoint = load(path)
    assert np.array_equal(checkpoint.ffns[0].down, tensors["blk.0.ffn_down.weight"])
    assert checkpoint.config["general.alignment"] == align


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("blk.0.ffn_up_exps.weight", ("mixture of experts",)),
        ("blk.0.ffn_gate_inp.weight", ("mixture of experts",)),
        ("blk.0.ffn_gate_shexp.weight", ("mixture of experts",)),
        ("blk.0.ffn_sub_norm.weight", ("lies in an FFN",)),
        ("blk.0.ffn_up.scale", ("lies in an FFN",)),
        ("blk.0.ffn.act.scales", ("lies in an FFN",)),
        ("blk.00.ffn_up.weight", ("lies in an FFN",)),
    ],
)
def test_nothing_in_an_ffn_is_dropped(name: str, words: tuple[str, ...], tmp_path: Path) -> None:
    _refused(_write(tmp_path / "x.gguf", {**_tensors(), name: np.zeros((F, D), np.float32)}), name, *words)


def test_missing_projection_is_named(tmp_path: Path) -> None:
    tensors = {**_tensors(), "blk.1.ffn_up.weight": np.zeros((F, D), np.float32)}
    _refused(_write(tmp_path / "x.gguf", tensors), "layer 1 has no down projection; expected 'blk.1.ffn_down.weight'")


def test_norm_belongs_to_the_layer(tmp_path: Path) -> None:
    norms = {"blk.0.ffn_norm.weight": np.zeros(D), "blk.0.post_ffw_norm.weight": np.zeros(D)}
    assert len(load(_write(tmp_path / "x.gguf", {**_tensors(), **norms})).ffns) == 1


def _head(n_tensors: int, n_keys: int, rest: bytes = b"", version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, n_tensors, n_keys) + rest


def _string(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


def _entry(name: bytes = b"w", sizes: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    return _string(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def _file(*entries: bytes, data: int = 64) -> bytes:
    head = _head(len(entries), 0, b"".join(entries))
    return head + bytes(-len(head) % 32) + bytes(data)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ("empty",)),
        (b"GG", ("b'GG'",)),
        (_head(0, 0, magic=b"GGML"), ("b'GGML'", "expected b'GGUF'")),
        (b"GGUF", ("the version needs 4 bytes",)),
        (_head(0, 0, version=1), ("version 1",)),
        (_head(0, 0, version=4), ("version 4",)),
        (_head(0, 0, version=0), ("version 0",)),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), ("big-endian",)),
        (_head(0, 0)[:-1], ("the key count needs 8 bytes",)),
        (_head(2**64 - 1, 0), ("announces 18446744073709551615 tensors", "0 bytes follow")),
        (_head(0, 2**64 - 1), ("18446744073709551615 keys",)),
        (_head(1000, 0, bytes(100)), ("announces 1000 tensors", "100 bytes follow")),
        (_head(0, 1, _string(b"a", 2**64 - 1) + bytes(9)), ("a key needs 18446744073709551615 bytes",)),
        (_head(0, 1, _string(b"\xff") + bytes(9)), ("a key", "UTF-8")),
        (_head(0, 1, _string(b"a") + struct.pack("<I", 77) + bytes(9)), ("'a' has type 77",)),
        (_head(0, 1, _string(b"a") + struct.pack("<IQ", 8, 2**63)), ("the value of 'a' needs",)),
        (
            _head(0, 1, _string(b"a") + struct.pack("<IIQ", 9, 4, 2**62)),
            ("the value of 'a' needs 184467440737",),
        ),
        (_head(0, 1, _string(b"a") + struct.pack("<IIQ", 9, 8, 2**60)), ("strings, more than the file can hold",)),
        (_head(0, 1, _string(b"a") + struct.pack("<IIQ", 9, 9, 1)), ("array of type 9",)),
        (_head(0, 2, 2 * (_string(b"a") + struct.pack("<IB", 0, 1))), ("'a' occurs twice",)),
        (_file(_entry(), _entry(offset=32)), ("tensor 'w' occurs twice",)),
        (_file(_entry(kind=999)), ("tensor 'w'", "type 999")),
        (_file(_entry(sizes=(1,) * 5)), ("tensor 'w' has 5 dimensions",)),
        (_file(_string(b"w") + struct.pack("<I", 2**32 - 1)), ("tensor 'w' has 4294967295 dimensions",)),
        (_file(_entry(sizes=(2**63, 2**63, 4))), ("tensor 'w'", "the file has")),
        (_file(_entry(sizes=(33,), kind=2)), ("tensor 'w'", "rows of 33 weights", "multiple of 32")),
        (_file(_entry(offset=4)), ("tensor 'w'", "offset 4", "alignment 32")),
        (_file(_entry(offset=2**63)), ("tensor 'w'", "the file has")),
        (_file(_entry(sizes=(64,)), _entry(b"v", (8,), 0, 32), data=256), ("tensor 'v'", "overlaps 'w'")),
        (_file(_entry(), _entry(b"v", (8,), 0, 0)), ("overlaps",)),
        (_file(_entry(offset=32)), ("tensor 'w'", "32 unused bytes after the header")),
        (_file(_entry(), data=31), ("tensor 'w'", "the file has 95")),
        (_file(_entry(), data=96), ("the tensors end at byte 96, but the file has 160",)),
    ],
)
def test_damaged_file(content: bytes, words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    _refused(tmp_path / "x.gguf", *words, activation="silu")


def test_truncated_data(tmp_path: Path) -> None:
    path = _write(tmp_path / "x.gguf", _tensors())
    path.write_bytes(path.read_bytes()[:-64])
    _refused(path, "ffn_down.weight", "the file has")


def test_big_endian_is_refused(tmp_path: Path) -> None:
    _refused(_write(tmp_path / "x.gguf", _tensors(), endianess=gguf.GGUFEndian.BIG), "big-endian")


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=_PATH_IS_SHARED)
@given(data=st.data())
def test_any_damage_is_a_checkpoint_error(data: st.DataObject, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    if not (tmp_path / "whole").exists():
        _write(path, _tensors(), form=Q.Q4_1, keys=lambda w: w.add_token_list(["a", "bc"]))
        path.rename(tmp_path / "whole")
    whole = bytearray((tmp_path / "whole").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        # half of the damage in the header, whose beginning matters most
        whole[data.draw(st.one_of(st.integers(0, 320), st.integers(0, len(whole) - 1)))] = data.draw(
            st.integers(0, 255)
        )
    path.write_bytes(whole[: data.draw(st.sampled_from([None, None, *range(0, len(whole), 97)]))])
    try:
        checkpoint = load(path)
    except CheckpointError:
        return
    assert all(weights.nbytes for weights in checkpoint.ffns.values())
