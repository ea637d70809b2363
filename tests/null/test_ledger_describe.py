"""Check decisions wherever they are shown.

An effect timed next to other work is marked. A demoted decision is shown with its reason, and its race as history,
without its effect.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import pytest

from autosel import dispatch, ops
from autosel.candidates import registry
from autosel.cli.main import run
from autosel.devices import this_device
from autosel.ledger.commands import Demote
from autosel.ledger.key import current_mode
from autosel.ledger.store import open_ledger
from autosel.tuning.shortlist import way_of
from autosel.values import Conditions, Decision
from tests.cpu.test_ledger import ATTN, CPP, PASSED, record, verdict
from tests.null.daemon_app import App, over_socket

BUSY = Conditions(watched=True, again=160, busy_cores=1.7, by=("cc1plus 1.2 cores", "make 0.4 cores"))
QUIET = Conditions(watched=True, again=2, busy_cores=0.01)
TOLD = "timed beside other work: cc1plus 1.2 cores, make 0.4 cores; 160 samples taken again"
WORK = ops.OPS["attn"].workload("bf16", {"B": 1, "Hq": 8, "Hkv": 2, "S": 1, "D": 64, "L": 512})
REASON = "a NaN was seen"
Said = Callable[..., str]

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


def promoted(home: Path, **changes: Any) -> Decision:
    """Record that PyTorch's packed attention was promoted on this device."""
    fp = this_device()
    arm, base = (way_of(registry.find("attn", name), WORK, fp).arm for name in ("torch:packed", "torch:sdpa"))
    found = dataclasses.replace(
        verdict(), winner=arm.candidate, **{"next_best": None, "read_bytes_per_s": 38e9, **changes}
    )
    with open_ledger(home=home) as ledger:
        return record(
            ledger, fp=fp, workload=WORK, mode=current_mode(), verdict=found, arm=arm, baseline=base,
            parities=[(arm, PASSED)],
        )  # fmt: skip


def test_the_verbs_mark_a_contended_effect(home: Path, said: Said) -> None:
    promoted(home, conditions=BUSY)
    table = said("best", "attn")
    assert "2.0x ≥1.90*" in table and f"* {TOLD}" in table
    found = json.loads(said("best", "attn", "--json"))["conditions"]
    assert (found["contended"], found["busy_cores"], found["by"]) == (True, 1.7, list(BUSY.by))
    assert re.search(
        rf"measured 20\d\d-\d\d-\d\d \d\d:\d\d UTC, memory read at 38 GB/s, {TOLD}", said("explain", "attn")
    )
    history = said("explain", "attn", "--history")
    assert "2.0x ≥1.90*" in history and TOLD in history


def test_results_of_a_quiet_machine_have_no_mark(home: Path, said: Said) -> None:
    promoted(home, conditions=QUIET)
    for words in (("best", "attn"), ("explain", "attn"), ("explain", "attn", "--history")):
        assert "other work" not in said(*words) and "*" not in said(*words)
    assert json.loads(said("best", "attn", "--json"))["conditions"]["contended"] is False


def test_systems_that_cannot_repeat_samples_are_marked(home: Path, said: Said) -> None:
    promoted(home, conditions=dataclasses.replace(BUSY, watched=False, again=0))
    assert "samples kept as they came" in said("best", "attn")


def test_a_selection_explains_the_mark(home: Path) -> None:
    promoted(home, conditions=BUSY)
    with dispatch.use(home) as board:
        assert TOLD in board.resolution(ops.find("attn"), WORK).explain()


@pytest.mark.parametrize(("conditions", "shown"), [(BUSY, True), (QUIET, False)])
def test_the_dashboard_and_the_metrics_mark_a_contended_effect(home: Path, conditions: Conditions, shown: bool) -> None:
    made = promoted(home, conditions=conditions)
    with over_socket(App(home)) as client:
        pages = [client.get(page).text for page in ("/", "/op/attn", f"/decisions/{made.id}")]
        assert [">contended<" in page for page in pages] == [shown] * 3
        found: Any = client.get(f"/v1/decisions/{made.id}").json()
        assert found["conditions"]["contended"] is shown
        metrics = client.get("/metrics").text
        assert f'autosel_speedup_contended{{op="attn"}} {float(shown)}' in metrics
        values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith("autosel_speedup_"))
        assert float(values['autosel_speedup_read_bytes_per_second{op="attn"}']) == 38e9
        measured = datetime.fromisoformat(made.created_at).timestamp()
        assert float(values['autosel_speedup_measured_time_seconds{op="attn"}']) == measured


def test_two_candidates_have_one_ratio_wherever_it_is_shown(home: Path, said: Said) -> None:
    """Show one ratio if the next best is the baseline: the effect is from confirming sessions, the next best from
    screening."""
    promoted(home, next_best=("torch:sdpa", 2.7))
    assert json.loads(said("best", "attn", "--json"))["next_best"] == {"candidate": "torch:sdpa", "speedup": 2.0}
    assert "2.7x" not in said("best", "attn")


# --- a demoted decision -------------------------------------------------------------------------------------------


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
