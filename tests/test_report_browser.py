"""The report page of a reading, used: clicked, typed into, moved through by keys, in a real browser."""

from __future__ import annotations

import os
from contextlib import contextmanager

import pytest

from browser import no_overflow, text, without
from fanfold.report import page
from report_documents import document, small

EVIL = "<script>alert(1)</script>"


def _number(text: str) -> float:
    return float(text.replace("−", "-").replace(",", ""))


def test_a_token_is_chosen_by_click_and_by_keys(opened):
    given = small()
    given["positions"][1]["predictions"][0]["text"] = " Lisbon"
    tab = opened(page(given))
    chosen = "#prompt [aria-checked=true]"
    assert tab.get_attribute(chosen, "data-at") == "4"  # the last token first
    tab.click("#prompt button >> nth=1")
    assert tab.get_attribute(chosen, "data-at") == "1"
    assert "␣Lisbon" in text(tab, "#verdict")
    assert "Lisbon" in tab.text_content("#live")  # a screen reader hears it
    tab.keyboard.press("ArrowRight")
    assert tab.get_attribute(chosen, "data-at") == "2"
    assert tab.evaluate("document.activeElement.dataset.at") == "2"
    assert "␣Paris" in text(tab, "#verdict")
    tab.keyboard.press("Home")
    tab.keyboard.press("ArrowLeft")  # nothing before the first
    assert tab.get_attribute(chosen, "data-at") == "0"


def test_layers_sum_to_the_logit(opened):
    given = small()
    at = given["positions"][4]
    tab = opened(page(given))
    rows = tab.query_selector_all("#layers tbody tr[data-layer]")
    assert len(rows) == 12
    cells = "rows => rows.map((row) => [...row.querySelectorAll('td.amount')].map((cell) => cell.innerText))"
    shown = tab.eval_on_selector_all("#layers tbody tr[data-layer]", cells)
    for (attention, ffn), layer in zip([map(_number, row) for row in shown], at["layers"]):
        assert attention == pytest.approx(layer["attention"], abs=0.006)
        assert ffn == pytest.approx(layer["ffn"], abs=0.006)
    total = _number(tab.inner_text("#layers tfoot .so-far"))
    assert total == pytest.approx(at["total"], abs=0.01)
    parts = [_number(cell.inner_text()) for cell in tab.query_selector_all("#parts td.amount")]
    assert parts[-1] == pytest.approx(sum(parts[:-1]), abs=0.03)
    assert "✓ as the model’s" in text(tab, "#parts")
    effects = [c["effect"] for layer in at["layers"] for c in layer["channels"]]
    strongest = sorted(effects, key=abs)[-10:]
    up, down = (sum(e for e in strongest if (e > 0) == raises) for raises in (True, False))
    assert f"raise it add +{up:.2f}, those that lower it −{-down:.2f}" in text(tab, "#parts")
    assert "leads from layer 7 on" in text(tab, "#verdict")
    assert "★" in text(tab, "#layers tr[data-layer='7']")
    assert tab.inner_text("#layers").count("★") == 1


def test_bars_show_sign_and_length(opened):
    """A bar begins at the zero line, lies on the side of its sign and is as long as its number."""
    given = small()
    tab = opened(page(given))
    bars = tab.evaluate("""() => [...document.querySelectorAll("#layers tbody tr[data-layer]")].map((row) => {
        const box = row.querySelectorAll(".bar")[1], fill = box.querySelector("i").getBoundingClientRect();
        const all = box.getBoundingClientRect(), zero = parseFloat(box.style.getPropertyValue("--zero")) / 100;
        return [(fill.left - all.left) / all.width - zero, (fill.right - all.left) / all.width - zero];
    })""")
    effects = [layer["ffn"] for layer in given["positions"][4]["layers"]]
    largest = max(range(12), key=lambda i: abs(effects[i]))
    unit = (bars[largest][1] - bars[largest][0]) / abs(effects[largest])
    for (left, right), effect in zip(bars, effects):
        assert (right if effect < 0 else left) == pytest.approx(0, abs=0.01)
        assert right - left == pytest.approx(unit * abs(effect), abs=0.012)  # a pixel at least


