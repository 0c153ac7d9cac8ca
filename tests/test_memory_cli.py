"""`fanfold read`, `fanfold index` and `memory.check`, from outside, on tiny models and on all-MiniLM."""

from __future__ import annotations

import importlib
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from typer.testing import CliRunner

import show_models
from families import FAMILIES, build
from fanfold.memory import silencing
from fanfold.memory.anatomy import Anatomy, anatomy
from fanfold.memory.check import check, mean_of, t_quantile
from fanfold.memory.edit import edit
from fanfold.memory.reading import read
from fanfold.show import cli, edits, index_tables, reading, reading_tables

runner = CliRunner()
module = importlib.import_module("fanfold.memory.check")  # whose name the package gives to the function
PROMPT = "the value of a function"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A llama whose FFNs show in the logits: transformers starts weights at std 0.02."""
    folder = show_models.llama(tmp_path_factory.mktemp("llama"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2 and "embed" not in name:
                p.normal_(std=p.shape[1] ** -0.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def indexed(tiny, tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("text")
    (place / "words.txt").write_text("the name of the value is a function of the object and the class\n" * 90)
    (place / "more.txt").write_text("an attribute of the module is the method of a class\n" * 60)
    out = document("index", tiny, place, "-o", place / "index", "--top", 4)
    assert out["tokens"] > 500
    assert out["model"] == str(tiny.resolve())
    return place / "index"


def invoke(*args: object, stdin: str | None = None):
    return runner.invoke(cli.app, [str(a) for a in args], input=stdin)


def document(*args: object, stdin: str | None = None) -> dict:
    result = invoke(*args, "--json", stdin=stdin)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    return json.loads(result.stdout)


def fails(*args: object, code: int = 1) -> str:
    result = invoke(*args)
    assert result.exit_code == code, (result.stdout, result.stderr)
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr.removeprefix("fanfold: ").strip()


def shown(*args: object) -> str:
    result = invoke(*args)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


# ---- read ----


def test_read_says_what_the_library_says(tiny):
    """The numbers of one position are those of `memory.read`; the sum rule is reported."""
    out = document("read", tiny, PROMPT, "--top", 3, "--position", 2)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny).eval()
    own = read(model, transformers.AutoTokenizer.from_pretrained(tiny), PROMPT)
    (position,) = out["positions"]
    assert (position["position"], out["title"], len(out["tokens"])) == (2, PROMPT, 5)
    best = own.predictions(2, 1)[0]
    assert position["predictions"][0]["id"] == best.id
    assert position["predictions"][0]["p"] == pytest.approx(best.p, rel=1e-3)
    shares = own.shares(2)
    assert position["total"] == pytest.approx(shares.logit, rel=1e-3)
    assert [r["ffn"] for r in position["layers"]] == pytest.approx([r.ffn for r in shares.layers], rel=1e-3)
    assert [len(r["channels"]) for r in position["layers"]] == [3, 3]
    channel = own.channels(2, top=1)[0]
    strongest = max((c | {"layer": r["layer"]} for r in position["layers"] for c in r["channels"]),
                    key=lambda c: abs(c["effect"]))  # fmt: skip
    assert (strongest["layer"], strongest["channel"]) == (channel.layer, channel.channel)
    assert all(r["holds"] for r in out["sum_rule"])
    assert {"edit", "check", "report"}.isdisjoint(out)


def test_read_for_people(tiny, indexed, tmp_path):
    text = shown("read", tiny, PROMPT, "--index", indexed, "-o", tmp_path / "r.html", "--top", 4)
    assert "2 FFN layers, gated silu 32->88" in text
    assert "0 ' the' 1 ' value' 2 ' of' 3 ' a' [4 ' function']" in text
    assert "Sum rule: Σ coefficient · value + bias = the layer's output holds in 2 of 2 layers" in text
    assert "The 4 channels with the largest effects on the logit of" in text
    assert "fires most on" in text
    assert f"report, to open in a browser: {(tmp_path / 'r.html').resolve()}" in text
    page = (tmp_path / "r.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html>")
    assert 'http-equiv="refresh"' not in page
    assert [f.name for f in tmp_path.iterdir()] == ["r.html"]  # nothing half written beside it


def test_read_one_layer_and_another_token(tiny):
    out = document("read", tiny, PROMPT, "--layer", 1, "--token", "class")
    (position,) = out["positions"]
    assert [r["layer"] for r in position["layers"]] == [1]
    assert "class" in position["token"]["text"]
    text = shown("read", tiny, PROMPT, "--layer", 1, "--token", "class")
    assert "the rank of" in text
    assert "Where the logit of" not in text  # its parts would not add up: there is one layer of two


def test_read_an_edit(tiny):
    """Before and after: what the same edit does to the model's own probabilities, and to the greedy text."""
    args = ("read", tiny, PROMPT, "--edit", "1:3=-30", "--edit", "0:0-4,9=0", "--edit", "1:7:=25", "--new-tokens", 6)
    out = document(*args)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    ids = torch.tensor([[t["id"] for t in out["tokens"]]])

    @torch.no_grad()
    def run() -> tuple[torch.Tensor, str]:
        text = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        return model(ids).logits[0, -1].double().softmax(-1), tokenizer.decode(text)

    p, before = run()
    changes = {(1, 3): -30.0, (1, 7): lambda m: m * 0 + 25, **{(0, c): 0.0 for c in (0, 1, 2, 3, 4, 9)}}
    with edit(model, changes):
        q, after = run()
    assert out["edit"]["given"] == ["1:3=-30", "0:0-4,9=0", "1:7:=25"]
    assert (out["edit"]["before"], out["edit"]["after"]) == (before, after)
    assert before != after
    rows = out["edit"]["tokens"]
    assert {int(p.argmax()), int(q.argmax())} <= {row["id"] for row in rows}
    assert [r["before"] for r in rows] == pytest.approx([float(p[r["id"]]) for r in rows], rel=1e-4)
    assert [r["after"] for r in rows] == pytest.approx([float(q[r["id"]]) for r in rows], rel=1e-4)
    text = shown(*args)
    assert "Edited: 1:3=-30, 0:0-4,9=0, 1:7:=25" in text
    assert f"text after:  {after!r}" in text


