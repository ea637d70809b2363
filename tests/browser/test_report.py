"""Test a run's report in a real Chromium: it fits a phone without horizontal scrolling, and needs no network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api")
pytest.importorskip("matplotlib")

from playwright.sync_api import sync_playwright

from autosel.certify import report, slo
from autosel.certify.certificate import seal
from tests.browser import test_dashboard
from tests.null.certificates import certificate, decode_run

pytestmark = test_dashboard.pytestmark


def test_a_report_fits_its_page_and_is_complete_without_a_network(tmp_path: Path) -> None:
    """Use the longest possible words: a key in hex, a deep path, a part of a model."""
    made = certificate(decode_run(layers=4, weights="/srv/" + "deep/" * 30 + "model"), objectives=slo.parse("itl<9s"))
    report.write(tmp_path, seal(replace(made, signer="0f" * 32)))
    troubles: list[str] = []
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=test_dashboard.CHROMIUM, args=["--no-sandbox"])
        for width, scheme in ((390, "light"), (1100, "dark")):
            context: Any = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page = context.new_page()
            page.on("request", lambda r: troubles.append(r.url) if not r.url.startswith("file:") else None)
            page.on("console", lambda m: troubles.append(m.text))
            page.goto((tmp_path / "index.html").as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.locator("figure svg").count() == 3
        browser.close()
    assert troubles == []
