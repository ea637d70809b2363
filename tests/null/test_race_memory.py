"""Memory that does not suffice, of the host or of a GPU: a race says so beforehand, and nobody is blamed for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from autosel.errors import UsageError, WorkerError
from autosel.fingerprint import nvml
from autosel.race import run
from autosel.tuning.contend import refuse_without_memory

GIB = 1 << 30


def contest(size: int) -> Any:
    op = SimpleNamespace(bytes_moved=lambda w: size)
    return SimpleNamespace(workload=SimpleNamespace(key=f"linear/{size}"), op=op, llc_bytes=GIB // 16)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int | None]:
    found: dict[str, int | None] = {"host": 64 * GIB, "cuda:1": 8 * GIB}
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=found["host"]))
    monkeypatch.setattr(nvml, "free_bytes", lambda ordinal: found[f"cuda:{ordinal}"])
    return found


def test_operands_that_a_small_card_cannot_hold_are_refused(free: dict[str, int | None]) -> None:
    refuse_without_memory([contest(4 * GIB)], "cuda:1")
    with pytest.raises(UsageError, match=r"takes 9\.2 GiB of cuda:1's memory; 8\.0 GiB are free"):
        refuse_without_memory([contest(8 * GIB)], "cuda:1")
    free["cuda:1"] = None  # nobody says: then the race finds out
    refuse_without_memory([contest(8 * GIB)], "cuda:1")


def test_a_large_card_needs_no_host_that_holds_the_copies_too(free: dict[str, int | None]) -> None:
    free["host"], free["cuda:1"] = 12 * GIB, 140 * GIB
    refuse_without_memory([contest(8 * GIB)], "cuda:1")
    with pytest.raises(UsageError, match="GiB of memory"):
        refuse_without_memory([contest(8 * GIB)], "cpu")


@pytest.mark.parametrize(("retryable", "blamed"), [(True, []), (False, ["cuda:gemv"])])
def test_who_finds_no_memory_is_not_blamed_for_it(
    retryable: bool, blamed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Seated:
        def __init__(self, *_: object) -> None: ...

        def sit(self) -> None:
            raise WorkerError("the worker fell", cause="raised OutOfMemoryError", retryable=retryable)

    monkeypatch.setattr(run, "_Seated", Seated)
    process = run._Process(run.Terms(threads=1, rng=Any))  # type: ignore[arg-type]
    seated: Any = SimpleNamespace(arms=["torch:linear", "cuda:gemv"], attempt=None, shelf=None, rng=None)
    assert list(process.find_culprit(seated)) == blamed
