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
    open_ = {
        (a, i, b, j) for a, b in combinations(range(len(sizes)), 2) for i in range(sizes[a]) for j in range(sizes[b])
    }
    for row in given:
        open_.difference_update(pairs_of(row))
    rows: list[Row] = []
    suspects = list(range(len(sizes)))
    for pair in rng.sample(sorted(open_), len(open_)):
        if pair not in open_:
            continue
        found = _completed(pair, sizes, admits, rng, open_, suspects)
        open_.discard(pair)
        if found is not None:
            rows.append(found)
            open_.difference_update(pairs_of(found))
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


def _completed(
    pair: Pair, sizes: Sequence[int], admits: Admits, rng: Random, open_: set[Pair], suspects: list[int]
) -> Row | None:
    """Return a pair's row with many new pairs, found greedily; None if no admissible row has the pair."""
    a, i, b, j = pair
    row: Partial = [0 if size == 1 else None for size in sizes]  # a choice of one may already exclude the pair
    row[a], row[b] = i, j
    if not admits(row):
        return None
    possible = _possible(row, sizes, admits, suspects)
    if possible is None:
        return None
    search = _Search(row, rng.sample(sorted(possible), len(possible)), possible, admits, rng, open_)
    return tuple(value for value in row if value is not None) if search.fill(0) else None


def _possible(row: Partial, sizes: Sequence[int], admits: Admits, suspects: list[int]) -> dict[int, list[int]] | None:
    """Return the values that each open factor can have next to the row's; None if one can have none, which a search
    would find out only after trying the values of all the others.

    `suspects`: all factors, those that had none for an earlier pair first.
    """
    found: dict[int, list[int]] = {}
    for factor in [f for f in suspects if row[f] is None]:
        found[factor] = []
        for value in range(sizes[factor]):
            row[factor] = value
            if admits(row):
                found[factor].append(value)
        row[factor] = None
        if not found[factor]:
            suspects.remove(factor)
            suspects.insert(0, factor)
            return None
    return found


class _Search:
    """Greedy search with backtracking: fills a row factor by factor, best value first."""

    def __init__(
        self,
        row: Partial,
        order: Sequence[int],
        possible: Mapping[int, Sequence[int]],
        admits: Admits,
        rng: Random,
        open_: set[Pair],
    ) -> None:
        self.row, self.order, self.possible, self.admits, self.rng, self.open = row, order, possible, admits, rng, open_
        self.left = STEPS

    def fill(self, at: int) -> bool:
        if at == len(self.order):
            return True
        factor = self.order[at]
        for value in self._by_gain(factor):
            self.left -= 1
            self.row[factor] = value
            if self.admits(self.row) and self.fill(at + 1):
                return True
            if self.left <= 0:
                break
        self.row[factor] = None
        return False

    def _by_gain(self, factor: int) -> list[int]:
        """Return the values by the number of new pairs, largest first; equal ones in random order."""
        values = self.rng.sample(self.possible[factor], len(self.possible[factor]))
        return sorted(values, key=lambda value: -self._gain(factor, value))

    def _gain(self, factor: int, value: int) -> int:
        gain = 0
        for other, taken in enumerate(self.row):
            if taken is not None and other != factor:
                pair = (other, taken, factor, value) if other < factor else (factor, value, other, taken)
                gain += pair in self.open
        return gain
