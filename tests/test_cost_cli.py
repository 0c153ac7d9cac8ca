"""`fanfold size` and `fanfold cost` from outside: tables, JSON, formulas, plots, exit codes, no torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fanfold.show import cli, cost_tables, measure, plots
from fanfold.show import size as size_work

runner = CliRunner()


def invoke(*args: object):
    return runner.invoke(cli.app, [str(a) for a in args])


def text(*args: object) -> str:
    result = invoke(*args)
    assert result.exit_code == 0, (result.stdout, result.stderr)
    assert result.stderr == ""
    return result.stdout


def document(*args: object) -> dict:
    return json.loads(text(*args, "--json"))


@pytest.mark.parametrize(
    "args",
    [
        "['size', '--d-model', '4096', '--tp', '8', '--format', 'int4', '--hardware', 'h200', '--json']",
        "['size', '--explain', 'llama-2-7b']",
        "['cost', '4096x11008', '--hardware', 'h200', '--why']",
        "['cost', 'llama-3-70b', '--plan', '--hardware', 'h200', '--json']",
        "['cost', '{config}']",
        "['cost', '--help']",
        "['size', '--help']",
    ],
)
def test_answers_without_torch(args, tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, '
        '"num_attention_heads": 4, "vocab_size": 100}'
    )
    args = args.replace("{config}", str(tmp_path / "config.json"))
    code = (
        f"import sys\nsys.argv = ['fanfold', *{args}]\nimport fanfold.show.cli as c\n"
        "try: c.main()\nexcept SystemExit as e: assert not e.code, e.code\n"
        "heavy = sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'transformers', 'matplotlib'})\n"
        "print(heavy, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"


# --- size ---


def test_size_table():
    out = text("size", "--d-model", 4096)
    assert "134,217,728 weights: d_ff = 10922.67" in out
    assert re.search(r"11008\s+2\^8 \* 43\s+\+0\.78\s+135,266,304", out)
    assert re.search(r"10922 .*matrix_unit, fp8_16, k_quant_256, power_of_two", out)
    assert "recommended: d_ff=11008" in out
    assert "round width: the nearest round width, 10240" in out
    head = next(line for line in out.splitlines() if "off budget" in line)
    assert "d_ff, channels" in head
    assert "score, points" in head


def test_size_json():
    found = document("size", "--d-model", 4096, "--tp", 8, "--format", "int4", "--group", 128, "--hardware", "h200")
    assert found["constraints"]["step_channels"] == 1024
    assert found["recommended_d_ff"] % 1024 == 0
    first = found["candidates"][0]
    assert first["rules"]["tp"] == {
        "kept": True,
        "hard": True,
        "detail": f"{first['d_ff']}/8 = {first['d_ff'] // 8} channels per rank",
    }
    assert {"tp", "group", "matrix_unit", "fp8_16", "k_quant_256", "power_of_two", "tile", "wave"} == set(
        first["rules"]
    )
    assert 0 < first["utilisation_percent"] <= 100
    assert not [c for c in found["candidates"] if c["d_ff"] == 10922 and c["usable"]]


def test_size_why():
    out = text("size", "--d-model", 4096, "--why")
    assert "11008: deviation = weights / budget - 1 = 1.35266e+08 / 1.34218e+08 - 1 = +0.7812 %" in out
    assert re.search(r"10880: score = 100 - 4 \* 0\.3906 - 6 \(k_quant_256\) = 92\.44", out)
    assert "10922: fp8_16 BROKEN: 10922 / 16 = 682.625" in out
    assert len(document("size", "--d-model", 64, "--why")["why"]) > 20


def test_size_like_and_budgets():
    out = text("size", "--d-model", 8192, "--like", "llama", "--multiplier", 1.3, "--multiple-of", 4096)
    assert "int(1.3 * 21845) = 28398; 4096 * ceil(28398 / 4096) = 28672" in out
    assert document("size", "--d-model", 768, "--budget", "gelu:768x3072")["budget"]["exact_d_ff"] == 2048
    assert document("size", "--d-model", 4096, "--params", "135.266304M")["recommended_d_ff"] == 11008
    assert document("size", "--d-model", 4096, "--flops-per-token", "270532608")["budget"]["exact_d_ff"] == 11008
    assert document("size", "--d-model", 4096, "--bytes", "270.532608M")["budget"]["exact_d_ff"] == 11008


def test_size_explain():
    out = text("size", "--explain", "llama-2-7b")
    assert "d_ff = 11008 = 2^8 * 43 = 2.6875 d_model" in out
    assert document("size", "--explain", "qwen3-30b-a3b")["n_experts"] == 128
    assert "206 released models" in text("size", "--list")
    assert len(document("size", "--list")["models"]) == 206


@pytest.mark.parametrize(
    ("typed", "value"), [("135266304", 135266304.0), ("135M", 135e6), ("1.2B", 1.2e9), ("2e9", 2e9), ("3 k", 3e3)]
)
def test_amounts(typed, value):
    assert size_work.amount("params", typed) == value


def test_size_measured(monkeypatch):
    """The best are timed by our kernels and ranked by that; what was predicted stays beside it."""
    monkeypatch.setattr(measure, "_SECONDS", 0.02)
    found = document("size", "--d-model", 64, "--measure")
    timed = [c for c in found["candidates"] if "speed_percent_of_best" in c]
    assert len(timed) == measure.TOP
    assert found["candidates"][: measure.TOP] == timed
    scores = [c["score_points"] for c in timed]
    assert scores == sorted(scores, reverse=True)
    assert max(c["speed_percent_of_best"] for c in timed) <= 100
    assert all(c["seconds_at_1_tokens_s"] > 0 for c in timed)
    assert found["recommended_d_ff"] == timed[0]["d_ff"]
    assert found["reason"].startswith("measured here in bf16: ")
    out = text("size", "--d-model", 64, "--tp", 2, "--measure")
    assert "64 tokens, ms" in out


@pytest.mark.parametrize(("name", "d_ff"), [("smollm2", 1536), ("minilm", 1536)])
def test_packaged_models_by_their_names(name, d_ff):
    assert document("size", "--explain", name)["d_ff"] == d_ff
    assert document("cost", name)["spec"]["d_ff"] == d_ff


def test_size_explain_of_a_folder(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, '
        '"num_attention_heads": 4, "vocab_size": 100}'
    )
    assert document("size", "--explain", tmp_path)["d_ff"] == 172
    assert document("size", "--explain", tmp_path / "config.json")["d_ff"] == 172


@pytest.mark.parametrize("args", [("size", "--explain", "a/model.gguf"), ("cost", "a/model.gguf")])
def test_gguf_is_no_config(args):
    result = invoke(*args)
    assert result.exit_code == 2
    assert "'a/model.gguf' is a GGUF file: expected a model of the table, a config.json or" in result.stderr


# --- cost ---


def test_cost_bits_are_those_of_this_ffn():
    """A row scale of 4 bytes and a row's last, part-filled group count; nothing is taken from the format alone."""
    found = document("cost", "100x50")
    out = text("cost", "100x50")
    for name in ("int8", "int4_g128", "q4_0"):
        bits = 8 * found["ffn_weight_bytes_by_format"][name] / found["ffn"]["params"]
        assert re.search(rf"{name}\s+{bits:.5g}\s", out), name
    assert re.search(r"int4_g128\s+7\.2533", out)  # rows of 100 and 50 fill a group of 128; the format alone says 4.25


