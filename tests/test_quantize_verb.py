"""`fanfold quantize` from outside, on tiny models and on all-MiniLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fanfold as ff
import show_models
from fanfold.kernels import torch as torch_ops
from fanfold.numerics import relative_error
from fanfold.quantize.calibrate import match, put, walk
from fanfold.show import cli, models, quantize_verb, text

runner = CliRunner()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return show_models.llama(tmp_path_factory.mktemp("llama"))


def invoke(*args: object):
    return runner.invoke(cli.app, ["quantize", *(str(a) for a in args)])


def document(*args: object) -> dict:
    result = invoke(*args, "--json")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    return json.loads(result.stdout)


def fails(*args: object, code: int = 1) -> str:
    result = invoke(*args)
    assert result.exit_code == code, (result.stdout, result.stderr)
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_a_folder_that_loads(tiny, tmp_path, method):
    found = document(tiny, "--format", "int4_g64", "--method", method, "--tokens", 300, "-o", tmp_path / "out")
    assert (found["format"], found["method"], len(found["layers"])) == ("int4_g64", method, 2)
    back = ff.load(tmp_path / "out")
    assert {m.format for layer in back.ffns for _, m in back.ffns[layer].items()} == {"int4_g64"}
    assert found["calibration"] is None if method == "rtn" else found["calibration"]["tokens"] == 288  # 3 times 96
    for row in found["layers"]:
        assert row["bytes"] == sum(m.nbytes for _, m in back.ffns[row["layer"]].items())
        assert ("output_error" in row) == (method == "gptq")
        assert set(row["guard"]) == (set() if method == "rtn" else {"gate and up", "down"})
    out = invoke(tiny, "--format", "int8", "-o", tmp_path / "again")
    assert out.exit_code == 0
    assert "2 FFNs in int8 by rtn" in out.stdout
    assert "what int8 activations cost was not measured" in out.stdout


def test_calibration_files(tiny, tmp_path):
    words = tmp_path / "words.txt"
    words.write_text("the value of a function is an object and the name of the class " * 40)
    a = document(tiny, "--calibration", words, "-o", tmp_path / "a")
    b = document(tiny, "--calibration", words, "--calibration", words, "-o", tmp_path / "b")
    assert a["calibration"]["tokens"] < b["calibration"]["tokens"]
    assert a["layers"][0]["guard"]["down"]["reason"].startswith("int8 activations change the output by")
    assert "cannot be read" in fails(tiny, "--calibration", tmp_path / "no.txt", "-o", tmp_path / "c")


def test_a_file_of_weights_has_no_model_to_run(tiny, tmp_path):
    file = tiny / "model.safetensors"
    assert len(document(file, "--format", "int8_g32", "-o", tmp_path / "out")["layers"]) == 2
    said = fails(file, "--method", "gptq", "-o", tmp_path / "more")
    assert "is a file of weights, not a model that runs: calibration needs the model's folder" in said


def test_a_model_without_a_tokenizer(tmp_path):
    folder = show_models.llama(tmp_path / "model")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert "cannot be calibrated on text" in fails(folder, "--method", "gptq", "-o", tmp_path / "out")


def test_wrong_usage_and_taken_places(tiny, tmp_path):
    out = tmp_path / "out"
    assert "format 'int5' is not known; known: fp32" in fails(tiny, "--format", "int5", "-o", out, code=2)
    assert "method 'awq' is not known; known: rtn, gptq" in fails(tiny, "--method", "awq", "-o", out, code=2)
    assert "is not a folder or .gguf file" in fails("nowhere", "-o", out)
    out.mkdir()
    assert "exists: give another place with -o" in fails(tiny, "-o", out)
    assert invoke(tiny).exit_code == 2  # no -o


def test_float_activations_are_reported(tiny, tmp_path, monkeypatch):
    """What the guard decides against int8 is said, with the layers."""
    from fanfold.quantize import guard

    monkeypatch.setattr(guard, "LIMIT", 0.0)
    monkeypatch.setattr(guard, "_rounding", lambda q, x: torch.zeros(len(x)))
    result = invoke(tiny, "--method", "gptq", "--format", "int8", "--tokens", 200, "-o", tmp_path / "out")
    assert "down: float activations: int8 activations change the output by" in result.stdout
    assert ff.load(tmp_path / "out").ffns[0].down.activations == "float"


def test_default_text_is_not_what_bench_measures_on():
    whole = text.default_text()
    assert whole.endswith(quantize_verb.default_text())
    assert len(quantize_verb.default_text()) > 16 * 8192


def test_encoders_read_marked_sequences():
    loaded = models.load("minilm")
    out = quantize_verb.sequences(loaded.tokenizer, text.default_text(), 600, 128, marked=True)
    assert {len(s) for s in out} == {128}
    assert {(s[0], s[-1]) for s in out} == {(loaded.tokenizer.cls_token_id, loaded.tokenizer.sep_token_id)}
    assert len(quantize_verb.sequences(loaded.tokenizer, "a few words", 600, 128, marked=False)) == 1
    with pytest.raises(ValueError, match="no tokens"):
        quantize_verb.sequences(loaded.tokenizer, "", 600, 128, marked=True)


def test_smollm2_keeps_its_own_codes(tmp_path):
    document("smollm2", "--format", "q4_1", "-o", tmp_path / "out")
    own, back = ff.load(models.resolve("smollm2"), packed=True), ff.load(tmp_path / "out")
    for layer in (0, 17):
        assert torch.equal(own.ffns[layer].down.data, back.ffns[layer].down.data)


# ---- quality on a model with float weights ----


@pytest.fixture(scope="module")
def minilm():
    loaded = models.load("minilm")
    texts = text.sentences(text.default_text(), 24)
    base = text.embeddings(loaded, loaded.model, texts)
    checkpoint = ff.load(models.resolve("minilm"))
    return loaded, texts, base, checkpoint, match(loaded.model, checkpoint)


def _cosine(minilm, weights) -> float:
    """Lowest cosine of the embeddings with those of float32, the FFNs' weights replaced by weights(layer)."""
    loaded, texts, base, checkpoint, sites = minilm
    with torch.no_grad():
        for site, layer in zip(sites, checkpoint.ffns, strict=True):
            put(loaded.model, site, weights(layer))
        cosine = (text.embeddings(loaded, loaded.model, texts) * base).sum(1).min()
        for site, layer in zip(sites, checkpoint.ffns, strict=True):
            put(loaded.model, site, checkpoint.ffns[layer])
    return float(cosine)


