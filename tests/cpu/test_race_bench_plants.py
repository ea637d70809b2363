"""Test the race with kernels that give correct results but fool the timing, which parity cannot detect."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from random import Random
from typing import Any

import pytest
import torch

from autosel import fingerprint
from autosel.devices.cpu.idle import _TASKS, _state, wait_until_idle
from autosel.models.workloads import Named
from autosel.ops import OPS
from autosel.ops.contract import Match
from autosel.pipeline import Tried, try_candidate
from autosel.race import bench
from autosel.race.bench import Bench
from autosel.race.contest import Entrant
from autosel.race.deployed import SITUATIONS
from autosel.race.drawn import KEPT
from autosel.race.judge import CLONE
from autosel.race.plan import plan
from autosel.race.worker import Workers, WorkerSeat, _WrongOutputError
from autosel.tuning.trial import _contest as contest_for
from autosel.values import Knobs, PythonRecipe
from tests import drawn
from tests.cpu.planting import Planted, built
from tests.quiet import Quiet

pytestmark = pytest.mark.usefixtures("preforked")

WORKLOAD = OPS["rmsnorm"].workload("bf16", {"M": 1, "d": 512})
NAMED = Named(workload=WORKLOAD, label="rmsnorm", calls_per_step=1)


def raced(function: str) -> Tried:
    (tried,) = try_candidate(Planted("rmsnorm", function), [NAMED], fingerprint.take("cpu"), Quiet(), seed=3)
    return tried


def test_the_baseline_under_another_name_gains_nothing() -> None:
    tried = raced("calls_the_baseline")
    assert tried.verdict is not None
    assert tried.verdict.outcome != "promote"


@pytest.fixture(scope="module")
def slow_starter() -> Tried:
    return raced("slow_at_first")


def test_the_plan_follows_the_baselines_times(slow_starter: Tried) -> None:
    """Race a kernel whose first calls take 10 ms: a plan based on them would have few, long samples."""
    race = slow_starter.race
    assert race is not None
    assert race.time_class == "short"
    assert len(race.sessions[0].pairs[0].samples_ns[0]) == plan(10e3).samples


@pytest.fixture
def seat(request: pytest.FixtureRequest) -> Iterator[WorkerSeat]:
    """Seat a planted kernel and the baseline in a race's worker."""
    contest = contest_for(Planted("rmsnorm", request.param), NAMED, fingerprint.take("cpu"))
    workers = Workers(threads=1, rng=Random(drawn.seed))
    room = workers.room()
    made = room.seat(contest, [contest.baseline.candidate, f"user:{request.param}"], None)
    try:
        made.sit()
        yield made
    finally:
        room.close()
        workers.close()


def take(seat: WorkerSeat, pairs: int) -> None:
    assert seat.plan is not None
    for _ in range(pairs):
        seat.pair(seat.arms, seat.plan.calls, seat.plan.samples)


@pytest.mark.parametrize("seat", ["wrong_once_in_300_calls", "leaves_out_one_call_in_50", "tires"], indirect=True)
def test_a_fault_of_some_timed_calls_is_found(seat: WorkerSeat) -> None:
    with pytest.raises(_WrongOutputError) as found:
        take(seat, 200)
    assert found.value.arm == seat.arms[1]


@pytest.mark.parametrize("seat", ["right"], indirect=True)
def test_compared_calls_are_counted(seat: WorkerSeat) -> None:
    take(seat, 20)
    assert seat.plan is not None
    kept = 3 * seat.plan.samples * 20
    arms = [arm for arm in seat.arms if arm != CLONE]
    assert seat.checked == dict.fromkeys(arms, (kept, seat.plan.calls * seat.plan.samples * 20))
    seat.release()