def test_cost_says_when_weights_do_not_fit():
    alone = text("cost", "llama-3-70b", "--hardware", "h200")
    assert "note: does not fit: 141.1 GB of weights on a 141 GB device" in alone
    assert "does not fit" not in text("cost", "llama-3-70b", "--hardware", "h200", "--tp", 2)
    assert "does not fit" not in text("cost", "llama-3-70b")


def test_cost_table():
    out = text("cost", "4096x11008", "--hardware", "h200")
    assert re.search(r"parameters\s+135,266,304", out)
    assert re.search(r"FLOPs forward\s+FLOP\s+270,532,608", out)
    assert re.search(r"floor of the time\s+µs\s+56\.4", out)
    assert "bound: memory" in out
    assert re.search(r"int4_g128\s+4\.25\s+71,860,224", out)
    assert re.search(r"preact\s+52,224\s+0", out)
    assert "1 token, weights" in out


def test_every_column_head_has_its_unit():
    out = text("cost", "llama-3-8b", "--hardware", "h200", "--tp", 8, "--sweep", "tokens=1:64", "--plan")
    heads = [line for line in out.splitlines() if re.search(r"  (bytes, B|unit|floor, µs|best tp)", line)]
    assert len(heads) == 6
    for head in heads:
        for column in re.split(r"\s{2,}", head.strip()):
            named = (
                "figure",
                "unit",
                "format",
                "layout",
                "save",
                "tokens",
                "bound",
                "devices",
                "best tp",
                "bits per weight",
            )
            in_unit_column = "unit" in head  # figures of several units: a column of its own says which
            assert in_unit_column or column in named or "," in column or "per" in column or "/s" in column, column


