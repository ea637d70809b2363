"""Tune with twenty-four kernels that crash their process or cheat, and a good one: each fault is contained, its cause
is stored, no process is left, and the good kernel is promoted.

test_workers.py tests the worker's side of the same faults, message by message.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from autosel.candidates import user
from autosel.candidates.user import UserCandidate
from autosel.ledger.store import Ledger, open_ledger
from autosel.models.workloads import Named
from autosel.ops import OPS
from autosel.parity.check import Prover, Terms
from autosel.pipeline import Report, Request, tune
from autosel.tuning.shortlist import way_of
from autosel.values import Failed
from autosel.workers.nursery import Nursery
from tests.cpu.planting import built, proof
from tests.processes import below
from tests.quiet import Quiet

pytestmark = pytest.mark.usefixtures("preforked")

WORKLOAD = OPS["rmsnorm"].workload("bf16", {"M": 1, "d": 512})
DEADLINE_S = 4.0  # the timeout of a call that takes microseconds unless it hangs


@dataclass(frozen=True)
class Fault:
    """`function` of planted.py; the ledger must give one of `causes`, a check or a cause of death."""

    function: str
    causes: tuple[str, ...]
    stage: str = "parity"


FAULTS = {
    "null read": Fault("fault_null_read", ("SIGSEGV",)),
    "abort": Fault("fault_abort_now", ("SIGABRT",)),
    "illegal instruction": Fault("fault_illegal_instruction", ("SIGILL", "SIGTRAP")),
    "stack overflow": Fault("fault_stack_overflow", ("SIGSEGV",)),
    "_exit(0)": Fault("fault_exit_without_a_word", ("exit 0",)),
    "exception": Fault("fault_throw_across", ("SIGABRT",)),
    "heap corruption": Fault("fault_heap_corruption", ("SIGABRT", "SIGSEGV")),
    "spin with the interpreter's lock": Fault("fault_spin", ("timeout in request",)),
    "spin with signals blocked": Fault("fault_signal_proof_spin", ("timeout in request",)),
    "half a reply": Fault("fault_half_reply", ("timeout in request",)),
    "an escaped child": Fault("fault_escape_and_crash", ("SIGSEGV",)),
    "fork storm": Fault("fault_fork_storm", ("processes",)),
    "memory hog": Fault("fault_memory_hog", ("SIGABRT",)),
    "output flood": Fault("fault_output_flood_once", ("passed",), "race"),  # drained; this only takes long
    "descriptor leak": Fault("fault_descriptor_leak_at_times", ("leak",)),
    "wrong at an edge shape": Fault("native_wrong_at_an_edge", ("elements",)),
    "NaN now and then": Fault("native_nan_now_and_then", ("repeat", "nan_pattern", "outside_reads")),
    "flaky": Fault("native_flaky", ("repeat", "elements", "outside_reads")),
    "a write out of bounds": Fault("native_past_the_end", ("guards",)),
    "an input changed": Fault("native_normalises_in_place", ("inputs",)),
    "a stale output": Fault("native_nothing", ("unwritten",)),
    "a patched clock": Fault("slows_the_clock", ("global_state",)),
    "deferred work": Fault("native_works_later", ("unwritten", "repeat", "outside_reads")),
    # The 24th, an import that hangs, is test_an_import_that_hangs_ends_at_the_deadline.
}
IN_THE_RACE = {
    "a crash in the race": Fault("fault_crash_in_the_race", ("SIGSEGV",), "race"),
    "zeros in the race": Fault("fault_zeros_in_the_race", ("elements",), "race"),
}
ALL = FAULTS | IN_THE_RACE


class Silent(Quiet):
    def decided(self, *_: object, **__: object) -> None: ...


@dataclass(frozen=True)
class Tuned:
    ledger: Ledger
    report: Report
    candidates: dict[str, UserCandidate]
    pid: int


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tuned]:
    """Return the result of one tune of rmsnorm with every fault among its candidates."""
    folder = tmp_path_factory.mktemp("ledger")
    patch = pytest.MonkeyPatch()
    patch.setattr(user, "_REGISTERED", {})
    candidates = {}
    for what, fault in ALL.items():
        target = f"planted:{fault.function}"
        candidates[what] = UserCandidate("rmsnorm", target, built("planted"), name=fault.function, dtypes=("bf16",))
        user.register(candidates[what])
    request = Request(
        workloads=(Named(workload=WORKLOAD, label="rmsnorm", calls_per_step=1),), seed=11, call_deadline_s=DEADLINE_S
    )
    with open_ledger(home=folder) as ledger:
        yield Tuned(ledger, tune(request, ledger, Silent()), candidates, os.getpid())
    patch.undo()


@pytest.mark.parametrize("what", FAULTS)
def test_every_fault_is_contained_and_its_cause_stored(tuned: Tuned, what: str) -> None:
    fault, fp = FAULTS[what], tuned.report.fingerprint
    arm = way_of(tuned.candidates[what], WORKLOAD, fp).arm
    stored = tuned.ledger.parity_known(fp.hw_id, arm.digest, WORKLOAD)
    if fault.causes == ("passed",):
        assert stored is not None
        return
    assert isinstance(stored, Failed), stored
    assert {stored.check, stored.evidence.get("cause")} & set(fault.causes), stored
    told = [r for r in tuned.report.rejected if r.candidate == f"user:{fault.function}"]
    assert [r.stage for r in told] == ["parity"]


@pytest.mark.parametrize("what", IN_THE_RACE)
def test_a_candidate_that_fails_in_a_race_is_found_and_quarantined(tuned: Tuned, what: str) -> None:
    fault, fp = IN_THE_RACE[what], tuned.report.fingerprint
    held = {q.arm.candidate: q for q in tuned.ledger.quarantined(fp.hw_id, "rmsnorm").values()}
    quarantine = held[f"user:{fault.function}"]
    assert any(cause in f"{quarantine.cause} {quarantine.reason}" for cause in (*fault.causes, "wrong")), quarantine


def test_the_good_candidate_is_promoted_despite_the_faulty_ones(tuned: Tuned) -> None:
    (decision,) = tuned.report.decisions
    assert (decision.state, decision.arm.candidate) == ("promoted", "cpp:rmsnorm"), decision.reason
    (served,) = tuned.ledger.serving_rows(tuned.report.fingerprint.hw_id, WORKLOAD.bucket, decision.mode)
    assert served.arm.candidate == "cpp:rmsnorm"


def test_no_process_is_left_and_the_tuner_is_the_same_process(tuned: Tuned, preforked: Nursery) -> None:
    assert os.getpid() == tuned.pid
    assert below(preforked) == []


def test_an_import_that_hangs_ends_at_the_deadline(preforked: Nursery) -> None:
    with Prover(None, Terms(proof_deadline_s=2.0)) as prover:
        found = prover.prove(proof("no_matter", module="hangs_at_import"))
    assert isinstance(found, Failed)
    assert (found.check, found.case, found.evidence["cause"]) == ("timeout", "load", "timeout in request")
    assert below(preforked) == []
