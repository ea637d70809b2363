"""Test insufficient memory of the host or of a GPU: a race reports it beforehand, and blames no arm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from autosel.devices.cuda import nvml
from autosel.errors import EnvironmentFault, UsageError, WorkerError
from autosel.ops import OPS
from autosel.race import worker
from autosel.race.contest import Contest, Entrant
from autosel.tuning.contend import refuse_without_memory
from autosel.values import PythonRecipe

GIB = 1 << 30


def contest(size: int) -> Any:
    op = SimpleNamespace(bytes_moved=lambda w: size)
    return SimpleNamespace(workload=SimpleNamespace(key=f"linear/{size}"), op=op, llc_bytes=GIB // 16, entrants={})


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int | None]:
    found: dict[str, int | None] = {"host": 64 * GIB, "cuda:1": 8 * GIB}
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=found["host"]))
    monkeypatch.setattr(nvml, "free_bytes", lambda ordinal: found[f"cuda:{ordinal}"])
    return found


def test_operands_that_a_small_card_cannot_hold_are_refused(free: dict[str, int | None]) -> None:
    refuse_without_memory([contest(4 * GIB)], "cuda:1")
    with pytest.raises(UsageError, match=r"needs 9\.2 GiB of cuda:1's memory; 8\.0 GiB are free"):
        refuse_without_memory([contest(8 * GIB)], "cuda:1")
    free["cuda:1"] = None  # unknown: then the race finds it
    refuse_without_memory([contest(8 * GIB)], "cuda:1")


def test_a_large_card_needs_no_host_that_holds_the_copies_too(free: dict[str, int | None]) -> None:
    free["host"], free["cuda:1"] = 12 * GIB, 140 * GIB
    refuse_without_memory([contest(8 * GIB)], "cuda:1")
    with pytest.raises(UsageError, match="GiB of memory"):
        refuse_without_memory([contest(8 * GIB)], "cpu")


def entrant(candidate: str) -> Entrant:
    recipe = PythonRecipe(target="not:loaded")
    return Entrant(candidate=candidate, op="rmsnorm", recipe=recipe, digest=candidate, knobs={}, writes_out=True)


@pytest.fixture
def falls(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Return the arms blamed if a worker fails with any of these arms."""
    base, challenger = entrant("torch:rmsnorm"), entrant("cuda:rmsnorm")
    w = OPS["rmsnorm"].workload("bf16", {"M": 1, "d": 64})
    met = Contest(workload=w, baseline=base, incumbent=base, challengers=(challenger,), margins={}, llc_bytes=0)

    def blamed(*arms: str, retryable: bool) -> list[str]:
        class Seated:
            def __init__(self, process: object, contest: object, seats: Sequence[str], *_: object) -> None:
                self.seats = seats
                self.plan = SimpleNamespace(calls=1, samples=1)

            def sit(self) -> None:
                if set(arms) & set(self.seats):
                    raise WorkerError("the worker fell", cause="raised OutOfMemoryError", retryable=retryable)

            def pair(self, *_: object) -> None: ...

            def release(self) -> None: ...

        monkeypatch.setattr(worker, "WorkerSeat", Seated)
        process = worker.Workers(threads=1, rng=Random(1)).room()
        seat: Any = SimpleNamespace(arms=[base.candidate, challenger.candidate], contest=met, plan=None)
        return list(process.find_culprit(seat))

    return blamed


def test_an_arm_that_runs_out_of_memory_is_not_blamed(falls: Callable[..., list[str]]) -> None:
    assert falls("cuda:rmsnorm", retryable=True) == []
    assert falls("cuda:rmsnorm", retryable=False) == ["cuda:rmsnorm"]


@pytest.mark.parametrize("control", ["torch:rmsnorm", "control:empty.py"])
def test_an_arm_that_fails_with_the_control_is_not_blamed(control: str, falls: Callable[..., list[str]]) -> None:
    with pytest.raises(EnvironmentFault, match="as cuda:rmsnorm did"):
        falls("cuda:rmsnorm", control, retryable=False)
