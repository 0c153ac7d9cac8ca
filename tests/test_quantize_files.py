"""Folders of quantized FFNs: whole or absent, continued, the same bytes twice, refused when they are not what they say;
and a GGUF's FFNs on their own codes."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import fanfold as ff
from fanfold import numerics
from fanfold.checkpoints import CheckpointError
from fanfold.kernels.packed import PackedMatrix
from fanfold.quantize import files, job
from fanfold.quantize.job import Calibration, quantize_checkpoint

LAYERS, D, F, VOCAB = 3, 64, 96, 64


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The folder of a tiny Llama."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=D,
        intermediate_size=F,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=VOCAB,
    )
    folder = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _calibration(model: Path) -> Calibration:
    torch.manual_seed(1)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    return Calibration(loaded, {"input_ids": torch.randint(0, VOCAB, (8, 24)), "use_cache": False})


def _bytes(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def _same(a: ff.Weights, b: ff.Weights) -> bool:
    return a.spec == b.spec and all(
        (v.format, v.activations) == (w.format, w.activations) and torch.equal(v.data, w.data)
        if isinstance(v, PackedMatrix)
        else torch.equal(v, w)
        for (_, v), (_, w) in zip(a.items(), b.items(), strict=True)
    )


# ---- whole and right ----


@pytest.mark.parametrize("format", ["int4", "int8", "q4_0", "bf16", "fp32"])
def test_what_is_loaded_is_what_quantize_makes(model, tmp_path, format):
    source = ff.load(model)
    document = quantize_checkpoint(source, tmp_path / "out", format, source="tiny")
    back = ff.load(tmp_path / "out")
    assert list(back.ffns) == list(source.ffns)
    assert back.packed
    assert back.config["hidden_size"] == D
    for layer in source.ffns:
        assert back.spec(layer) == source.spec(layer)
        assert _same(back.ffns[layer], ff.quantize(source.ffns[layer], format))
        assert back.ffns[layer].up.data.data_ptr() % 64 == 0
    stored = sum(m.nbytes for layer in back.ffns for _, m in back.ffns[layer].items())
    assert document["bytes"] == stored
    assert document["fp32_bytes"] == 4 * LAYERS * 3 * D * F
    assert not (tmp_path / "out.partial").exists()


def test_biases_and_odd_widths(tmp_path):
    """A GPT-2 with [in, out] matrices, biases, and rows that no group divides."""
    config = transformers.GPT2Config(n_embd=36, n_inner=50, n_layer=2, n_head=4, vocab_size=VOCAB, n_positions=32)
    torch.manual_seed(0)
    made = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for name, value in made.named_parameters():
            if name.endswith("bias"):
                value.normal_()
    made.save_pretrained(tmp_path / "model")
    document = quantize_checkpoint(ff.load(tmp_path / "model"), tmp_path / "out", "int4_g32")
    own, back = ff.load(tmp_path / "model").ffns[1], ff.load(tmp_path / "out").ffns[1]
    assert torch.equal(back.up_bias, own.up_bias)
    assert torch.equal(back.down_bias, own.down_bias)
    assert _same(back, ff.quantize(own, "int4_g32"))
    assert "up: rows of 36 in groups of 32: the last group has 4" in document["layers"][1]["notes"]


def test_safetensors_reads_the_files_too(model, tmp_path):
    """The parts are plain safetensors files: the library opens them, and finds the same bytes."""
    quantize_checkpoint(ff.load(model), tmp_path / "out", "int8_g32")
    tensors = load_file(tmp_path / "out" / "ffn-00001.safetensors")
    back = ff.load(tmp_path / "out").ffns[1]
    assert set(tensors) == {"up", "down", "gate"}
    assert torch.equal(tensors["down"], back.down.data)


def test_same_bytes_twice(model, tmp_path):
    for out in ("a", "b"):
        quantize_checkpoint(ff.load(model), tmp_path / out, "int4", "gptq", calibration=_calibration(model))
    assert _bytes(tmp_path / "a") == _bytes(tmp_path / "b")
    quantize_checkpoint(ff.load(model), tmp_path / "c", "int4")
    assert _bytes(tmp_path / "a").keys() == _bytes(tmp_path / "c").keys()
    assert _bytes(tmp_path / "a") != _bytes(tmp_path / "c")


# ---- calibrated ----


def test_each_ffn_is_calibrated_on_what_it_reads_behind_the_quantized_ones(model, tmp_path):
    """Layer 1 sees what layer 0 does after it was quantized: recomputed here by hand, with the model's own code."""
    calibration = _calibration(model)
    quantize_checkpoint(ff.load(model), tmp_path / "out", "int4_g32", "gptq", calibration=calibration)
    back, source = ff.load(tmp_path / "out"), ff.load(model)
    fresh = _calibration(model).model
    for layer in range(LAYERS):
        mlp = fresh.model.layers[layer].mlp
        seen: list[torch.Tensor] = []
        handle = mlp.register_forward_pre_hook(lambda m, args, seen=seen: seen.append(args[0].detach()))
        with torch.no_grad():
            fresh(**calibration.inputs)
        handle.remove()
        x = seen[0].reshape(-1, D)
        expected = ff.quantize(source.ffns[layer], "int4_g32", "gptq", inputs=x)
        assert _same(back.ffns[layer], expected), layer
        with torch.no_grad():
            for name in ("gate", "up", "down"):
                getattr(mlp, f"{name}_proj").weight.copy_(getattr(expected, name).dequantize())


