"""Test a tune spread over workers: the assignment, and lost workers; without Ray, device or clock."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosel.fleet.spread import ATTEMPTS, RESTS, FleetPart, Lost, Spread, error_of, parts
from autosel.models.workloads import Named
from autosel.tuning.job import Request
from autosel.values import Workload, from_json


def named(count: int) -> tuple[Named, ...]:
    found = (Workload(op=f"op{n % 3}", dims=(("M", n + 1),), dtype="bf16") for n in range(count))
    return tuple(Named(workload=w, label=w.op, calls_per_step=1) for w in found)


class World:
    """Simulate workers and their ledger: a workload takes one call of `news`; a worker with `dies_after` dies in the
    middle of a part."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ledger: dict[tuple[str, str], int] = {}  # (kind, workload): decision
        self.at_once: list[set[str]] = []  # devices that worked at each check
        self.busy: list[Fake] = []

    def rest(self, seconds: float) -> None:
        devices = [w.device for w in self.busy]
        assert len(devices) == len(set(devices)), "two measure on one device"
        self.at_once.append(set(devices))
        self.now += seconds


@pytest.fixture
def world() -> World:
    return World()


class Fake:
    def __init__(self, world: World, name: str, kind: str = "kind", device: str = "", dies_after: int = -1) -> None:
        self.world, self.name, self.kind, self.device = world, name, kind, device or name
        self.dies_after = dies_after
        self.in_use = 0  # number of checks for which its device is in use
        self.fails = False
        self.stopped = False
        self.tasks: list[list[str]] = []
        self._left: list[str] = []

    def start(self, task: Mapping[str, Any]) -> None:
        assert self not in self.world.busy
        self.world.busy.append(self)
        self._left = [from_json(Workload, w).key for w in task["workloads"]]
        self.tasks.append(list(self._left))

    def news(self) -> list[dict[str, Any]]:
        if self.dies_after == 0:
            self.world.busy.remove(self)
            raise Lost("killed")
        if self.in_use:
            self.in_use -= 1
            return self._end(1, {"event": "error", "kind": "InUseError", "what": "in use", "why": "", "todo": ""})
        if self.fails:
            return self._end(1, {"event": "error", "kind": "LedgerError", "what": "no memory", "why": "", "todo": ""})
        if not self._left:
            return self._end(0, {"event": "done", "undecided": [], "fingerprint": {"kind": self.kind}})
        self.dies_after -= 1
        key = self._left.pop(0)
        before = (self.kind, key) in self.world.ledger
        made = self.world.ledger.setdefault((self.kind, key), len(self.world.ledger) + 1)
        return [{"event": "decided", "id": made, "workload": key, "before": before}]

    def _end(self, code: int, event: dict[str, Any]) -> list[dict[str, Any]]:
        self.world.busy.remove(self)
        return [event, {"event": "ended", "code": code}]

    def stop(self) -> None:
        self.stopped = True


def spread(world: World, workers: list[Fake], count: int = 12, **more: Any) -> Spread:
    budget_s = more.pop("budget_s", 0.0)
    request = Request(workloads=named(count), budget_s=budget_s)
    return Spread(request, workers, clock=lambda: world.now, rest=world.rest, **more)


def test_devices_of_a_kind_share_the_workloads_and_each_is_decided_once(world: World) -> None:
    workers = [Fake(world, name) for name in "abc"]
    found = spread(world, workers).run()
    assert len(found.decided) == 12
    assert all(w.tasks for w in workers)
    assert max(map(len, world.at_once)) == 3
    assert not found.undecided
    assert not found.failed


def test_each_kind_of_device_gets_all_workloads(world: World) -> None:
    found = spread(world, [Fake(world, "a", kind="x"), Fake(world, "b", kind="y")]).run()
    assert len(found.decided) == 24


def test_workers_of_one_device_take_turns(world: World) -> None:
    found = spread(world, [Fake(world, "a", device="cpu"), Fake(world, "b", device="cpu")]).run()
    assert len(found.decided) == 12
    assert max(map(len, world.at_once)) == 1


def test_workloads_of_an_op_stay_together(world: World) -> None:
    made = parts(named(12), [Fake(world, "a"), Fake(world, "b")])
    assert [[n.workload.op for n in part.workloads] for part in made] == [[f"op{n // 2}"] * 2 for n in range(6)]
    assert sum(len(part.workloads) for part in made) == 12


