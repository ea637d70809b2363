"""Test the dashboard in a real Chromium: pages, charts, phone, dark mode, live updates, and actions with a token."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("playwright.sync_api")

from playwright.sync_api import sync_playwright

from autosel.ledger import open_ledger
from autosel.ledger.key import current_mode
from tests import drawn
from tests.cpu.daemons import Daemon, cli, running
from tests.cpu.test_ledger import ATTN, record
from tests.quiet import here

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian: apt install chromium)"),
]
PAGES = (
    "/",
    "/race",
    "/op",
    "/op/attn",
    "/decisions",
    "/decisions/1",
    "/certificates",
    "/fleet",
    "/health",
)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    home = tmp_path_factory.mktemp("home")
    with open_ledger(home=home, alone=True) as ledger:
        for power in range(7, 14):
            record(ledger, f"{power}", fp=here(), workload=ATTN.at(L=1 << power), mode=current_mode())
    with running(home, "--no-tune", "--tcp", "127.0.0.1:0") as made:
        yield made


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as p:
        made = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def troubles() -> list[str]:
    """Return the browser's complaints: errors of scripts, of the content policy, of missing files."""
    return []


@contextmanager
def opened(browser: Any, **options: Any) -> Iterator[Any]:
    """Open a page in a new context."""
    context = browser.new_context(**options)
    yield context.new_page()
    context.close()


@pytest.fixture
def tab(browser: Any, troubles: list[str]) -> Iterator[Any]:
    with opened(browser, viewport={"width": 1280, "height": 900}) as page:
        page.on("console", lambda m: troubles.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: troubles.append(str(e)))
        yield page


def test_every_page_is_complete_and_the_browser_reports_no_error(tab: Any, daemon: Daemon, troubles: list[str]) -> None:
    for path in PAGES:
        assert tab.goto(daemon.url.rstrip("/") + path).status == 200
        assert tab.locator("nav a[aria-current]").count() == 1, path
    assert troubles == []


def test_charts_are_drawn_from_the_pages_own_data(tab: Any, daemon: Daemon) -> None:
    tab.goto(f"{daemon.url}op/attn")
    tab.wait_for_selector("#times .scatterlayer .trace")
    assert "cpp:attn" in (tab.locator("#times .legend").first.text_content() or "")
    assert tab.locator("#times .scatterlayer .trace path.js-line").count() >= 1


@pytest.mark.parametrize("path", drawn.share(PAGES, days=3))
def test_a_phone_scrolls_down_and_never_sideways(browser: Any, daemon: Daemon, path: str) -> None:
    with opened(browser, viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True) as page:
        page.goto(daemon.url.rstrip("/") + path)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        sideways = "[...document.querySelectorAll('.wide:has(.stack)')].filter(w => w.scrollWidth > w.clientWidth + 1)"
        assert page.evaluate(f"{sideways}.length") == 0, "on a phone, rows of a table must be lists"


def test_it_is_dark_if_the_system_is(browser: Any, daemon: Daemon) -> None:
    grounds = {}
    for scheme in ("light", "dark"):
        with opened(browser, color_scheme=scheme) as page:
            page.goto(daemon.url)
            grounds[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
    channels = {scheme: [int(x) for x in text[4:-1].split(",")] for scheme, text in grounds.items()}
    assert max(channels["dark"]) < 64 < 192 < min(channels["light"])


def test_a_page_is_complete_without_javascript(browser: Any, daemon: Daemon) -> None:
    with opened(browser, java_script_enabled=False) as page:
        page.goto(f"{daemon.url}op/attn")
        assert "cpp:attn" in page.locator("main").inner_text()
        assert page.locator("table tbody tr").count() >= 7
        page.goto(daemon.url)
        assert "attn" in page.locator("#serving").inner_text()
        page.goto(f"{daemon.url}decisions/1")
        assert "2.0x" in page.locator("main").inner_text()


def test_another_site_cannot_read_or_change_anything(browser: Any, daemon: Daemon) -> None:
    """Load a page from another origin in the browser."""
    asking = (
        "async ([url, method]) => { try { const a = await fetch(url, {method, headers: method === 'POST' ?"
        " {'Content-Type': 'application/json'} : {}, body: method === 'POST' ? '{\"reason\":\"x\"}' : undefined});"
        " return await a.text(); } catch (e) { return 'refused'; } }"
    )
    with opened(browser) as page:
        page.route("http://evil.example/", lambda route: route.fulfill(body="<p>hello</p>", content_type="text/html"))
        page.goto("http://evil.example/")
        assert page.evaluate(asking, [f"{daemon.url}v1/serving", "GET"]) == "refused"
        assert page.evaluate(asking, [f"{daemon.url}v1/decisions/1/demote", "POST"]) == "refused"
    with daemon.client() as ask:
        assert ask.get("/v1/decisions/1")["serves"]


def test_a_decision_of_another_process_appears_without_a_reload(tab: Any, daemon: Daemon) -> None:
    tab.goto(daemon.url)
    tab.wait_for_selector("#line.live")
    with open_ledger(home=daemon.home) as ledger:
        made = record(ledger, "while looking", fp=here(), workload=ATTN.at(L=64), mode=current_mode())
    tab.wait_for_selector(f"#changes a[href='/decisions/{made.id}']")


def test_demoting_needs_the_token_a_reason_and_a_confirmation(tab: Any, daemon: Daemon) -> None:
    tab.on("dialog", lambda dialog: dialog.accept())
    tab.goto(f"{daemon.url}decisions/2")
    form = tab.locator("form.act")
    form.locator("select[name=verb]").select_option("demote")
    form.locator("button").click()
    assert form.locator("output").inner_text() == ""  # the browser requests missing files
    form.locator("input[name=reason]").fill("seen to be wrong")
    form.locator("input[name=sure]").check()
    form.locator("button").click()
    tab.wait_for_function("document.querySelector('form.act output').textContent.includes('token')")
    form.locator("input[name=token]").fill(daemon.token)
    form.locator("button").click()
    tab.wait_for_url("**/decisions/*", wait_until="load")
    tab.wait_for_selector("h1 .state-word.demoted")
    assert "seen to be wrong" in cli(daemon.home, "explain", "--history", "-n", "1").stdout


def test_a_missing_file_of_certificates_is_not_an_error(tab: Any, daemon: Daemon) -> None:
    tab.goto(f"{daemon.url}certificates")
    assert "No certificate yet" in tab.locator("main").inner_text()


def test_an_unknown_address_shows_a_message(tab: Any, daemon: Daemon) -> None:
    assert tab.goto(f"{daemon.url}op/nothing").status == 404
    assert "nothing is decided for" in tab.locator("h1").inner_text()
