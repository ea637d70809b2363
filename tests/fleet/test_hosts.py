"""Test two hosts of one device kind that share a ledger: each proves the decisions of the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from autosel.cli import doctor
from autosel.ledger import Ledger, compare, containment, open_ledger, snapshot
from autosel.ledger.commands import Adopt, Demote, Hold, OpenTrial, TakeOver
from autosel.values import Timing
from tests.cpu.daemons import cli, running
from tests.cpu.test_ledger import ATTN, BASELINE, CPP, FAILED, FP, MODE, PACKED, PASSED, record, verdict

pytestmark = pytest.mark.fleet


@pytest.fixture
def other(url: str, tmp_path: Path) -> Iterator[Ledger]:
    with open_ledger(url, home=tmp_path / "other", alone=True) as made:
        yield made


def published(ledger: Ledger) -> list[int]:
    ledger.publish()
    found = snapshot.read(ledger.home / snapshot.FILE)
    assert found is not None
    return [row.decision.id for row in found.rows]


def test_a_host_serves_what_another_decided_only_after_its_own_proof(ledger: Ledger, other: Ledger) -> None:
    made = record(ledger)
    assert published(ledger) == [made.id]
    assert (published(other), other.serving()) == ([], ())
    assert other.offered(FP.hw_id, MODE) == (made,)
    assert other.parity_known(FP.hw_id, CPP.digest, ATTN) is None, "the proof of another host must not count here"
    assert other.known(FP.hw_id, ATTN.bucket, MODE, [CPP.digest, BASELINE.digest]) is None, (
        "it must not be settled here"
    )
    assert not other.write(Adopt(decision_id=made.id, parity=FAILED))
    assert other.offered(FP.hw_id, MODE) == (made,)
    assert other.write(Adopt(decision_id=made.id, parity=PASSED))
    assert published(other) == [made.id]
    assert other.offered(FP.hw_id, MODE) == ()


def test_a_proven_kernel_serves_until_the_better_one_is_proven_too(ledger: Ledger, other: Ledger) -> None:
    first = record(other, arm=PACKED, parities=[(PACKED, PASSED)])
    second = record(ledger, "two")
    assert published(ledger) == [second.id]
    assert published(other) == [first.id]
    other.write(Hold(arm=PACKED, hw_id=FP.hw_id, op="attn", cause="kernel", reason="wrong after all"))
    assert published(other) == [], "quarantined builds must not serve"
    assert other.write(Adopt(decision_id=second.id, parity=PASSED))
    assert published(other) == [second.id]


def test_a_demotion_by_one_host_reaches_all_of_them(ledger: Ledger, other: Ledger) -> None:
    made = record(ledger)
    other.write(Adopt(decision_id=made.id, parity=PASSED))
    demoted = ledger.write(Demote(decision_id=made.id, reason="wrong once"))
    assert published(other) == [demoted.id]


def test_taking_over_a_device_closes_only_the_trials_of_this_host(ledger: Ledger, other: Ledger) -> None:
    ledger.write(OpenTrial(hw_id=FP.hw_id, op="attn", arm=CPP))
    _, strikes = other.write(TakeOver(hw_id=FP.hw_id, holder="another host's tuner"))
    assert strikes == ()
    _, strikes = ledger.write(TakeOver(hw_id=FP.hw_id, holder="our next tuner"))
    assert [s.arm for s in strikes] == [CPP]


def test_each_host_has_a_permanent_separate_id(ledger: Ledger, other: Ledger, url: str) -> None:
    record(ledger)
    record(other, "two")
    with open_ledger(url, home=other.home, alone=True) as again:
        record(again, "three")
        with again.reading() as c:
            found = compare.hosts(c)
    assert [(h["decisions"], h["proofs"]) for h in found] == [(1, 2), (2, 2)]


def test_leases_of_two_hosts_are_independent(ledger: Ledger, other: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two machines of one kind tune at the same time, because each has a separate device."""
    with ledger.lock(FP.hw_id):
        monkeypatch.setattr(containment, "machine", lambda: "another machine's boot")
        with other.lock(FP.hw_id):
            record(other, "there")
        monkeypatch.undo()
        record(ledger, "here")


