"""Test energy by RAPL, from a tree of files like the kernel's, and by a GPU's counter."""

from __future__ import annotations

from pathlib import Path

import pytest

from autosel.decode import measure as measuring
from autosel.decode.arms import WrittenArm
from autosel.devices.cpu.device import Cpu
from autosel.devices.energy import BoardMeter, packages
from tests.flows.test_decode_verdict import Said, folder, ran

__all__ = ["folder"]  # the fixture
MOST = 262_143_328_850


def domain(root: Path, name: str, told: str, energy: int = 0) -> Path:
    made = root / name
    made.mkdir(parents=True)
    (made / "name").write_text(f"{told}\n")
    (made / "energy_uj").write_text(f"{energy}\n")
    (made / "max_energy_range_uj").write_text(f"{MOST}\n")
    return made / "energy_uj"


def test_packages_are_added_up_and_their_parts_are_not_counted_again(tmp_path: Path) -> None:
    first, second = (domain(tmp_path, f"intel-rapl:{i}", f"package-{i}") for i in (0, 1))
    part, again = domain(tmp_path, "intel-rapl:0:0", "core"), domain(tmp_path, "intel-rapl-mmio:0", "package-0")
    found = packages(tmp_path)
    for energy in (1_000_000, 3_000_000):
        for file in (first, part, again):
            file.write_text(str(energy))
        found.begin()
        for file in (first, second, part, again):
            file.write_text(str(energy + 500_000))
        found.end()
    assert found.joules == pytest.approx(0.5 + 1.5 + 0.5 + 2.0) and not found.why


def test_a_counter_that_wraps_around_is_added_correctly(tmp_path: Path) -> None:
    file = domain(tmp_path, "intel-rapl:0", "package-0", MOST - 999_999)
    found = packages(tmp_path)
    found.begin()
    file.write_text("1000000")
    found.end()
    assert found.joules == pytest.approx(2.0)


def test_an_unreadable_counter_is_unknown_and_named(tmp_path: Path) -> None:
    assert str(tmp_path) in packages(tmp_path).why
    file = domain(tmp_path, "intel-rapl:0", "package-0")
    found = packages(tmp_path)
    found.begin()
    file.unlink()
    found.end()
    assert found.joules is None and str(file) in found.why
    assert packages(tmp_path).joules is None and str(file) in packages(tmp_path).why


class Board:
    """Count energy: advances every 70 ms of a simulated clock, at 500 W; a step takes 3 ms."""

    def __init__(self, advances: bool = True) -> None:
        self.ns, self.advances, self.steps = 12_345_678, advances, 0

    def step(self) -> None:
        self.ns += 3_000_000
        self.steps += 1

    def clock(self) -> int:
        return self.ns

    def read(self) -> int:
        return 10**9 + (self.ns // 70_000_000 * 35_000 if self.advances else 0)


def test_a_boards_energy_is_measured_over_consecutive_steps_between_two_advances_of_its_counter() -> None:
    board = Board()
    found = BoardMeter(board.read, board.clock)
    found.begin()
    found.end()
    assert found.joules is None
    found.after(board.step, 40)
    # Advances are seen a step late at most: 3 of 2,000 ms at either end.
    assert found.joules == pytest.approx(500 * 0.003 * 40, rel=3 / 2000) and not found.why
    assert 600 < board.steps < 800 and "more steps in a row" in found.told


def test_a_counter_that_does_not_advance_is_unknown() -> None:
    board = Board(advances=False)
    found = BoardMeter(board.read, board.clock)
    found.after(board.step, 40)
    assert found.joules is None and "does not advance" in found.why and board.steps < 500


def test_a_boards_counter_that_can_no_longer_be_read_is_unknown() -> None:
    board = Board()

    def lost() -> int:
        if board.steps > 100:
            raise OSError("GPU is lost")
        return board.read()

    found = BoardMeter(lost, board.clock)
    found.after(board.step, 40)
    assert found.joules is None and "GPU is lost" in found.why


def test_a_run_counts_the_energy_of_its_optimised_steps_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = domain(tmp_path, "intel-rapl:0", "package-0")
    monkeypatch.setattr(Cpu, "meter", lambda self: packages(tmp_path))
    for arm, joules in ((WrittenArm, 2), (measuring.Baseline, 100)):
        honest = arm.tokens

        def stepped(self: object, honest: object = honest, joules: int = joules) -> Said:
            file.write_text(str(int(file.read_text()) + joules * 1_000_000))
            return honest(self)  # type: ignore[operator, no-any-return]

        monkeypatch.setattr(arm, "tokens", stepped)
    run = ran(folder, iters=3)
    assert run.energy_joules == 6.0 and not any("energy" in note for note in run.notes)