def test_the_part_of_a_killed_worker_goes_to_another_and_its_decisions_are_kept(world: World) -> None:
    dying, other = Fake(world, "a", device="cpu", dies_after=5), Fake(world, "b", device="cpu")
    found = spread(world, [dying, other]).run()
    assert len(found.decided) == 12
    assert other.tasks == dying.tasks
    assert not found.failed


def test_a_lost_worker_is_replaced(world: World) -> None:
    found = spread(world, [Fake(world, "a", dies_after=2)], replace=lambda _: Fake(world, "a again")).run()
    assert len(found.decided) == 12


def test_with_no_worker_left_the_rest_is_undecided_with_the_reason(world: World) -> None:
    found = spread(world, [Fake(world, "a", dies_after=2)]).run()
    assert len(found.decided) == 2
    assert len(found.undecided) == 10
    assert [part.trouble["what"] for part in found.failed] == ["no worker is left"]


def test_a_part_that_kills_every_worker_is_given_up(world: World) -> None:
    made = [0]

    def another(_: Any) -> Fake:
        made[0] += 1
        return Fake(world, f"{made[0]}", dies_after=0)

    found = spread(world, [Fake(world, "first", dies_after=0)], 4, replace=another).run()
    assert made[0] == ATTEMPTS
    assert len(found.undecided) == 4
    assert len(found.failed) == 1


def test_a_device_in_use_is_waited_for_a_while(world: World) -> None:
    worker = Fake(world, "a")
    worker.in_use = 3
    assert len(spread(world, [worker]).run().decided) == 12
    stuck = Fake(world, "b")
    stuck.in_use = RESTS + 1
    found = spread(world, [stuck], 5).run()
    assert found.failed[0].trouble["what"] == "in use"


def test_a_part_that_one_worker_refuses_goes_to_another(world: World) -> None:
    poor, rich = Fake(world, "a"), Fake(world, "b")
    poor.fails = True
    found = spread(world, [poor, rich]).run()
    assert len(found.decided) == 12
    alone = Fake(world, "c")
    alone.fails = True
    assert spread(world, [alone], 3).run().failed[0].trouble["what"] == "no memory"
    assert len(alone.tasks) == 1, "the worker must not get a part that it refused again"


@pytest.mark.parametrize(("kind", "code"), [("LedgerError", 1), ("EnvironmentFault", 6)])
def test_a_workers_broken_environment_keeps_its_exit_code(kind: str, code: int) -> None:
    part = FleetPart(kind="kind", workloads=(), trouble={"kind": kind, "what": "it broke", "why": "", "todo": ""})
    assert (error_of(part).what, error_of(part).exit_code) == ("it broke", code)


def test_after_the_budget_no_new_part_starts(world: World) -> None:
    found = spread(world, [Fake(world, "a"), Fake(world, "b")], 30, budget_s=1.0).run()
    assert 0 < len(found.decided) < 30
    assert len(found.decided) + len(found.undecided) == 30
    assert not found.failed


def test_ctrl_c_stops_the_workers_and_is_raised(world: World) -> None:
    workers = [Fake(world, "a"), Fake(world, "b")]

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    made = spread(world, workers)
    made._rest = interrupted
    with pytest.raises(KeyboardInterrupt):
        made.run()
    assert all(w.stopped for w in workers)
    assert len(made.outcome.decided) == 2


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 3), st.integers(1, 30))
def test_each_workload_is_decided_once_or_reported_undecided_for_any_deaths(
    seed: int, workers: int, devices: int, count: int
) -> None:
    rng, world = Random(seed), World()

    def another(lost: Any) -> Fake | None:
        after = rng.choice([-1, 0, 2])
        return Fake(world, f"{lost.name}'", device=lost.device, dies_after=after) if rng.random() < 0.5 else None

    made = [
        Fake(world, f"{n}", device=f"device {n % devices}", dies_after=rng.choice([-1, -1, 0, 1, 7]))
        for n in range(workers)
    ]
    found = spread(world, made, count, replace=another).run()
    decided = {event["workload"] for event in found.decided.values()}
    assert decided | set(found.undecided) == {n.workload.key for n in named(count)}
    assert not decided & set(found.undecided)
    assert bool(found.undecided) == bool(found.failed)
