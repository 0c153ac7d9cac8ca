"""The report page as text: what it embeds, what it escapes, how large it is, that it asks the network for nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib import resources

import numpy as np
import pytest

from fanfold.report import fragment, page
from fanfold.report.render import as_json
from report_documents import TOKENS, document

HOSTILE = (
    "<script>alert(1)</script>", "</script>", "<!--<script>", "]]>", "&lt;&amp;", "\u2028\u2029", "\ud83d", "\x00\x1b",
    "\u202etxet", '"\'`', "{{ 7 * 7 }}", "{% raw %}", "\\u003c", "é", "日本", "\r\n", "",
)  # fmt: skip


class Elements(HTMLParser):
    """Every element with its attributes, and the text inside scripts, styles and titles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.inside: dict[str, list[str]] = {"script": [], "style": [], "title": []}
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag in self.inside:
            self.inside[tag].append("")
            self._open = tag

    def handle_endtag(self, tag):
        self._open = ""

    def handle_data(self, data):
        if self._open:
            self.inside[self._open][-1] += data


def _data(text: str) -> dict:
    return json.loads(Elements(text).inside["script"][0])


def test_data_is_the_document():
    given = document(triggers=False)
    for value in given["values"].values():
        del value["promoted_ids"]
    assert _data(page(given)) == given


@pytest.mark.parametrize("token", HOSTILE)
def test_a_token_is_data(token):
    """No token changes which elements the page has, and every token arrives as it was."""
    plain = Elements(page(document(["a"], layers=1)))
    given = document([token], layers=1)
    for value in given["values"].values():
        value["promoted"][0][0] = token
    for kept in given["triggers"].values():
        kept["positive"][0]["text"] = [[token, True]]
    given["notes"] = [token]
    given["model"]["name"] = token
    text = page(given)
    hostile = Elements(text)
    assert [tag for tag, _ in hostile.found] == [tag for tag, _ in plain.found]
    assert len(hostile.inside["script"]) == 2
    arrived = json.loads(hostile.inside["script"][0])
    assert arrived["tokens"][0]["text"] == token
    assert all(value["promoted"][0][0] == token for value in arrived["values"].values())
    assert arrived["notes"] == [token]
    assert text.encode("utf-8")  # can be written
    assert "<script>alert" not in text


@pytest.mark.parametrize("character", ["<", ">", "&", "\u2028", "\u2029", "\ud800"])
def test_json_escapes(character):
    text = as_json({character: [character]})
    assert character not in text
    assert json.loads(text) == {character: [character]}


def test_only_what_is_unsafe_is_escaped():
    assert as_json(["é日本", "'\"\\"]) == '["é日本","\'\\"\\\\"]'


def test_asks_for_nothing():
    """No address but SVG's name, no source, no import; and the page forbids itself the rest."""
    text = page(document())
    elements = Elements(text)
    for tag, attributes in elements.found:
        assert not {"src", "srcset", "action", "onclick", "style"} & set(attributes), tag
        assert attributes.get("href", "#").startswith("#"), tag
    assert tag_count(elements, "link") == 0
    own = "".join(elements.inside["style"]) + elements.inside["script"][1]
    assert set(re.findall(r"\w+://[^\s\"']+", own)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|innerHTML|insertAdjacentHTML|eval\(", own)


def tag_count(elements: Elements, name: str) -> int:
    return sum(tag == name for tag, _ in elements.found)


def test_policy_names_what_the_page_holds():
    elements = Elements(page(document(layers=1)))
    policy = next(a["content"] for tag, a in elements.found if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';")
    for name, text in (("style", elements.inside["style"][0]), ("script", elements.inside["script"][1])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy


def test_size():
    """30 layers, 20 tokens, ten channels each, none of them twice: the largest that such a document can be."""
    given = document([*TOKENS] * 4, channels=10)
    assert len(given["values"]) > 5000
    assert len(page(given).encode()) < 5_000_000


def test_triggers_are_cut_around_the_peak():
    given = document(layers=1)
    key = next(iter(given["triggers"]))
    words = [[f"word{i} ", i == 30] for i in range(60)]
    given["triggers"][key]["positive"] = [{"text": words, "coefficient": 2.5, "source": "a.txt"}] * 9
    kept = _data(page(given))["triggers"][key]
    assert len(kept["positive"]) == 5
    assert kept["frequency"] == given["triggers"][key]["frequency"]
    before, peak, after = kept["positive"][0]["text"]
    assert peak == ["word30 ", True]
    assert (before[1], after[1]) == (False, False)
    assert before[0].startswith("…")
    assert before[0].endswith("word29 ")
    assert 80 < len(before[0]) < 100
    assert after[0].startswith("word31 ")
    assert after[0].endswith("…")
    assert 40 < len(after[0]) < 50
    assert kept["positive"][0]["coefficient"] == 2.5


def test_a_short_trigger_is_whole():
    given = document(layers=1)
    key = next(iter(given["triggers"]))
    for text in ([["Paris", True]], [["in", False], [" Paris", True]], [["no peak", False]]):
        given["triggers"][key]["positive"] = [{"text": text, "coefficient": 1.0}]
        assert _data(page(given))["triggers"][key]["positive"][0]["text"] == text


def test_numbers_that_are_not_finite_are_said():
    given = document(layers=2)
    given["heat"][0][1] = float("nan")
    given["positions"][0]["layers"][0]["channels"][0]["coefficient"] = float("-inf")
    arrived = _data(page(given))
    assert arrived["heat"][0][1] is None
    assert arrived["notes"][-1].startswith("2 numbers were not finite")
    assert len(given["notes"]) == 1  # the caller's document is left as it is
    assert np.isnan(given["heat"][0][1])


@pytest.mark.parametrize("name", ["title", "model", "tokens", "positions", "heat"])
def test_refuses_what_it_cannot_show(name):
    given = document(layers=1)
    del given[name]
    with pytest.raises(ValueError, match=f"needs title, model, tokens, positions, heat; {name} missing"):
        page(given)


def test_refuses_no_positions():
    with pytest.raises(ValueError, match="explains no position"):
        page({**document(layers=1), "positions": []})


def test_refuses_arrays():
    given = document(layers=1)
    given["heat"] = np.ones((5, 1))
    with pytest.raises(TypeError, match="ndarray"):
        page(given)


def test_fragment_holds_the_page():
    given = document(HOSTILE, layers=1)
    (frame,) = [attributes for tag, attributes in Elements(fragment(given, height=500)).found if tag == "iframe"]
    assert frame["srcdoc"] == page(given)
    assert frame["sandbox"] == "allow-scripts"
    assert "height:500px" in frame["style"]
    assert frame["title"].startswith("<script>alert(1)</script></script>")
    assert frame["title"].isprintable()


def test_every_file_of_the_page_is_in_the_package():
    names = {path.name for path in resources.files("fanfold.report").iterdir()}
    assert {"base.html.j2", "style.css", "base.js", "reading.html.j2", "reading.css", "reading.js"} <= names
