"""Test the comparison of the results of timed calls."""

from __future__ import annotations

import torch
from torch import Tensor

from autosel.race.kept import Kept


def results(count: int, change: float = 0.0) -> list[tuple[Tensor, ...]]:
    """Return results that are alike but for one element of the last one."""
    made = [(torch.arange(8, dtype=torch.bfloat16),) for _ in range(count)]
    made[-1][0][3] += change
    return made


def test_results_with_the_same_bits_agree_for_any_bound() -> None:
    nan = [(torch.full((4,), torch.nan),)] * 3
    assert Kept().odd("arm", results(5)) is None
    assert Kept().odd("arm", nan) is None


def test_an_element_further_off_than_two_bounds_is_a_fault() -> None:
    kept = Kept(bound=(0.05,))
    found = kept.odd("arm", results(6, 0.5))
    assert found is not None
    assert found.check == "timed_calls"
    assert found.evidence == {"calls": 6, "call": 5}
    assert Kept(bound=(0.5,)).odd("arm", results(6, 0.5)) is None


def test_an_output_that_was_not_written_is_a_fault() -> None:
    poisoned = results(3)
    poisoned[1][0].fill_(torch.nan)
    assert Kept(bound=(1e9,)).odd("arm", poisoned) is not None


def test_a_stale_result_is_far_from_the_baselines() -> None:
    kept, (base,) = Kept(bound=(0.01,)), results(1)
    assert not kept.stray(base, base)
    assert not kept.stray((base[0] + 0.1,), base)
    assert kept.stray((base[0].flip(0),), base)


def test_counts_are_added_by_arm() -> None:
    kept = Kept()
    for _ in range(2):
        kept.add("arm", timed=160, checked=24)
    assert kept.counts == {"arm": (48, 320)}