def test_a_model_that_is_not_the_file_s_is_noticed(model, tmp_path):
    calibration = _calibration(model)
    with torch.no_grad():
        calibration.model.model.layers[2].mlp.up_proj.weight[5, 5] += 1e-3
    with pytest.raises(
        ValueError, match=r"layer 2: up of model\.layers\.2\.mlp in the model is not the one in the file"
    ):
        quantize_checkpoint(ff.load(model), tmp_path / "out", "int4", "gptq", calibration=calibration)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=r"layer 0: by the file gated gelu_erf .* computes gated silu"):
        quantize_checkpoint(
            ff.load(model, activation="geglu"), tmp_path / "b", "int4", "gptq", calibration=_calibration(model)
        )


def test_hooks_are_taken_off_again(model, tmp_path):
    calibration = _calibration(model)
    quantize_checkpoint(ff.load(model), tmp_path / "out", "int4", "gptq", calibration=calibration)
    assert not any(m._forward_pre_hooks for m in calibration.model.modules())


# ---- stopped and continued ----


class _StoppedError(Exception):
    pass


def _stop_after(n: int):
    def progress(done: int, total: int) -> None:
        if done == n:
            raise _StoppedError

    return progress


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_continued_work_gives_the_same_bytes(model, tmp_path, method, monkeypatch):
    def run(out: Path, **more: Any) -> dict[str, Any]:
        calibration = _calibration(model) if method == "gptq" else None
        return quantize_checkpoint(ff.load(model), out, "int4", method, calibration=calibration, **more)

    whole = run(tmp_path / "whole")
    with pytest.raises(_StoppedError):
        run(tmp_path / "out", progress=_stop_after(2))
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match="an unfinished quantization: run the same `fanfold quantize` again"):
        ff.load(tmp_path / "out.partial")
    calls: list[Any] = []
    real = job.quantize_ffn
    monkeypatch.setattr(job, "quantize_ffn", lambda *a, **k: calls.append(a) or real(*a, **k))
    document = run(tmp_path / "out")
    assert (len(calls), document["kept"], whole["kept"]) == (1, 2, 0)  # nothing is computed twice
    assert _bytes(tmp_path / "out") == _bytes(tmp_path / "whole")