@pytest.mark.parametrize("seat", ["right"], indirect=True)
def test_single_calls_are_timed_in_each_situation_of_a_program(seat: WorkerSeat) -> None:
    take(seat, 1)
    arms = [arm for arm in seat.arms if arm != CLONE]
    found = seat.deployed(arms)
    assert [one.situation for one in found] == list(SITUATIONS)
    for one in found:  # a turn in which a thread had to wait for a core is left out
        assert all(len(turn) == len(arms) and min(turn) > 0 for turn in one.turns_ns)


def test_the_verdict_has_the_number_of_compared_timed_calls(slow_starter: Tried) -> None:
    verdict = slow_starter.verdict
    assert verdict is not None and verdict.checked is not None
    checked, timed = verdict.checked
    kept, called = 0, 0  # of the pairs that count; dropped pairs were compared as well
    for session in slow_starter.race.sessions:  # type: ignore[union-attr]
        samples = plan(10e3).samples * len(session.pairs)
        kept += samples * min(KEPT, session.calls_per_sample[0])
        called += samples * session.calls_per_sample[0]
    assert kept > 0
    assert checked >= kept
    assert timed >= called
    assert timed >= checked


# --- the bench itself -------------------------------------------------------------------------------------------------


def seated(*functions: str) -> Bench:
    """Seat planted kernels as arms, like the race's worker."""
    made = Bench()
    inputs = OPS["rmsnorm"].inputs(WORKLOAD, 1)
    names = {}
    for function in functions:
        recipe = PythonRecipe(target=f"planted:{function}", path=built("planted"))
        entrant = Entrant(
            candidate=f"user:{function}", op="rmsnorm", recipe=recipe, digest=function, knobs=Knobs().values,
            writes_out=True,
        )  # fmt: skip
        made.load(entrant)
        names[entrant.candidate] = entrant.loaded_name
    made.prepare(WORKLOAD, inputs, names, 1)
    return made


def test_work_that_an_arm_leaves_running_is_not_timed_with_its_rival(monkeypatch: pytest.MonkeyPatch) -> None:
    patient = partial(wait_until_idle, limit_ns=10_000_000_000)  # while other tests run, the residue waits for a core
    monkeypatch.setattr(bench, "wait_until_idle", patient)
    earlier = set(_TASKS.iterdir())  # threads of the test runner wake when they like
    made, seen = seated("native_leaves_residue", "right"), []
    rival = made.seats["user:right"].timed
    plain = rival.call

    def watched(*arguments: Any) -> Any:
        seen.append(any(_state(task) == "R" for task in set(_TASKS.iterdir()) - earlier))
        return plain(*arguments)

    rival.call = watched
    for _ in range(5):
        made.pair(["user:native_leaves_residue", "user:right"], calls=1, samples=1)
    assert len(seen) >= 5
    assert not any(seen)


@pytest.mark.parametrize(
    ("function", "right"), [("right", True), ("lazy_in_bursts", False), ("remembers_the_last", False)]
)
def test_work_left_out_of_a_burst_shows_in_an_unannounced_call_on_new_contents(function: str, right: bool) -> None:
    """Race kernels that skip work in a timed burst, where the result of one call is right for all."""
    made, name = seated(function), f"user:{function}"
    old, new = (OPS["rmsnorm"].inputs(WORKLOAD, seed) for seed in (2, 3))
    made.refresh(tensors(old))
    made.pair([name], calls=20, samples=8)
    assert holds(made, name, old)
    made.surprise(name, 20, tensors(new))
    assert holds(made, name, new) == right


def tensors(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {n: v for n, v in inputs.items() if isinstance(v, torch.Tensor)}


def holds(made: Bench, name: str, inputs: Mapping[str, Any]) -> bool:
    """Return True if the arm's output is right for these inputs."""
    return isinstance(OPS["rmsnorm"].verify(inputs, made.outputs(name)), Match)


def test_a_patched_clock_is_not_the_one_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    made = seated("right")
    monkeypatch.setattr(time, "perf_counter_ns", lambda: 0)
    times, _ = made.pair(["user:right"], calls=1, samples=2)
    assert min(times["user:right"]) > 0
