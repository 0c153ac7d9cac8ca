"""`fanfold superpose` from outside, the page it writes, and the figures of the study."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import show_models
from fanfold import canvas
from fanfold.show import cli, superpose_verb
from fanfold.superposition import figures, figures_ffn, page, phase, separability, train

runner = CliRunner()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return show_models.llama(tmp_path_factory.mktemp("llama"))


def invoke(*args: object):
    return runner.invoke(cli.app, ["superpose", *(str(a) for a in args)])


def fails(*args: object, code: int = 2) -> str:
    result = invoke(*args)
    assert result.exit_code == code, (result.stdout, result.stderr)
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr


def test_document_and_page(tiny, tmp_path):
    out = tmp_path / "page.html"
    result = invoke(tiny, "--json", "-o", out)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    document = json.loads(result.stdout)
    assert [r["layer"] for r in document["layers"]] == [0, 1]
    assert document["page"] == str(out)
    for row in document["layers"]:
        assert (row["d_model"], row["d_ff"]) == (32, 88)
        assert row["norm"].endswith("post_attention_layernorm")
        # random weights are random directions
        for part in ("gate", "up", "value"):
            assert row[part]["interference"] == pytest.approx(row["random"]["interference"], rel=0.1)
    text = out.read_text(encoding="utf-8")
    assert text.count("data:image/svg+xml;base64,") == 2
    assert "img-src data:" in text
    assert re.findall(r"https?://[^\s\"'<]+", re.sub(r"base64,[\w+/=]+", "", text)) == []  # asks the network nothing
    assert text.count('alt="') == 2
    assert list(tmp_path.iterdir()) == [out]  # nothing half written is left


def test_what_people_see(tiny):
    result = invoke(tiny, "--layers", "1", "--threshold", "0.2")
    assert result.exit_code == 0, result.stderr
    assert "|cos| ≥ 0.2" in result.stdout
    assert "1 layers, 88 channels in 32 dimensions: 2.75 per dimension" in result.stdout
    assert "orthogonal output" in result.stdout


def test_wrong_usage(tiny, tmp_path):
    assert "--layers '0-x': expected numbers and ranges by commas, as in 0,3,8-11" in fails(tiny, "--layers", "0-x")
    assert "layer 9 does not exist: the model has layers 0 to 1" in fails(tiny, "--layers", "1,9")
    assert "--threshold 1.5: expected a cosine between 0 and 1" in fails(tiny, "--threshold", "1.5")
    assert "a page is written to a file that ends in .html" in fails(tiny, "-o", tmp_path / "page.pdf")
    assert "there is no folder" in fails(tiny, "-o", tmp_path / "no" / "page.html")
    assert "is not a folder or .gguf file" in fails("nowhere", code=1)


def test_layers_are_parsed():
    assert superpose_verb.parse_layers("0,3,8-10") == [0, 3, 8, 9, 10]
    for wrong in ("", "3-1", "-1", "1-2-3"):
        with pytest.raises(ValueError, match="expected numbers and ranges"):
            superpose_verb.parse_layers(wrong)


def test_a_picture_needs_words():
    with pytest.raises(ValueError, match="has a picture without alt text"):
        page.page("t", [], [page.Section(title="s", figure=canvas.figure((1, 1)))])
    text = page.page("a < b", [("x", "<y>")], [page.Section(title="s", table=page.Table(header=["a"], rows=[["<i>"]]))])
    assert "&lt;i&gt;" in text
    assert "<i>" not in text


def test_figures_are_drawn(tmp_path):
    """Each figure is made of results of the shape that the study stores, and written as PNG and SVG."""
    sweep = train(20, 5, [0.0, 0.5, 0.9], 0.7, seeds=1, steps=5, batch=32)
    result = {
        "density": sweep.density,
        "gram": np.swapaxes(sweep.weights, 1, 2) @ sweep.weights,
        "norms": sweep.norms(),
        "interference": sweep.interference(),
        "star": sweep.dimensions_per_feature(),
    }
    uniform = {
        "inverse_density": 1 / sweep.density,
        "star": sweep.dimensions_per_feature(),
        "dimensionality": sweep.dimensionality(),
    }
    small = phase.diagram(2, 1, [0.1, 1.0], [0.1, 1.0, 10.0], seeds=1, steps=5)
    grid = {"density": small.density, "importance": small.importance, "phase": small.phase}
    rows = separability.experiment(["relu"], ratios=(1,), seeds=1, steps=5)
    made = {
        "gram": figures.gram_matrices(result),
        "phase": figures.phase_diagrams({**grid, "agreement": [(1.0, *small.agreement())]}, grid),
        "star": figures.star(uniform, result),
        "scatter": figures.scatter(uniform),
        "separability": figures_ffn.separability(rows, separability.linear()),
    }
    for name, figure in made.items():
        for suffix in (".png", ".svg"):
            path = tmp_path / f"{name}{suffix}"
            canvas.save(figure, path)
            assert path.stat().st_size > 5000
    again = canvas.svg(figures.scatter(uniform), "a")
    assert again == canvas.svg(figures.scatter(uniform), "a")  # the same figure is the same text
