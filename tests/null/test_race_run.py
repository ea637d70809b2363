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
    pairs = tuple(
        PairedSamples(order=tuple(range(len(medians))), samples_ns=tuple((x,) for x in one)) for one in rows(medians)
    )
    return RaceSession(
        kind="confirming", seed=0, arms=tuple(medians), pairs=pairs, calls_per_sample=(1,) * len(medians), voided=voided
    )


def rows(medians: dict[str, list[float]]) -> list[tuple[Any, ...]]:
    return list(zip(*medians.values(), strict=True))


QUIET = session(base=[10.0, 10.0, 10.0], fast=[5.0, 5.0, 5.0])


def test_a_session_in_which_only_one_arm_is_slowed_is_void() -> None:
    stalled = session(base=[30.0, 30.0, 30.0], fast=[5.0, 6.0, 5.0])
    found = near_floor([QUIET], stalled)
    assert "base took 3.0 times as long as in its best pair, another arm 1.0 times" in found.voided


def test_a_session_that_was_slow_from_its_middle_on_is_void_by_its_own_best_pair() -> None:
    assert near_floor([], session(base=[10.0, 40.0, 40.0], fast=[5.0, 5.0, 5.0])).voided


def test_slowing_all_arms_alike_voids_no_session() -> None:
    assert near_floor([QUIET], session(base=[30.0, 30.0, 30.0], fast=[14.0, 15.0, 16.0])).voided == ""


def test_a_slowdown_within_the_limit_voids_no_session() -> None:
    slow = 10.0 * FAR_ABOVE_FLOOR
    assert near_floor([QUIET], session(base=[slow] * 3, fast=[5.0] * 3)).voided == ""


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
