"""Check that a demoted decision is shown as demoted, with the reason, and its race as history, without its effect."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from autosel import dispatch, ops
from autosel.cli.main import run
from autosel.devices import this_device
from autosel.ledger.commands import Demote
from autosel.ledger.key import current_mode
from autosel.ledger.store import open_ledger
from autosel.values import Decision
from tests.cpu.test_ledger import ATTN, CPP, record, verdict
from tests.null.daemon_app import App, over_socket

Said = Callable[..., str]
REASON = "a NaN was seen"
pytestmark = pytest.mark.usefixtures("cpu_alone")


@pytest.fixture
def cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autosel.native.cuda.DRIVER", "libno-such-driver.so.1")


@pytest.fixture
def said(home: Path, capsys: pytest.CaptureFixture[str]) -> Said:
    """Return the output of a command line as one line."""

    def call(*arguments: str) -> str:
        assert run(list(arguments)) == 0, capsys.readouterr()
        out = capsys.readouterr().out
        return out if "--json" in arguments else " ".join(click.unstyle(out).split())

    return call


@pytest.fixture
def decisions(home: Path) -> tuple[Decision, Decision]:
    """Return a promoted decision, and its demotion."""
    fp = dataclasses.replace(this_device(), environment={"torch": "2"})
    with open_ledger(home=home) as ledger:
        found = dataclasses.replace(verdict(), roofline=0.72, read_bytes_per_s=4e10)
        promoted = record(ledger, fp=fp, mode=current_mode(), verdict=found)
        return promoted, ledger.write(Demote(decision_id=promoted.id, reason=REASON))


def numbers(made: Decision) -> list[str]:
    """Return the numbers of the promotion's effect."""
    v = made.verdict
    assert v is not None and v.effect is not None and v.next_best is not None and v.roofline is not None
    return [f"{v.effect.median:.2g}x", f"{v.next_best[1]:.2g}x", f"{v.roofline:.0%}"]


def test_a_demotion_leaves_the_verdict_and_takes_its_effect(decisions: tuple[Decision, Decision]) -> None:
    promoted, demoted = decisions
    assert promoted.standing == promoted.verdict and promoted.effect is not None
    assert demoted.verdict == promoted.verdict and demoted.standing is None and demoted.effect is None
    assert (promoted.told, demoted.told) == (promoted.reason, f"demoted: {REASON}")


def test_the_verbs_show_it_as_demoted(decisions: tuple[Decision, Decision], said: Said) -> None:
    promoted, demoted = decisions
    table = said("best", ATTN.op)
    assert "demoted" in table and f"decision {demoted.id}, demoted: {REASON}; the baseline runs instead" in table
    assert not [n for n in numbers(promoted) if n in table]
    found = json.loads(said("best", ATTN.op, "--json"))
    assert (found["state"], found["recorded"], found["reason"]) == ("baseline", "demoted", REASON)
    assert [found[n] for n in ("speedup", "next_best", "roofline", "outcome")] == [None] * 4
    explained = said("explain", ATTN.op)
    assert f"demoted: {REASON}" in explained and f"history raced before: {CPP.candidate}" in explained
    assert not any(f" {name} " in explained for name in ("effect", "limit", "tail"))
    evidence = json.loads(said("explain", ATTN.op, "--json"))[0]
    assert evidence["verdict"] is None and evidence["history"]["winner"] == CPP.candidate
    newest = json.loads(said("explain", "--history", "--json"))[0]
    assert newest["state"] == "demoted" and newest["speedup"] is None


def test_best_and_its_explanation_show_it_as_demoted(decisions: tuple[Decision, Decision], home: Path) -> None:
    with dispatch.use(home) as board:
        found = board.resolution(ops.find(ATTN.op), ATTN)
    assert found.reason == f"demoted: {REASON}" and not found.served
    told = found.explain()
    assert "demoted" in told and "effect" not in told


def test_the_daemon_its_pages_and_metrics_show_it_as_demoted(decisions: tuple[Decision, Decision], home: Path) -> None:
    promoted, demoted = decisions
    with over_socket(App(home)) as client:
        found: Any = client.get(f"/v1/decisions/{demoted.id}").json()
        assert found["serves"] and found["recorded"] == "demoted" and found["speedup"] is None
        assert client.get(f"/v1/best/{ATTN.op}").json()[0]["speedup"] is None
        assert "autosel_speedup_median{" not in client.get("/metrics").text
        page = client.get(f"/decisions/{demoted.id}").text
        assert f"demoted: {REASON}" in page and "is history: what it found is not what serves now" in page
        facts = page.partition('<dl class="facts">')[2].partition("</dl>")[0]
        assert not [n for n in numbers(promoted) if n.replace("%", " %") in facts or n in facts]
        served = client.get(f"/op/{ATTN.op}").text.partition("<h2>Served</h2>")[2].partition("</table>")[0]
        assert "demoted" in served and not [n for n in numbers(promoted) if n in served]


def test_an_arm_that_was_promoted_by_hand_has_no_effect_of_another(decisions: tuple[Decision, Decision]) -> None:
    promoted, _ = decisions
    other = dataclasses.replace(promoted, arm=dataclasses.replace(promoted.arm, candidate="cpp:another"))
    assert other.standing is None and other.effect is None and other.told == other.reason
