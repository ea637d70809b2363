"""Check that threads get real-time priority, and their previous one back, if the system allows it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from autosel.race import realtime
from autosel.race.realtime import RealTime

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setscheduler"), reason="a system without scheduling policies")


def policy() -> int:
    return os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK


def test_a_thread_is_raised_and_given_back_its_priority() -> None:
    if not realtime.allowed():
        pytest.skip("real-time priority is not allowed here")
    before, raised = policy(), RealTime()
    raised.place([threading.get_native_id()])
    assert policy() == os.SCHED_RR
    raised.place([threading.get_native_id()])
    raised.release()
    assert policy() == before


def test_where_it_is_not_allowed_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    before, raised = policy(), RealTime()
    raised.place([threading.get_native_id()])
    raised.release()
    assert policy() == before and not realtime.allowed()


def test_a_query_does_not_change_the_priority() -> None:
    before = policy()
    realtime.allowed()
    assert policy() == before


def test_a_thread_is_raised_for_a_block_and_what_it_starts_is_not() -> None:
    if not realtime.allowed():
        pytest.skip("real-time priority is not allowed here")
    before, asked = policy(), "import os; print(os.sched_getscheduler(0))"
    with realtime.raised():
        assert policy() == os.SCHED_RR
        said = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout
        assert int(said) == os.SCHED_OTHER
    assert policy() == before


PREFER = """
import os
from autosel.race import realtime

def weight_of_session():
    text = realtime.AUTOGROUP.read_text() if realtime.AUTOGROUP.exists() else ""
    return text.split()[-1] if text else "none"  # empty in the first session, and where the kernel weighs none

before = weight_of_session()
realtime.prefer()
print(os.getpriority(os.PRIO_PROCESS, 0), before, weight_of_session())
"""


@pytest.mark.parametrize("own_session", [True, False])
def test_a_process_is_preferred_and_its_session_only_if_it_is_its_own(own_session: bool) -> None:
    most = str(realtime.MOST_WEIGHT)
    if not realtime.allowed() or str(os.getpriority(os.PRIO_PROCESS, 0)) == most:
        pytest.skip("another niceness is not allowed here, or would not be another")
    command = [sys.executable, "-c", PREFER]
    said = subprocess.run(command, capture_output=True, text=True, check=True, start_new_session=own_session).stdout
    process, before, after = said.split()
    assert process == most
    assert after == (most if own_session and before != "none" else before)