def test_cost_json_is_one_document():
    found = document("cost", "llama-3-70b", "--hardware", "h200", "--tp", 8, "--sweep", "d_ff=8192:16384:4096", "--why")
    assert found["model"]["params"] == 70_552_387_584
    assert [row["d_ff"] for row in found["rows"]] == [8192, 12288, 16384]
    assert found["hardware"]["bytes_per_s"] == 4.8e12
    assert len(found["widened"]) == 4
    assert any(line.startswith("ffn: FLOPs forward = ") for line in found["why"])
    assert not [key for key in found if key.startswith("_")]


def test_cost_of_a_block():
    found = document("cost", "4096x11008", "--heads", 32, "--kv-heads", 8, "--context", 1000)
    assert found["attention"]["params"] == 41_943_040
    assert found["block"]["equal_context_tokens"] == 16512
    assert found["attention"]["score_flop"] == 4 * 1000 * 4096


def test_cost_plan():
    out = text(
        "cost", "llama-3-70b", "--hardware", "h200", "--plan", "--target-ms", 1, "--target-ms", 20, "--devices", 64
    )
    assert "none meets it" in out
    assert re.search(r"20\.0\s+64\s+4\s+192", out)
    found = document("cost", "4096x11008", "--hardware", "tpu-v4", "--plan", "--intra-GBps", 50, "--intra-us", 1)
    assert found["plan"]["devices"][-1] == 4096
    assert found["plan"]["points"]


def test_links_given():
    slow, fast = (
        document("cost", "4096x11008", "--hardware", "h200", "--tp", 16, "--inter-GBps", g)["ffn"]["all_reduce_s"]
        for g in (1, 100)
    )
    assert slow > fast
    steps = document("cost", "4096x11008", "--hardware", "h200", "--tp", 2, "--intra-us", 10, "--base-us", 1)
    assert steps["ffn"]["all_reduce_s"] > 21e-6


def test_cost_list():
    found = document("cost", "--list")
    assert len(found["hardware"]) == 25
    assert {"fp32", "int4_g32", "q4_0"} <= {f["name"] for f in found["formats"]}
    assert re.search(r"h200-sxm\s+GPU\s+989\s+989\s+1,980\s+1,980\s+4,800\s+141\s+450\s+yes", text("cost", "--list"))


