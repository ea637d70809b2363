"""Test that the SIMT harness detects the mistakes that it should detect."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.compile.emulate import emulated, overlapped

FAULTS = str(Path(__file__).parent / "simt_faults")
ROOT = Path(__file__).parents[2]
X = torch.arange(64, dtype=torch.float32)


def run(which: int, barriers: bool) -> list[torch.Tensor]:
    """Run twice, because the harness reverses the order of threads between launches."""
    made = []
    for _ in range(2):
        y = torch.full((64,), -1.0)
        emulated(FAULTS, "run")(X, y, which, int(barriers))
        made.append(y)
    return made


def test_unwritten_memory_is_nan() -> None:
    assert all(torch.equal(y, X.flip(0)) for y in run(0, barriers=True))
    assert any(y.isnan().any() for y in run(0, barriers=False))


def test_a_barrier_missing_before_memory_is_used_again_shows_in_one_order_of_threads() -> None:
    assert all(torch.equal(y, X.roll(-2)) for y in run(1, barriers=True))
    assert not all(torch.equal(y, X.roll(-2)) for y in run(1, barriers=False))


@pytest.mark.parametrize(("which", "words"), [(2, "deadlock"), (3, "different operations")])
def test_a_deadlock_of_threads_is_an_error(which: int, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        run(which, barriers=True)


def test_a_write_beyond_the_requested_shared_memory_ends_the_process() -> None:
    code = (
        "import torch\nfrom tests.compile.emulate import emulated\n"
        f"x = torch.arange(64.0)\nemulated({FAULTS!r}, 'run')(x, torch.empty(64), 4, 1)\n"
    )
    emulated(FAULTS, "run")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, cwd=ROOT)
    assert done.returncode < 0, done.stderr


def followed(*hows: int) -> torch.Tensor:
    """Compute x + 1 by a chain of dependent launches, and write the result to x."""
    x, y = X.clone(), torch.full((64,), float("nan"))
    emulated(FAULTS, "step_on")  # loaded
    with overlapped(FAULTS):
        for number, how in enumerate(hows):
            emulated(FAULTS, "step_on")(*((y, x) if number % 2 else (x, y)), how)
    return y if len(hows) % 2 else x


def test_launches_that_wait_may_overlap() -> None:
    for count in (1, 2, 3, 4):
        assert torch.equal(followed(*[1] * count), X + count)


def test_data_read_before_the_wait_is_not_there_yet() -> None:
    assert followed(1, 0).isnan().all()


def test_writes_before_the_wait_spoil_the_reads_of_the_previous_kernel() -> None:
    assert not torch.equal(followed(1, 2), X + 2)


def test_every_thread_of_a_dependent_launch_must_wait() -> None:
    with pytest.raises(RuntimeError, match="without waiting"):
        followed(1, 3)


@pytest.mark.parametrize(("how", "words"), [(1, "without a fence"), (2, "has not fenced since")])
def test_a_block_that_counts_its_arrival_must_fence_where_the_memory_model_requires_it(how: int, words: str) -> None:
    counter = torch.zeros(1, dtype=torch.int32)
    emulated(FAULTS, "meet")(counter, 0)
    assert int(counter) == 0
    with pytest.raises(RuntimeError, match=words):
        emulated(FAULTS, "meet")(counter, how)
