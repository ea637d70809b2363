"""Covering arrays: few rows in which every pair of values of any two factors occurs together.

Rows are built greedily, one at a time (after AETG: Cohen, Dalal, Fredman and Patton, IEEE TSE 23(7), 1997): a row
starts from a pair that no row has yet, and each other factor takes the value that adds the most pairs. Most faults need
one or two factors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from random import Random

Row = tuple[int, ...]  # index of a value for each factor
Partial = list[int | None]
Admits = Callable[[Sequence[int | None]], bool]
Pair = tuple[int, int, int, int]  # factor, value, later factor, its value

STEPS = 300  # values tried for one row before its pair counts as impossible


def covering(sizes: Sequence[int], admits: Admits, rng: Random, *, given: Iterable[Row] = ()) -> list[Row]:
    """Return rows that, together with `given`, cover each pair of values that an admissible row can have.

    `sizes` has the number of values of each factor. `admits` judges rows with some factors open (None); a row that it
    refuses must stay refused whatever the open factors become.
    """
    search = _Search(sizes, admits, rng)
    for row in given:
        search.open.difference_update(pairs_of(row))
    rows: list[Row] = []
    for pair in rng.sample(sorted(search.open), len(search.open)):
        if pair not in search.open:
            continue
        found = search.row_with(pair)
        search.open.discard(pair)
        if found is not None:
            rows.append(found)
            search.open.difference_update(pairs_of(found))
    return rows


def one_at_a_time(sizes: Sequence[int]) -> list[Row]:
    """Return the row of first values, and a row for each other value alone: with a second unusual value it may have no
    effect.
    """
    plain = (0,) * len(sizes)
    return [plain, *((*plain[:f], value, *plain[f + 1 :]) for f, n in enumerate(sizes) for value in range(1, n))]


def values_first(rows: Sequence[Row]) -> list[Row]:
    """Sort rows by the number of values that no earlier row has, so that a few first rows contain every value."""
    left, first, seen = list(rows), list[Row](), set[tuple[int, int]]()

    def fresh(row: Row) -> int:
        return len(set(enumerate(row)) - seen)

    while left:
        best = max(left, key=fresh)
        if not fresh(best):
            break
        left.remove(best)
        first.append(best)
        seen.update(enumerate(best))
    return [*first, *left]


def pairs_of(row: Row) -> list[Pair]:
    """Return every pair of a row."""
    return [(a, row[a], b, row[b]) for a, b in combinations(range(len(row)), 2)]


class _Search:
    """Greedy search for rows, with backtracking: fills a row factor by factor, best value first.

    `open`: the pairs that no row has yet.
    """

    def __init__(self, sizes: Sequence[int], admits: Admits, rng: Random) -> None:
        self.sizes, self.admits, self.rng = sizes, admits, rng
        self.open = {
            (a, i, b, j)
            for a, b in combinations(range(len(sizes)), 2)
            for i in range(sizes[a])
            for j in range(sizes[b])
        }
        self.suspects = list(range(len(sizes)))  # factors, those that had no value for an earlier pair first
        self.left = 0  # values that may still be tried for this row

    def row_with(self, pair: Pair) -> Row | None:
        """Return a pair's row with many new pairs; None if no admissible row has the pair."""
        a, i, b, j = pair
        row: Partial = [0 if size == 1 else None for size in self.sizes]  # a choice of one may already exclude the pair
        row[a], row[b] = i, j
        possible = self._possible(row) if self.admits(row) else None
        if possible is None:
            return None
        self.left = STEPS
        order = self.rng.sample(sorted(possible), len(possible))
        return tuple(value for value in row if value is not None) if self._fill(row, order, possible) else None

    def _possible(self, row: Partial) -> dict[int, list[int]] | None:
        """Return the values that each open factor can have next to the row's. Return None if one can have none: filling
        would find that out only after it has tried the values of the others.
        """
        found: dict[int, list[int]] = {}
        for factor in [f for f in self.suspects if row[f] is None]:
            found[factor] = [value for value in range(self.sizes[factor]) if self._admitted(row, factor, value)]
            row[factor] = None
            if not found[factor]:
                self.suspects.remove(factor)
                self.suspects.insert(0, factor)
                return None
        return found

    def _admitted(self, row: Partial, factor: int, value: int) -> bool:
        row[factor] = value
        return self.admits(row)

    def _fill(self, row: Partial, order: Sequence[int], possible: Mapping[int, Sequence[int]]) -> bool:
        """Fill the factors in this order; leave them open and return False if no values are found."""
        if not order:
            return True
        factor = order[0]
        for value in self._by_gain(row, factor, possible[factor]):
            self.left -= 1
            if self._admitted(row, factor, value) and self._fill(row, order[1:], possible):
                return True
            if self.left <= 0:
                break
        row[factor] = None
        return False

    def _by_gain(self, row: Partial, factor: int, values: Sequence[int]) -> list[int]:
        """Return the values by the number of new pairs, largest first; equal ones in random order."""
        return sorted(self.rng.sample(values, len(values)), key=lambda value: -self._gain(row, factor, value))

    def _gain(self, row: Partial, factor: int, value: int) -> int:
        gain = 0
        for other, taken in enumerate(row):
            if taken is not None and other != factor:
                pair = (other, taken, factor, value) if other < factor else (factor, value, other, taken)
                gain += pair in self.open
        return gain
