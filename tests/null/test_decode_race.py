"""Test what a race of whole steps takes for read from memory."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from autosel.decode.race import StepSeat

L3 = 32 << 20


@pytest.mark.parametrize(("moved", "read"), [(200 << 20, (200 << 20) - L3), (90 << 20, 0)])
def test_a_step_reads_from_memory_all_but_what_the_last_one_left_in_the_cache(moved: int, read: int) -> None:
    """A small step may find most of its weights in the cache: nothing is certain about it."""
    fp = SimpleNamespace(identity={"l3_bytes": L3 // 2, "l3_domains": 2})
    scene = SimpleNamespace(fp=fp, clock=time.perf_counter_ns, plan=SimpleNamespace(device="cpu"))
    steps: Any = SimpleNamespace(scene=scene, moved={"cpp:step": moved})
    seat = StepSeat(steps, ["cpp:step"], None)
    assert seat.moved_bytes("cpp:step") == read
    seat.release()
