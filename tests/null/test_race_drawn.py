"""Test how calls of a sample are drawn: outputs do not identify a drawn call, and are not written again."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from autosel.race.drawn import KEPT, SLOTS, draw, kept_of, most_faults, slots_for
from tests import drawn


@pytest.mark.parametrize("calls", [1, 2, 3, 7, 400])
def test_the_last_call_is_kept_and_no_kept_output_is_written_again(calls: int) -> None:
    rng = Random(drawn.seed)
    for _ in range(50):
        found = draw(calls, SLOTS, rng)
        assert len(found.slots) == calls
        assert len(set(found.kept)) == len(found.kept) == kept_of(calls, SLOTS)
        assert found.slots[-1] == found.kept[-1]
        last_write = {slot: call for call, slot in enumerate(found.slots)}
        assert sorted(last_write[slot] for slot in found.kept) == [last_write[slot] for slot in found.kept]


def test_all_calls_are_drawn_equally_often() -> None:
    rng, calls, draws = Random(drawn.seed), 20, 6000
    counts: Counter[int] = Counter()
    for _ in range(draws):
        found = draw(calls, SLOTS, rng)
        last_write = {slot: call for call, slot in enumerate(found.slots)}
        counts.update(last_write[slot] for slot in found.kept[:-1])
    expected = draws * (KEPT - 1) / (calls - 1)
    assert all(abs(counts[call] - expected) < 6 * expected**0.5 for call in range(calls - 1))


def test_large_outputs_have_one_set_and_keep_the_last_call() -> None:
    assert slots_for(1 << 30) == slots_for(0) == 1
    found = draw(5, 1, Random(1))
    assert found.kept == [0]
    assert list(found.slots) == [0] * 5


def test_a_thousand_calls_without_a_fault_rule_out_a_rate_of_three_in_a_thousand() -> None:
    assert most_faults(1000) == 0.003
    assert (1 - most_faults(1000)) ** 1000 < 0.05
    assert most_faults(0) == 1.0