def test_encoders(tmp_path):
    """BERT writes into no running sum: sizes instead of effects, with the reason, and the sentence's vector moves."""
    folder = show_models.bert(tmp_path / "bert")
    out = document("read", folder, PROMPT, "--edit", "0:5=-900")
    assert not out["effects"]
    assert out["effects_why_not"]
    assert all(r["holds"] for r in out["sum_rule"])
    assert out["edit"]["cosine"] < 0.9999
    assert out["edit"]["before"] is None
    text = shown("read", folder, PROMPT, "--edit", "0:5=-900")
    assert "The 10 channels with the largest sizes (coefficient m; size |m|·‖v‖, how much it writes):" in text
    assert "What each FFN writes at this position" in text
    assert f"cosine of the sentence's vector before and after: {out['edit']['cosine']:.6f}" in text
    assert out["effects_why_not"] in text


def test_what_cannot_be_read(tiny, tmp_path):
    assert "--edit '1:3' is not understood; expected LAYER:CHANNEL=FACTOR" in fails(
        "read", tiny, PROMPT, "--edit", "1:3", code=2
    )
    for wrong in ("1:3=x", "1:3=nan", "3=0", "1:9-3=0", "1:3=0,4=0", "a:3=0", "1:-3=0", "1:3==0", "1:0-99999999999=0"):
        fails("read", tiny, PROMPT, "--edit", wrong, code=2)
    assert "twice" in fails("read", tiny, PROMPT, "--edit", "1:3=0", "--edit", "1:2-4=2", code=2)
    assert "no folder to write in" in fails("read", tiny, PROMPT, "-o", tmp_path / "no" / "r.html", code=2)
    assert "is a folder" in fails("read", tiny, PROMPT, "-o", tmp_path, code=2)
    assert str(tmp_path) in fails("read", tiny, PROMPT, "--index", tmp_path, code=2)
    assert "channel 88 is not in layer 1: its channels are 0 to 87" in fails("read", tiny, PROMPT, "--edit", "1:88=0")
    assert "layer 2 is not in the model: its FFN layers are 0 to 1" in fails("read", tiny, PROMPT, "--edit", "2:8=0")
    assert "layer 7 does not exist: the model has layers 0 to 1" in fails("read", tiny, PROMPT, "--layer", 7)
    assert "position 5 does not exist: the prompt has 5 tokens" in fails("read", tiny, PROMPT, "--position", 5)
    assert "expected one" in fails("read", tiny, PROMPT, "--token", "the value")
    assert "the prompt has no tokens" in fails("read", tiny, "")
    assert "the model reads up to 96" in fails("read", tiny, "the " * 97)
    assert "is not a folder or .gguf file" in fails("read", "nowhere", PROMPT)
    image = show_models.vit(tmp_path / "vit")
    assert "comes without a tokenizer" in fails("read", image, PROMPT)
    assert invoke("read").exit_code == 2