def test_a_layer_filters_the_channels(opened):
    given = small()
    tab = opened(page(given))
    tab.click("#layers tr[data-layer='8'] button")
    keys = tab.eval_on_selector_all("#channels tr[data-channel]", "rows => rows.map((row) => row.dataset.channel)")
    expected = sorted(given["positions"][4]["layers"][8]["channels"], key=lambda one: -abs(one["effect"]))
    assert keys == [f"8:{one['channel']}" for one in expected]
    assert "Layer 8" in text(tab, "#layer h3")
    facts = "list => [...list.childNodes].map((one) => one.querySelector?.('dt').textContent ?? one.data)"
    assert tab.eval_on_selector("#layer dl", facts) == [
        "attention", "FFN", "update ‖y‖", "residual ‖h‖", "ten largest channels",
    ]  # fmt: skip
    assert tab.evaluate("document.activeElement.closest('tr').dataset.layer") == "8"  # the focus stays
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("Enter")
    assert tab.get_attribute("#layers button[aria-pressed=true] >> xpath=../..", "data-layer") == "9"
    tab.keyboard.press("Enter")
    assert tab.query_selector("#layers button[aria-pressed=true]") is None
    assert not tab.is_visible("#layer")


def test_channels_are_ordered_and_all_can_be_shown(opened):
    given = small()
    tab = opened(page(given))
    visible = "#channels tr[data-channel]:not([hidden])"
    first = [_number(cell.inner_text()) for cell in tab.query_selector_all(f"{visible} td:nth-child(2)")]
    assert len(first) == 12
    assert [abs(value) for value in first] == sorted((abs(value) for value in first), reverse=True)
    strongest = max(abs(c["effect"]) for x in given["positions"][4]["layers"] for c in x["channels"])
    assert abs(first[0]) == pytest.approx(strongest, abs=0.006)
    tab.click("#channels .more")
    assert len(tab.query_selector_all(visible)) == 60


def test_a_channel_opens_its_card(opened):
    given = small()
    channel = max(given["positions"][4]["layers"][10]["channels"], key=lambda one: abs(one["effect"]))
    key = f"10:{channel['channel']}"
    channel["coefficient"] = -abs(channel["coefficient"])
    given["values"][key]["promoted"][0][0] = " Alpha"
    given["values"][key]["suppressed"][0][0] = " Omega"
    given["triggers"][key]["negative"][0]["text"] = [["in", False], [" Peak", True], [" of", False]]
    tab = opened(page(given))
    tab.click("#layers tr[data-layer='10'] button")
    row = f"#channels tr[data-channel='{key}']"
    # The coefficient is negative: what the value suppresses is raised here, and the trigger is of that end.
    assert "Omega" in text(tab, f"{row} .line >> nth=0")
    assert "Alpha" in text(tab, f"{row} .line >> nth=1")
    assert text(tab, f"{row} mark") == "␣Peak"
    tab.focus(f"{row} button")
    tab.keyboard.press("Enter")
    assert tab.evaluate("document.activeElement.id") == "card-title"
    card = text(tab, "#card")
    assert f"Channel {key}" in card
    assert "Alpha" in text(tab, "#card .ends > div >> nth=0")
    assert "Omega" in text(tab, "#card .ends > div >> nth=1")
    assert "−v is written" in card
    assert "fires in" in card
    assert "Triggers of its negative end" in card
    assert text(tab, "#card mark >> nth=3") == "␣Peak"
    tab.keyboard.press("Escape")
    assert tab.evaluate("document.activeElement.closest('tr').dataset.channel") == key


def test_the_heat_map_chooses_layer_and_token(opened):
    tab = opened(page(small()))
    tab.click("#heat .cell[aria-label^='layer 7, token 2 ']")
    assert tab.get_attribute("#prompt [aria-checked=true]", "data-at") == "2"
    assert text(tab, "#layer h3") == "Layer 7"
    tab.focus("#heat .cell.chosen")
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("ArrowRight")
    assert text(tab, "#heat output").startswith("layer 8, token 3 ␣France: ")
    tab.keyboard.press("Enter")
    assert tab.get_attribute("#prompt [aria-checked=true]", "data-at") == "3"
    assert text(tab, "#layer h3") == "Layer 8"
    assert len(tab.query_selector_all("#heat .cell")) == 60
    assert len(tab.query_selector_all("#heat .cell[tabindex='0']")) == 1


def test_colours_of_the_heat_map_follow_the_numbers(opened):
    """Larger is darker, and a first token hundreds of times away from the rest leaves the rest its differences."""
    given = small()
    given["heat"][0] = [300.0, 1e-4] * 6
    tab = opened(page(given))
    read = "cells => cells.map((one) => [one.at, one.layer, parseFloat(one.style.getPropertyValue('--much'))])"
    much = tab.eval_on_selector_all("#heat .cell", read)
    by_value = [m for _, m in sorted((given["heat"][at][layer], m) for at, layer, m in much)]
    assert by_value == sorted(by_value)
    assert (by_value[0], by_value[-1]) == (0, 100)
    rest = [m for at, _, m in much if at > 0]
    assert max(rest) - min(rest) > 50


