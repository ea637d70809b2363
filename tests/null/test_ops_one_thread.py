from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event, current_thread

import pytest
import torch

from autosel.formats import find_weight_format
from autosel.ops.one_thread import each, one_thread, spread
from autosel.ops.weight import product, product_error, quantise


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


def test_parts_keep_their_order_and_run_side_by_side_only_inside_spread() -> None:
    def thread_of(part: int) -> tuple[int, str]:
        return part, current_thread().name

    own = current_thread().name
    assert each(thread_of, range(40)) == [(part, own) for part in range(40)]
    with spread():
        found = each(thread_of, range(40))
    assert [part for part, _ in found] == list(range(40)) and own not in {name for _, name in found}
    assert each(thread_of, [1]) == [(1, own)]


def test_an_error_in_a_part_passes_through() -> None:
    with spread(), pytest.raises(ZeroDivisionError):
        each(lambda part: 1 // part, [1, 0, 2])


@pytest.mark.parametrize("format_", ["plain", "int4-g128", "q4_k"])
def test_products_and_their_bounds_are_the_same_bits_in_parts_at_once(format_: str) -> None:
    g = torch.Generator().manual_seed(3)
    x, w = torch.randn(2, 1024, generator=g).bfloat16(), torch.randn(1500, 1024, generator=g).bfloat16()
    matrix = w if format_ == "plain" else quantise(w, find_weight_format(format_))
    alone = product(x, matrix), product_error(x, matrix, "bf16")
    with spread():
        together = product(x, matrix), product_error(x, matrix, "bf16")
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
