"""Test which sessions a race voids, with sessions made by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from autosel.race.run import FAR_ABOVE_FLOOR, _below_ceiling, near_floor
from autosel.values import PairedSamples, RaceSession


def session(voided: str = "", **medians: list[float]) -> RaceSession:
    """Return a session of pairs in which each arm has these medians."""
    count, rows = len(medians), zip(*medians.values(), strict=True)
    pairs = tuple(PairedSamples(order=tuple(range(count)), samples_ns=tuple((x,) for x in row)) for row in rows)
    return RaceSession(
        kind="confirming", seed=0, arms=tuple(medians), pairs=pairs, calls_per_sample=(1,) * count, voided=voided
    )


QUIET = session(base=[10.0, 10.0, 10.0], fast=[5.0, 5.0, 5.0])


@pytest.mark.parametrize(
    ("earlier", "base", "fast", "voided"),
    [
        (
            [QUIET],
            [30.0] * 3,
            [5.0, 6.0, 5.0],
            "base took 3.0 times as long as in its best pair, another arm 1.0",
        ),
        ([], [10.0, 40.0, 40.0], [5.0] * 3, "base took 4.0 times as long as in its best pair"),  # its own best pair
        ([QUIET], [30.0] * 3, [14.0, 15.0, 16.0], ""),  # all arms alike
        ([QUIET], [10.0 * FAR_ABOVE_FLOOR] * 3, [5.0] * 3, ""),  # within the limit
    ],
)
def test_a_session_in_which_only_one_arm_is_slowed_is_void(
    earlier: list[RaceSession], base: list[float], fast: list[float], voided: str
) -> None:
    found = near_floor(earlier, session(base=base, fast=fast)).voided
    assert found.startswith(voided) and bool(found) == bool(voided)


def test_sessions_that_are_void_and_arms_that_were_not_timed_do_not_count() -> None:
    void = session(voided="throttled", base=[1.0], fast=[5.0])
    other = session(base=[10.0, 10.0], slow=[90.0, 95.0])
    assert near_floor([void, other], QUIET) is QUIET


@pytest.mark.parametrize(
    ("gb_per_s", "void", "blamed"), [(10.9, False, False), (16.4, True, False), (16.6, True, True)]
)
def test_a_kernel_is_blamed_only_if_two_thirds_of_its_rate_are_impossible(
    gb_per_s: float, void: bool, blamed: bool
) -> None:
    """Memory reads 10 GB/s. Of three last-level caches of copies, one may have kept its share."""
    taken = replace(session(fast=[1000 / gb_per_s] * 3), read_bytes_per_s=10e9)
    seat: Any = SimpleNamespace(moved_bytes=lambda _: 1000)
    attempt: Any = SimpleNamespace(contest=SimpleNamespace(read_bytes_per_s=9e9))
    found = _below_ceiling(attempt, seat, taken)
    assert (bool(found.session.voided), set(found.too_fast) == {"fast"}) == (void, blamed)
