"""Test that a wait ends at the first quiet check, or at the deadline."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize(
    ("busy_until", "deadline", "waited"), [(0.0, float("inf"), 1.0), (3.0, float("inf"), 4.0), (100.0, 5.0, 5.0)]
)
def test_a_busy_machine_is_waited_for_until_the_deadline_and_the_busy_process_is_named(
    busy_until: float, deadline: float, waited: float
) -> None:
    m = Machine(busy_until)
    Quiet(tell=m.told.append, deadline=deadline, clock=lambda: m.now, look=m.look, rest=m.rest).wait()
    assert (m.now, m.told) == (waited, ["make 1.0 cores"] * round(min(busy_until, deadline)))
