"""The parts of the show floor on their own: numbers in print, spreads, text, perplexity, layer ranges."""

from __future__ import annotations

import json
import math
import re
import sys
import types

import pytest
import torch

from fanfold.models.report import SwapReport, SwapRow
from fanfold.show import card, machine, outcome, output, text, timing


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (12345.6, "12,300"), (0.0123456, "0.0123"), (1.5, "1.50"), (999.9, "1,000"), (1.234e-7, "1.23e-07")]
    + [(-12.34, "-12.3"), (math.inf, "inf")],
)
def test_number(value, shown):
    assert output.number(value) == shown


def test_sizes_and_shares():
    assert output.size(67_584) == "67.6 kB"
    assert output.size(1_500_000) == "1.5 MB"
    assert output.size(2_340_000_000) == "2.34 GB"
    assert output.percent(0.5921) == "59.2 %"


def test_json_is_plain_and_without_nan(capsys):
    output.emit({"a": math.inf, "b": (1, math.nan), 3: True, "d": None, "e": torch.float32})
    assert json.loads(capsys.readouterr().out) == {
        "a": None,
        "b": [1, None],
        "3": True,
        "d": None,
        "e": "torch.float32",
    }


def test_no_bar_without_a_terminal(capsys):
    with output.progress("working") as step:
        step(1, 2)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("wide", [60, 20])
def test_numbers_are_whole_on_a_narrow_terminal(capsys, monkeypatch, wide):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(wide))
    names = ["format", *(f"column {i}" for i in range(9))]
    rows = [[form, *(f"{i}{i},{i}{i}{i}.{i}{i}" for i in range(1, 10))] for form in ("fp32", "int4_g128")]
    output.table("title", names, rows)
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    for i in range(1, 10):
        assert out.count(f"{i}{i},{i}{i}{i}.{i}{i}") == 2
    if wide == 60:  # turned
        lines = out.splitlines()
        assert max(map(len, lines)) <= wide
        assert lines[2].split() == ["format", "fp32", "int4_g128"]
        assert lines[4].split() == ["column", "0", "11,111.11", "11,111.11"]


def test_table_is_not_cut_in_a_pipe(capsys):
    output.table("title", ["name", "value"], [["x" * 150, "y" * 150]])
    lines = capsys.readouterr().out.splitlines()
    assert any("x" * 150 in line and "y" * 150 in line for line in lines)


def test_spread():
    spread = timing.Spread.of([5.0, 1.0, 2.0, 4.0, 3.0, 6.0])
    assert (spread.median, spread.p20, spread.p80) == (3.5, 2.0, 5.0)
    rate = spread.rate(10)
    assert rate.p20 <= rate.median <= rate.p80
    assert timing.Spread.of([2.0]) == timing.Spread(2.0, 2.0, 2.0)


def test_by_turns_alternates_and_drops_the_warm_up():
    order: list[str] = []

    def one(model: str) -> dict[str, float]:
        order.append(model)
        return {"pass": float(len(order))}

    steps: list[tuple[int, int]] = []
    before, after = timing.by_turns("a", "b", one, 3, lambda done, total: steps.append((done, total)))
    assert "".join(order) == "baabbaab"
    assert (before["pass"].median, after["pass"].median) == (6.0, 5.0)
    assert steps[-1] == (8, 8)


