"""Test changes of libraries or sources: old winners serve only after a new proof, and are marked stale."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from autosel import dispatch, resources
from autosel.candidates import arms, registry, validity
from autosel.cli.main import run as cli
from autosel.client import connect, socket_path
from autosel.dispatch.board import this_device
from autosel.errors import LedgerError
from autosel.ledger import Ledger, commands, open_ledger
from autosel.ledger.commands import Demote, Hold, Record, Renew, Unpin
from autosel.ledger.key import current_mode
from autosel.tuning import renew
from autosel.values import Arm, Decision, Failed, Knobs, NativeRecipe, Passed, to_json
from tests.cpu.daemons import Daemon, running
from tests.cpu.test_dispatch_board import WEIGHT, W, X, built, home, native_arm
from tests.cpu.test_ledger import verdict
from tests.quiet import Quiet

__all__ = ["built", "home"]  # fixtures
pytestmark = pytest.mark.usefixtures("preforked")

PASSED = Passed(cases=1, worst=0.1, worst_case="random")
FAILED = Failed(check="bound", case="random", reason="wrong", evidence={})
OTHER_TORCH = "torch:rmsnorm's code or its libraries"


@pytest.fixture
def ledger(home: Path) -> Iterator[Ledger]:
    with open_ledger() as made:
        yield made


def baseline() -> Arm:
    return arms.arm(registry.baseline(W.op), W, this_device(), "", Knobs())


def promote(ledger: Ledger, arm: Arm, **changes: Any) -> Decision:
    values: dict[str, Any] = {
        "verdict": dataclasses.replace(verdict(), winner="cpp:rmsnorm"),
        "race": None,
        "parities": [(arm, PASSED)],
        "arm": arm,
        "baseline": baseline(),
        "mode": current_mode(),
        "state": "promoted",
        "reason": "for the test",
        "idempotency_key": "one",
    }
    return ledger.write(Record(fp=this_device(), workload=W, **values | changes))


def another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = arms.torch_identity()
    monkeypatch.setattr(arms, "torch_identity", lambda: {**identity, "torch": "99.0"})
    validity.forget()


def served(home: Path) -> Any:
    with dispatch.use(home):
        return dispatch.best("rmsnorm", like=(X, WEIGHT))


def renewals(ledger: Ledger) -> list[renew.Renewal]:
    return list(renew.renew(ledger, this_device(), Quiet()))


def test_a_winner_under_another_torch_serves_again_once_proven_and_is_to_be_raced(
    home: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = promote(ledger, native_arm())
    another_torch(monkeypatch)
    assert served(home).candidate == "torch:rmsnorm", "a stale decision must not serve without a proof"
    (done,) = renewals(ledger)
    new = done.decision
    assert new is not None and done.reason == "" and done.stale.id == old.id
    assert (new.state, new.arm, new.baseline.digest) == ("promoted", old.arm, baseline().digest)
    assert OTHER_TORCH in new.stale and "decision" not in new.stale
    assert served(home).candidate == "cpp:rmsnorm"
    proof = [p for arm, p in ledger.evidence(new.id).parities if arm.digest == new.arm.digest and p != PASSED]
    assert isinstance(proof[0], Passed) and proof[0].cases > 10, "the proof is not in the ledger"
    settled = ledger.known_rows(this_device().hw_id, W.bucket, current_mode(), [old.arm.digest, baseline().digest])
    assert settled == (), "the next tune must race it"
    assert renewals(ledger) == [], "once"
    assert cli(["best", "rmsnorm", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["candidate"]) == ("promoted", "cpp:rmsnorm") and OTHER_TORCH in told["stale"]
    assert cli(["best", "rmsnorm"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "stale" in out and "proven again, and serves until it is raced again" in out


def with_source(place: Path, monkeypatch: pytest.MonkeyPatch, change: tuple[str, str]) -> None:
    """Return the kernels with a changed rmsnorm.cpp."""
    shutil.copytree(resources.kernels() / "cpu", place / "cpu")
    for shared in resources.kernels().glob("*.h"):
        shutil.copy(shared, place)
    source = place / "cpu" / "rmsnorm.cpp"
    text = source.read_text()
    assert change[0] in text
    source.write_text(text.replace(*change))
    monkeypatch.setattr(resources, "kernels", lambda: place)
    validity.forget()


def test_after_an_edit_the_build_that_was_raced_serves_once_it_is_proven_again(
    home: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old = promote(ledger, native_arm())
    with_source(tmp_path / "kernels", monkeypatch, ("\n", "\n// edited\n"))
    assert "source has been edited" in served(home).reason
    (done,) = renewals(ledger)
    assert done.decision is not None and done.decision.arm == old.arm
    bound = served(home)
    assert bound.candidate == "cpp:rmsnorm"
    assert torch.allclose(bound(X, WEIGHT), torch.nn.functional.rms_norm(X, (256,), WEIGHT, 1e-6), atol=1e-5)


def test_the_baseline_replaces_a_build_that_fails_now_and_the_evidence_is_kept(
    home: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Fail now a build that an earlier proof promoted without finding its fault."""
    with monkeypatch.context() as once:
        with_source(tmp_path / "kernels", once, ("float(d) + eps)", "float(d) + 0.3f)"))
        arm = native_arm()
    validity.forget()
    old = promote(ledger, arm)
    assert "source has been edited" in served(home).reason
    (done,) = renewals(ledger)
    assert done.decision is None and done.reason.startswith("parity: ")
    assert served(home).candidate == "torch:rmsnorm"
    assert isinstance(ledger.parity_known(this_device().hw_id, arm.digest, W), Failed)
    assert [d.id for d in ledger.history()] == [old.id]


