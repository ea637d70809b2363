"""Test covering arrays: they contain every possible pair, and no excluded one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, product
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from autosel.ops.covering import Pair, Row, covering, pairs_of

Rule = tuple[int, int, int, int]  # two factors, and pairs of their values that exclude each other

shapes = st.lists(st.integers(1, 5), min_size=2, max_size=5)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[Rule]]:
    """Draw sizes of factors, and a few exclusions."""
    sizes = draw(shapes)
    rules = []
    for _ in range(draw(st.integers(0, 6))):
        a, b = sorted(draw(st.lists(st.integers(0, len(sizes) - 1), min_size=2, max_size=2, unique=True)))
        rules.append((a, draw(st.integers(0, sizes[a] - 1)), b, draw(st.integers(0, sizes[b] - 1))))
    return sizes, rules


def admitted_by(rules: list[Rule]) -> Callable[[Sequence[int | None]], bool]:
    return lambda row: not any(row[a] == i and row[b] == j for a, i, b, j in rules)


def possible(sizes: list[int], rules: list[Rule]) -> set[Pair]:
    """Return the possible pairs, found by trying every row."""
    admits = admitted_by(rules)
    return {pair for row in product(*map(range, sizes)) if admits(row) for pair in pairs_of(row)}


def pairs(rows: list[Row]) -> set[Pair]:
    return {pair for row in rows for pair in pairs_of(row)}


@given(problems(), st.integers(0, 99))
def test_every_possible_pair_is_covered_by_admitted_rows(problem: tuple[list[int], list[Rule]], seed: int) -> None:
    sizes, rules = problem
    rows = covering(sizes, admitted_by(rules), Random(seed))
    assert all(admitted_by(rules)(row) for row in rows)
    assert pairs(rows) == possible(sizes, rules)


@given(problems(), st.integers(0, 99))
def test_given_rows_are_not_repeated_and_the_rest_is_covered(problem: tuple[list[int], list[Rule]], seed: int) -> None:
    sizes, rules = problem
    whole = covering(sizes, admitted_by(rules), Random(seed))
    kept = whole[::2]
    more = covering(sizes, admitted_by(rules), Random(seed + 1), given=kept)
    assert pairs([*kept, *more]) == pairs(whole)
    assert not set(more) & set(kept)


@given(shapes, st.integers(0, 99))
def test_an_array_has_far_fewer_rows_than_all_combinations(sizes: list[int], seed: int) -> None:
    rows = covering(sizes, lambda _: True, Random(seed))
    two_largest = sorted(sizes)[-1] * sorted(sizes)[-2]
    assert two_largest <= len(rows) <= 2 * two_largest + 6


def test_a_seed_fixes_the_rows_and_another_changes_them() -> None:
    sizes = [4, 5, 3, 6]
    first, again, other = (covering(sizes, lambda _: True, Random(seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_many_factors_take_hardly_more_rows_than_few() -> None:
    few, many = (covering([6] * n, lambda _: True, Random(3)) for n in (4, 12))
    assert len(many) < 2.5 * len(few)
    every = set(combinations(range(12), 2))
    assert {(a, b) for row in many for a, _, b, _ in pairs_of(row)} == every
