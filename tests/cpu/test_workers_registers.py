"""Test that the control words of all threads of another process are read, regardless of who started them."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from autosel.workers.registers import threads_of

PROGRAM = """
import ctypes, threading
libm = ctypes.CDLL("libm.so.6")
def serve(mode):
    libm.fesetround(mode)
    ready.wait()
    threading.Event().wait()
ready = threading.Barrier(3)
for mode in (0, {mode}):
    threading.Thread(target=serve, args=(mode,), daemon=True).start()
ready.wait()
print("ready", flush=True)
input()
print("works", flush=True)
"""


@contextmanager
def process(mode: int) -> Iterator[subprocess.Popen[str]]:
    """Start a process with three threads; the last one rounds in this mode."""
    command = [sys.executable, "-c", PROGRAM.format(mode=mode)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as made:
        assert made.stdout is not None
        assert made.stdout.readline() == "ready\n"
        yield made
        made.kill()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the rounding mode is given as x86 numbers it")
def test_a_thread_with_another_rounding_mode_is_found() -> None:
    with process(0) as same, process(0x400) as other:
        assert len(threads_of(same.pid)) == 1
        words = threads_of(other.pid)
    assert len(words) == 2
    assert any("mxcsr 3f80" in w for w in words)


def test_a_process_continues_after_its_threads_were_read() -> None:
    with process(0) as read:
        threads_of(read.pid)
        assert read.communicate("\n", timeout=30)[0] == "works\n"


def test_a_thread_that_has_ended_is_left_out() -> None:
    with process(0) as read:
        read.kill()
        read.wait()
        with pytest.raises(FileNotFoundError):
            threads_of(read.pid)