# --- what the ledger keeps --------------------------------------------------------------------------------------------


ARM = Arm(
    candidate="cpp:rmsnorm",
    backend="CPP",
    recipe=NativeRecipe(source="cpu/rmsnorm.cpp", entry="rmsnorm", flags=(), knob_args=()),
    knobs={},
    digest="c" * 64,
    build="d" * 64,
)


def again(ledger: Ledger, d: Decision, parity: Passed | Failed = PASSED, **changes: Any) -> Decision | None:
    values: dict[str, Any] = {"arm": d.arm, "baseline": baseline(), "parity": parity, "why": "torch is another"}
    return ledger.write(Renew(decision_id=d.id, **values | changes))


def test_a_renewed_decision_keeps_its_state_race_and_figures(ledger: Ledger) -> None:
    old = promote(ledger, ARM, state="pinned", reason="by hand")
    new = again(ledger, old)
    assert new is not None
    assert (new.state, new.verdict, new.arm) == ("pinned", old.verdict, ARM)
    assert (new.stale, new.reason.endswith("raced again: torch is another")) == ("torch is another", True)
    assert ledger.evidence(new.id).previous == old
    assert again(ledger, old) == new, "repeated calls must give one decision"
    assert [s.decision for s in ledger.serving()] == [new]
    back = ledger.write(Unpin(decision_id=new.id, reason="enough"))
    assert (back.state, back.arm.candidate) == ("kept", "torch:rmsnorm")


def test_a_superseded_decision_is_not_served_again(ledger: Ledger) -> None:
    old = promote(ledger, ARM)
    newer = promote(ledger, ARM, idempotency_key="two")
    assert again(ledger, old) is None
    assert [s.decision for s in ledger.serving()] == [newer]


def test_a_failed_proof_changes_nothing_but_the_evidence(ledger: Ledger) -> None:
    old = promote(ledger, ARM)
    assert again(ledger, old, FAILED) is None
    assert [s.decision for s in ledger.serving()] == [old]
    assert ledger.parity_known(this_device().hw_id, ARM.digest, W) == FAILED