def test_edits_as_typed():
    found = edits.parse(["0:3=2.5", "12:7,9-10=0", "4:1:=-3"])
    assert {key: value for key, value in found.items() if key != (4, 1)} == {
        (0, 3): 2.5, (12, 7): 0.0, (12, 9): 0.0, (12, 10): 0.0,
    }  # fmt: skip
    assert torch.equal(found[(4, 1)](torch.tensor([1.0, 2.0])), torch.tensor([-3.0, -3.0]))
    assert edits.place(" 12:345 ") == (12, 345)


@pytest.mark.parametrize(
    ("value", "left", "right"), [(0.0, 0, 0), (1.0, 0, 8), (-1.0, 8, 0), (-0.5, 4, 0), (0.01, 0, 0)]
)
def test_bars(value, left, right):
    drawn = reading_tables.bar(value, 1.0)
    assert (len(drawn), drawn.count("█")) == (17, left + right)
    assert drawn.split("│")[0].count("█") == left


def test_a_trigger_has_its_peak_in_brackets():
    known = {
        "positive": [{"text": [["at 1 to 16", False], [" tokens", True], [". The\n machine", False]]}],
        "negative": [],
    }
    assert reading_tables._trigger(known, 1.0) == "at 1 to 16 [tokens]. The machine"
    assert reading_tables._trigger(known, -1.0) == "–"


QUIET_FIRST = """
import sys
from fanfold.show import cli, models

def quiet():
    raise ValueError(f"tqdm is loaded: {'tqdm' in sys.modules}")

models.quiet = quiet
cli.main()
"""


@pytest.mark.parametrize("args", [["read", "smollm2"], ["index", "smollm2", ".", "-o", "x"], ["index", "x", "--geva"]])
def test_no_bars_of_other_libraries(args):
    """tqdm can be silenced only before it is loaded, and torch loads it."""
    done = subprocess.run([sys.executable, "-c", QUIET_FIRST, *args], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "fanfold: tqdm is loaded: False\n")


# ---- index ----


def test_index_answers(tiny, indexed):
    about = document("index", indexed)
    assert [row["d_ff"] for row in about["layers"]] == [88, 88]
    assert "Ask it: fanfold index" in shown("index", indexed)
    found = document("index", indexed, "--search", "attribute", "--limit", 5)
    assert 0 < len(found["matches"]) <= 5
    match = found["matches"][0]
    assert "attribute" in "".join(match["examples"][0][k] for k in ("before", "peak", "after"))
    text = shown("index", indexed, "--search", "attribute", "--limit", 5)
    assert f"{match['layer']}:{match['channel']}" in text
    where = f"{match['layer']}:{match['channel']}"
    one = document("index", indexed, "--channel", where, "--limit", 2)
    assert (one["layer"], one["channel"]) == (match["layer"], match["channel"])
    assert len(one["triggers_positive"]) == 2
    assert sum(n for _, n in one["histogram"]) == about["tokens"]
    text = shown("index", indexed, "--channel", where)
    assert "Strongest positive coefficients" in text
    assert "Strongest negative coefficients" in text
    assert all(m["layer"] == 1 for m in document("index", indexed, "--token", "the", "--layer", 1)["matches"])
    assert "has a trigger with" in shown("index", indexed, "--search", "zebra")