def test_search(opened):
    given = small()
    keys = list(given["values"])
    given["values"][keys[5]]["promoted"][3][0] = " Zanzibar"
    given["values"][keys[6]]["suppressed"][3][0] = " zanzibari"
    given["triggers"][keys[7]]["positive"][0]["text"] = [["to ", False], ["Zan", True], ["zibar", False]]
    tab = opened(page(given))
    tab.keyboard.press("/")
    tab.keyboard.type("zanzibar")
    found = [text(tab, f"#found li >> nth={i}") for i in range(len(tab.query_selector_all("#found li")))]
    assert [line.split()[0] for line in found] == [keys[5], keys[6], keys[7]]
    assert "promotes" in found[0]
    assert "suppresses" in found[1]
    assert "fires at" in found[2]
    tab.keyboard.press("ArrowDown")
    assert tab.get_attribute("#find", "aria-activedescendant") == "found-1"
    tab.keyboard.press("Enter")
    assert f"Channel {keys[6]}" in text(tab, "#card")
    assert not tab.is_visible("#found")

    tab.fill("#find", keys[9])
    tab.click("#found li >> nth=0")
    assert f"Channel {keys[9]}" in text(tab, "#card")
    tab.fill("#find", "capital")
    tab.focus("#find")
    tab.keyboard.press("Enter")
    assert tab.evaluate("document.activeElement.dataset.at") == "1"
    tab.fill("#find", "no such thing")
    assert "Nothing found" in text(tab, "#found")
    tab.keyboard.press("Escape")
    assert not tab.is_visible("#found")


def test_a_hostile_prompt_is_text(opened):
    tokens = [EVIL, "</script>", "\n", "\t", "\x00", "\u202edlrow", "  ", "", "x" * 400, "\ud83d"]
    given = document(tokens, layers=2)
    for value in given["values"].values():
        value["promoted"][0][0] = EVIL
    for kept in given["triggers"].values():
        kept["positive"][0]["text"] = [[EVIL, True]]
    given["notes"] = [EVIL]
    tab = opened(page(given), width=375)
    shown = [text(tab, f"#prompt button >> nth={i} >> .token") for i in range(8)]
    assert shown == [EVIL, "</script>", "↵", "⇥", "␀", "⟨202E⟩dlrow", "␣␣", "∅"]
    assert tab.inner_text("h1").startswith(EVIL)
    assert EVIL in tab.inner_text("#notes")
    tab.click("#channels tr[data-channel] button >> nth=0")
    assert EVIL in tab.inner_text("#card .ends")
    assert len(tab.query_selector_all("script")) == 2
    tab.fill("#find", "alert")
    assert EVIL in tab.inner_text("#found")
    no_overflow(tab)


def test_refused_effects_are_replaced_by_sizes(opened):
    given = document(effects=False, triggers=False, gated=False, layers=6)
    for at in given["positions"]:
        at.update(predictions=[], token=None)
    tab = opened(page(given))
    assert given["effects_why_not"] in text(tab, "#refused")
    assert not tab.is_visible("#prediction")
    layer = given["positions"][4]["layers"][3]
    share = 100 * layer["update_norm"] / layer["residual_norm"]
    assert f"{share:.1f}" in text(tab, "#layers tr[data-layer='3'] td.amount >> nth=0")
    sizes = [_number(cell.inner_text()) for cell in tab.query_selector_all("#channels td.amount:nth-child(2)")][:12]
    assert sizes == sorted(sizes, reverse=True)
    assert "key · x" in text(tab, "#card")
    assert "gate" not in text(tab, "#card .equation")
    assert "No index was given" in text(tab, "#card")


def test_a_broken_sum_is_said_loudly(opened):
    given = document(layers=4)
    given["sum_rule"][2] = {"layer": 2, "error": 0.5, "allowed": 1e-6, "holds": False}
    given["positions"][4]["total"] += 1
    tab = opened(page(given))
    assert "⚠" in text(tab, "#broken")
    assert ": 2." in text(tab, "#broken")
    assert "In layer 2 the channels do not add up" in text(tab, "#notes")
    assert "⚠ the model’s is" in text(tab, "#parts")
    assert "✓" not in text(tab, "#checked") + text(tab, "#parts")


@contextmanager
def _environment(**values):
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def test_a_missing_browser_is_skipped_or_fails():
    with _environment(FANFOLD_REQUIRE_BROWSER="0"), pytest.raises(pytest.skip.Exception, match="Chromium"):
        without("Chromium is not installed")
    with _environment(FANFOLD_REQUIRE_BROWSER="1"), pytest.raises(pytest.fail.Exception, match="Chromium"):
        without("Chromium is not installed")
