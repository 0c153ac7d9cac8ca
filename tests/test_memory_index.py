"""The index of a model: against brute force, killed at any moment, resumed, refused, and asked."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import families
from fanfold.memory import anatomy, capture
from fanfold.memory.index import Index, index, store
from fanfold.memory.index import build as job
from fanfold.memory.index.accumulate import is_signed
from fanfold.memory.index.sources import Sources
from fanfold.memory.index.stream import Stream
from fanfold.memory.index.watch import Watch
from fanfold.models.swap import swap
from fanfold.numerics import UNIT_ROUNDOFF
from fanfold.reference import coefficients
from fanfold.weights import to_float64
from memory_texts import texts, tokenizer

TOP, SEQUENCE = 4, 20


@functools.cache
def model(name: str) -> nn.Module:
    return families.build(next(f for f in families.FAMILIES if f.name == name))


@functools.cache
def found(name: str):
    return anatomy(model(name))


def make(name: str, directory, given=None, **settings) -> Index:
    settings = {"top": TOP, "sequence": SEQUENCE, "batch": 3, "anatomy": found(name), "name": name} | settings
    tok = settings.pop("tokenizer", None) or tokenizer()
    return index(model(name), tok, texts() if given is None else given, directory, **settings)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Index:
    return make("llama", tmp_path_factory.mktemp("llama"))


# --- against brute force


# gated; biases and one end; [gate;up] in one matrix; parts connected by the layer's code; both sides seen, exact zeros
@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "bert", "opt"])
@pytest.mark.parametrize("marks", [False, True])
def test_index_is_what_brute_force_gives(name, marks, tmp_path):
    if marks and name not in ("llama", "bert"):
        pytest.skip("special tokens do not depend on the family")
    made = make(name, tmp_path, tokenizer=tokenizer(marks))
    stream = Stream(Sources(texts()), tokenizer(marks), SEQUENCE, 1)
    skip = 1  # <s>, or the first token where there is no special one
    coefficient: dict[int, list[np.ndarray]] = {layer.index: [] for layer in found(name).layers}
    names: list[tuple[str, int]] = []
    for batch in stream.batches():
        ids = torch.from_numpy(stream.inputs(batch))
        seen = capture(model(name), found(name), ids)
        names.append((batch[0].source, batch[0].offset + (0 if marks else 1)))
        for layer in found(name).layers:
            m = coefficients(seen.x[layer.index][0], layer.weights())
            coefficient[layer.index].append(m[skip : len(m) - marks])
    assert made.meta["tokens"] == sum(len(m) for m in coefficient[0])
    for layer in found(name).layers:
        _check_layer(made, layer, coefficient[layer.index], names)


def _check_layer(made: Index, layer, m: list[np.ndarray], names: list[tuple[str, int]]) -> None:
    flat, statistics = np.concatenate(m), made.statistics(layer.index)
    norms = np.linalg.norm(to_float64(layer.weights().down), axis=0)
    near = 64 * UNIT_ROUNDOFF["float32"] * np.abs(flat).max()
    assert np.allclose(statistics["value_norm"], norms, rtol=1e-6)
    assert np.abs(statistics["mean"] - flat.mean(0)).max() <= near
    assert np.allclose(statistics["variance"], flat.var(0), rtol=1e-3)
    threshold, exact = made.layers[layer.index]["threshold"], layer.spec.activation == "relu"
    active = (np.abs(flat) * norms > threshold).mean(0)
    assert np.abs(statistics["frequency"] - active).max() <= (0 if exact else 2 / len(flat))
    assert exact == (threshold == 0)
    for side, count in (("positive", flat > 0), ("zero", flat == 0), ("negative", flat < 0)):
        assert np.allclose(statistics[side], count.mean(0), atol=1e-12), side
    signed = is_signed(layer.spec)
    for c in range(layer.spec.d_ff):
        channel = made.channel(layer.index, c)
        assert sum(channel.histogram.values()) == len(flat)
        for sign, triggers in ((1, channel.triggers_positive), (-1, channel.triggers_negative)):
            best = [(sign * part[:, c]).max() for part in m]
            order = [i for i in np.argsort(-np.array(best), kind="stable") if best[i] > 0][:TOP]
            if sign < 0 and not signed:
                order = []
            assert [t.coefficient for t in triggers] == pytest.approx([sign * best[i] for i in order], abs=near)
            for i, t in zip(order, triggers):
                at = int((sign * m[i][:, c]).argmax())
                value = sign * m[i][:, c]
                alone = np.sort(value)[-2:] if len(value) > 1 else np.array([-np.inf, value[0]])
                others = np.abs(np.array(best) - best[i])
                if alone[1] - alone[0] > near and np.sort(others)[1:2].min(initial=1.0) > 2 * near:
                    assert (t.source, t.position) == (names[i][0], names[i][1] + at)


def test_triggers_carry_their_text(made):
    given = texts()
    for channel in range(0, 56, 5):
        for t in made.channel(1, channel).triggers_positive:
            assert t.before + t.peak + t.after in given[t.source] or not t.after
            assert (t.before + t.peak + t.after).strip() in given[t.source]
            ids = tokenizer()(given[t.source])["input_ids"]
            assert ids[t.position] == t.token
            following = ids[t.position + 1] if t.position + 1 < len(ids) else None
            assert t.next_token == following
            assert t.next == ("" if following is None else tokenizer().decode([following]))
            assert t.text().count("[") == 1
            assert f"[{t.peak.strip()}]" in t.text()


@pytest.mark.parametrize("batch", [1, 5])
def test_the_size_of_a_batch_changes_roundings_only(batch, made, tmp_path):
    other = make("llama", tmp_path, batch=batch)
    for c in range(56):
        a, b = (i.channel(1, c).triggers_positive for i in (made, other))
        assert [t.coefficient for t in a] == pytest.approx([t.coefficient for t in b], rel=1e-4)
    assert other.meta["tokens"] == made.meta["tokens"]


def test_kernels_on_or_off(made, tmp_path):
    import copy

    import fanfold

    swapped = copy.deepcopy(model("llama"))
    report = fanfold.swap(swapped)
    assert report.rows
    other = index(swapped, tokenizer(), texts(), tmp_path, top=TOP, sequence=SEQUENCE, batch=3)
    for c in range(0, 56, 7):
        a, b = (i.channel(1, c).triggers_negative for i in (made, other))
        assert [t.coefficient for t in a] == pytest.approx([t.coefficient for t in b], rel=1e-4)


def test_bfloat16_models(tmp_path):
    small = families.build(next(f for f in families.FAMILIES if f.name == "llama")).bfloat16()
    made = index(small, tokenizer(), texts(6), tmp_path, top=2, sequence=16)
    assert made.channel(0, 0).triggers_positive


def test_the_model_is_left_as_it_was(tmp_path):
    own = model("gpt2").train()
    try:
        make("gpt2", tmp_path, texts(4))
        assert all(m.training for m in own.modules())
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in own.modules())
    finally:
        own.eval()


# --- killed, resumed, refused


def _dump(directory: Path) -> dict[str, list]:
    """Every row of every table, those of the text search too."""
    db = sqlite3.connect(directory / store.FILE)
    names = [n for (n,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL")]
    out = {n: sorted(db.execute(f"SELECT * FROM {n}"), key=repr) for n in names if n != "passages_text"}
    db.close()
    return out


def test_killed_at_any_moment_nothing_is_lost_or_counted_twice(tmp_path):
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(here / "index_zygote.py"), str(tmp_path), "1"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    rounds, by_time, by_statement = map(int, done.stdout.split())
    assert by_time >= 3, done.stdout
    assert by_statement >= 3, done.stdout
    whole = _dump(tmp_path / "whole")
    assert len(whole["triggers"]) > 100
    assert whole["state"] == []
    for i in range(rounds):
        killed = _dump(tmp_path / f"killed {i}")
        assert list(whole) == list(killed)
        for name, rows in whole.items():
            assert rows == killed[name], (i, name)


class _StopError(Exception):
    pass


def _stopped(directory, monkeypatch, after: int, name="llama", **settings) -> None:
    """An index that is left unfinished after some batches."""
    monkeypatch.setattr(job, "_EVERY", -1.0)
    monkeypatch.setattr(job, "_SPARE", -1.0)
    calls = []

    def progress(_done, _total):
        calls.append(1)
        if len(calls) == after:
            raise _StopError

    with pytest.raises(_StopError):
        make(name, directory, progress=progress, **settings)


def test_an_unfinished_index_says_so_and_goes_on(tmp_path, monkeypatch, made):
    _stopped(tmp_path, monkeypatch, 5)
    with pytest.raises(ValueError, match=r"is not finished \(\d+ tokens read\): give the same command again"):
        Index.open(tmp_path)
    runs = []
    run = job.Watch.run
    monkeypatch.setattr(job.Watch, "run", lambda self, ids: (runs.append(1), run(self, ids))[1])
    make("llama", tmp_path)
    assert len(runs) == json.loads(dict(_dump(tmp_path)["meta"])["position"]) - 5
    assert _dump(tmp_path) == _dump(made.path.parent)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"given": texts() | {"text 2": "another text"}}, "holds an index of other text"),
        ({"given": {"text 0": "the cat"}}, "the text given is shorter"),
        ({"top": TOP + 1}, f"made with top={TOP} instead of {TOP + 1}"),
        ({"sequence": SEQUENCE + 1}, "made with sequence="),
        ({"batch": 2}, "made with batch=3 instead of 2"),
        ({"tokenizer": tokenizer(size=60)}, "made with another tokenizer"),
        ({"name": "mistral"}, "made with another model"),
    ],
)
def test_a_resume_with_other_inputs_is_refused(change, words, tmp_path, monkeypatch):
    _stopped(tmp_path, monkeypatch, 6)
    before = _dump(tmp_path)
    change = dict(change)
    with pytest.raises(ValueError, match=words):
        make(change.pop("name", "llama"), tmp_path, **change)
    assert _dump(tmp_path) == before


def test_a_weight_that_differs_is_another_model(tmp_path, monkeypatch):
    import copy

    _stopped(tmp_path, monkeypatch, 3)
    other = copy.deepcopy(model("llama"))
    with torch.no_grad():
        other.get_submodule("model.layers.1.mlp.down_proj").weight[-1, -1] += 1e-3  # type: ignore[index]
    with pytest.raises(ValueError, match="another model"):
        index(other, tokenizer(), texts(), tmp_path, top=TOP, sequence=SEQUENCE, batch=3)


def test_a_finished_index_is_not_made_again(made, monkeypatch):
    monkeypatch.setattr(job.Watch, "run", lambda *_: pytest.fail("the model was run"))
    again = make("llama", made.path.parent)
    assert again.meta == made.meta
    again.close()


def test_a_finished_index_takes_no_further_text(tmp_path):
    given = [*texts(3).values()]
    make("llama", tmp_path, given, batch=1).close()
    with pytest.raises(ValueError, match="the text given goes on after it"):
        make("llama", tmp_path, [*given, "the cat sat"], batch=1)


def test_nothing_counted_yet_binds_nobody(tmp_path):
    with pytest.raises(ValueError, match=r"there is no text in the 2 given \(text 1: it is empty; text 2"):
        make("llama", tmp_path, ["", " "])
    assert make("gpt2", tmp_path).meta["name"] == "gpt2"


def test_one_builder_at_a_time(tmp_path):
    held = store.Store.create(tmp_path)
    try:
        for act in (lambda: make("llama", tmp_path), lambda: Index.open(tmp_path)):
            with pytest.raises(ValueError, match="is in use: another process"):
                act()
    finally:
        held.close()


def test_what_is_no_index_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no index"):
        Index.open(tmp_path)
    (tmp_path / store.FILE).write_bytes(b"no database at all" * 100)
    for act in (lambda: Index.open(tmp_path), lambda: make("llama", tmp_path)):
        with pytest.raises(ValueError, match="is not an index: file is not a database"):
            act()
    other = tmp_path / "other"
    other.mkdir()
    sqlite3.connect(other / store.FILE).execute("CREATE TABLE t (x)").connection.close()
    with pytest.raises(ValueError, match="another program's database"):
        Index.open(other)
    newer = tmp_path / "newer"
    made = store.Store.create(newer)
    made.db.execute("PRAGMA user_version=9")
    made.close()
    with pytest.raises(ValueError, match="has version 9 of the schema"):
        Index.open(newer)


def test_a_full_disk_is_one_line_and_nothing_half_written(tmp_path):
    held = store.Store.create(tmp_path)
    with held:
        held.set_meta(position=1)
    pages = held.db.execute("PRAGMA page_count").fetchone()[0]
    held.db.execute(f"PRAGMA max_page_count={pages + 4}")

    def write(array: np.ndarray) -> None:
        with held:
            held.set_meta(position=2)
            held.set_state(0, {"big": array})
            raise KeyError

    with pytest.raises(ValueError, match=r"index.sqlite cannot be written: database or disk is full"):
        write(np.zeros(1 << 16))
    assert held.meta("position") == 1
    with pytest.raises(KeyError):
        write(np.zeros(1))
    assert held.meta("position") == 1
    held.close()


def test_only_what_is_referred_to_is_kept(tmp_path, monkeypatch):
    """Sequences that no trigger needs go, but for the random sample; whether checkpoints came often or not."""
    monkeypatch.setattr(job, "SAMPLE", 2)
    few = {"top": 1, "given": texts(40, longest=9)}
    for name, every in (("often", -1.0), ("once", 1e9)):
        monkeypatch.setattr(job, "_EVERY", every)
        monkeypatch.setattr(job, "_SPARE", -1.0)
        make("gpt2", tmp_path / name, **few)
        dump = _dump(tmp_path / name)
        referred = {row[1] for row in dump["passages"]}
        kept = {row[0] for row in dump["sequences"]}
        assert referred <= kept
        assert len(kept - referred) <= 2
        assert len(kept) < 40
    assert _dump(tmp_path / "often") == _dump(tmp_path / "once")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"top": 0}, "top=0: expected a positive whole number"),
        ({"batch": 1.5}, "batch=1.5: expected"),
        ({"sequence": 65}, "sequence=65: the model reads at most 64 tokens"),
        ({"sequence": 1}, "sequence=1 is too short"),
    ],
)
def test_settings_that_do_not_fit(settings, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        make("llama", tmp_path, **settings)


def test_models_that_do_not_fit(tmp_path):
    with pytest.raises(ValueError, match="without a tokenizer"):
        index(model("llama"), None, ["x"], tmp_path)
    with pytest.raises(ValueError, match="reads two texts"):
        index(model("t5"), tokenizer(), ["x"], tmp_path)


def test_numbers_that_are_not_finite_name_their_text(tmp_path):
    import copy

    broken = copy.deepcopy(model("gpt2"))
    with torch.no_grad():
        broken.get_submodule("transformer.h.1.mlp.c_fc").bias[3] = float("nan")  # type: ignore[index]
    with pytest.raises(ValueError, match=r"tokens 0 to \d+ of text \d+ give coefficients that are not finite"):
        index(broken, tokenizer(), texts(3), tmp_path, anatomy=anatomy(broken))


# --- asked


def _contexts(made: Index):
    """(layer, channel, sign, triggers) of every end, from `channel` alone."""
    for layer in made.layers:
        for c in range(layer["d_ff"]):
            channel = made.channel(layer["layer"], c)
            for sign, triggers in ((1, channel.triggers_positive), (-1, channel.triggers_negative)):
                if triggers:
                    yield layer["layer"], c, sign, triggers


def _expected(made: Index, matches, at_peak) -> list[tuple]:
    out = []
    for layer, c, sign, triggers in _contexts(made):
        hit = [t for t in triggers if matches(t)]
        if hit:
            score = sum(abs(t.coefficient) * (1 + at_peak(t)) for t in hit) / sum(abs(t.coefficient) for t in triggers)
            out.append((layer, c, sign, score, len(hit), sum(map(at_peak, hit)), len(triggers)))
    return sorted(out, key=lambda r: (-round(r[3], 9), -r[4], *r[:3]))


def _words_of(t) -> list[str]:
    return re.findall(r"\w+", (t.before + t.peak + t.after).lower())


def _peak_word(t) -> str:
    left, right = re.search(r"\w*$", t.before), re.match(r"\w*", t.after)
    assert left
    assert right
    inside = left[0] if re.match(r"\w", t.peak) else ""
    return (inside + t.peak.strip() + right[0]).lower()


@pytest.mark.parametrize(
    ("query", "matches", "words"),
    [
        ("paris", lambda w: "paris" in w, {"paris"}),
        ("PARIS", lambda w: "paris" in w, {"paris"}),
        ("dog warm", lambda w: "dog" in w and "warm" in w, {"dog", "warm"}),
        ('"the dog"', lambda w: ("the", "dog") in itertools.pairwise(w), {"the", "dog"}),
        ("wa*", lambda w: any(x.startswith("wa") for x in w), {"was", "warm"}),
    ],
)
def test_search_ranks_as_defined(made, query, matches, words):
    expected = _expected(made, lambda t: matches(_words_of(t)), lambda t: _peak_word(t) in words)
    got = made.search(query, limit=10_000)
    assert expected
    rows = [(m.layer, m.channel, m.sign, m.score, m.matches, m.at_peak, m.triggers) for m in got]
    assert [r[:3] + r[4:] for r in sorted(rows)] == [r[:3] + r[4:] for r in sorted(expected)]
    assert [r[3] for r in rows] == pytest.approx([r[3] for r in expected])
    for m in got[:5]:
        assert m.examples
        assert all(matches(_words_of(t)) for t in m.examples)
        strengths = [abs(t.coefficient) for t in m.examples]
        assert strengths == sorted(strengths, reverse=True)


def test_search_by_token(made):
    (token,) = tokenizer()(" cat")["input_ids"]
    expected = _expected(made, lambda t: t.token == token, lambda t: True)
    for asked in (token, " cat", "cat"):
        got = made.search(token=asked, limit=10_000)
        assert [(m.layer, m.channel, m.sign, m.matches) for m in got] == [(*r[:3], r[4]) for r in expected]
    assert made.search(token="no such token") == []


def test_search_within_a_layer_and_a_limit(made):
    every = made.search("cat", limit=10_000)
    assert {m.layer for m in every} == {0, 1}
    assert made.search("cat", layer=1, limit=10_000) == [m for m in every if m.layer == 1]
    assert made.search("cat", limit=3) == every[:3]


@pytest.mark.parametrize("text", ["", "!?", '"', '""', "***", " - "])
def test_a_search_without_a_word_is_refused(made, text):
    with pytest.raises(ValueError, match="there is no word in"):
        made.search(text)


@pytest.mark.parametrize(
    "text", ['cat" OR "dog', "peak : cat", "cat AND", "NEAR(cat dog)", "(cat", "cat'; DROP TABLE x"]
)
def test_a_search_is_words_never_a_query_language(made, text):
    words = re.findall(r"\w+", text.lower())
    expected = _expected(made, lambda t: all(w in _words_of(t) for w in words), lambda t: False)
    assert len(made.search(text, limit=10_000)) == len(expected)


def test_search_wants_one_question(made):
    for wrong in ({}, {"text": "cat", "token": "cat"}):
        with pytest.raises(ValueError, match="for a text or for a token"):
            made.search(**wrong)


@pytest.mark.parametrize(("layer", "channel"), [(2, 0), (-1, 0), (0, 56), (0, -1)])
def test_what_does_not_exist(made, layer, channel):
    with pytest.raises(ValueError, match=rf"(layer {layer}|channel {channel}) does not exist"):
        made.channel(layer, channel)


def test_the_report_gets_its_triggers(made):
    entry = made.triggers(1, 5, top=2, before=3, after=1)
    assert json.loads(json.dumps(entry)) == entry
    channel = made.channel(1, 5)
    assert (entry["frequency"], entry["mean"]) == (channel.frequency, channel.mean)
    for name, triggers in (("positive", channel.triggers_positive), ("negative", channel.triggers_negative)):
        assert [t["coefficient"] for t in entry[name]] == [t.coefficient for t in triggers[:2]]
        for shown, t in zip(entry[name], triggers):
            assert [piece for piece, peak in shown["text"] if peak] == [t.peak]
            joined = "".join(piece for piece, _ in shown["text"])
            assert joined in t.before + t.peak + t.after
            assert len(joined) <= 5 * 6


def test_answers_are_json(made):
    for answer in (made.channel(0, 0), made.search("cat", limit=1)[0]):
        assert json.loads(json.dumps(answer.to_dict())) == answer.to_dict()
    assert "llama" in repr(made)
    with Index.open(made.path.parent) as again:
        assert again.layers == made.layers


# --- where the coefficients are taken from


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "bert", "opt"])
def test_coefficients_are_those_that_down_reads_where_it_reads_them(name):
    paths = {layer.path for layer in found(name).layers}
    assert Watch(model(name), found(name), lambda *_: None)._before_down == paths


def test_coefficients_are_computed_where_down_reads_something_else():
    def taken(net: nn.Module) -> set[str]:
        return Watch(net, anatomy(net), lambda *_: None)._before_down

    llama = copy.deepcopy(model("llama"))
    first, second = (layer.path for layer in anatomy(llama).layers)
    handle = llama.get_submodule(f"{first}.down_proj").register_forward_pre_hook(lambda _m, args: (args[0] * 1.0001,))
    watch = Watch(llama, found("llama"), lambda *_: None)
    handle.remove()
    assert watch._before_down == {second}
    assert not taken(copy.deepcopy(llama).to(torch.bfloat16))  # down reads rounded ones
    swap(llama, format="fp32")
    assert not taken(llama)  # our kernel calls no down