def test_index_geva_finds_the_model_again(tiny, indexed):
    """The model is loaded from where it was; a second call only reads what was kept."""
    first = document("index", indexed, "--geva", "--prefixes", 16)
    assert first["prefixes"] == 16
    assert document("index", indexed, "--geva", "--prefixes", 16) == first
    text = shown("index", indexed, "--geva", "--prefixes", 16)
    assert "value/key agreement" in text
    assert "arXiv:2012.14913" in text
    other = document("index", indexed, "--geva", "--prefixes", 8, "--model", tiny)
    assert other["prefixes"] == 8


def test_index_reads_standard_input_and_goes_on(tiny, tmp_path):
    words = "the name of the value is a function of the object and the class " * 12
    made = document("index", tiny, "-", "-o", tmp_path / "a", "--sequence", 16, "--batch", 2, stdin=words)
    assert made["tokens"] > 100
    assert made["settings"]["sequence"] == 16
    (tmp_path / "words.txt").write_text(words)
    again = document("index", tiny, tmp_path / "words.txt", "-o", tmp_path / "b", "--sequence", 16, "--batch", 2)
    assert [row["frequency"] for row in again["layers"]] == [row["frequency"] for row in made["layers"]]


def test_what_cannot_be_indexed(tiny, indexed, tmp_path):
    assert "needs a place: -o FOLDER" in fails("index", tiny, "README.md", code=2)
    assert "needs text" in fails("index", tiny, "-o", tmp_path / "x", code=2)
    assert "one question at a time" in fails("index", indexed, "--search", "a", "--geva", code=2)
    assert "one question at a time" in fails("index", indexed, "a.txt", "--search", "a", code=2)
    assert "expected LAYER:CHANNEL" in fails("index", indexed, "--channel", "3", code=2)
    assert "does not exist: expected UTF-8 files" in fails("index", tiny, "no.txt", "-o", tmp_path / "x")
    assert "channels 0 to 87" in fails("index", indexed, "--channel", "0:88")
    assert str(tmp_path) in fails("index", tmp_path)
    assert not (tmp_path / "x").exists()


def test_bins_name_their_coefficients():
    assert index_tables._bin(0) == "0"
    assert index_tables._bin(0.5) == "0.500 to 1.00"
    assert index_tables._bin(-0.5) == "-1.00 to -0.500"
    assert index_tables._bin(2.0**-14) == "0 to 1.22e-04"
    assert index_tables._bin(-(2.0**9)) == "-512 and less"


# ---- check ----


@pytest.fixture(scope="module")
def planted() -> tuple[nn.Module, Anatomy]:
    """A llama whose head reads half of the state, into which one channel in four writes: most are of no effect."""
    model = build(next(f for f in FAMILIES if f.name == "llama"), seed=3)
    with torch.no_grad():
        model.get_submodule("lm_head").weight[:, 16:] = 0  # type: ignore[index]
        for p in (model.get_submodule(f"model.layers.{i}.mlp.down_proj").weight for i in (0, 1)):
            reads = torch.arange(56) % 4 == 0
            p *= 3.0
            p[16:, reads] = 0  # type: ignore[index]
            p[:16, ~reads] = 0  # type: ignore[index]
    return model, anatomy(model)


def prompts(n: int) -> list[torch.Tensor]:
    return list(torch.randint(3, 60, (n, 6), generator=torch.Generator().manual_seed(0)))