def test_ffn_time_counts_only_the_named_modules():
    class Slow(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    model = torch.nn.Sequential(Slow(), Slow())
    seen: list[str] = []

    def one(m: torch.nn.Module) -> dict[str, float]:
        m(torch.zeros(1))
        seen.append("run")
        return {"pass": 1.0}

    spent, share = timing.ffn_time(model, ["0"], one, 2)
    assert 0 < spent < 1
    assert share == spent  # a pass is said to take a second
    assert seen == ["run", "run"]
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks


class Uniform:
    """A language model that finds every token equally likely, and remembers what it was shown."""

    def __init__(self, vocabulary: int, limit: int) -> None:
        config = types.SimpleNamespace(max_position_embeddings=limit)
        config.get_text_config = lambda: config
        self.config, self.vocabulary, self.shown = config, vocabulary, []

    def __call__(self, input_ids: torch.Tensor, use_cache: bool) -> types.SimpleNamespace:
        self.shown.append(input_ids[0].tolist())
        return types.SimpleNamespace(logits=torch.zeros(1, input_ids.shape[1], self.vocabulary))


@pytest.mark.parametrize("n_tokens", [2, 15, 16, 17, 24, 33, 100])
def test_perplexity_scores_each_token_once(n_tokens):
    model = Uniform(50, 16)
    assert math.isclose(text.perplexity(model, torch.arange(n_tokens)[None] % 50), 50, rel_tol=2.0**-20)
    assert all(len(part) <= 16 for part in model.shown)
    assert model.shown[-1][-1] == (n_tokens - 1) % 50


def test_perplexity_of_a_model_that_knows():
    class Knows(Uniform):
        def __call__(self, input_ids, use_cache):
            logits = torch.full((1, input_ids.shape[1], 50), -1e4)
            logits[0, torch.arange(input_ids.shape[1]), (input_ids[0] + 1) % 50] = 0.0
            return types.SimpleNamespace(logits=logits)

    assert text.perplexity(Knows(50, 16), torch.arange(60)[None] % 50) == 1.0


def test_default_text_is_prose_in_a_fixed_order():
    assert text.default_text() == text.default_text()
    assert len(text.default_text()) > 100_000
    found = text.sentences(text.default_text(), 32)
    assert len(found) == 32
    assert all(len(s.split()) >= 4 for s in found)


def _report(**changed):
    """Twelve layers alike; `changed`: {field: {layer: value}}."""
    rows = []
    for i in range(12):
        fields = {"path": f"model.layers.{i}.mlp", "kind": "module", "spec": None, "layout": None, "format": "bf16",
                  "backend": "cpu", "status": "swapped", "reason": "", "ratio": 0.01 * i,
                  "format_error": 1e-3}  # fmt: skip
        fields.update({name: by_layer[i] for name, by_layer in changed.items() if i in by_layer})
        rows.append(SwapRow(**fields))
    return SwapReport(rows=[*rows, SwapRow(**{**fields, "path": "model.head", "ratio": None})])


def test_like_layers_print_as_one_row():
    lines = str(_report(status={3: "left"}, reason={3: "a hook"}, backend={7: "torch", 8: "torch"})).splitlines()
    assert [line.split("  ")[0] for line in lines[1:5]] == [
        "model.layers.0–2, 4–6, 9–11.mlp", "model.layers.3.mlp", "model.layers.7–8.mlp", "model.head"
    ]  # fmt: skip
    assert [line.split()[-3:-1] for line in (lines[1], lines[3])] == [["0.11", "1.0e-03"], ["0.08", "1.0e-03"]]
    assert lines[2].endswith("a hook")
    assert len(_report().to_dict()["rows"]) == 13


@pytest.mark.parametrize(("field", "value"), [("format", "int8"), ("kind", "linear"), ("activations", {"up": "float"}),
                                              ("shape", (3, 4)), ("save", "input"), ("reason", "why")])  # fmt: skip
def test_layers_that_differ_print_apart(field, value):
    groups = _report(**{field: {5: value}}).grouped()
    assert [g.path for g in groups] == ["model.layers.0–4, 6–11.mlp", "model.layers.5.mlp", "model.head"]


def test_a_groups_largest_error_may_be_nan():
    (group, _) = _report(ratio={4: math.nan, 5: None}).grouped()
    assert group.largest("ratio") == "nan"
    assert group.largest("quantization_error") == "-"


def test_guarded_matrices_of_like_layers_are_one_line():
    float_up = {"activations": {"gate": "int8", "up": "float"}, "guard": {"up": "int8 changes 5 %", "gate": "no"}}
    report = _report(**{name: dict.fromkeys((2, 3, 9), v) for name, v in float_up.items()}).to_dict()
    assert outcome.activations({**report, "calibrated": True}) == [
        "activations measured on calibration text: int8 at 3 of 6 matrices, else float",
        "  model.layers.2–3, 9.mlp up: float, as int8 changes 5 % (layer 2; --json has all)",
    ]
    assert outcome.activations({**report, "calibrated": True}, details=False) == [
        "activations measured on calibration text: int8 at 3 of 6 matrices, else float"
    ]


def test_a_log_tells_of_long_work_alone(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    with output.progress("working") as step:
        for done, seconds in ((1, 29), (2, 31), (3, 60), (4, 100)):
            now[0] = seconds
            step(done, 4)
    assert capsys.readouterr().err == "fanfold: working: 50 %\n"


def test_layer_ranges():
    paths = [f"model.layers.{i}.mlp" for i in (3, 0, 1, 2, 5, 7, 8)]
    assert card.ranges(paths) == "0–3, 5, 7–8"
    assert card.ranges(["ffn", ""]) == "ffn, (root)"
    assert card.block_path("encoder.block.11.layer.1.DenseReluDense") == "encoder.block.11"
    assert card.block_path("model.mlp") == "model"


def test_stacks_are_named_by_what_differs():
    assert card._stack_names(["encoder.block", "decoder.block"]) == ["encoder ", "decoder "]
    assert card._stack_names(["model.layers", "model.layers"]) == ["", ""]
    assert card._stack_names(["m.vision.encoder.layers", "m.text.layers"]) == ["vision.encoder ", "text "]
    assert card._stack_names(["m", "m.text"]) == ["m ", "text "]


def test_memory_of_this_machine():
    free = machine.available_memory()
    assert free is None or free > 10**6
    assert machine.peak_memory() > 10**6
    if machine.reset_peak_memory():
        first = machine.peak_memory()
        block = torch.ones(50_000_000)
        assert machine.peak_memory() - first > 100_000_000
        del block
