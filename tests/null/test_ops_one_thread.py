from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import torch

from autosel.ops.one_thread import one_thread


def seen_by_another() -> int:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result()


def test_the_number_of_threads_is_restored_for_overlapping_users() -> None:
    before, entered, go = torch.get_num_threads(), Event(), Event()
    torch.set_num_threads(3)

    def other() -> int:
        with one_thread():
            entered.set()
            go.wait()
            return torch.get_num_threads()

    try:
        with ThreadPoolExecutor(1) as pool:
            with one_thread():
                inside = pool.submit(other)
                entered.wait()
                assert torch.get_num_threads() == 1
            go.set()
            assert inside.result() == 1
        assert torch.get_num_threads() == 3
        assert seen_by_another() == 3
    finally:
        torch.set_num_threads(before)


def test_the_number_of_threads_is_restored_after_an_error() -> None:
    before = torch.get_num_threads()
    try:
        with one_thread(), one_thread():
            raise KeyError
    except KeyError:
        pass
    assert (torch.get_num_threads(), seen_by_another()) == (before, before)
