"""Test the process from which workers are forked; test_workers.py runs every fault in a forked worker too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autosel.errors import EnvironmentFault
from autosel.workers import Worker
from autosel.workers.nursery import Nursery
from tests.cpu.test_workers import FAULTY, LONG_S, ended
from tests.processes import below


@pytest.fixture
def own() -> Iterator[Nursery]:
    with Nursery() as made:
        yield made
    assert made.process is None or made.process.returncode is not None


def answer(nursery: Nursery, fault: str = "none") -> dict[str, object]:
    with Worker(FAULTY, nursery=nursery) as worker:
        return worker.request({"fault": fault}, LONG_S)


def forked(nursery: Nursery) -> bool:
    """Return True if the nursery forks a worker that is started now."""
    with Worker(FAULTY, nursery=nursery) as worker:
        worker.wait_ready()
        return worker.pid in below(nursery) if nursery.process and nursery.process.poll() is None else False


def test_a_nursery_starts_with_its_first_worker_and_serves_all(own: Nursery) -> None:
    assert own.process is None
    first, second = answer(own), answer(own)
    assert first["pid"] != second["pid"] and first["folder"] != second["folder"]
    assert forked(own) and below(own) == []


def test_a_forked_worker_has_the_environment_of_its_own_start(own: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(own)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    seen = answer(own)["env"]
    assert isinstance(seen, dict) and seen["OMP_NUM_THREADS"] == "3"


def test_modules_that_a_worker_imports_are_not_there_for_the_next(own: Nursery) -> None:
    for _ in range(2):
        with Worker(FAULTY, nursery=own) as worker:
            assert worker.request({"fault": "imported", "name": "wave"}, LONG_S) == {"before": False}


def test_a_nursery_that_has_ended_is_replaced_by_new_interpreters(own: Nursery) -> None:
    assert forked(own)
    assert own.process is not None
    own.process.kill()
    own.process.wait()
    assert answer(own)["pid"]
    assert not forked(own)


def test_a_nursery_that_cannot_import_leaves_the_error_to_the_worker(
    own: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "raise ImportError('libtorch.so: cannot open shared object file')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with (
        Nursery("torch") as broken,
        Worker(FAULTY, threads=1, nursery=broken) as worker,
        pytest.raises(EnvironmentFault, match=r"libtorch\.so"),
    ):
        worker.wait_ready()


OWNER = """
from autosel.workers import Worker
from autosel.workers.nursery import Nursery
nursery = Nursery()
worker = Worker("tests.cpu.faulty:serve", nursery=nursery)
worker.wait_ready()
print(worker.pid, nursery.process.pid, flush=True)
worker.request({"fault": "wait"}, 600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_nursery_and_its_workers_end_with_their_parent(number: signal.Signals) -> None:
    words = [sys.executable, "-P", "-c", OWNER]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as owner:
        assert owner.stdout is not None
        family = [os.pidfd_open(int(pid)) for pid in owner.stdout.readline().split()]
        owner.send_signal(number)
        assert len(family) == 2 and all(ended(handle) for handle in family)
