"""Pages in a real browser: Chromium, driven by Playwright, as the fixture `opened`.

Without Chromium or Playwright these tests are skipped; FANFOLD_REQUIRE_BROWSER=1 makes that a failure.
"""

from __future__ import annotations

import os
import re
import shutil

import pytest

TIMEOUT_MS = 60_000  # for machines that are busy with other tests


@pytest.fixture(scope="module")
def chromium():
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        without("Playwright is not installed: pip install playwright")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        without("Chromium is not installed: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox"], headless=True, timeout=4 * TIMEOUT_MS
        )  # fmt: skip
        yield browser
        browser.close()


def without(reason: str) -> None:
    if os.environ.get("FANFOLD_REQUIRE_BROWSER") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture
def opened(chromium, tmp_path):
    """opened(html, width, scheme) -> the browser's page of it. The test fails on any error, warning or request."""
    contexts, said = [], []

    def show(html, width=1440, scheme="light"):
        file = tmp_path / f"page{len(contexts)}.html"
        file.write_text(html, encoding="utf-8")
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


def text(tab, selector: str) -> str:
    """What is shown there, on one line."""
    return re.sub(r"\s+", " ", tab.inner_text(selector)).strip()


def no_overflow(tab) -> None:
    """Nothing on the page is wider than the window."""
    wide, window = tab.evaluate("() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide <= window
