"""The report page of a reading, looked at: widths, contrast, focus, roles, themes, inside a notebook."""

from __future__ import annotations

import pytest

from browser import no_overflow
from fanfold.report import fragment, page
from report_documents import document, small

CASES = {
    "plain": {"layers": 12},
    "long": {"tokens": [f" word{i}" for i in range(20)], "layers": 48, "channels": 1},
    "one": {"tokens": ["x"], "layers": 1, "triggers": False, "values": False},
    "refused": {"effects": False, "triggers": False, "gated": False, "layers": 6},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("width", [375, 1440])
def test_nothing_is_wider_than_the_window(opened, case, width):
    tab = opened(page(document(**CASES[case])), width=width)
    no_overflow(tab)
    tab.click("#channels tr[data-channel] button >> nth=0")
    tab.click("summary >> text=Words used here", force=True)
    no_overflow(tab)


def test_the_card_is_a_sheet_on_a_small_screen(opened):
    tab = opened(page(small()), width=375)
    assert not tab.is_visible("#card")
    tab.click("#channels tr[data-channel] button >> nth=2")
    box = tab.locator("#card").bounding_box()
    assert box["x"] == 0
    assert box["y"] > 100
    assert box["y"] + box["height"] == pytest.approx(900, abs=1)
    tab.click("#card .close")
    assert not tab.is_visible("#card")


def test_theme(opened):
    tab = opened(page(document(layers=1)), scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = tab.evaluate(background)
    assert tab.inner_text("#theme") == "Light theme"
    tab.click("#theme")
    assert tab.evaluate(background) != dark

    kept = "localStorage.getItem('fanfold-theme')"
    assert tab.evaluate(kept) == "light"
    # What a browser does with it until the page is opened again is its own affair, and Chromium has been seen to lose
    # it here: the next page finds it stored.
    tab.add_init_script("localStorage.setItem('fanfold-theme', 'light')")
    tab.reload()
    assert tab.evaluate(background) != dark
    tab.click("#theme")
    assert tab.evaluate(background) == dark
    assert tab.evaluate(kept) == "dark"


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
    tab = opened(page(given), scheme=scheme)
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
    tab = opened(page(small()))
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
    tab = opened(page(document(layers=2)))
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