def test_killed_at_any_write_nothing_is_lost(model, tmp_path):
    """A process that ends without warning, in the middle of writing its second part."""
    code = f"""
import os, fanfold as ff
from fanfold.quantize import files, job
real, n = os.replace, 0
def dying(a, b):
    global n
    n += 1
    if n == 2:
        os._exit(9)
    real(a, b)
os.replace = dying
job.quantize_checkpoint(ff.load({str(model)!r}), {str(tmp_path / "out")!r}, "int4")
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 9
    left = sorted(p.name for p in (tmp_path / "out.partial").iterdir())
    assert left == ["ffn-00000.safetensors", "ffn-00001.safetensors.tmp", "job.json"]
    assert quantize_checkpoint(ff.load(model), tmp_path / "out", "int4")["kept"] == 1
    quantize_checkpoint(ff.load(model), tmp_path / "whole", "int4")
    assert _bytes(tmp_path / "out") == _bytes(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["flip", "cut", "other"])
def test_a_damaged_part_is_made_again(model, tmp_path, damage):
    with pytest.raises(_StoppedError):
        quantize_checkpoint(ff.load(model), tmp_path / "out", "int4", progress=_stop_after(2))
    first, second = (tmp_path / "out.partial" / f"ffn-0000{i}.safetensors" for i in range(2))
    raw = bytearray(first.read_bytes())
    if damage == "flip":
        raw[-1] ^= 1
    first.write_bytes({"flip": bytes(raw), "cut": bytes(raw[:-1]), "other": second.read_bytes()}[damage])
    assert quantize_checkpoint(ff.load(model), tmp_path / "out", "int4")["kept"] == 1
    quantize_checkpoint(ff.load(model), tmp_path / "whole", "int4")
    assert _bytes(tmp_path / "out") == _bytes(tmp_path / "whole")


def test_another_job_is_not_mixed_in(model, tmp_path):
    with pytest.raises(_StoppedError):
        quantize_checkpoint(ff.load(model), tmp_path / "out", "int4", progress=_stop_after(1))
    with pytest.raises(ValueError, match=r"unfinished work of another job \(format: int4_g32 there, int8 here"):
        quantize_checkpoint(ff.load(model), tmp_path / "out", "int8")
    quantize_checkpoint(ff.load(model), tmp_path / "out", "int4")


def test_another_model_of_the_same_size_and_time_is_not_mixed_in(model, tmp_path):
    with pytest.raises(_StoppedError):
        quantize_checkpoint(ff.load(model), tmp_path / "out", "int4", progress=_stop_after(1))
    (file,) = model.glob("*.safetensors")
    before = file.stat()
    save_file({name: value + 1 for name, value in load_file(file).items()}, file, {"format": "pt"})
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    with pytest.raises(ValueError, match="unfinished work of another job"):
        quantize_checkpoint(ff.load(model), tmp_path / "out", "int4")


def test_places_that_cannot_be_written(model, tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(ValueError, match="taken exists: give another place"):
        quantize_checkpoint(ff.load(model), tmp_path / "taken")
    with pytest.raises(ValueError, match="is not a folder"):
        quantize_checkpoint(ff.load(model), tmp_path / "no" / "where")
    with (
        files.Folder(tmp_path / "out", {}, "0"),
        pytest.raises(ValueError, match="is being written by another process"),
    ):
        quantize_checkpoint(ff.load(model), tmp_path / "out")


# ---- files that are not what they say ----


@pytest.fixture
def folder(model, tmp_path) -> Path:
    quantize_checkpoint(ff.load(model), tmp_path / "out", "int4")
    return tmp_path / "out"


def _edit_index(folder: Path, change) -> None:
    index = json.loads((folder / "fanfold.json").read_text())
    change(index)
    (folder / "fanfold.json").write_text(json.dumps(index))


@pytest.mark.parametrize("key", ["fanfold_quantized", "packed_layout"])
@pytest.mark.parametrize("value", [2, "2", None, True, 0])
def test_another_version_is_refused(folder, key, value):
    _edit_index(folder, lambda index: index.update({key: value}))
    with pytest.raises(CheckpointError, match=rf"{key} is {value!r}, this fanfold reads 1 \(written by fanfold"):
        ff.load(folder)


@pytest.mark.parametrize("at", [-1, -700])
def test_damaged_data_are_refused(folder, at):
    path = folder / "ffn-00001.safetensors"
    raw = bytearray(path.read_bytes())
    raw[at] ^= 4
    path.write_bytes(raw)
    loaded = ff.load(folder)
    with pytest.raises(CheckpointError, match=r"ffn-00001.safetensors: damaged: its data are not those of its sha256"):
        loaded.ffns[1]
    assert loaded.ffns[0].spec == loaded.ffns[2].spec


def test_another_version_of_a_part_is_refused(folder):
    path = folder / "ffn-00000.safetensors"
    save_file(load_file(path), path, {"fanfold_quantized": "1", "packed_layout": "9", "fanfold": "3.0"})
    with pytest.raises(
        CheckpointError, match=r"packed_layout is '9', this fanfold reads 1 \(written by fanfold '3.0'\)"
    ):
        ff.load(folder)


INDEX_FAULTS = {
    "layers is": lambda i: i.update(layers={}),
    "layers is []": lambda i: i.update(layers=[]),
    "config is": lambda i: i.pop("config"),
    "occurs once": lambda i: i["layers"][1].update(layer=0),
    "layer None": lambda i: i["layers"][1].pop("layer"),
    "expected a .safetensors file name": lambda i: i["layers"][0].update(file="../ffn-00000.safetensors"),
    "is not the file that fanfold.json lists": lambda i: i["layers"][0].update(file="ffn-00001.safetensors"),
    "for layer 2": lambda i: i["layers"][2].update(sha256="0" * 64),
    "cannot be opened": lambda i: i["layers"][0].update(file="ffn-00009.safetensors"),
}


@pytest.mark.parametrize("words", list(INDEX_FAULTS))
def test_a_damaged_index_is_refused(folder, words):
    _edit_index(folder, INDEX_FAULTS[words])
    with pytest.raises(CheckpointError, match=words.replace("[", r"\[").replace("]", r"\]")):
        ff.load(folder)


def _rewrite(folder: Path, tensors=lambda t: None, metadata=lambda m: None) -> None:
    """Write part 0 again, changed, with everything else as it was."""
    path = folder / "ffn-00000.safetensors"
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    said = json.loads(raw[8 : 8 + length])["__metadata__"]
    values = load_file(path)
    tensors(values)
    metadata(said)
    save_file(values, path, said)


def _described(change):
    def edit(metadata):
        matrices = json.loads(metadata["matrices"])
        change(matrices)
        metadata["matrices"] = json.dumps(matrices)

    return {"metadata": edit}


def _specified(**fields):
    return {"metadata": lambda m: m.update(spec=json.dumps(json.loads(m["spec"]) | fields))}


PART_FAULTS = {
    "holds 'down', 'up'": {"tensors": lambda t: t.pop("gate")},
    "expected gate, up, down of": {"tensors": lambda t: t.update(more=torch.zeros(3))},
    r"up is U8 \[10\], expected U8": {"tensors": lambda t: t.update(up=torch.zeros(10, dtype=torch.uint8))},
    r"down is F32 .*, expected U8": {"tensors": lambda t: t.update(down=torch.zeros(len(t["down"])))},
    "gate is described as": _described(lambda m: m["gate"].update(format="int3")),
    "up is described as": _described(lambda m: m["up"].pop("activations")),
    "up has activations 'fp8'": _described(lambda m: m["up"].update(activations="fp8")),
    "and describes 'gate', 'up', expected": _described(lambda m: m.pop("down")),
    r"for int8 \[96, 64\]": _described(lambda m: m["up"].update(format="int8")),
    "expected U8": _specified(d_ff=2**40),
    "spec: d_ff": _specified(d_ff=-1),
    "spec: .*activation": _specified(activation="swooshl"),
    "spec: unknown key": _specified(color="red"),
    "up_bias": _specified(up_bias=True),
    "spec: not valid JSON": {"metadata": lambda m: m.update(spec="{")},
    "lack the layer": {"metadata": lambda m: m.pop("layer")},
    "matrices: expected a JSON object": {"metadata": lambda m: m.update(matrices="[]")},
}


@pytest.mark.parametrize("words", list(PART_FAULTS))
def test_a_damaged_part_is_refused(folder, words):
    _rewrite(folder, **PART_FAULTS[words])
    with pytest.raises(CheckpointError, match=words):
        ff.load(folder)


def test_an_untouched_rewritten_part_is_read(folder):
    """What the test above changes is what it is refused for: the same rewriting without a change passes."""
    before = ff.load(folder).ffns[0]
    _rewrite(folder)
    assert _same(before, ff.load(folder).ffns[0])


def test_activation_is_the_folder_s_own(folder):
    with pytest.raises(CheckpointError, match="states its own"):
        ff.load(folder, activation="gelu")


# ---- GGUF's own codes ----


def _gguf(path: Path, form: str, arch: str = "llama", fused: bool = False) -> Path:
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch)
    up = 2 * F if fused else F
    shapes = {"ffn_up": (up, D), "ffn_down": (D, F)} | ({} if fused else {"ffn_gate": (F, D)})
    for name, shape in shapes.items():
        w = rng.standard_normal(shape, np.float32)
        kind = gguf.GGMLQuantizationType[form]
        data = gguf.quants.quantize(w, kind)
        writer.add_tensor(f"blk.0.{name}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("form", ["Q8_0", "Q4_0", "Q4_1", "F32", "F16", "BF16"])
@pytest.mark.parametrize("fused", [False, True])
def test_packed_is_bit_by_bit_what_the_file_holds(tmp_path, form, fused):
    path = _gguf(tmp_path / "m.gguf", form, "phi3" if fused else "llama", fused)
    plain, packed = ff.load(path), ff.load(path, packed=True)
    assert (plain.packed, packed.packed) == (False, True)
    name = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}.get(form, form.lower())
    for key, matrix in packed.ffns[0].items():
        assert isinstance(matrix, PackedMatrix)
        assert matrix.format == name
        assert torch.equal(matrix.dequantize(), getattr(plain.ffns[0], key))
    assert not torch.equal(packed.ffns[0].gate.dequantize(), packed.ffns[0].up.dequantize())
    if form.startswith("Q"):
        assert f"{form} tensors keep their own codes" in packed.notes
        assert f"{form} tensors are decoded to float32" in plain.notes


@pytest.mark.parametrize("form", ["Q8_0", "Q4_0", "Q4_1"])
def test_kernels_on_a_gguf_s_own_codes(tmp_path, form):
    """Float activations: the float64 product of the dequantized weights, by the rule; and quantize keeps the codes."""
    path = _gguf(tmp_path / "m.gguf", form)
    own = ff.load(path, packed=True).ffns[0]
    for name in ("gate", "up", "down"):
        getattr(own, name).activations = "float"
    plain, x = ff.load(path).ffns[0], torch.randn(5, D, generator=torch.Generator().manual_seed(0))
    truth = ff.reference.forward(x.double().numpy(), plain)
    eager = ff.ffn(x, plain, "torch")
    assert numerics.compare(ff.ffn(x, own, "cpu"), truth, eager)
    for _, mutant in numerics.mutants(plain):
        assert not numerics.compare(ff.ffn(x, mutant, "torch"), truth, eager)
    quantize_checkpoint(ff.load(path, packed=True), tmp_path / "out", form.lower())
    assert _same(ff.load(tmp_path / "out").ffns[0], ff.load(path, packed=True).ffns[0])


def test_float64_cannot_be_packed_as_it_is(tmp_path):
    config = {"model_type": "llama", "hidden_act": "silu"}
    names = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}
    tensors = {f"model.layers.0.mlp.{n}.weight": torch.zeros(shape, dtype=torch.float64) for n, shape in names.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="format F64, which cannot be packed as it is"):
        ff.load(tmp_path, packed=True).ffns[0]


def test_smollm2_on_its_own_codes():
    """The real file: every layer bit by bit, one matrix at a time in memory."""
    from fanfold.show.models import resolve

    path = resolve("smollm2")
    plain, packed = ff.load(path), ff.load(path, packed=True)
    for layer in (0, 14, 29):
        for key, matrix in packed.ffns[layer].items():
            assert matrix.format == "q4_1"
            assert torch.equal(matrix.dequantize(), getattr(plain.ffns[layer], key))
