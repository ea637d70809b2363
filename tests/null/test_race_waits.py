"""Test that samples during which a thread waited for a core are repeated, if other processes used the core."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autosel.devices.device import READ_S
from autosel.race.spread import ThreadPlacement
from autosel.race.waits import MOST_LOST_NS, PROBES, Others, Waits, WaitWatch, read_rate

IDLE = 3  # column of /proc/stat


class Proc:
    """A simulated /proc of one thread and one CPU, whose times a test sets."""

    def __init__(self, root: Path) -> None:
        self.root, self.now_s = root, 100.0
        (root / "self" / "task" / "7").mkdir(parents=True)
        self.waited(0)
        self.idle(0)

    def waited(self, ns: int, thread: str = "7") -> None:
        folder = self.root / "self" / "task" / thread
        folder.mkdir(exist_ok=True)
        (folder / "schedstat").write_text(f"123 {ns} 4\n")

    def idle(self, ticks: int) -> None:
        fields = ["5"] * 10
        fields[IDLE] = str(ticks)
        (self.root / "stat").write_text(f"cpu  {' '.join(fields)}\ncpu0 1\n")


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Proc:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    return Proc(tmp_path)


def watch(proc: Proc, *, busy: bool) -> WaitWatch:
    """Return a watch with a clock of 1 ms per reading, on a CPU that other processes keep busy, or that is idle."""
    ticks = iter(range(0, 10**12, 1_000_000))

    def clock() -> float:
        proc.now_s += 0.1
        if not busy:
            proc.idle(round((proc.now_s - 100) * os.sysconf("SC_CLK_TCK")))
        return proc.now_s

    made = WaitWatch(
        waits=Waits(proc.root), others=Others(proc=proc.root, clock=clock), spread=ThreadPlacement(()),
        clock=lambda: next(ticks),
    )  # fmt: skip
    made.begin()
    return made


def samples(proc: Proc, waits_ns: list[int]) -> Iterator[float]:
    """Yield samples 0, 1, 2 ...; in each, the thread waits this long."""
    total = 0
    for number, ns in enumerate(waits_ns):
        total += ns
        proc.waited(total)
        yield float(number)


def test_a_sample_with_a_wait_is_taken_again(proc: Proc) -> None:
    made, taken, settled = watch(proc, busy=True), samples(proc, [0, 5_000_000, 0]), []
    assert made.samples(lambda: next(taken), 2, lambda: settled.append("settled")) == [0.0, 2.0]
    assert (made.again, settled) == (1, ["settled"])


def test_a_wait_of_a_hundredth_of_the_sample_is_allowed(proc: Proc) -> None:
    made, taken = watch(proc, busy=True), samples(proc, [10_000, 10_001, 0])
    assert made.samples(lambda: next(taken), 2, lambda: None) == [0.0, 2.0]


def test_a_wait_that_our_own_threads_cause_is_part_of_the_sample(proc: Proc) -> None:
    """Run more threads than cores while no other process uses CPU time."""
    made, taken = watch(proc, busy=False), samples(proc, [5_000_000, 5_000_000])
    assert made.samples(lambda: next(taken), 2, lambda: None) == [0.0, 1.0]
    assert made.again == 0


def test_one_sample_says_how_long_it_was_disturbed(proc: Proc) -> None:
    made, taken = watch(proc, busy=True), samples(proc, [0, 5_000_000])
    assert [made.once(lambda: next(taken)) for _ in range(2)] == [(0.0, 0), (1.0, 1_000_000)]


def test_after_too_long_disturbed_samples_fewer_are_returned(proc: Proc) -> None:
    made, taken = watch(proc, busy=True), samples(proc, [0] + [MOST_LOST_NS] * 1000)
    ticks = iter(range(0, 10**18, MOST_LOST_NS // 4))
    made.clock = lambda: next(ticks)
    assert made.samples(lambda: next(taken), 8, lambda: None) == [0.0]
    assert made.again == 4


def test_a_read_rate_is_the_best_of_probes_without_a_wait(proc: Proc) -> None:
    """A probe whose threads waited reads less than memory can give, and would make every kernel look impossible."""
    made, taken = watch(proc, busy=True), samples(proc, [0] * 3 + [5_000_000] + [0] * 20)
    asked: list[float] = []

    def windows(seconds: float) -> list[float]:
        asked.append(seconds)
        return [next(taken), 0.0]

    assert read_rate(windows, made) == float(len(asked) - 1)
    assert len(asked) == PROBES + 1 and set(asked) == {0.0}


def test_without_such_a_probe_it_is_that_of_a_long_one(proc: Proc) -> None:
    made, taken = watch(proc, busy=True), samples(proc, [MOST_LOST_NS] * 1000)
    ticks = iter(range(0, 10**18, MOST_LOST_NS))
    made.clock = lambda: next(ticks)
    assert read_rate(lambda seconds: [next(taken) if seconds == 0 else 77.0], made) == 77.0
    assert read_rate(lambda seconds: [seconds], None) == READ_S


def test_a_new_thread_is_followed_and_one_that_has_ended_is_not(proc: Proc) -> None:
    waits = Waits(proc.root)
    proc.waited(1000, thread="8")
    assert waits.total_ns() == 0
    waits.renew()
    assert waits.total_ns() == 1000
    (proc.root / "self" / "task" / "8" / "schedstat").unlink()
    (proc.root / "self" / "task" / "8").rmdir()
    waits.renew()
    assert waits.total_ns() == 0
    waits.close()


def test_without_schedstat_nothing_is_watched_and_samples_are_taken(tmp_path: Path) -> None:
    made = WaitWatch(waits=Waits(tmp_path), others=Others(proc=tmp_path), spread=ThreadPlacement(()))
    made.begin()
    assert made.samples(lambda: 1.0, 3, lambda: None) == [1.0, 1.0, 1.0]
    assert not made.waits.watched


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system does not count waits")
def test_the_system_counts_the_wait_of_a_thread_that_shares_its_core() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    try:
        os.sched_setaffinity(0, {core})
        with subprocess.Popen([sys.executable, "-S", "-c", "print(flush=True)\nwhile True: pass"], stdout=-1) as other:
            assert other.stdout is not None
            other.stdout.readline()
            waits, others = Waits(), Others()
            others.look()
            start = waits.total_ns()
            while waits.total_ns() == start or not others.run():  # without the counters it never ends
                sum(range(10_000))
            other.kill()
    finally:
        os.sched_setaffinity(0, before)