@pytest.mark.parametrize("format", ["int8_g32", "int8_g64", "int8_g128"])
def test_embeddings_at_8_bits(minilm, format):
    checkpoint = minilm[3]
    assert _cosine(minilm, lambda layer: ff.quantize(checkpoint.ffns[layer], format)) >= 0.9995


def test_embeddings_at_4_bits(minilm, tmp_path):
    """int4 with GPTQ on 2048 tokens; rounding to nearest, which it must beat, does not get there."""
    checkpoint = minilm[3]
    document("minilm", "--format", "int4", "--method", "gptq", "--tokens", 2048, "-o", tmp_path / "out")
    back = ff.load(tmp_path / "out")
    rounded = _cosine(minilm, lambda layer: ff.quantize(checkpoint.ffns[layer], "int4"))
    assert _cosine(minilm, lambda layer: back.ffns[layer]) >= 0.99 > rounded
    assert _cosine(minilm, lambda layer: checkpoint.ffns[layer]) > 1 - 1e-6  # nothing of it is left in the model


def _reads(minilm, words: str) -> dict[int, torch.Tensor]:
    """What each FFN of the model reads on 4096 tokens of `words`."""
    loaded, _, _, checkpoint, sites = minilm
    out: dict[int, torch.Tensor] = {}

    def visit(position: int, x: torch.Tensor) -> ff.Weights:
        out[position] = x
        return checkpoint.ffns[position]

    ids = quantize_verb.sequences(loaded.tokenizer, words, 4096, 256, marked=True)
    walk(loaded.model, {"input_ids": torch.tensor(ids)}, checkpoint, visit, sites)
    return out


@pytest.fixture(scope="module")
def reads(minilm):
    """What the FFNs read on calibration text, and on other text."""
    return _reads(minilm, quantize_verb.default_text()), _reads(minilm, text.default_text())


@pytest.mark.parametrize(("format", "layer"), [("int4_g32", 0), ("int4_g128", 5)])
def test_gptq_halves_the_squared_output_error(minilm, reads, format, layer):
    """Of a real FFN on other text than it was calibrated on. Mutant: GPTQ on random inputs does not."""
    calibration, other = reads
    own, x = minilm[3].ffns[layer], other[layer][:1024]
    truth = torch_ops.forward(x, own)

    def error(packed) -> float:
        return relative_error(torch_ops.forward(x, torch_ops.dequantized(packed, torch.float32)), truth)

    allowed = error(ff.quantize(own, format)) / 2**0.5
    assert error(ff.quantize(own, format, "gptq", calibration[layer])) < allowed
    strange = torch.randn(1024, 384, generator=torch.Generator().manual_seed(0))
    assert error(ff.quantize(own, format, "gptq", strange)) > allowed
