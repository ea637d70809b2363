"""Test the turns of a measurement with steps that only count: the warm-up, by a guard whose first checks take a known
time, and the pairs that another process disturbs, by a simulated count of waits."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autosel import dispatch
from autosel.decode import turns
from autosel.decode.run import Silent
from autosel.decode.turns import Turns
from autosel.decode.verdict import LATER
from autosel.devices.device import Took
from autosel.devices.energy import Meter

STEP_NS = 1_000_000


@dataclass
class Guarded:
    """A clock, an arm and a board: each step takes STEP_NS, and `extra_ns` more while first checks are left."""

    checks: int
    extra_ns: int
    now_ns: int = 0
    spent_ns: float = 0.0
    steps: list[str] = field(default_factory=list)

    def step(self, arm: str) -> None:
        self.steps.append(arm)
        self.now_ns += STEP_NS
        if arm == "ours" and self.checks:
            self.checks -= 1
            self.now_ns += self.extra_ns
            self.spent_ns += self.extra_ns

    def first_checks_ns(self) -> float:
        return self.spent_ns


def warmed_up(guarded: Guarded, monkeypatch: pytest.MonkeyPatch, *, warmup: int = 10) -> list[str]:
    monkeypatch.setattr(dispatch, "board", lambda: guarded)
    monkeypatch.setattr(turns, "step", guarded.step)
    scene = SimpleNamespace(plan=SimpleNamespace(warmup=warmup), listener=Silent(), clock=lambda: guarded.now_ns)
    arms: Any = {"ours": "ours", "theirs": "theirs"}
    Turns(scene=cast(Any, scene), **arms, timer=cast(Any, None), power=Meter(()), uses=cast(Any, None)).warm_up()
    return guarded.steps


def test_steps_are_timed_once_the_guards_first_checks_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded = Guarded(checks=32, extra_ns=STEP_NS)
    steps = warmed_up(guarded, monkeypatch)
    assert guarded.checks == 0
    assert steps.count("theirs") == 10
    assert steps.count("ours") == 33  # the last one shows that no check is left


def test_first_checks_that_hardly_show_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(warmed_up(Guarded(checks=32, extra_ns=STEP_NS // 1000), monkeypatch)) == 21


def test_without_a_warm_up_no_step_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert warmed_up(Guarded(checks=32, extra_ns=STEP_NS), monkeypatch, warmup=0) == []


# --- pairs that another process disturbs -----------------------------------------------------------------------------


@dataclass
class Machine:
    """A machine on which the steps of these numbers wait for a core. It is the watch, the timer, the uses and the
    arms' clock; each step counts one call and one joule."""

    disturbed: set[int]
    steps: int = 0
    calls: int = 0
    dropped: int = 0
    marked: int = 0

    @property
    def waits(self) -> Machine:
        return self

    def close(self) -> None: ...

    def begin(self) -> None: ...

    def enqueued(self) -> None: ...

    def took(self) -> Took:
        return Took(ns=self.steps, host_ns=self.steps)

    def once(self, run: Any) -> tuple[Any, int]:
        self.steps, self.calls = self.steps + 1, self.calls + 1
        return run(), 1000 * (self.steps - 1 in self.disturbed)

    def mark(self) -> None:
        self.marked = self.calls

    def drop(self) -> None:
        self.dropped += self.calls - self.marked


@dataclass(eq=False)
class Arm:
    """An arm that chooses token 7, and 8 in its steps of these numbers."""

    power: Meter
    other: set[int] = field(default_factory=set)
    steps: int = 0

    def enqueue(self) -> None:
        self.power.total += 1.0
        self.steps += 1

    def tokens(self) -> list[list[int]]:
        return [[8 if self.steps in self.other else 7]]

    def remember(self, tokens: list[int]) -> None: ...


def taken(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    other: set[int] | None = None,
    *,
    alone: bool = False,
    **plan: Any,
) -> Turns:
    """Run four pairs of steps on the machine; `other` numbers the optimised steps that choose another token."""
    power = Meter(())
    greedy = SimpleNamespace(changes_greedy=False)
    asked = {"iters": 4, "warmup": 0, "device": "cpu", "advance": False, "sampling": greedy}
    probes: list[float] = []
    scene: Any = SimpleNamespace(
        plan=SimpleNamespace(**asked | plan), listener=Silent(), rng=Random(1), probes=probes,
        probe=lambda: probes.append(1e10), advance=lambda kept: None,
    )  # fmt: skip
    monkeypatch.setattr(turns, "watch", lambda: machine)
    monkeypatch.setattr(turns, "UsesSince", lambda: machine)
    monkeypatch.setattr(turns, "verdict", lambda *_, **__: LATER)
    monkeypatch.setattr(turns, "Passes", lambda *_: SimpleNamespace(verdict=lambda *_, **__: LATER))
    ours, theirs, timer = (cast(Any, x) for x in (Arm(power, other or set()), Arm(Meter(())), machine))
    made = Turns(scene=scene, ours=ours, theirs=None if alone else theirs, timer=timer, power=power)
    assert len(made.timed()) == len(probes) == 4
    return made


def test_a_pair_that_another_process_disturbed_is_repeated_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(disturbed={2, 5})
    found = taken(machine, monkeypatch)
    numbers = {frozenset((s.optimised.ns, s.baseline[0].ns)) for s in found.steps if s.baseline}
    assert numbers == {frozenset(pair) for pair in ((1, 2), (7, 8), (9, 10), (11, 12))}
    assert (found.repeated, found.waited, machine.dropped) == (2, 0, 4)
    assert found.power.total == 4
    assert found.told() == "2 pairs of steps were repeated: a thread waited for a core that another process used"


def test_on_a_machine_that_stays_busy_pairs_are_taken_as_they_are_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    found = taken(Machine(disturbed=set(range(100))), monkeypatch)
    assert (found.repeated, found.waited) == (4, 4)
    assert "in 4 of 4 timed pairs of steps a thread waited for a core" in found.told()


@pytest.mark.parametrize("plan", [{"advance": True}, {"sampling": SimpleNamespace(changes_greedy=True)}])
def test_a_pair_whose_repetition_would_be_another_one_is_counted(
    plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = taken(Machine(disturbed={2}), monkeypatch, **plan)
    assert (found.repeated, found.waited) == (0, 1)


def test_a_disturbed_pair_with_another_token_counts_because_it_needs_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    found = taken(Machine(disturbed={0, 1, 2, 3}), monkeypatch, other={2})
    assert (found.repeated, found.waited) == (1, 1)


def test_without_a_baseline_a_disturbed_step_is_repeated_if_it_chose_the_last_ones_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = taken(Machine(disturbed={0, 1, 2}), monkeypatch, other={3}, alone=True)
    assert (found.repeated, found.waited) == (1, 2)  # the first has none to compare with, the third chose another
    assert found.told().startswith("1 step was repeated: a thread waited") and "in 2 of 4 timed steps" in found.told()


def test_on_a_quiet_machine_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert taken(Machine(disturbed=set()), monkeypatch).told() == ""
