"""Test the sentences that sum up a race."""

from __future__ import annotations

from typing import Any

import pytest

from autosel.cli.sentences import race_sentence
from autosel.models.workloads import Named
from autosel.tuning.trial import Tried
from autosel.values import Effect, Failed, Passed, Verdict, Workload
from tests.null.test_cli_headline import timing

OWN, TORCH = "user:norm", "torch:rmsnorm"
RMSNORM = Named(
    workload=Workload(op="rmsnorm", dims=(("M", 1), ("d", 64)), dtype="bf16"), label="rmsnorm", calls_per_step=1
)
WIN = "register it with autosel.candidate, and `tune` can choose it"


def raced(outcome: Any, us: float, name: str = OWN) -> Tried:
    """Return a race against a baseline of 10 us."""
    verdict = Verdict(
        outcome=outcome,
        winner=name if outcome == "promote" else TORCH,
        reason="a reason",
        effect=Effect(median=10 / us, lo=9.8 / us, hi=11 / us),
        timings={name: timing(us), TORCH: timing(10)},
    )
    return Tried(named=RMSNORM, parity=Passed(cases=3, worst=0.5, worst_case="random"), verdict=verdict)


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ([raced("lose", 12.1)], "your kernel is 21 % slower than PyTorch's; PyTorch stays"),
        ([raced("lose", 23.0)], "your kernel takes 2.3x as long as PyTorch's; PyTorch stays"),
        ([raced("tie", 9.8)], "your kernel is not reliably faster than PyTorch's (1.02x); PyTorch stays"),
        ([raced("promote", 5.0)], f"your kernel is 2.0x as fast as PyTorch's (at least 2.0x); {WIN}"),
        (
            [raced("promote", 5.0), raced("lose", 20)],
            f"your kernel wins 1 of 2 workloads against PyTorch (2.0x as fast); PyTorch stays at the other; {WIN}",
        ),
        (
            [raced("promote", 5.0), raced("promote", 2.5)],
            f"your kernel wins 2 of 2 workloads against PyTorch (2.0x to 4.0x as fast); {WIN}",
        ),
        ([raced("tie", 9), raced("lose", 20)], "your kernel wins none of 2 workloads against PyTorch; PyTorch stays"),
        ([raced("undecided", 9)], ""),
    ],
)
def test_a_race_ends_with_a_sentence(found: list[Tried], told: str) -> None:
    assert race_sentence(found, OWN) == told


def test_a_candidate_of_tune_is_named_and_can_be_chosen_by_it() -> None:
    told = race_sentence([raced("promote", 5.0, "cpp:rmsnorm")], "cpp:rmsnorm")
    assert told == "cpp:rmsnorm is 2.0x as fast as PyTorch's (at least 2.0x); `tune` can choose it"


def test_a_candidate_that_was_not_timed_gets_an_error_and_no_sentence() -> None:
    wrong = Failed(check="elements", case="strided", evidence={}, reason="row 3")
    assert race_sentence([Tried(named=RMSNORM, parity=wrong)], OWN) == ""
    assert race_sentence([Tried(named=RMSNORM, parity=None, reason="takes bf16")], OWN) == ""
