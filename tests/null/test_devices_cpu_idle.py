"""Test that threads that another runtime left spinning are noticed and waited for."""

import threading
import zlib

from autosel.devices.cpu.idle import wait_until_idle


def test_a_thread_that_computes_is_waited_for_until_it_ends() -> None:
    stop, started, data = threading.Event(), threading.Event(), bytes(1 << 24)

    def spin() -> None:
        started.set()
        while not stop.is_set():
            zlib.crc32(data)  # without the interpreter lock, like a thread of a parallel runtime

    thread = threading.Thread(target=spin)
    thread.start()
    started.wait()
    assert not wait_until_idle(limit_ns=2_000_000)
    stop.set()
    thread.join()
    assert wait_until_idle(limit_ns=10_000_000_000)


def test_sleeping_threads_are_idle() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    assert wait_until_idle(limit_ns=10_000_000_000)
    stop.set()
    thread.join()