def test_a_quarantined_build_is_not_served_again(ledger: Ledger) -> None:
    old = promote(ledger, ARM)
    ledger.write(Hold(arm=ARM, hw_id=this_device().hw_id, op=W.op, cause="kernel", reason="crashed", digest="e" * 64))
    moved = dataclasses.replace(ARM, digest="e" * 64)
    with pytest.raises(LedgerError, match="quarantine"):
        again(ledger, promote(ledger, ARM, idempotency_key="two"), arm=moved)
    assert again(ledger, old) is None


def test_a_race_ends_the_mark_and_a_demotion_still_works(ledger: Ledger) -> None:
    new = again(ledger, promote(ledger, ARM))
    assert new is not None
    demoted = ledger.write(Demote(decision_id=new.id, reason="wrong"))
    assert (demoted.state, demoted.arm.candidate) == ("demoted", "torch:rmsnorm")
    assert promote(ledger, ARM, idempotency_key="raced").stale == ""


def test_the_command_can_be_sent_to_the_daemon(ledger: Ledger) -> None:
    old = promote(ledger, ARM)
    command = commands.Renew(decision_id=old.id, arm=ARM, baseline=baseline(), parity=PASSED, why="x")
    decoded, leases = commands.decode(json.loads(json.dumps(commands.encode(command, {}))))
    made = ledger.write(decoded, leases=leases)
    assert made.stale == "x" and made.id > old.id
    assert commands.result_of(command, json.loads(json.dumps(to_json(made)))) == made


def test_only_winners_of_this_device_and_mode_are_proven_again(ledger: Ledger) -> None:
    d = promote(ledger, ARM)  # its build is missing: stale
    hw_id, mode = d.hw_id, d.mode
    assert renew.outdated([d], hw_id, mode) == [d]
    assert renew.outdated([d], "another", mode) == [] == renew.outdated([d], hw_id, "another")
    for change in ({"state": "demoted"}, {"arm": d.baseline}):
        assert renew.outdated([dataclasses.replace(d, **change)], hw_id, mode) == []
    (done,) = renewals(ledger)
    assert done.decision is None and "missing or damaged" in done.reason


# --- the daemon -------------------------------------------------------------------------------------------------------


def heard(daemon: Daemon, kind: str) -> dict[str, Any]:
    """Return the first event of a kind since the daemon started."""
    with connect(socket_path(daemon.home), 120.0) as line:
        line.sendall(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\nLast-Event-ID: 0\r\n\r\n")
        with line.makefile("r", encoding="utf-8") as text:
            for said in text:
                if said.strip() == f"event: {kind}":
                    found: dict[str, Any] = json.loads(text.readline().removeprefix("data:"))
                    return found
    raise AssertionError(f"the daemon never said {kind}")


def until(look: Callable[[], Any], right: Callable[[Any], bool]) -> Any:
    """Repeat until the result is right, because a commit is acknowledged before the daemon's view has it."""
    end = time.monotonic() + 120.0
    while not right(found := look()):
        assert time.monotonic() < end, found
    return found


def test_the_daemon_proves_stale_winners_again_and_reports_it(home: Path, ledger: Ledger) -> None:
    then = dataclasses.replace(baseline(), digest="b" * 64)
    old = promote(ledger, native_arm(), baseline=then, mode=f"eager.t{torch.get_num_threads()}.highest")
    ledger.close()
    with running(home, "--busy", "1000") as daemon, daemon.client() as ask:
        told = heard(daemon, "renewed")
        assert (told["id"], told["reason"]) == (old.id, "")
        row = until(lambda: ask.get("/v1/serving")["serving"][0], lambda row: row["decision_id"] > old.id)
        assert (row["state"], row["candidate"]) == ("promoted", "cpp:rmsnorm") and OTHER_TORCH in row["stale"]
        until(lambda: ask.get("/v1/health"), lambda health: health["stale"] == 1)
        queued = until(lambda: ask.get("/v1/jobs")["jobs"], bool)
        assert any(j["source"] == "stale" for j in queued), "no race was queued"