# --- devices that disagree --------------------------------------------------------------------------------------------


def timed(ledger: Ledger, key: str, us: float, spread: float = 0.02, **changes: object) -> int:
    """Record a decision whose arm has this time and interval."""
    timing = Timing(
        median_us=us, lo_us=us * (1 - spread), hi_us=us * (1 + spread), p95_us=us * 1.1, min_us=us * 0.9, samples=60
    )
    found = dataclasses.replace(verdict(), timings={CPP.candidate: timing})
    return record(ledger, key, verdict=found, race=None, **changes).id


def odd(ledger: Ledger) -> list[compare.Discrepancy]:
    with ledger.reading() as c:
        return compare.disagreements(c)


def test_hosts_of_one_kind_that_measure_differently_are_named_with_the_evidence(ledger: Ledger, other: Ledger) -> None:
    first, second = timed(ledger, "a", 50.0), timed(other, "b", 80.0)
    (found,) = odd(ledger)
    assert found.hw_id == FP.hw_id and found.compared == 1
    (apart,) = found.apart
    assert {apart.first.decision_id, apart.second.decision_id} == {first, second}
    assert max(apart.ratio, 1 / apart.ratio) == pytest.approx(1.6)
    slow = max((apart.first, apart.second), key=lambda m: m.timing.median_us)
    assert slow.decision_id == second
    assert all(word in compare.words(found)[0] for word in ("50 us", "80 us", ATTN.key, CPP.candidate))


@pytest.mark.parametrize(
    ("us", "spread", "why"),
    [(52.0, 0.001, "less than the margin apart"), (70.0, 0.30, "the intervals meet")],
    ids=["margin", "intervals"],
)
def test_hosts_that_agree_within_intervals_and_margin_are_not_reported(
    ledger: Ledger, other: Ledger, us: float, spread: float, why: str
) -> None:
    timed(ledger, "a", 50.0, spread)
    timed(other, "b", us, spread)
    assert odd(ledger) == [], why


def test_only_the_same_arm_at_the_same_workload_in_the_same_mode_is_compared(ledger: Ledger, other: Ledger) -> None:
    timed(ledger, "a", 50.0)
    timed(other, "b", 90.0, mode="eager.t1.highest")
    timed(other, "c", 90.0, workload=ATTN.at(B=2))
    edited = dataclasses.replace(CPP, digest="e" * 64)
    timed(other, "d", 90.0, arm=edited, parities=[(edited, PASSED)])
    timed(other, "e", 90.0, fp=dataclasses.replace(FP, identity={"model": "another", "cpus": 2}))
    assert odd(ledger) == []


def test_the_latest_measurement_of_each_host_counts(ledger: Ledger, other: Ledger) -> None:
    timed(ledger, "a", 50.0)
    timed(other, "b", 80.0)
    timed(other, "c", 50.5)
    assert odd(ledger) == []


def test_doctor_and_status_name_a_device_that_disagrees(ledger: Ledger, other: Ledger, shared_home: Path) -> None:
    timed(ledger, "a", 50.0)
    timed(other, "b", 80.0)
    with running(shared_home, "--no-tune") as daemon, daemon.client() as ask:
        found = ask.get("/v1/fleet")
        assert len(found["hosts"]) == 2 and found["shared"]
        (told,) = found["disagreements"]
        assert told["slower"] in told["names"] and told["apart"][0]["candidate"] == CPP.candidate
        said = cli(shared_home, "status")
        assert "SICK?" in said.stdout, said
    (finding,) = doctor._fleet(ledger, FP.hw_id)
    assert finding.what == "sick device" and finding.level == "note"
    assert "50 us" in finding.todo and "80 us" in finding.todo
