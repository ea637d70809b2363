"""Test a tune under kill -9, several tuners of one device, and readers during a write. `tests/soak` has the long
form."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch

from autosel import dispatch
from autosel.errors import LedgerError
from autosel.ledger import engine, open_ledger, snapshot
from autosel.ledger.commands import Demote
from autosel.tuning import contend
from tests import drawn
from tests.cpu.killed import Graveyard, Pipe, Told, fork, hold_to, kill_at_moments, kill_at_step, outcome
from tests.cpu.test_ledger import ATTN, race, record

KILLS = 4  # more than 1,000 in tests/soak
STEPS = (3, 77, 160, 251, 290, 337)


@pytest.fixture(scope="module")
def graveyard(tmp_path_factory: pytest.TempPathFactory) -> Graveyard:
    made = Graveyard(tmp_path_factory.mktemp("graveyard"))
    made.whole()  # compilers run once, and the decisions that every tune must reach are known
    return made


# --- kill -9 ----------------------------------------------------------------------------------------------------------


def test_tunes_killed_at_random_moments_lose_nothing_and_reach_the_same_decisions(graveyard: Graveyard) -> None:
    assert kill_at_moments(graveyard, KILLS, Random(20), graveyard.whole()) >= KILLS


@pytest.mark.parametrize("fuse", drawn.share(STEPS, days=3))
def test_a_tune_killed_at_a_failpoint_loses_nothing_and_reaches_the_same_decisions(
    graveyard: Graveyard, fuse: int
) -> None:
    assert kill_at_step(graveyard, fuse)


# --- several tuners ---------------------------------------------------------------------------------------------------


class Tuner:
    """Run a tuner in a separate process, which stops itself (SIGSTOP) after its first race."""

    def __init__(self, graveyard: Graveyard, home: Path, complaints: Path) -> None:
        def work(pipe: Pipe) -> None:
            judge = contend.judge

            def stop_and_judge(found: object) -> object:
                contend.judge = judge
                os.kill(os.getpid(), signal.SIGSTOP)
                return judge(found)  # type: ignore[arg-type]

            contend.judge = stop_and_judge  # type: ignore[assignment]
            os.dup2(os.open(complaints, os.O_WRONLY | os.O_CREAT), 2)
            graveyard.tune(home)(pipe)

        self.complaints = complaints
        self.pid, self.pipe = fork(work)

    def wait(self) -> int | None:
        """Wait until it has stopped (None) or ended: return its exit status."""
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        return None if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)

    def go_on(self) -> int | None:
        os.kill(self.pid, signal.SIGCONT)
        return self.wait()

    def said(self) -> bytes:
        """Return all its output; call this once."""
        with os.fdopen(self.pipe, "rb") as pipe:
            return pipe.read()


def heard(output: bytes) -> Told:
    made = Told()
    made.hear(output)
    return made


def test_one_of_several_tuners_measures_and_the_others_fail_at_once_naming_it(
    graveyard: Graveyard, tmp_path: Path
) -> None:
    home = graveyard.home()
    tuners = [Tuner(graveyard, home, tmp_path / str(number)) for number in range(4)]
    ends = {tuner: tuner.wait() for tuner in tuners}  # the others end while this one is stopped
    (one,) = [tuner for tuner, end in ends.items() if end is None]
    for other in set(tuners) - {one}:
        assert ends[other] == 1
        said = other.complaints.read_text()
        assert "this device is in use by another process" in said
        assert f"pid {one.pid} " in said
        assert heard(other.said()).decided == {}
    assert one.go_on() == 0
    hold_to(heard(one.said()), home)
    assert outcome(home) == graveyard.expected


def test_a_tuner_whose_lock_was_lost_cannot_store_or_publish_what_it_measured(
    graveyard: Graveyard, tmp_path: Path
) -> None:
    home = graveyard.home()
    stale = Tuner(graveyard, home, tmp_path / "stale")
    assert stale.wait() is None
    shutil.rmtree(home / "locks")
    other = Tuner(graveyard, home, tmp_path / "other")
    assert other.wait() is None
    assert other.go_on() == 0
    before = (home / snapshot.FILE).read_bytes()
    assert stale.go_on() == 1
    assert "another process has taken over this device" in stale.complaints.read_text()
    assert f"pid {other.pid} " in stale.complaints.read_text()
    assert (home / snapshot.FILE).read_bytes() == before
    said = stale.said()
    assert heard(said).decided == {}
    hold_to(heard(said + other.said()), home)  # earlier debits of the stale tuner stay
    assert outcome(home) == graveyard.expected


# --- readers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def read_on(home: Path, stop: int, read: str) -> float:
    """Read until the writer has ended; return the longest time of one reading in seconds."""
    longest = 0.0
    os.set_blocking(stop, False)
    x, weight = torch.ones(1, 64), torch.ones(64)
    with dispatch.use(home) as board:
        while True:
            started = time.monotonic()
            if read == "library":
                board.refresh()
                assert dispatch.best("rmsnorm")(x, weight) is not None
            else:
                with open_ledger(home=home) as ledger:
                    newest = ledger.history(limit=1)[0]
                    assert ledger.evidence(newest.id).race is not None
                    assert ledger.serving()
            longest = max(longest, time.monotonic() - started)
            try:
                if os.read(stop, 1) == b"":
                    return longest
            except BlockingIOError:
                continue


def test_readers_during_writes_see_no_error_and_wait_no_longer_than_a_writer_may(home: Path) -> None:
    ledger = open_ledger(home=home)
    record(ledger, "first")
    stop, writing = os.pipe()

    def read(pipe: Pipe, how: str) -> None:
        os.close(writing)
        pipe.tell("read", longest=read_on(home, stop, how))

    readers = [fork(lambda pipe, how=how: read(pipe, how)) for how in ("library", "command") * 3]
    for n in range(25):
        w = ATTN.at(B=n % 4 + 1)
        record(ledger, str(n), workload=w, race=race(w))
    os.close(writing)
    for pid, pipe in readers:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        with os.fdopen(pipe, "rb") as output:
            (told,) = heard(output.read()).lines
        assert told["longest"] < engine.BUSY_S
    os.close(stop)
    assert len(ledger.history()) == 26
    ledger.check()


@pytest.fixture
def stopped_writer(home: Path) -> Iterator[int]:
    """Stop a process in the middle of a transaction, and of publishing."""
    made = record(open_ledger(home=home))

    def work(_: Pipe) -> None:
        with open_ledger(home=home) as ledger:
            snapshot.publish = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
            ledger._database._checkpoint = lambda _: None  # type: ignore[method-assign]
            ledger.write(Demote(decision_id=made.id, reason="stopped before it could report it"))

    pid, pipe = fork(work)
    _, status = os.waitpid(pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(pipe)


def test_a_stuck_writer_does_not_block_readers(home: Path, stopped_writer: int) -> None:
    with open_ledger(home=home) as ledger:
        assert [d.state for d in ledger.history()] == ["demoted", "promoted"]
        assert snapshot.read(home / snapshot.FILE) is not None


def test_a_writer_behind_a_stuck_one_fails_naming_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = open_ledger(home=home)
    record(ledger)

    def work(_: Pipe) -> None:
        with ledger._database.writing():
            os.kill(os.getpid(), signal.SIGSTOP)

    pid, pipe = fork(work)
    _, status = os.waitpid(pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    monkeypatch.setattr(engine, "BUSY_S", 0.05)
    with open_ledger(home=home) as reader:
        assert reader.writable
        assert len(reader.history()) == 1
        with pytest.raises(LedgerError, match=f"pid {pid} "):
            record(reader, "later")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(pipe)
    assert record(ledger, "later").id == 2
