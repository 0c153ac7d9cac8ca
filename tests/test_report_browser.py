"""The report page in a real browser: clicked, typed into, read by its roles; Chromium driven by Playwright.

Without Chromium or Playwright these tests are skipped; FANFOLD_REQUIRE_BROWSER=1 makes that a failure.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import contextmanager

import pytest

from fanfold.report import fragment, page
from report_documents import document

EVIL = "<script>alert(1)</script>"
TIMEOUT_MS = 60_000  # for machines that are busy with other tests


@pytest.fixture(scope="module")
def chromium():
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        _without("Playwright is not installed: pip install playwright")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        _without("Chromium is not installed: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox"], headless=True, timeout=4 * TIMEOUT_MS
        )  # fmt: skip
        yield browser
        browser.close()


def _without(reason: str) -> None:
    if os.environ.get("FANFOLD_REQUIRE_BROWSER") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture
def opened(chromium, tmp_path):
    """opened(document or html, width, scheme) -> page of the browser. Fails on any error, warning or request."""
    contexts, said = [], []

    def show(given, width=1440, scheme="light"):
        file = tmp_path / f"report{len(contexts)}.html"
        file.write_text(given if isinstance(given, str) else page(given), encoding="utf-8")
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        tab = context.new_page()
        tab.set_default_timeout(TIMEOUT_MS)
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.on("dialog", lambda dialog: (said.append(f"dialog {dialog.message}"), dialog.dismiss()))
        tab.on("request", lambda request: request.url == file.as_uri() or said.append(f"request {request.url}"))
        tab.goto(file.as_uri())
        return tab

    yield show
    for context in contexts:
        context.close()
    assert said == []


def small(**more) -> dict:
    """Twelve layers: enough to see everything, quick to open."""
    return document(**{"layers": 12, "channels": 5, **more})


def _text(tab, selector: str) -> str:
    return re.sub(r"\s+", " ", tab.inner_text(selector)).strip()


def _number(text: str) -> float:
    return float(text.replace("−", "-").replace(",", ""))


def test_a_token_is_chosen_by_click_and_by_keys(opened):
    given = small()
    given["positions"][1]["predictions"][0]["text"] = " Lisbon"
    tab = opened(given)
    chosen = "#prompt [aria-checked=true]"
    assert tab.get_attribute(chosen, "data-at") == "4"  # the last token first
    tab.click("#prompt button >> nth=1")
    assert tab.get_attribute(chosen, "data-at") == "1"
    assert "␣Lisbon" in _text(tab, "#verdict")
    assert "Lisbon" in tab.text_content("#live")  # a screen reader hears it
    tab.keyboard.press("ArrowRight")
    assert tab.get_attribute(chosen, "data-at") == "2"
    assert tab.evaluate("document.activeElement.dataset.at") == "2"
    assert "␣Paris" in _text(tab, "#verdict")
    tab.keyboard.press("Home")
    tab.keyboard.press("ArrowLeft")  # nothing before the first
    assert tab.get_attribute(chosen, "data-at") == "0"


def test_layers_sum_to_the_logit(opened):
    given = small()
    at = given["positions"][4]
    tab = opened(given)
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
    assert "✓ the model’s logit" in _text(tab, "#parts")
    assert "leads from layer 7 on" in _text(tab, "#verdict")
    assert "★" in _text(tab, "#layers tr[data-layer='7']")
    assert tab.inner_text("#layers").count("★") == 1


def test_bars_show_sign_and_length(opened):
    """A bar begins at the zero line, lies on the side of its sign and is as long as its number."""
    given = small()
    tab = opened(given)
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
    tab = opened(given)
    tab.click("#layers tr[data-layer='8'] button")
    keys = tab.eval_on_selector_all("#channels tr[data-channel]", "rows => rows.map((row) => row.dataset.channel)")
    expected = sorted(given["positions"][4]["layers"][8]["channels"], key=lambda one: -abs(one["effect"]))
    assert keys == [f"8:{one['channel']}" for one in expected]
    assert "Layer 8" in _text(tab, "#layer h3")
    assert tab.evaluate("document.activeElement.closest('tr').dataset.layer") == "8"  # the focus stays
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("Enter")
    assert tab.get_attribute("#layers button[aria-pressed=true] >> xpath=../..", "data-layer") == "9"
    tab.keyboard.press("Enter")
    assert tab.query_selector("#layers button[aria-pressed=true]") is None
    assert not tab.is_visible("#layer")


def test_channels_are_ordered_and_all_can_be_shown(opened):
    given = small()
    tab = opened(given)
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
    tab = opened(given)
    tab.click("#layers tr[data-layer='10'] button")
    row = f"#channels tr[data-channel='{key}']"
    # The coefficient is negative: what the value suppresses is raised here, and the trigger is of that end.
    assert "Omega" in _text(tab, f"{row} .line >> nth=0")
    assert "Alpha" in _text(tab, f"{row} .line >> nth=1")
    assert _text(tab, f"{row} mark") == "␣Peak"
    tab.focus(f"{row} button")
    tab.keyboard.press("Enter")
    assert tab.evaluate("document.activeElement.id") == "card-title"
    card = _text(tab, "#card")
    assert f"Channel {key}" in card
    assert "Alpha" in _text(tab, "#card .ends > div >> nth=0")
    assert "Omega" in _text(tab, "#card .ends > div >> nth=1")
    assert "−v is written" in card
    assert "fires in" in card
    assert "Triggers of its negative end" in card
    assert _text(tab, "#card mark >> nth=3") == "␣Peak"
    tab.keyboard.press("Escape")
    assert tab.evaluate("document.activeElement.closest('tr').dataset.channel") == key


def test_the_heat_map_chooses_layer_and_token(opened):
    tab = opened(small())
    tab.click("#heat .cell[aria-label^='layer 7, token 2 ']")
    assert tab.get_attribute("#prompt [aria-checked=true]", "data-at") == "2"
    assert _text(tab, "#layer h3") == "Layer 7"
    tab.focus("#heat .cell.chosen")
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("ArrowRight")
    assert _text(tab, "#heat output").startswith("layer 8, token 3 ␣France: ")
    tab.keyboard.press("Enter")
    assert tab.get_attribute("#prompt [aria-checked=true]", "data-at") == "3"
    assert _text(tab, "#layer h3") == "Layer 8"
    assert len(tab.query_selector_all("#heat .cell")) == 60
    assert len(tab.query_selector_all("#heat .cell[tabindex='0']")) == 1


def test_search(opened):
    given = small()
    keys = list(given["values"])
    given["values"][keys[5]]["promoted"][3][0] = " Zanzibar"
    given["values"][keys[6]]["suppressed"][3][0] = " zanzibari"
    given["triggers"][keys[7]]["positive"][0]["text"] = [["to ", False], ["Zan", True], ["zibar", False]]
    tab = opened(given)
    tab.keyboard.press("/")
    tab.keyboard.type("zanzibar")
    found = [_text(tab, f"#found li >> nth={i}") for i in range(len(tab.query_selector_all("#found li")))]
    assert [line.split()[0] for line in found] == [keys[5], keys[6], keys[7]]
    assert "promotes" in found[0]
    assert "suppresses" in found[1]
    assert "fires at" in found[2]
    tab.keyboard.press("ArrowDown")
    assert tab.get_attribute("#find", "aria-activedescendant") == "found-1"
    tab.keyboard.press("Enter")
    assert f"Channel {keys[6]}" in _text(tab, "#card")
    assert not tab.is_visible("#found")

    tab.fill("#find", keys[9])
    tab.click("#found li >> nth=0")
    assert f"Channel {keys[9]}" in _text(tab, "#card")
    tab.fill("#find", "capital")
    tab.focus("#find")
    tab.keyboard.press("Enter")
    assert tab.evaluate("document.activeElement.dataset.at") == "1"
    tab.fill("#find", "no such thing")
    assert "Nothing found" in _text(tab, "#found")
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
    tab = opened(given, width=375)
    shown = [_text(tab, f"#prompt button >> nth={i} >> .token") for i in range(8)]
    assert shown == [EVIL, "</script>", "↵", "⇥", "␀", "⟨202E⟩dlrow", "␣␣", "∅"]
    assert tab.inner_text("h1").startswith(EVIL)
    assert EVIL in tab.inner_text("#notes")
    tab.click("#channels tr[data-channel] button >> nth=0")
    assert EVIL in tab.inner_text("#card .ends")
    assert len(tab.query_selector_all("script")) == 2
    tab.fill("#find", "alert")
    assert EVIL in tab.inner_text("#found")
    _no_overflow(tab)


def _no_overflow(tab):
    wide = tab.evaluate("""() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]""")
    assert wide[0] <= wide[1]


CASES = {
    "plain": {"layers": 12},
    "long": {"tokens": [f" word{i}" for i in range(20)], "layers": 48, "channels": 1},
    "one": {"tokens": ["x"], "layers": 1, "triggers": False, "values": False},
    "refused": {"effects": False, "triggers": False, "gated": False, "layers": 6},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("width", [375, 1440])
def test_nothing_is_wider_than_the_window(opened, case, width):
    tab = opened(document(**CASES[case]), width=width)
    _no_overflow(tab)
    tab.click("#channels tr[data-channel] button >> nth=0")
    tab.click("summary >> text=Words used here", force=True)
    _no_overflow(tab)


def test_the_card_is_a_sheet_on_a_small_screen(opened):
    tab = opened(small(), width=375)
    assert not tab.is_visible("#card")
    tab.click("#channels tr[data-channel] button >> nth=2")
    box = tab.locator("#card").bounding_box()
    assert box["x"] == 0
    assert box["y"] > 100
    assert box["y"] + box["height"] == pytest.approx(900, abs=1)
    tab.click("#card .close")
    assert not tab.is_visible("#card")


def test_refused_effects_are_replaced_by_sizes(opened):
    given = document(**CASES["refused"])
    for at in given["positions"]:
        at.update(predictions=[], token=None)
    tab = opened(given)
    assert given["effects_why_not"] in _text(tab, "#refused")
    assert not tab.is_visible("#prediction")
    layer = given["positions"][4]["layers"][3]
    share = 100 * layer["update_norm"] / layer["residual_norm"]
    assert f"{share:.1f}" in _text(tab, "#layers tr[data-layer='3'] td.amount >> nth=0")
    sizes = [_number(cell.inner_text()) for cell in tab.query_selector_all("#channels td.amount:nth-child(2)")][:12]
    assert sizes == sorted(sizes, reverse=True)
    assert "key · x" in _text(tab, "#card")
    assert "gate" not in _text(tab, "#card .equation")
    assert "No index was given" in _text(tab, "#card")


def test_a_broken_sum_is_said_loudly(opened):
    given = document(layers=4)
    given["sum_rule"][2] = {"layer": 2, "error": 0.5, "allowed": 1e-6, "holds": False}
    given["positions"][4]["total"] += 1
    tab = opened(given)
    assert "⚠" in _text(tab, "#broken")
    assert ": 2." in _text(tab, "#broken")
    assert "In layer 2 the channels do not add up" in _text(tab, "#notes")
    assert "⚠ the model’s logit is" in _text(tab, "#parts")
    assert "✓" not in _text(tab, "#checked") + _text(tab, "#parts")


def test_theme(opened):
    tab = opened(document(layers=1), scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = tab.evaluate(background)
    assert tab.inner_text("#theme") == "Light theme"
    tab.click("#theme")
    assert tab.evaluate(background) != dark
    tab.reload()
    assert tab.evaluate(background) != dark  # kept
    tab.click("#theme")
    assert tab.evaluate(background) == dark


# Contrast of every text with what lies behind it (WCAG 2: 4.5, or 3 for large text), opacity counted in.
CONTRAST = """() => {
    const pen = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    const rgba = (colour) => { pen.clearRect(0, 0, 1, 1); pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1);
        return [...pen.getImageData(0, 0, 1, 1).data].map((v) => v / 255); };
    const over = (top, below, alpha) => below.map((v, i) => v + (top[i] - v) * alpha);
    const light = (c) => { const [r, g, b] = c.map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const low = [];
    let seen = 0;
    for (const box of document.querySelectorAll("body *")) {
        if (![...box.childNodes].some((node) => node.nodeType === 3 && node.data.trim())) continue;
        if (/^(SCRIPT|STYLE|NOSCRIPT)$/.test(box.tagName) || box.closest(".unseen, .skip")) continue;
        if (!box.checkVisibility()) continue;
        let behind = [1, 1, 1], alpha = 1;
        const chain = [];
        for (let each = box; each; each = each.parentElement) chain.unshift(each);
        for (const each of chain) {
            const style = getComputedStyle(each), c = rgba(style.backgroundColor);
            alpha *= style.opacity;
            behind = over(c.slice(0, 3), behind, c[3]);
        }
        const style = getComputedStyle(box), c = rgba(style.color);
        const [a, b] = [light(over(c.slice(0, 3), behind, c[3] * alpha)), light(behind)];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
        seen++;
        if (ratio < (large ? 3 : 4.5)) low.push(`${ratio.toFixed(2)} ${box.className} ${box.textContent}`);
    }
    return [seen, [...new Set(low)]];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(opened, scheme):
    given = document(layers=6)
    given["sum_rule"][2]["holds"] = False
    given["positions"] = given["positions"][1:]  # one token cannot be chosen
    tab = opened(given, scheme=scheme)
    tab.click("#layers tr[data-layer='4'] button")
    tab.click("summary >> nth=0")
    tab.fill("#find", "paris")
    seen, low = tab.evaluate(CONTRAST)
    assert seen > 300
    assert low == []


FOCUSED = """() => {
    const at = document.activeElement, style = getComputedStyle(at);
    const name = at.id || at.closest("[id]")?.id || at.tagName;
    return at === document.body ? null : [name, style.outlineStyle, parseFloat(style.outlineWidth)];
}"""


def test_the_focus_is_seen(opened):
    """Every stop of the tab key has an outline, and there are few: arrow keys move inside lists."""
    tab = opened(small())
    stops = []
    for _ in range(40):
        tab.keyboard.press("Tab")
        stop = tab.evaluate(FOCUSED)
        if stop is None:
            break
        stops.append(stop)
    assert all(style == "solid" and width >= 2 for _, style, width in stops)
    order = [name for name, *_ in stops]
    assert [name for name in order if name in ("find", "prompt", "layers", "channels", "heat")] == [
        "find", "prompt", "layers", "channels", "channels", "heat",
    ]  # fmt: skip
    assert len(order) < 20


def test_roles(opened):
    tab = opened(document(layers=2))
    assert tab.get_by_role("radiogroup", name="Prompt").get_by_role("radio").count() == 5
    assert tab.get_by_role("radio", name="token 3: ␣France").get_attribute("aria-checked") == "false"
    assert tab.get_by_role("combobox", name="Search tokens, channels and triggers").count() == 1
    assert tab.get_by_role("table", name="Layer by layer").get_by_role("button").count() == 2
    assert tab.get_by_role("grid").get_by_role("gridcell").count() == 10
    assert tab.get_by_role("complementary").count() == 1
    names = tab.eval_on_selector_all(
        "button", "all => all.map((b) => b.getAttribute('aria-label') ?? b.textContent.trim())"
    )
    assert all(names)


def test_inside_a_notebook(opened):
    """The frame runs its script without reaching the notebook's page, and keeps working where nothing can be stored."""
    tab = opened(f"<!doctype html><meta charset=utf-8><title>notebook</title>{fragment(document(layers=2))}")
    frame = tab.frame_locator("iframe")
    assert "␣Paris" in frame.locator("#verdict").inner_text()
    frame.locator("#prompt button").nth(1).click()
    frame.locator("#theme").click()
    assert frame.locator("#prompt [aria-checked=true]").get_attribute("data-at") == "1"


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
        _without("Chromium is not installed")
    with _environment(FANFOLD_REQUIRE_BROWSER="1"), pytest.raises(pytest.fail.Exception, match="Chromium"):
        _without("Chromium is not installed")
