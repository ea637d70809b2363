"""Check that quarantines are shown everywhere, with the command that ends them, and that this command works."""

from __future__ import annotations

import html
import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autosel.candidates import arms, registry
from autosel.cli.tune import report_json, show_remarks
from autosel.ledger.commands import Hold, Record
from autosel.ledger.key import current_mode
from autosel.ledger.store import Ledger, open_ledger
from autosel.ops import OPS
from autosel.tuning.job import Rejection, Report
from autosel.values import Arm, Failed, Fingerprint, Knobs
from tests.quiet import here

W = OPS["rmsnorm"].workload("bf16", {"M": 1, "d": 512})
REASON = "the worker ended: raised ImportError"
FAULT = Failed(check="elements", case="strided", evidence={}, reason="row 3 differs")
BASELINE_FAULT = Failed(check="outside_reads", case="ragged", evidence={}, reason="it reads outside its inputs")
Said = Callable[..., tuple[int, str, str]]


@pytest.fixture
def held(home: Path) -> list[int]:
    """Return two quarantines of this machine, in addition to a decision that serves the baseline."""
    fp = here()
    base = arms.arm(registry.baseline(W.op), W, fp, "", Knobs())
    with open_ledger() as ledger:
        ledger.write(
            Record(
                fp=fp,
                workload=W,
                verdict=None,
                race=None,
                parities=[(base, BASELINE_FAULT), (arm(base, "cpp:three"), FAULT)],
                arm=base,
                baseline=base,
                mode=current_mode(),
                state="kept",
                reason="no other candidate can run this here",
                idempotency_key="1",
                entrants=(base.digest,),
            )
        )
        return [hold(ledger, fp, arm(base, name)) for name in ("cpp:one", "cpp:two")]


def arm(base: Arm, name: str) -> Arm:
    return Arm(candidate=name, backend="CPP", recipe=base.recipe, knobs={}, digest=f"digest of {name}", build="")


def hold(ledger: Ledger, fp: Fingerprint, of: Arm) -> int:
    return ledger.write(Hold(arm=of, hw_id=fp.hw_id, op=W.op, cause="crash", reason=REASON))


def release_in(text: str) -> list[str]:
    """Return the words of the command in a text."""
    found = re.search(r"autosel (db release( \d+)+)", text)
    assert found, text
    return shlex.split(found[1])


def in_quarantine() -> int:
    with open_ledger() as ledger:
        return len(ledger.quarantined(here().hw_id))


def report() -> Report:
    rejected = [
        Rejection(workload=W, candidate=name, stage="quarantine", reason=REASON, quarantine=number)
        for number, name in ((1, "cpp:one"), (2, "cpp:two"))
    ]
    fallen = Rejection(workload=W, candidate="cpp:three", stage="race", reason=f"crash: {REASON}", quarantine=3)
    return Report(
        fingerprint=here(),
        decisions=(),
        measured=0,
        rejected=(*rejected, rejected[0], fallen),
        undecided=(),
        seconds=1.0,
    )


def test_tune_names_quarantined_candidates_and_how_to_release_them(
    capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    show_remarks(report())
    text = capsys.readouterr().out
    assert "3 kernels are in quarantine and will not race: cpp:one, cpp:two, cpp:three\n" in text
    assert "\n  autosel db release 1 2 3      lets them race again\n" in text
    assert [(r["candidate"], r["stage"], r["quarantine"]) for r in report_json(report())["rejected"]][2:] == [
        ("cpp:one", "quarantine", 1),
        ("cpp:three", "race", 3),
    ]


def test_tune_says_once_that_pytorchs_own_op_fails_its_proof(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    one, other = (OPS["rmsnorm"].workload("bf16", {"M": 1, "d": d}) for d in (512, 1024))
    why = "outside_reads (ragged): the result depends on memory outside its inputs"
    failed = [Rejection(workload=w, candidate="torch:rmsnorm", stage="baseline", reason=why) for w in (one, other)]
    show_remarks(replace(report(), rejected=tuple(failed)))
    text = " ".join(capsys.readouterr().out.split())
    assert f"PyTorch's own torch:rmsnorm fails its proof at 2 workloads: {why}. It is what runs without" in text
    assert text.count("outside_reads") == 1 and "candidates failed" not in text


def test_explain_names_quarantined_candidates_of_the_op(held: list[int], said: Said) -> None:
    code, text, _ = said("explain", "rmsnorm")
    assert code == 0
    told = f"held cpp:one is in quarantine and will not race: crash: {REASON} autosel db release {held[0]} lets it race"
    assert told in " ".join(text.split())
    assert max(len(line) for line in text.splitlines()) <= 80
    (explained,) = json.loads(said("explain", "rmsnorm", "--json")[1])
    told = [(q["id"], q["candidate"], q["release"]) for q in explained["quarantined"]]
    assert told == [(n, c, f"autosel db release {n}") for n, c in zip(held, ("cpp:one", "cpp:two"), strict=True)]


def test_python_explains_an_op_as_the_command_does(held: list[int], said: Said) -> None:
    import autosel

    found = autosel.explain("rmsnorm")
    assert repr(found) == said("explain", "rmsnorm")[1].rstrip("\n")
    assert found._repr_html_() == f"<pre>{html.escape(repr(found))}</pre>"


def test_explain_failed_tells_pytorchs_own_op_from_the_candidates(held: list[int], said: Said) -> None:
    found = json.loads(said("explain", "--failed", "--json")[1])
    stages = {f["candidate"]: f["stage"] for f in found if f["stage"] not in ("quarantine", "eligible")}
    assert stages == {"torch:rmsnorm": "baseline", "cpp:three": "parity"}


def test_explain_failed_lists_quarantines_with_their_commands(held: list[int], said: Said) -> None:
    found = [f for f in json.loads(said("explain", "--failed", "--json")[1]) if f["stage"] == "quarantine"]
    assert [(f["candidate"], f["check"], f["reason"]) for f in found] == [
        ("cpp:one", "crash", REASON),
        ("cpp:two", "crash", REASON),
    ]
    _, text, _ = said("explain", "--failed")
    assert "lets it race again" in " ".join(text.split())


def test_the_dashboards_first_page_shows_quarantines(held: list[int], home: Path, said: Said) -> None:
    pytest.importorskip("starlette")
    from tests.null.daemon_app import App, over_tcp

    with over_tcp(App(home)) as client:
        page = html.unescape(client.get("/").text)
        assert "nothing is wrong" not in page
        assert "2 kernels are in quarantine and will not race: cpp:one, cpp:two" in page
        command = release_in(page)
        assert command == ["db", "release", *map(str, held)]
        assert said(*command)[0] == 0
        page = html.unescape(client.get("/").text)
        assert "nothing is wrong" in page and "quarantine" not in page


def test_the_printed_command_ends_all_of_them(held: list[int], said: Said) -> None:
    code, out, _ = said(*release_in(said("explain", "rmsnorm")[1]), "--json")
    assert (code, json.loads(out)) == (0, {"released": held[:1], "reason": "released by hand"})
    code, out, _ = said("db", "release", *map(str, held), "--reason", "the environment was rebuilt")
    assert code == 0 and f"quarantines {held[0]}, {held[1]} have ended" in out
    assert in_quarantine() == 0
    assert said("db", "release", "77")[0] == 1