def test_check_is_the_experiment_that_it_says(planted):
    """One row again, by single edits: promoters silenced at the last token alone, and their probability."""
    model, shape = planted
    found = check(model, None, prompts(4), top=3, seeds=(0, 1), anatomy=shape)
    for ids, row in zip(prompts(4), found.rows, strict=True):
        own = read(model, None, ids, anatomy=shape)
        token = own.explained(-1)
        effects = {(r.layer.index, c): float(e) for r in own.layers for c, e in enumerate(r.effect(token, -1))}
        best = sorted(effects, key=lambda k: -effects[k])[:3]
        assert row.channels == best

        def silent(m: torch.Tensor) -> torch.Tensor:
            m[:, -1] = 0.0
            return m

        with torch.no_grad():
            p = model(ids[None]).logits[0, -1].double().log_softmax(-1)[token]
            with edit(model, dict.fromkeys(best, silent), anatomy=shape):
                q = model(ids[None]).logits[0, -1].double().log_softmax(-1)[token]
        assert row.promoting == pytest.approx(float(q - p), abs=1e-5)
        assert row.p == pytest.approx(float(p.exp()), rel=1e-5)
        assert row.p_after == pytest.approx(float(q.exp()), rel=1e-5)
        assert len(row.random) == 2
        assert row.matched is not None
        assert row.difference == pytest.approx(row.matched - statistics.fmean(row.random))


def test_controls_take_exactly_as_much(planted, monkeypatch):
    """The same norm, layer by layer, at the last token alone, from other channels that are about as large."""
    model, shape = planted
    seen: list[tuple[int, tuple[int, ...], torch.Tensor]] = []
    own = read(model, None, prompts(1)[0], anatomy=shape)

    def spied(changes):
        for (layer, channels), change in changes:

            def spy(m, layer=layer, channels=channels, change=change):
                out = change(m.clone())
                seen.append((layer, channels, (out / m)[:, -1]))
                assert torch.equal(m[:, :-1], out[:, :-1])
                return out

            yield (layer, channels), spy

    real = silencing.edit
    monkeypatch.setattr(silencing, "edit", lambda m, changes, anatomy: real(m, list(spied(changes)), anatomy=anatomy))
    (row,) = check(model, None, prompts(1), top=4, seeds=range(20), anatomy=shape).rows
    assert len(row.matched_channels) == 4
    drawn: list[set[tuple[int, int]]] = [set() for _ in range(20)]
    for layer, channels, factor in seen:
        size = own.layer(layer).size[-1, list(channels)]
        places = [(layer, c) for c in channels]
        promoting = torch.tensor([p in row.channels for p in places])
        matched = torch.tensor([p in row.matched_channels for p in places])
        assert bool((factor[0] == 1).all())  # the model as it is
        assert torch.equal(factor[1] == 0, promoting)
        assert torch.equal(factor[2] == 0, matched)
        for variant in range(3, 23):
            control = factor[variant] != 1
            assert not bool((control & (matched | promoting)).any())
            less = (1 - factor[variant][control]) * size[control]
            assert torch.allclose(less.sort().values, size[matched].sort().values, rtol=1e-4)
            assert bool((factor[variant][control] >= -1.001).all())
            assert bool((factor[variant][control] <= 0.501).all())
            drawn[variant - 3].update(p for p, c in zip(places, control) if c)
    assert [len(some) for some in drawn] == [4] * 20  # no channel twice
    assert len({frozenset(some) for some in drawn}) > 10


def test_check_tells_promoters_from_others(planted, monkeypatch):
    model, shape = planted
    found = check(model, None, prompts(12), top=4, anatomy=shape)
    assert found.ok, str(found)
    assert found.verdict == "holds"
    assert found.promoting is not None
    assert found.promoting.high < 0  # type: ignore[operator]
    out = found.to_dict()
    json.dumps(out)
    assert [f["holds"] for f in out["findings"]] == [True] * 4
    assert found.random is not None
    # the same with the channels that suppress the token: the experiment says so
    real = silencing._promoters
    monkeypatch.setattr(silencing, "_promoters", lambda effects, n: real([-e for e in effects], n))
    wrong = check(model, None, prompts(12), top=4, anatomy=shape)
    assert not wrong.ok
    assert "silencing" in wrong.verdict
    assert "NO: silencing" in str(wrong)