@pytest.mark.parametrize("suffix", [".png", ".svg"])
@pytest.mark.parametrize(
    ("what", "swept", "extra"),
    [
        ("4096x11008", "tokens=1:4096", ["--hardware", "h200"]),
        ("4096x11008", "tokens=1:4096", ["--hardware", "h200", "--tp", "8", "--format", "fp32"]),
        ("4096x11008", "tokens=1:16", []),
        ("llama-3-8b", "d_ff=4096:16384:4096", ["--hardware", "h200"]),
        ("4096x11008", "d_ff=4096,8192", []),
    ],
)
def test_plots(tmp_path, what, swept, extra, suffix):
    path = tmp_path / f"curves{suffix}"
    assert f"plot written to {path}" in text("cost", what, "--sweep", swept, "--plot", path, *extra).replace("\n", "")
    start = path.read_bytes()[:300]
    assert start.startswith(b"\x89PNG") if suffix == ".png" else b"<svg" in start or b"<?xml" in start
    assert list(tmp_path.iterdir()) == [path]


def test_a_plot_that_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "_roofline", lambda ax, sweep: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner.invoke(cli.app, ["cost", "64x64", "--hardware", "h200", "--sweep", "tokens=1:4", "--plot",
                                str(tmp_path / "a.png")], catch_exceptions=False)  # fmt: skip
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["size"], "size needs --d-model, or --explain MODEL, or --list"),
        (["size", "--d-model", "0"], "d_model=0: expected a positive int"),
        (["size", "--d-model", "-8"], "d_model=-8: expected a positive int"),
        (["size", "--d-model", "64", "--params", "x"], "params='x': expected a positive number such as"),
        (["size", "--d-model", "64", "--budget", "gelu"], "budget='gelu': expected VARIANT:D_MODELxD_FF"),
        (["size", "--explain", "lama-2-7b"], "nearest: llama-2-7b"),
        (["size", "--d-model", "64", "--tp", "999"], "at least one channel for each of tp=999 ranks"),
        (["cost"], "cost needs a shape (4096x11008), a model (llama-2-7b) or a config.json"),
        (["cost", "0x8"], "d_model=0: expected a positive int"),
        (["cost", "64x172", "--tp", "3"], "d_ff=172 cannot be split over 3 ranks"),
        (["cost", "64x172", "--variant", "swigloo"], "known: swiglu, geglu"),
        (["cost", "64x172", "--hardware", "h900"], "known: this, a100-sxm-40gb"),
        (["cost", "64x172", "--format", "int3"], "known: fp32, bf16"),
        (["cost", "llama-3-8b", "--heads", "8"], "go with a shape"),
        (["cost", "64x172", "--plot", "a.png"], "--plot draws a sweep"),
        (["cost", "64x172", "--sweep", "tokens=1:2", "--plot", "a.gif"], "ends in .png or .svg"),
        (["cost", "64x172", "--sweep", "tokens=1:2", "--plot", "no/such/a.png"], "there is no folder"),
        (["cost", "64x172", "--plan"], "a plan needs a device: name the hardware"),
        (["cost", "64x172", "--hardware", "h200", "--plan", "--target-ms", "0"], "expected seconds above 0"),
        (["cost", "64x172", "--hardware", "h200", "--tp", "2", "--intra-us", "-1"], "intra_us=-1.0: expected a number"),
        (["cost", "no/config.json"], "is no config.json and no folder with one"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(args, message):
    result = invoke(*args)
    assert result.exit_code == 2, (result.stdout, result.stderr)
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("fanfold: ")
    assert message in result.stderr
    assert result.stdout == ""


def test_a_plot_without_matplotlib_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = invoke("cost", "64x64", "--sweep", "tokens=1:4", "--plot", tmp_path / "a.png")
    assert result.exit_code == 2
    assert "pip install 'fanfold[plots]'" in result.stderr


def test_merged_keys_keep_each_list_in_order():
    assert cost_tables._merged([["a", "c", "d"], ["x", "c", "e"], ["d", "f"]]) == ["x", "a", "c", "e", "d", "f"]


def test_the_tables_are_shipped():
    """The data is in the package, so that a wheel of it has them."""
    root = Path(cli.__file__).parents[1]
    assert {p.name for p in (root / "count" / "data").iterdir()} == {"hardware.csv", "links.csv", "models.csv"}
