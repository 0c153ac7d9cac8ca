"""`fanfold shard`, `bench --tp` under torchrun, and the alpha-beta model fitted to all-reduces."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import fanfold as ff
from fanfold import parallel
from fanfold.count.collective import all_reduce
from fanfold.count.hardware import Link, Links
from fanfold.parallel.links import Point, compared, fit
from fanfold.show.cli import app
from test_parallel_load import gguf_file
from test_parallel_plan import same


def run(*args):
    return CliRunner().invoke(app, list(map(str, args)))


def test_shard_saves_what_loads(tmp_path):
    from gguf import GGMLQuantizationType as Q

    path = gguf_file(tmp_path / "x.gguf", Q.Q4_0, bias=True)
    done = run("shard", path, "--tp", 3, "-o", tmp_path / "out", "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["plans"][0]["layers"] == [0, 1]
    assert [r["channels"] for r in said["plans"][0]["ranks"]] == [[0, 64], [64, 128], [128, 160]]
    whole = ff.load(path, packed=True).ffns[1]
    parts = [ff.load(tmp_path / "out", rank=r, tp=3).ffns[1] for r in range(3)]
    assert same(parallel.unshard(parts), whole)
    shown = run("shard", path, "--tp", 2)
    assert shown.exit_code == 0
    assert "gated silu 32->160" in shown.stdout
    assert "0–95" in shown.stdout
    assert "64 bytes a token in bfloat16, by one all-reduce" in shown.stdout


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (
            ["--tp", "6"],
            2,
            "d_ff=160 cannot be split over 6 ranks in groups of 32: it has 5 groups. Use tp from 1 to 5",
        ),
        (["--tp", "2", "-o", "there"], 1, "there exists: give another place with -o, or remove it"),
    ],
)
def test_shard_refuses(args, code, words, tmp_path, monkeypatch):
    from gguf import GGMLQuantizationType as Q

    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    done = run("shard", gguf_file(tmp_path / "x.gguf", Q.Q4_0), *args)
    assert done.exit_code == code
    assert words in done.stderr
    assert not (tmp_path / "there.partial").exists()


def test_bench_tp_needs_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    done = run("bench", "smollm2", "--tp", 2)
    assert done.exit_code == 2
    assert "it was not started by torchrun: torchrun --nproc-per-node 2 -m fanfold bench MODEL --tp 2" in done.stderr
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "3"), ("MASTER_ADDR", "x"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    done = run("bench", "smollm2", "--tp", 2)
    assert done.exit_code == 2
    assert "runs on 2 ranks, and torchrun has started 3" in done.stderr
    done = run("bench", "--shape", "64x128", "--tp", 2)
    assert done.exit_code == 2
    assert "--tp goes with a MODEL" in done.stderr


def torchrun(*args):
    """torchrun over gloo on this machine."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [*command, "-m", "fanfold", *map(str, args)], env=env, capture_output=True, text=True, timeout=400, check=False
    )


def tiny(path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 98, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=64, max_position_embeddings=64)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def test_bench_under_torchrun(tmp_path):
    path = tiny(tmp_path / "model")
    done = torchrun("bench", path, "--tp", 2, "--repeats", 1, "--prompt-tokens", 9, "--new-tokens", 2, "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout)
    assert said["tokens"] == {"prefill": 9, "decode": 2}
    assert said["relative_difference"] < 1e-5
    assert said["ffn_bytes_per_rank"] == [2 * 3 * 32 * 98 * 4, 2 * 3 * 32 * 49 * 4]
    assert all(0 < share < 1 for share in said["collective_share"].values())
    assert len(said["links"]["points"]) == 7
    assert all(row["prefill"]["median"] > 0 for row in said["tokens_per_s"])


def test_a_rank_that_cannot_load_ends_all(tmp_path):
    """One message, from every rank, and no result."""
    done = torchrun("bench", tmp_path, "--tp", 2, "--repeats", 1, "--timeout", 60)
    assert done.returncode != 0
    assert done.stdout == ""
    message = f"fanfold: loading the model for --tp 2: rank 0 of 2: {tmp_path} has no config.json: "
    assert done.stderr.count(message) == 2, done.stderr[-3000:]


# ---- the model of an all-reduce ----


def points(links, noise=1.0, ranks=(2, 3, 4)):
    out = []
    for p in ranks:
        for i, n in enumerate((4096, 65536, 1 << 20, 1 << 24)):
            seconds = all_reduce(n, p, links).seconds * (noise if i % 2 else 1 / noise)
            out.append(Point(ranks=p, n_bytes=n, seconds=seconds, low=seconds, high=seconds))
    return out


def links(base, step, rate):
    link = Link(bytes_per_s=rate, step_s=step)
    return Links(devices_per_node=4, intra=link, inter=link, base_s=base, source="")


def test_fit_finds_alpha_and_beta():
    found = fit(points(links(2e-5, 3e-6, 2e9)))
    assert (found.base_s, found.intra.step_s, found.intra.bytes_per_s) == pytest.approx((2e-5, 3e-6, 2e9), rel=1e-6)
    assert all(row["model_over_measured"] == pytest.approx(1, rel=1e-6) for row in compared(points(found), found))
    one = fit(points(links(0, 3e-6, 2e9), ranks=(2,)))  # base and alpha cannot be told apart
    assert (one.base_s, one.intra.step_s, one.intra.bytes_per_s) == pytest.approx((0, 3e-6, 2e9), rel=1e-6)
    noisy = fit(points(links(2e-5, 3e-6, 2e9), noise=1.1))
    assert all(0.8 < row["model_over_measured"] < 1.25 for row in compared(points(links(2e-5, 3e-6, 2e9)), noisy))
    wrong = links(2e-5, 3e-6, 4e9)  # the mutant: twice the bandwidth
    assert not all(0.8 < row["model_over_measured"] < 1.25 for row in compared(points(links(2e-5, 3e-6, 2e9)), wrong))
    nothing_negative = fit(points(links(0, 0, 2e9), noise=1.3))
    assert min(nothing_negative.base_s, nothing_negative.intra.step_s) >= 0
    with pytest.raises(ValueError, match="1 points: a fit needs at least 2"):
        fit(points(links(0, 1e-6, 1e9))[:1])