def test_check_sees_sums_that_are_off(planted, monkeypatch):
    """A coefficient, or a share, that is a thousandth off fails."""
    model, shape = planted
    from fanfold.memory import reading as readings

    true = readings.coefficients
    with monkeypatch.context() as patch:
        patch.setattr(readings, "coefficients", lambda w, x: _off(true(w, x)))
        found = check(model, None, prompts(2), top=2, seeds=(0,), anatomy=shape)
    assert {f.name: f.holds for f in found.findings}["sum rule"] is False
    assert "sum rule" in found.verdict
    assert {f.name: f.holds for f in found.findings}["direct effects"] is False


def _off(c):
    import dataclasses

    return dataclasses.replace(c, coefficient=c.coefficient * 1.001)


def test_check_without_a_head(monkeypatch):
    """all-MiniLM: the sums can be checked, effects on logits it has none."""
    monkeypatch.setattr(module, "PROMPTS", module.PROMPTS[:3])
    out = document("read", "minilm", "A cat sat on the mat.", "--check", "--edit", "3:10=0")
    assert [f["holds"] for f in out["check"]["findings"]] == [True, None, None, None]
    assert out["check"]["verdict"] == "holds (could not be checked: direct effects, silencing, control)"
    assert len(out["sum_rule"]) == 6
    assert all(r["holds"] for r in out["sum_rule"])
    assert 0.9 < out["edit"]["cosine"] < 1


def test_a_check_that_fails_exits_1(tiny, monkeypatch):
    monkeypatch.setattr(module, "PROMPTS", (PROMPT, "the name of the class is"))
    monkeypatch.setattr(module, "QUARTER", 0.0)
    result = invoke("read", tiny, PROMPT, "--check")
    assert result.exit_code == 1
    assert "failed: the memory view does not hold: " in result.stderr
    assert result.stderr.count("\n") == 1
    assert "Checked on 2 prompts:" in result.stdout


def test_means_and_their_intervals():
    for freedom, exact in ((1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (19, 2.093), (200, 1.972)):
        assert t_quantile(freedom) == pytest.approx(exact, rel=0.005)
    m = mean_of([1.0, 2.0, 3.0, 6.0])
    assert m.mean == 3.0
    assert m.high - m.mean == pytest.approx(2.776 * statistics.stdev([1, 2, 3, 6]) / 2, rel=0.2)  # type: ignore[operator]
    assert m.high - m.mean == pytest.approx(3.182 * math.sqrt(14 / 3) / 2, rel=0.005)  # type: ignore[operator]
    assert mean_of([2.0]).low is None


@pytest.mark.parametrize(
    ("matched", "random", "difference", "holds"),
    [
        ((-2.0, -3.0, -1.0), (-0.4, -0.9, 0.1), (-1.6, -2.0, -1.2), True),
        ((-2.0, -3.0, -1.0), (-0.6, -0.9, -0.3), (-1.4, -2.0, -0.8), False),  # more than a quarter
        ((-2.0, -3.0, -1.0), (0.6, 0.3, 0.9), (-2.6, -3.0, -2.2), False),  # or raising it as much
        ((-2.0, -3.0, -1.0), (-0.4, -0.9, 0.1), (-1.6, -3.4, 0.2), False),  # not told from nothing
    ],
)
def test_when_controls_count_as_quiet(matched, random, difference, holds):
    means = [module.Mean(*m) for m in (matched, random, difference)]
    assert module._control_finding(*means, [], [], "").holds is holds
    assert module._control_finding(None, None, None, [], [], "").holds is None


def test_nothing_to_check_with(planted):
    model, shape = planted
    for options in ({"prompts": []}, {"seeds": ()}, {"top": 0}):
        with pytest.raises(ValueError, match="expected at least 1 of each"):
            check(model, None, **({"prompts": prompts(1)} | options), anatomy=shape)  # type: ignore[arg-type]


def test_the_default_prompt_is_the_demo_s():
    assert reading.PROMPT == "The capital of France is"
