"""Test that a wait ends at the first quiet check, or at the deadline."""

from __future__ import annotations

from autosel.devices.cpu.neighbours import Process, Reading
from autosel.race.quiet import Quiet


class Machine:
    """One CPU, on which another process runs until `busy_until`."""

    def __init__(self, busy_until: float) -> None:
        self.now, self.busy_until, self.told = 0.0, busy_until, list[str]()

    def rest(self, seconds: float) -> None:
        self.now += seconds

    def look(self) -> Reading:
        busy = min(self.now, self.busy_until)
        make = Process(parent=1, name="make", used_s=busy, ended_s=0.0)
        return Reading(at_s=self.now, cpus=1, idle_s=self.now - busy, stolen_s=0.0, processes={7: make})

    def wait(self, deadline: float = float("inf")) -> None:
        Quiet(tell=self.told.append, deadline=deadline, clock=lambda: self.now, look=self.look, rest=self.rest).wait()


def test_a_quiet_machine_is_checked_once() -> None:
    machine = Machine(busy_until=0.0)
    machine.wait()
    assert (machine.now, machine.told) == (1.0, [])


def test_a_busy_machine_is_waited_for_and_the_busy_process_is_named() -> None:
    machine = Machine(busy_until=3.0)
    machine.wait()
    assert (machine.now, machine.told) == (4.0, ["make 1.0 cores"] * 3)


def test_the_wait_ends_at_the_deadline() -> None:
    machine = Machine(busy_until=100.0)
    machine.wait(deadline=5.0)
    assert machine.now == 5.0
