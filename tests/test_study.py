"""Equal-budget studies: exact budgets, pairs, runs that survive a kill, verdicts that do not overreach."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from fanfold import study
from fanfold.study import budget, channels, data, page, statistics, summary, training, workers
from fanfold.study.model import LanguageModel, initialize
from fanfold.study.plan import Study
from fanfold.study.settings import DEFAULT_VARIANTS, Setup, Variant

TINY = Setup(
    d_model=32, n_layers=2, n_heads=2, d_ff=128, sequence=32, batch=4, steps=12, warmup=2, rates=(3e-3,),
    log_every=2, check_every=4, check_tokens=512,
)  # fmt: skip


@pytest.fixture
def text(tmp_path):
    rng = random.Random(1)
    words = [f"w{i}" for i in range(40)]
    path = tmp_path / "text"
    path.mkdir()
    for i in range(3):
        (path / f"{i}.txt").write_text(" ".join(rng.choice(words) for _ in range(900)))
    return path


def make(folder, text, names=("relu", "swiglu"), seeds=1, setup=TINY):
    return Study(folder=folder, setup=setup, variants=tuple(map(Variant.parse, names)), seeds=seeds, paths=(str(text),))


# ---- budget ----


def test_parameters_are_those_of_the_model():
    for planned in budget.plan(
        TINY, [Variant.parse(n) for n in (*DEFAULT_VARIANTS, "swiglu:layers=3", "relu:bias=true")]
    ):
        model = LanguageModel(TINY, planned)
        assert planned.params == sum(p.numel() for p in model.parameters()), planned.variant.name


@pytest.mark.parametrize("what", ["params", "flops"])
def test_no_width_is_nearer_to_the_budget(what):
    setup = Setup(d_model=48, n_heads=2, n_layers=3, d_ff=200, budget=what)
    count = budget.params if what == "params" else budget.flops
    target = count(setup, Variant.parse("relu").spec(48, 200), 3)
    for planned in budget.plan(
        setup, [Variant.parse(n) for n in ("relu", "swiglu", "geglu:layers=2", "glu:bias=true")]
    ):
        spec, gap = planned.spec, abs(count(setup, planned.spec, planned.n_layers) - target)
        for near in (spec.d_ff - 1, spec.d_ff + 1):
            other = planned.variant.spec(48, near)
            assert abs(count(setup, other, planned.n_layers) - target) >= gap
        assert planned.deviation == pytest.approx(count(setup, spec, planned.n_layers) / target - 1)
    assert budget.plan(setup, [Variant.parse("relu")])[0].spec.d_ff == 200


def test_gated_gets_two_thirds_of_the_width():
    (planned,) = budget.plan(Setup(), [Variant.parse("swiglu")])
    assert planned.spec.d_ff == round(2 / 3 * Setup().d_ff)


def test_attention_alone_gets_the_blocks():
    (planned,) = budget.plan(Setup(), [Variant.parse("none")])
    assert planned.spec is None
    assert planned.n_layers == 12  # an FFN of 4 D is worth two attentions
    assert abs(planned.deviation) < 0.01


def test_a_budget_that_cannot_be_met_is_refused():
    with pytest.raises(ValueError, match="misses the budget"):
        budget.plan(TINY, [Variant.parse("relu:layers=40")])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nonsense", "not known"),
        ("relu:width=3", "layers=N"),
        ("relu:layers=0", "layers=N"),
        ("none:bias=true", "no bias"),
    ],
)
def test_variants_that_do_not_exist_are_refused(name, said):
    with pytest.raises(ValueError, match=said):
        Variant.parse(name)


# ---- model and data ----


def test_a_token_does_not_see_later_ones():
    (planned,) = budget.plan(TINY, [Variant.parse("geglu")])
    model = LanguageModel(TINY, planned)
    initialize(model, TINY, 0)
    ids = torch.randint(0, 256, (2, 20))
    changed = ids.clone()
    changed[:, 11] = (changed[:, 11] + 1) % 256
    with torch.no_grad():
        a, b = model(ids), model(changed)
    assert torch.equal(a[:, :11], b[:, :11])
    assert not torch.equal(a[:, 11:], b[:, 11:])


def test_positions_count():
    (planned,) = budget.plan(TINY, [Variant.parse("none")])
    model = LanguageModel(TINY, planned)
    initialize(model, TINY, 0)
    ids = torch.tensor([[5, 9, 7], [9, 5, 7]])
    with torch.no_grad():
        y = model(ids)[:, -1]
    assert not torch.allclose(y[0], y[1])  # the same tokens in another order: without RoPE they would be equal


def test_weights_of_the_same_name_and_shape_begin_equal():
    planned = budget.plan(TINY, [Variant.parse(n) for n in ("relu", "gelu_erf", "swiglu", "none")])
    models = {}
    for p in planned:
        models[p.variant.name] = model = LanguageModel(TINY, p)
        initialize(model, TINY, 3)
    first = dict(models["relu"].named_parameters())
    for name, model in models.items():
        shared = [(n, p) for n, p in model.named_parameters() if n in first and first[n].shape == p.shape]
        assert len(shared) >= 8, name
        assert all(torch.equal(p, first[n]) for n, p in shared)
    assert all(torch.equal(p, first[n]) for n, p in models["gelu_erf"].named_parameters())
    other = LanguageModel(TINY, planned[0])
    initialize(other, TINY, 4)
    assert not torch.equal(other.embedding.weight, models["relu"].embedding.weight)


def test_no_text_is_in_both_parts(tmp_path):
    folder = tmp_path / "many"
    folder.mkdir()
    for i in range(60):
        (folder / f"{i}.txt").write_text(f"file {i % 50} " * 20)  # ten of them are there twice
    (folder / "binary").write_bytes(b"\xff\x00\x01")
    (folder / "empty").write_text("  \n")
    found = data.read([folder])
    assert len(found.train) + len(found.validation) == 50
    assert not {*found.train} & {*found.validation}
    assert len(found.skipped) == 2
    assert found.validation
    assert data.read([folder]).fingerprint == found.fingerprint


def test_few_files_are_cut_between_characters(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("Ωé漢" * 50, encoding="utf-8")
    found = data.read([path])
    assert (found.train[0] + found.validation[0]).decode() == "Ωé漢" * 50
    found.validation[0].decode()


def test_text_that_is_too_short_is_refused(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("short")
    with pytest.raises(ValueError, match="give more text"):
        data.corpus(data.read([path]), 256, 64)
    path.write_text("")
    with pytest.raises(ValueError, match="no text found"):
        data.read([path])


def test_batches_are_of_the_seed_and_step_alone(text):
    corpus = data.corpus(data.read([text]), 256, 32)
    a, b = corpus.batch(1, 7, 4, 32), corpus.batch(1, 7, 4, 32)
    assert a.shape == (4, 33)
    assert np.array_equal(a, b)
    assert not np.array_equal(a, corpus.batch(1, 8, 4, 32))
    assert not np.array_equal(a, corpus.batch(2, 7, 4, 32))
    windows = corpus.windows(10**9, 32)
    assert np.array_equal(windows[:, :-1].reshape(-1), corpus.validation[: len(windows) * 32])


def test_bpe_tells_bytes(text):
    pytest.importorskip("tokenizers")
    found = data.read([text])
    corpus = data.corpus(found, 300, 32)
    assert corpus.bytes_of[corpus.train].sum() == sum(map(len, found.train)) + len(found.train) - 1
    assert len(corpus.train) < 0.8 * sum(map(len, found.train))


# ---- runs ----


def job(folder, study_, corpus_text, i=0):
    return study_.jobs(corpus_text.fingerprint)[i]


def test_loss_is_the_cross_entropy_in_bits_for_each_byte(tmp_path, text):
    one = make(tmp_path / "s", text)
    found, corpus = one.read_text()
    run = training._Run(job(tmp_path, one, found), corpus, training.Group())
    windows = run.windows
    with torch.no_grad():
        logits = run.model(windows[:, :-1]).double()
    p = torch.log_softmax(logits, -1).gather(-1, windows[:, 1:, None])
    assert run.validate() == pytest.approx(float(-p.mean() / math.log(2)), rel=1e-5)


def test_training_lowers_the_loss(tmp_path, text):
    one = make(tmp_path / "s", text, ("swiglu",), setup=Setup(**{**TINY.to_dict(), "rates": (1e-2,), "steps": 60}))
    out = study.carry_out(one)
    (variant,) = out["variants"]
    curve = variant["curves"][0]
    assert curve["step"][0] == 0
    assert curve["validation"][0] > 7
    assert curve["validation"][-1] < 4.5
    assert curve["validation"][-1] == variant["validation"]


def tensors(folder):
    from safetensors.torch import load_file

    return load_file(folder / "checkpoint.safetensors")


def test_a_run_that_was_cut_goes_on_bit_by_bit(tmp_path, text, monkeypatch):
    whole, cut = make(tmp_path / "whole", text), make(tmp_path / "cut", text)
    found, corpus = whole.read_text()
    training.work(job(tmp_path, whole, found, 1), corpus)
    target = job(tmp_path, cut, found, 1)
    for stop in (3, 5, 6, 11):  # steps after which it dies, without a word

        def dying(done, _all, stop=stop):
            if done == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            training.work(target, corpus, dying)
    out = training.work(target, corpus)
    theirs = whole.folder / "runs" / "swiglu" / "0"
    a, b = tensors(theirs), tensors(target.folder)
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert a.keys() == b.keys()
    assert (theirs / "metrics.jsonl").read_text() == (target.folder / "metrics.jsonl").read_text()
    assert out["validation"] == training.result(theirs)["validation"]


def test_killed_processes_lose_nothing(tmp_path, text):
    setup = Setup(**{**TINY.to_dict(), "steps": 400})
    whole, cut = make(tmp_path / "w", text, ("relu",), setup=setup), make(tmp_path / "c", text, ("relu",), setup=setup)
    found, corpus = whole.read_text()
    training.work(job(tmp_path, whole, found), corpus)
    cut.claim(found.fingerprint)
    folder = cut.folder / "runs" / "relu" / "0"
    command = [sys.executable, "-m", "fanfold.study.worker", str(cut.folder), "runs/relu/0"]
    process = subprocess.Popen(command)
    end = time.monotonic() + 60
    while not (folder / "checkpoint.safetensors").exists() and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert training.result(folder) is None  # it was in the middle
    subprocess.run(command, check=True)
    a, b = tensors(whole.folder / "runs" / "relu" / "0"), tensors(folder)
    assert all(torch.equal(a[n], b[n]) for n in a)


def test_no_worker_outlives_what_started_it(tmp_path, text):
    one = make(tmp_path / "s", text, ("relu",), setup=Setup(**{**TINY.to_dict(), "steps": 100_000}))
    one.claim(one.read_text()[0].fingerprint)
    code = "import pathlib, sys, fanfold.study as s; s.carry_out(s.plan.Study.open(pathlib.Path(sys.argv[1])), jobs=2)"
    process = subprocess.Popen([sys.executable, "-c", code, os.fspath(one.folder)])
    mine = f"/proc/{process.pid}/task/{process.pid}/children"
    children: list[str] = []
    end = time.monotonic() + 60
    while not children and time.monotonic() < end:
        time.sleep(0.05)
        children = Path(mine).read_text().split()
    process.kill()
    process.wait()
    assert children
    while any(Path(f"/proc/{c}").exists() for c in children):
        assert time.monotonic() < end, "a worker goes on without its parent"
        time.sleep(0.05)


def test_a_folder_of_another_run_is_refused(tmp_path, text):
    one = make(tmp_path / "s", text)
    study.carry_out(one)
    with pytest.raises(ValueError, match=r"other settings.*steps 12 -> 13"):
        study.carry_out(make(tmp_path / "s", text, setup=Setup(**{**TINY.to_dict(), "steps": 13})))
    other = text / "more.txt"
    other.write_text("something else " * 50)
    with pytest.raises(ValueError, match="another text"):
        study.carry_out(make(tmp_path / "s", text, seeds=2))


def test_more_seeds_and_variants_are_added(tmp_path, text):
    study.carry_out(make(tmp_path / "s", text, ("relu",)))
    before = training.result(tmp_path / "s" / "runs" / "relu" / "0")
    out = study.carry_out(make(tmp_path / "s", text, ("relu", "swiglu"), seeds=2))
    assert out["missing"] == 0
    assert training.result(tmp_path / "s" / "runs" / "relu" / "0") == before


def test_two_processes_do_the_same_runs(tmp_path, text):
    a = study.carry_out(make(tmp_path / "a", text))
    b = study.carry_out(make(tmp_path / "b", text), jobs=2)
    assert [(v["name"], v["validation"]) for v in a["variants"]] == [
        (v["name"], v["validation"]) for v in b["variants"]
    ]


def test_a_failed_run_is_told_and_the_others_are_kept(tmp_path, text, monkeypatch):
    one = make(tmp_path / "s", text, ("relu", "swiglu"))

    def spoil(self, i):
        if self.job.planned.variant.name == "relu":
            raise training.DivergedError("the loss is nan")
        return honest(self, i)

    honest = training._Run.train
    monkeypatch.setattr(training._Run, "train", spoil)
    with pytest.raises(workers.RunsFailedError, match="the loss is nan"):
        study.carry_out(one)
    out = summary.collect(one)
    assert [v["name"] for v in out["variants"] if v["runs"]] == ["swiglu"]
    assert out["missing"] == 1


def test_the_rate_with_the_lowest_loss_is_taken(tmp_path, text):
    setup = Setup(**{**TINY.to_dict(), "rates": (1e-5, 1e-2), "rate_share": 0.5})
    out = study.carry_out(make(tmp_path / "s", text, ("relu",), setup=setup))
    trials = {t["rate"]: t["validation"] for t in out["rates"]["relu"]}
    assert trials[1e-2] < trials[1e-5]
    assert out["variants"][0]["rate"] == 1e-2


def test_equal_time_gives_the_slower_fewer_steps(tmp_path, text, monkeypatch):
    setup = Setup(**{**TINY.to_dict(), "rates": (1e-3, 1e-2), "budget": "time"})
    one = make(tmp_path / "s", text, setup=setup)
    monkeypatch.setattr(Study, "_seconds_per_step", lambda self, v: {"relu": 1.0, "swiglu": 1.5}[v.name])
    out = study.carry_out(one)
    assert {v["name"]: v["steps"] for v in out["variants"]} == {"relu": 12, "swiglu": 8}


# ---- channels ----


def test_dead_channels_are_counted():
    (planned,) = budget.plan(TINY, [Variant.parse("relu:bias=true")])
    model = LanguageModel(TINY, planned)
    initialize(model, TINY, 0)
    ffn = model.blocks[1].ffn
    with torch.no_grad():
        ffn.up_proj.bias[:7] = -1e6  # never active
        ffn.down_proj.weight[:, 10] = 0  # active, but writes nothing
    first, second = channels.measure(model, torch.randint(0, 256, (6, 20)), 4)
    assert (first["dead"], second["dead"], second["silent"]) == (0, 7, 8)
    assert second["zero_share"] > first["zero_share"]


def test_smooth_activations_have_no_dead_channels():
    (planned,) = budget.plan(TINY, [Variant.parse("swiglu")])
    model = LanguageModel(TINY, planned)
    initialize(model, TINY, 0)
    for layer in channels.measure(model, torch.randint(0, 256, (6, 20)), 4):
        assert (layer["dead"], layer["zero_share"]) == (0, 0)
        assert 0 < layer["participation"] < 1


# ---- statistics ----


@pytest.mark.parametrize(("freedom", "expected"), [(1, 12.706), (2, 4.303), (4, 2.776), (9, 2.262), (30, 2.042)])
def test_quantiles_are_those_of_the_tables(freedom, expected):
    assert statistics.t_quantile(0.05, freedom) == pytest.approx(expected, abs=5e-4)


def test_intervals_hold_what_they_promise():
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(2000):
        base = rng.normal(0, 1, 5)  # seeds differ a lot, the pairs little
        gap = statistics.difference(
            "a", "b", dict(enumerate(base - 0.1 + rng.normal(0, 0.05, 5))), dict(enumerate(base))
        )
        held += abs(gap.mean + 0.1) <= gap.half
    assert 0.935 < held / 2000 < 0.965


def test_words_say_no_more_than_the_interval():
    clear = statistics.difference("a", "b", {0: 1.0, 1: 1.1, 2: 1.2}, {0: 1.10, 1: 1.21, 2: 1.31})
    assert clear.words().startswith("a better than b by 0.1067")
    assert "3 of 3 seeds" in clear.words()
    turned = statistics.difference("b", "a", {0: 1.10, 1: 1.21, 2: 1.31}, {0: 1.0, 1: 1.1, 2: 1.2})
    assert turned.words() == clear.words()
    vague = statistics.difference("a", "b", {0: 1.0, 1: 1.1, 2: 1.2}, {0: 1.10, 1: 1.0, 2: 1.31})
    assert "not separated" in vague.words()
    assert "better" not in vague.words()
    lone = statistics.difference("a", "b", {0: 1.0}, {0: 5.0})
    assert "no interval" in lone.words()
    assert not lone.separated
    assert statistics.difference("a", "b", {0: 1.0}, {1: 2.0}) is None
    many = statistics.difference("a", "b", {0: 1.0, 1: 1.1, 2: 1.2}, {0: 1.10, 1: 1.25, 2: 1.33}, family=500)
    assert many.separated
    assert not many.firmly
    assert "together" in many.words()


def test_the_page_and_the_pictures(tmp_path, text):
    out = study.carry_out(make(tmp_path / "s", text, ("relu", "swiglu", "none"), seeds=2))
    out["variants"][0]["name"] = "<script>alert(1)</script>"
    written = page.save(out, tmp_path / "s", "A <b>title</b>")
    html = written[0].read_text(encoding="utf-8")
    assert "<script>alert(1)" not in html
    assert "<b>title" not in html
    assert all(p.stat().st_size > 5000 for p in written)
    json.dumps(out, allow_nan=False)
