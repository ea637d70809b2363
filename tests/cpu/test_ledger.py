"""Test the ledger on real SQLite files: acknowledged writes are there, refused ones changed nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sqlite3
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from autosel.cli import bundle
from autosel.errors import BadConfig, LedgerError, ParityError, UnknownName
from autosel.ledger import Ledger, containment, open_ledger, snapshot
from autosel.ledger import schema as t
from autosel.ledger.commands import (
    Adopt,
    Demote,
    Hold,
    Import,
    Pin,
    Promote,
    Record,
    Release,
    SaveAA,
    SaveParity,
    Spend,
    TakeOver,
    Unpin,
)
from autosel.ledger.key import budget_key
from autosel.ledger.locks import InUseError, KeptLock, write_lock
from autosel.ledger.restore import restore
from autosel.values import (
    Arm,
    Decision,
    Effect,
    Failed,
    Fingerprint,
    NativeRecipe,
    PairedSamples,
    Passed,
    PythonRecipe,
    Race,
    RaceSession,
    Rate,
    Timing,
    Verdict,
    Workload,
)
from tests.forks import CONTEXT, forked

MODE = "eager.t2.highest"
FP = Fingerprint(
    kind="cpu",
    name="a CPU",
    identity={"model": "test", "cpus": 2},
    environment={"torch": "2.13.0"},
    rates={"read_bytes_per_s@1": Rate(value=2e10, unit="B/s", spread=0.01, source="probe")},
)
ATTN = Workload(
    op="attn",
    dims=(("B", 1), ("Hq", 32), ("Hkv", 8), ("S", 1), ("D", 128), ("L", 8192)),
    dtype="bf16",
    traits=(("softcap", 1.0),),
)
BASELINE = Arm(
    candidate="torch:sdpa",
    backend="TORCH",
    recipe=PythonRecipe(target="autosel.candidates.torch_eager:attn"),
    knobs={},
    digest="b" * 64,
)
CPP = Arm(
    candidate="cpp:attn",
    backend="CPP",
    recipe=NativeRecipe(source="cpu/attn.cpp", entry="attn", flags=("-mavx2",), knob_args=("threads",)),
    knobs={"threads": 2, "share": 1.0},
    digest="c" * 64,
)
PACKED = dataclasses.replace(BASELINE, candidate="torch:packed", digest="d" * 64)
PASSED = Passed(cases=47, worst=0.61, worst_case="needle")
FAILED = Failed(check="bound", case="strided", evidence={"row": 3, "got": float("nan")}, reason="ignores the stride")


def race(w: Workload = ATTN) -> Race:
    pairs = tuple(PairedSamples(order=(0, 1), samples_ns=((100.5, 101.25), (50.0, 51.0))) for _ in range(30))
    session = RaceSession(
        kind="confirming",
        seed=2**61 + 1,
        arms=("torch:sdpa", "cpp:attn"),
        pairs=pairs,
        calls_per_sample=(1, 2),
        aa_crossed=False,
    )
    return Race(
        workload=w,
        baseline="torch:sdpa",
        incumbent="torch:sdpa",
        finalist="cpp:attn",
        delta=0.05,
        alpha_session=0.05,
        pi=0.01,
        sessions=(session,) * 4,
    )


def verdict(outcome: Any = "promote") -> Verdict:
    return Verdict(
        outcome=outcome,
        winner="cpp:attn",
        reason="won 42 of 42",
        effect=Effect(median=2.0, lo=1.9, hi=2.1),
        next_best=("torch:packed", 1.5),
        timings={"cpp:attn": Timing(median_us=50, lo_us=49, hi_us=51, p95_us=53, min_us=48, samples=60)},
        e_values=(30.0, 41.5),
        wins=((14, 14),),
    )


def recording(key: str = "one", **changes: Any) -> Record:
    """Return the command that records a decision for CPP, as a tune sends it."""
    values: dict[str, Any] = {
        "verdict": verdict(),
        "race": race(),
        "parities": [(CPP, PASSED), (PACKED, FAILED)],
        "arm": CPP,
        "baseline": BASELINE,
        "mode": MODE,
        "state": "promoted",
        "reason": "faster in three sessions",
        "idempotency_key": key,
    }
    fp, w = changes.pop("fp", FP), changes.pop("workload", ATTN)
    return Record(fp=fp, workload=w, **values | changes)


def record(ledger: Ledger, key: str = "one", **changes: Any) -> Decision:
    return ledger.write(recording(key, **changes))


@pytest.fixture
def ledger(home: Path) -> Ledger:
    return open_ledger(home=home)


# --- decisions ----------------------------------------------------------------------------------------------------


def test_a_decision_comes_back_whole_with_its_evidence(ledger: Ledger, home: Path) -> None:
    made = record(ledger)
    ledger.close()
    again = open_ledger(home=home)
    assert again.decision(made.id) == made
    evidence = again.evidence(made.id)
    assert evidence.race == race()
    assert evidence.fingerprint == FP
    assert evidence.serves
    (cpp, passed), (packed, failed) = evidence.parities
    assert (cpp, passed, packed) == (CPP, PASSED, PACKED)
    assert isinstance(failed, Failed)
    assert failed.reason == FAILED.reason
    assert failed.evidence["got"] != failed.evidence["got"], "the NaN of the evidence was not stored"


def test_a_float_trait_or_knob_stays_a_float(ledger: Ledger, home: Path) -> None:
    made = record(ledger)
    assert ledger.decision(made.id).workload.key == ATTN.key
    assert type(ledger.decision(made.id).arm.knobs["share"]) is float
    (row,) = read_snapshot(home).rows
    assert row.decision == made


def test_every_change_is_in_the_snapshot_when_it_is_acknowledged(ledger: Ledger, home: Path) -> None:
    made = record(ledger)
    assert [r.decision for r in read_snapshot(home).rows] == [made]
    demoted = ledger.write(Demote(decision_id=made.id, reason="wrong once"))
    assert [r.decision for r in read_snapshot(home).rows] == [demoted]
    assert demoted.arm == BASELINE
    assert read_snapshot(home).epoch == 2


def test_one_idempotency_key_is_one_decision(ledger: Ledger) -> None:
    assert record(ledger, "k") == record(ledger, "k", reason="asked again")
    assert len(ledger.history()) == 1


def test_history_can_be_neither_updated_nor_deleted_nor_replaced(ledger: Ledger, home: Path) -> None:
    record(ledger)
    with sqlite3.connect(home / "ledger.db") as raw:
        raw.execute("PRAGMA recursive_triggers=ON")
        for table in t.HISTORY:
            assert raw.execute(f"SELECT count(*) FROM {table}").fetchone() is not None
            column = t.METADATA.tables[table].c[0].name
            if raw.execute(f"SELECT count(*) FROM {table}").fetchone()[0]:
                for sql in (f"UPDATE {table} SET {column} = {column}", f"DELETE FROM {table}"):
                    with pytest.raises(sqlite3.IntegrityError, match="append only"):
                        raw.execute(sql)
        with pytest.raises(sqlite3.IntegrityError):
            raw.execute("INSERT OR REPLACE INTO decisions SELECT * FROM decisions")


def test_an_arm_that_has_not_passed_parity_is_not_promoted(ledger: Ledger) -> None:
    for parities in ([], [(CPP, FAILED)], [(PACKED, PASSED)]):
        with pytest.raises(ParityError, match="has not passed parity"):
            record(ledger, parities=parities)
    assert ledger.history() == []
    assert ledger.serving() == ()


def test_a_value_that_is_not_json_is_refused_before_anything_is_written(ledger: Ledger) -> None:
    bad = dataclasses.replace(verdict(), roofline=float("nan"))
    with pytest.raises(ValueError, match=r"(?i)nan"):
        record(ledger, verdict=bad)
    assert ledger.history() == []


# --- settled buckets and known proofs -----------------------------------------------------------------------------


def test_a_bucket_is_settled_until_its_winner_or_candidates_change(ledger: Ledger) -> None:
    made = record(ledger)
    now = [CPP.digest, PACKED.digest, BASELINE.digest]

    def known(digests: list[str]) -> Decision | None:
        return ledger.known(FP.hw_id, ATTN.bucket, MODE, digests)

    assert known(now) == made
    assert known(now[::2]) == made, "only a removed winner makes a bucket unsettled"
    assert known([*now, "e" * 64]) is None, "a new candidate must make the bucket unsettled"
    assert known(["e" * 64, *now[1:]]) is None, "an edited winner must make the bucket unsettled"
    assert known([*now[:2], "e" * 64]) is None, "another torch"
    assert ledger.known("other", ATTN.bucket, MODE, now) is None
    assert ledger.known(FP.hw_id, ATTN.bucket, "eager.t1.highest", now) is None


def test_an_undecided_verdict_is_not_known(ledger: Ledger) -> None:
    record(ledger, verdict=verdict("undecided"), state="kept", arm=BASELINE)
    assert ledger.known(FP.hw_id, ATTN.bucket, MODE, [CPP.digest, BASELINE.digest]) is None


def test_parity_is_known_by_arm_and_bucket_across_a_restart(ledger: Ledger, home: Path) -> None:
    ledger.write(SaveParity(hw_id=FP.hw_id, workload=ATTN, arm=CPP, parity=PASSED))
    again = open_ledger(home=home)
    near = ATTN.at(L=5000)
    assert again.parity_known(FP.hw_id, CPP.digest, near) == PASSED
    assert again.parity_known(FP.hw_id, CPP.digest, ATTN.at(L=2048)) is None
    assert again.parity_known(FP.hw_id, PACKED.digest, near) is None
    assert again.parity_known("other", CPP.digest, near) is None
    again.write(SaveParity(hw_id=FP.hw_id, workload=ATTN, arm=CPP, parity=FAILED))
    assert isinstance(again.parity_known(FP.hw_id, CPP.digest, near), Failed), "the latest proof must count"


def test_a_split_bucket_serves_two_rows_and_a_whole_one_replaces_both(ledger: Ledger) -> None:
    short = record(ledger, "a", length_range=(4097, 6000), arm=BASELINE, state="kept")
    long = record(ledger, "b", length_range=(6001, 8192))
    assert {s.decision.id for s in ledger.serving()} == {short.id, long.id}
    digests = [CPP.digest, PACKED.digest, BASELINE.digest]
    assert ledger.known_rows(FP.hw_id, ATTN.bucket, MODE, digests) == (short, long)
    whole = record(ledger, "c")
    assert [s.decision.id for s in ledger.serving()] == [whole.id]
    assert ledger.evidence(whole.id).previous == long


def test_a_bucket_of_which_only_a_part_was_stored_is_not_settled(ledger: Ledger) -> None:
    digests = [CPP.digest, PACKED.digest, BASELINE.digest]
    record(ledger, "a", length_range=(4097, 6000), arm=BASELINE, state="kept")
    assert ledger.known_rows(FP.hw_id, ATTN.bucket, MODE, digests) == ()
    record(ledger, "b", length_range=(6002, 8192))
    assert ledger.known_rows(FP.hw_id, ATTN.bucket, MODE, digests) == ()
    record(ledger, "c", length_range=(6001, 6001))
    assert len(ledger.known_rows(FP.hw_id, ATTN.bucket, MODE, digests)) == 3


# --- by hand ------------------------------------------------------------------------------------------------------


def test_demoting_twice_is_demoting_once_and_stays_after_a_restart(ledger: Ledger, home: Path) -> None:
    made = record(ledger)
    first = ledger.write(Demote(decision_id=made.id, reason="fault"))
    assert ledger.write(Demote(decision_id=made.id, reason="fault again")) == first
    assert open_ledger(home=home).serving()[0].decision == first


def test_a_superseded_decision_cannot_be_demoted_by_mistake(ledger: Ledger) -> None:
    old = record(ledger, "a")
    new = record(ledger, "b", arm=PACKED, parities=[(PACKED, PASSED)])
    with pytest.raises(LedgerError, match=f"decision {new.id} does"):
        ledger.write(Demote(decision_id=old.id, reason="late report"))
    assert ledger.serving()[0].decision == new


def test_promote_by_hand_requires_a_passed_proof(ledger: Ledger) -> None:
    made = record(ledger, arm=BASELINE, state="kept", verdict=verdict("tie"))
    with pytest.raises(ParityError, match="failed parity"):
        ledger.write(Promote(decision_id=made.id, candidate="torch:packed", reason="I like it"))
    with pytest.raises(UnknownName, match="cpp:attn"):
        ledger.write(Promote(decision_id=made.id, candidate="cpp:attm", reason="typo"))
    promoted = ledger.write(Promote(decision_id=made.id, candidate="cpp:attn", reason="a tie, but it saves memory"))
    assert (promoted.state, promoted.arm) == ("promoted", CPP)
    assert ledger.evidence(promoted.id).previous == made


def test_a_pin_holds_against_races_and_unpin_restores_the_displaced_decision(ledger: Ledger, home: Path) -> None:
    made = record(ledger, "a")
    pinned = ledger.write(Pin(decision_id=made.id, reason="frozen for the demo", candidate="torch:sdpa"))
    later = record(ledger, "b")
    assert ledger.serving()[0].decision == pinned
    assert read_snapshot(home).rows[0].decision.arm == BASELINE
    with pytest.raises(LedgerError, match="not a pin"):
        ledger.write(Unpin(decision_id=later.id, reason="wrong id"))
    back = ledger.write(Unpin(decision_id=pinned.id, reason="demo over"))
    assert (back.state, back.arm, back.verdict) == ("promoted", CPP, made.verdict)


# --- containment --------------------------------------------------------------------------------------------------


def test_quarantine_ends_every_use_of_an_arm_and_prevents_new_ones(ledger: Ledger, home: Path) -> None:
    record(ledger, "a")
    record(ledger, "b", workload=ATTN.at(L=2048), race=race(ATTN.at(L=2048)))
    held = ledger.write(Hold(arm=CPP, hw_id=FP.hw_id, op="attn", cause="SIGSEGV", reason="crashed at L=9"))
    assert {r.decision.state for r in read_snapshot(home).rows} == {"quarantined"}
    assert {r.decision.arm.candidate for r in read_snapshot(home).rows} == {"torch:sdpa"}
    assert ledger.quarantined(FP.hw_id, "attn")[CPP.digest].reason == "crashed at L=9"
    assert ledger.quarantined("other") == {}
    with pytest.raises(LedgerError, match="in quarantine"):
        record(ledger, "c")
    ledger.write(Release(quarantine_id=held, reason="fixed upstream"))
    ledger.write(Release(quarantine_id=held, reason="again"))
    assert ledger.quarantined(FP.hw_id) == {}
    assert record(ledger, "d").state == "promoted"


def test_a_failure_from_before_a_release_is_forgotten(ledger: Ledger) -> None:
    failed = Failed(check="crash", case="while racing", evidence={}, reason="it fell")
    ledger.write(SaveParity(hw_id=FP.hw_id, workload=ATTN, arm=CPP, parity=failed))
    held = ledger.write(Hold(arm=CPP, hw_id=FP.hw_id, op="attn", cause="crash", reason="it fell"))
    assert ledger.released(FP.hw_id, "attn") == {}
    ledger.write(Release(quarantine_id=held, reason="the environment was broken"))
    released = ledger.released(FP.hw_id, "attn")
    assert released.keys() == {CPP.digest} and ledger.released(FP.hw_id, "linear") == {}
    assert ledger.parity_known(FP.hw_id, CPP.digest, ATTN) == failed
    assert ledger.parity_known(FP.hw_id, CPP.digest, ATTN, since=released[CPP.digest]) is None
    again = dataclasses.replace(failed, seconds=2.0)
    ledger.write(SaveParity(hw_id=FP.hw_id, workload=ATTN, arm=CPP, parity=again))
    assert ledger.parity_known(FP.hw_id, CPP.digest, ATTN, since=released[CPP.digest]) == again


def die_in_a_trial(home: Path) -> None:
    def work() -> None:
        with open_ledger(home=home) as ledger, ledger.lock(FP.hw_id), ledger.trial(FP.hw_id, "attn", CPP):
            os.kill(os.getpid(), signal.SIGKILL)

    child = forked(work)
    child.join()
    assert child.exitcode == -signal.SIGKILL


def struck(home: Path) -> list[tuple[str, int, bool]]:
    """Return the strikes that the next tuner reports: (candidate, strikes, quarantined now)."""
    with open_ledger(home=home) as ledger, ledger.lock(FP.hw_id) as found:
        return [(s.arm.candidate, s.strikes, s.out) for s in found]


def test_a_candidate_on_trial_when_the_machine_went_down_twice_in_a_row_is_quarantined(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(open_ledger(home=home))
    for strikes in (1, 2):
        die_in_a_trial(home)
        monkeypatch.setattr(containment, "boot", lambda strikes=strikes: f"boot {strikes}")
        assert struck(home) == [("cpp:attn", strikes, strikes == 2)]
        assert struck(home) == []
        monkeypatch.undo()
    held = open_ledger(home=home).quarantined(FP.hw_id, "attn")[CPP.digest]
    assert held.reason == "the machine went down 2 times while it was tried"
    (row,) = read_snapshot(home).rows
    assert (row.decision.state, row.decision.arm) == ("quarantined", BASELINE)


def test_a_candidate_on_trial_in_five_killed_tunes_in_a_row_is_quarantined(home: Path) -> None:
    for strikes in (1, 2, 3):
        die_in_a_trial(home)
        assert struck(home) == [("cpp:attn", strikes, False)]
    ledger = open_ledger(home=home)
    with ledger.lock(FP.hw_id), ledger.trial(FP.hw_id, "attn", CPP):
        """Finish one trial of the candidate, so that earlier kills no longer count against it."""
    for strikes in (1, 2, 3, 4, 5):
        die_in_a_trial(home)
        assert struck(home) == [("cpp:attn", strikes, strikes == 5)]
    assert CPP.digest in ledger.quarantined(FP.hw_id, "attn")


def test_a_trial_left_running_by_ctrl_c_is_not_a_strike(ledger: Ledger, home: Path) -> None:
    with ExitStack() as thread:
        with ledger.lock(FP.hw_id):
            thread.enter_context(ledger.trial(FP.hw_id, "attn", CPP))
        assert struck(home) == []
    assert struck(home) == []


def test_a_trial_that_raises_is_closed_and_is_not_a_strike(ledger: Ledger) -> None:
    with pytest.raises(KeyboardInterrupt), ledger.trial(FP.hw_id, "attn", CPP):
        raise KeyboardInterrupt
    with ledger.lock(FP.hw_id) as found:
        assert found == []


def test_devices_of_a_machine_are_measured_at_the_same_time_each_by_one_tuner(ledger: Ledger, home: Path) -> None:
    cpu = dataclasses.replace(FP, identity={"model": "another kind"})
    with (
        open_ledger(home=home) as other,
        ledger.lock(FP.hw_id, "GPU-a"),
        other.lock(cpu.hw_id),
        other.lock(FP.hw_id, "GPU-b") as struck,
    ):
        with ledger.trial(FP.hw_id, "attn", CPP), open_ledger(home=home) as third:
            with pytest.raises(LedgerError, match="in use"), third.lock(FP.hw_id, "GPU-b"):
                raise AssertionError("two at a time")
            third.write(TakeOver(hw_id=FP.hw_id, holder="whose lock was lost", unit="GPU-b"))
        assert struck == []
        assert record(ledger, "by a").id == 1
        with pytest.raises(LedgerError, match="taken over this device"):
            record(other, "by b")
        assert record(other, "of another kind", fp=cpu).id == 2
    with ledger.reading() as c:
        assert c.execute(sa.select(t.trials.c.unit, t.trial_ends.c.outcome).join(t.trial_ends)).all() == [
            ("GPU-a", containment.FINISHED)
        ]


def test_the_device_lock_names_its_holder_and_ends_with_it(ledger: Ledger, home: Path) -> None:
    here, there = CONTEXT.Pipe(duplex=False)

    def hold() -> None:
        with open_ledger(home=home) as other, other.lock(FP.hw_id):
            there.send("held")
            signal.pause()

    child = forked(hold)
    assert here.recv() == "held"
    with pytest.raises(LedgerError, match=f"pid {child.pid} "), ledger.lock(FP.hw_id):
        pass
    with ledger.lock("another-device"):
        pass
    child.kill()
    child.join()
    with ledger.lock(FP.hw_id):
        pass


# --- budget -------------------------------------------------------------------------------------------------------


def test_the_lifetime_budget_refuses_what_no_longer_fits_and_ignores_versions(ledger: Ledger, home: Path) -> None:
    key = budget_key(FP.hw_id, ATTN)
    newer = dataclasses.replace(FP, environment={"torch": "2.14.0"})
    assert budget_key(newer.hw_id, ATTN.at(L=5000)) == key
    assert [ledger.write(Spend(key=key, amount=0.004)) for _ in range(3)] == [True, True, False]
    assert open_ledger(home=home).spent(key) == pytest.approx(0.008)
    assert ledger.write(Spend(key=key, amount=0.002)), "exactly .01 must fit the budget"
    assert ledger.spent("another") == 0.0


def test_aa_sessions_add_up_by_device_and_time_class(ledger: Ledger) -> None:
    ledger.write(SaveAA(hw_id=FP.hw_id, time_class="us", crossings=(True, False, False)))
    ledger.write(SaveAA(hw_id=FP.hw_id, time_class="us", crossings=(False,)))
    ledger.write(SaveAA(hw_id=FP.hw_id, time_class="ms", crossings=(True,)))
    assert ledger.aa(FP.hw_id, "us") == (4, 1)
    assert ledger.aa("other", "us") == (0, 0)


# --- export and import --------------------------------------------------------------------------------------------


def test_an_imported_decision_serves_once_this_host_has_proven_its_arm(ledger: Ledger, tmp_path: Path) -> None:
    made = record(ledger)
    ledger.export(tmp_path / "out.json")
    other = open_ledger(home=tmp_path / "other")
    own = record(other, arm=PACKED, parities=[(PACKED, PASSED)])
    content = (tmp_path / "out.json").read_bytes()
    imported = other.write(Import(document=bundle.read(content, "out.json").decisions, hw_id=FP.hw_id))
    waiting = other.decision(*imported.waiting)
    assert (waiting.arm, waiting.verdict, imported.served, imported.kept) == (CPP, made.verdict, (), ())
    assert [s.decision for s in other.serving()] == [own], "the previous decision keeps serving"
    assert [r.decision for r in read_snapshot(tmp_path / "other").rows] == [own]
    assert other.known(FP.hw_id, ATTN.bucket, MODE, [CPP.digest, BASELINE.digest]) is None
    assert other.offered(FP.hw_id, MODE) == (waiting,)
    assert not other.write(Adopt(decision_id=waiting.id, parity=FAILED))
    assert other.write(Adopt(decision_id=waiting.id, parity=PASSED))
    assert [s.decision for s in other.serving()] == [waiting]
    assert [r.decision for r in read_snapshot(tmp_path / "other").rows] == [waiting]
    assert other.offered(FP.hw_id, MODE) == ()
    again = other.write(Import(document=ledger.export(), hw_id=FP.hw_id))
    assert again.served == (waiting.id,), "a second import must change nothing"


def test_an_imported_demotion_serves_at_once(ledger: Ledger, tmp_path: Path) -> None:
    ledger.write(Demote(decision_id=record(ledger).id, reason="wrong once"))
    other = open_ledger(home=tmp_path / "other")
    record(other)
    assert other.write(Import(document=ledger.export(), hw_id=FP.hw_id)).waiting == ()
    assert [(s.decision.state, s.decision.arm) for s in other.serving()] == [("demoted", BASELINE)]


def test_a_manual_pin_does_not_replace_a_proof(ledger: Ledger, tmp_path: Path) -> None:
    record(ledger)
    other = open_ledger(home=tmp_path / "other")
    (waiting,) = other.write(Import(document=ledger.export(), hw_id=FP.hw_id)).waiting
    other.write(Pin(decision_id=waiting, reason="I want it"))
    assert other.serving() == ()
    assert other.serving(everywhere=True)[0].decision.state == "pinned"


def test_foreign_and_code_importing_rows_are_kept_but_do_not_serve(ledger: Ledger, tmp_path: Path) -> None:
    user = dataclasses.replace(CPP, candidate="mine:f", recipe=PythonRecipe(target="os:system"))
    record(ledger, "a", arm=user, parities=[(user, PASSED)])
    other = open_ledger(home=tmp_path / "other")
    imported = other.write(Import(document=ledger.export(), hw_id=FP.hw_id))
    assert [why for _, why in imported.kept] == ["it would import os:system: race that candidate here instead"]
    record(ledger, "b")
    third = open_ledger(home=tmp_path / "third")
    imported = third.write(Import(document=ledger.export(), hw_id="another-device"))
    assert "another device" in imported.kept[0][1]
    assert other.serving() == third.serving() == ()
    assert len(other.history()) == len(third.history()) == 1


def test_an_edited_cut_or_malformed_import_is_refused_whole(ledger: Ledger, tmp_path: Path) -> None:
    record(ledger)
    good = json.dumps(ledger.export())
    other = open_ledger(home=tmp_path / "other")
    bad = [
        good[:-40],
        good.replace("cpp:attn", "cpp:evil"),
        good.replace('"version": 1', '"version": 2'),
        "{}",
        "[1]",
        "",
        '{"format": "autosel.decisions", "version": 1, "epoch": NaN, "rows": [], "digest": "x"}',
        "[" * 10_000 + "]" * 10_000,
        json.dumps(snapshot.document(1, [{"key": "k", "epoch": 1, "decision": {}}])),
        json.dumps(snapshot.document(1, [{"key": "k", "epoch": True, "decision": {}}])),
        json.dumps(snapshot.document(1, [{**ledger.export()["rows"][0], "key": "stolen"}])),
    ]
    for content in bad:
        with pytest.raises(BadConfig):
            other.write(Import(document=bundle.read(content, "it").decisions, hw_id=FP.hw_id))
    assert other.history() == []


# --- a kept connection --------------------------------------------------------------------------------------------


def test_a_kept_connection_writes_to_the_present_file(home: Path, tmp_path: Path) -> None:
    with open_ledger(home=home) as ledger:
        ledger.keep_line()
        first = record(ledger)
        ledger.backup(tmp_path / "copy.db")
        record(ledger, "after the copy", workload=ATTN.at(B=2))
        restore(tmp_path / "copy.db", home / "ledger.db")
        third = record(ledger, "after the restore", workload=ATTN.at(B=4))
        assert ledger.history() == [third, first]
        (home / "ledger.db").rename(tmp_path / "away.db")
        with pytest.raises(LedgerError):
            record(ledger, "nowhere", workload=ATTN.at(B=8))
        (tmp_path / "away.db").rename(home / "ledger.db")
        last = record(ledger, "and back", workload=ATTN.at(B=16))
    with open_ledger(home=home) as again:
        assert again.history() == [last, third, first]
        again.check()


def test_killing_a_kept_connection_loses_no_acknowledged_write(home: Path) -> None:
    read, write = os.pipe()

    def work() -> None:
        ledger = open_ledger(home=home)
        ledger.keep_line()
        for n in range(1000):
            os.write(write, b"%d\n" % record(ledger, str(n), race=None).id)
            if n == 50:
                ledger.move_log()
            if n == 70:
                os.kill(os.getpid(), signal.SIGKILL)

    forked(work).join()
    os.close(write)
    with os.fdopen(read) as pipe:
        told = [int(line) for line in pipe]
    with open_ledger(home=home) as ledger:
        assert len(told) == 71
        assert {d.id for d in ledger.history()} >= set(told)
        ledger.check()


def test_a_kept_connection_moves_its_log_on_request_and_releases_its_lock_after_each_write(home: Path) -> None:
    with open_ledger(home=home) as ledger, open_ledger(home=home) as other:
        ledger.keep_line()
        before = (home / "ledger.db").read_bytes()
        record(ledger, "one")
        assert (home / "ledger.db").read_bytes() == before, "the write is not in the log"
        ledger.move_log()
        assert (home / "ledger.db").read_bytes() != before
        record(other, "two", workload=ATTN.at(B=2))
        record(ledger, "three", workload=ATTN.at(B=4))
        assert len(other.history()) == 3


def test_a_kept_lock_excludes_others_also_after_its_file_was_deleted(home: Path) -> None:
    with open_ledger(home=home) as ledger:
        ledger.keep_line()
        record(ledger, "one")
        for path in (home / "locks").glob("write-*"):
            path.unlink()
        with write_lock(home / "ledger.db", deadline_s=1.0):
            with pytest.raises(InUseError):
                KeptLock(home / "ledger.db").held(deadline_s=0.0).__enter__()
            with pytest.raises(LedgerError, match="in use"), ledger._database.writing(patience_s=0.0):
                raise AssertionError("two writers at a time")


# --- helpers ------------------------------------------------------------------------------------------------------


def read_snapshot(home: Path) -> snapshot.Snapshot:
    found = snapshot.read(home / snapshot.FILE)
    assert found is not None
    return found
