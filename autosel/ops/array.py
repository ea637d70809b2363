"""The array of an op: cases in which every pair of values of any two of its domains occurs, from a secret seed.

It complements the op's hand-made cases (`Op.cases`) and depends only on dtype and traits: all workloads of a kernel
share it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations, product
from random import Random
from typing import Any

from autosel.ops.contract import Case, Op
from autosel.ops.covering import Row, covering, one_at_a_time, values_first
from autosel.ops.domains import ABSENT, ORDER, Domain, Kind, Level, compatible
from autosel.ops.draw import Draw
from autosel.values import Scalar, Workload

PROBES = 40
FORMATS = ("weight", "cache")  # the traits that name an operand's format

Accepts = Callable[[Workload], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """One domain of an op, with drawn levels."""

    name: str  # `M`, or `Hq Hkv` for dimensions that belong together
    domain: Domain
    levels: tuple[Level, ...]


class Array:
    """The domains of an op at a dtype and traits, and the cases that cover them."""

    def __init__(self, op: Op, w: Workload, seed: int, *, traits: bool = False, sizes: bool = True) -> None:
        """Draw the levels. With `traits`, the traits vary too, else they are w's; without `sizes`, the dimensions are
        w's.
        """
        self.op, self.w, self.rng = op, w, Random(seed)
        self.factors = tuple(self._factor(name, domain, traits, sizes) for name, domain in op.domains.items())

    def _factor(self, name: str, domain: Domain, traits: bool, sizes: bool) -> Factor:
        levels = tuple(domain.levels(self.w.dtype, self.rng))
        if domain.kind == "trait":
            own = self.w.trait(name, self.op.trait_defaults[name])
            mine = tuple(level for level in levels if level.value == own) or (Level(name=str(own), value=own),)
            levels = tuple(dict.fromkeys((*mine, *levels))) if traits else mine
        if domain.presence and not traits:
            there = bool(self.w.trait(domain.presence, False))
            levels = tuple(level for level in levels if (level is not ABSENT) == there)
        if domain.kind == "count" and not sizes:
            own_sizes = tuple(self.w[n] for n in name.split())
            value = own_sizes if len(own_sizes) > 1 else own_sizes[0]
            levels = (Level(name="x".join(map(str, own_sizes)), value=value),)
        return Factor(name=name, domain=domain, levels=levels)

    @cached_property
    def _shaped(self) -> list[int]:
        """Return the factors that determine a workload."""
        return [i for i, f in enumerate(self.factors) if f.domain.kind in ("count", "trait") or f.domain.presence]

    @cached_property
    def admits(self) -> Callable[[Sequence[int | None]], bool]:
        """Return the test that a row has a defined result, for a candidate that accepts every workload."""
        return self._admits(lambda _: True)

    @cached_property
    def rows(self) -> list[Row]:
        """Return the rows for a candidate that accepts every workload."""
        sizes = [len(f.levels) for f in self.factors]
        alone = [*filter(self.admits, one_at_a_time(sizes)), *self._sizes_of_formats()]
        return values_first([*alone, *covering(sizes, self.admits, self.rng, given=alone)])

    def _sizes_of_formats(self) -> Iterator[Row]:
        """Yield each size alone in each format: operands in a format have other code, and other contents in the same
        row can hide an error in it. If that is too much work, one or two other sizes are smaller.
        """
        counts = [j for j, f in enumerate(self.factors) if f.domain.kind == "count"]
        formats = [(i, at) for i, f in enumerate(self.factors) if f.name in FORMATS for at in range(1, len(f.levels))]
        for (i, at), j in product(formats, counts):
            for size in range(1, len(self.factors[j].levels)):
                row = [0] * len(self.factors)
                row[i], row[j] = at, size
                found = self._affordable(row, [other for other in counts if other != j])
                if found is not None:
                    yield found

    def _affordable(self, row: Sequence[int], sizes: Sequence[int]) -> Row | None:
        """Return the row, or the one of most work with as few as possible of these sizes changed; at most two."""
        for changed in range(3):
            found = []
            for those in combinations(sizes, changed):
                for levels in product(*(range(1, len(self.factors[j].levels)) for j in those)):
                    made = list(row)
                    for j, level in zip(those, levels, strict=True):
                        made[j] = level
                    if self.admits(made):
                        found.append(tuple(made))
            if found:
                return max(found, key=lambda r: self.op.bytes_moved(self._workload(self.level_of(r))))
        return None

    def cases(self, accepts: Accepts) -> list[Case]:
        """Return the rows that a candidate accepts, and more if it accepts only some, to cover every pair that it
        accepts.
        """
        rng = Random(f"{self.rows}")
        kept = [row for row in self.rows if accepts(self._workload(self.level_of(row)))]
        if len(kept) < len(self.rows):
            admits = self._admits(accepts, self._refused(accepts, rng))
            kept += covering([len(f.levels) for f in self.factors], admits, rng, given=kept)
        return [self.case(self.level_of(row)) for row in kept]

    def _refused(self, accepts: Accepts, rng: Random) -> set[tuple[int, int]]:
        """Return (factor, level) pairs with which a candidate accepted none of many workloads."""
        known = {(i, at) for i in self._shaped for at in range(len(self.factors[i].levels))}
        for i, at in sorted(known):
            for _ in range(PROBES):
                row = list(rng.choice(self.rows))
                row[i] = at
                w = self._workload(self.level_of(tuple(row)))
                if self.op.affordable(w) and accepts(w):
                    known.discard((i, at))
                    break
        return known

    def level_of(self, row: Row) -> dict[str, Level]:
        return {f.name: f.levels[at] for f, at in zip(self.factors, row, strict=True)}

    # --- admission ----------------------------------------------------------------------------------------------------

    def _admits(
        self, accepts: Accepts, refused: Collection[tuple[int, int]] = ()
    ) -> Callable[[Sequence[int | None]], bool]:
        known: dict[tuple[int | None, ...], bool] = {}
        shaped = self._shaped
        coarse = [self._shape_classes(f) for f in self.factors]

        def shape_admitted(row: Sequence[int | None]) -> bool:
            """Test the smallest sizes for open factors, because they may still be chosen."""
            key = tuple(None if (at := row[i]) is None else coarse[i][at] for i in shaped)
            if key not in known:
                w = self._workload({self.factors[i].name: self._level_or_least(i, row[i]) for i in shaped})
                known[key] = self.op.affordable(w) and (None in key or accepts(w))
            return known[key]

        def admits(row: Sequence[int | None]) -> bool:
            if any((i, row[i]) in refused for i in shaped):
                return False
            levels = {f.name: f.levels[at] for f, at in zip(self.factors, row, strict=True) if at is not None}
            return compatible(levels) and self._present(levels) and self.op.admits(levels) and shape_admitted(row)

        return admits

    @staticmethod
    def _shape_classes(f: Factor) -> list[int]:
        """Return the class of each level: levels that make the same workload share one, such as contents of an optional
        argument.
        """
        return [int(level is not ABSENT) if f.domain.presence else i for i, level in enumerate(f.levels)]

    def _present(self, levels: Mapping[str, Level]) -> bool:
        """Refuse contents for an absent argument."""
        for f in self.factors:
            needed = levels.get(f.domain.needs)
            if needed is not None and not needed.value and levels.get(f.name, f.levels[0]) is not f.levels[0]:
                return False
        return True

    def _level_or_least(self, factor: int, at: int | None) -> Level:
        found = self.factors[factor]
        if at is not None:
            return found.levels[at]
        if found.domain.kind != "count":
            return found.levels[0]
        return min(found.levels, key=lambda level: math.prod(_sizes(level)))

    # --- from a row to a case -----------------------------------------------------------------------------------------

    def _workload(self, levels: Mapping[str, Level]) -> Workload:
        dims: dict[str, int] = {}
        traits: dict[str, Scalar] = {}
        for f in self.factors:
            if f.domain.kind == "count":
                dims |= zip(f.name.split(), _sizes(levels[f.name]), strict=True)
            elif f.domain.kind == "trait":
                traits[f.name] = levels[f.name].value
            elif f.domain.presence:
                traits[f.domain.presence] = levels[f.name] is not ABSENT
        return self.op.workload(self.w.dtype, dims, **traits)

    def case(self, levels: Mapping[str, Level]) -> Case:
        """Return the case of a row. Its name is a digest of its levels, so a row has the same name everywhere."""
        at = self._workload(levels)
        unusual = [f for f in self.factors if levels[f.name] is not f.levels[0]]
        told = ", ".join(f"{f.name} {levels[f.name].name}" for f in unusual)
        name = hashlib.blake2b(f"{at.key} {told}".encode(), digest_size=4).hexdigest()
        made = partial(self._made, at, levels)
        return Case(name=f"pairs {name}", workload=at, make=made, covers=told, averages=False)

    def _made(self, at: Workload, levels: Mapping[str, Level], seed: int) -> dict[str, Any]:
        inputs, draw = self.op.small_inputs(at, seed), Draw(seed + 77_003, at.dtype)
        for f in sorted(self.factors, key=lambda f: _turn(f.domain.kind, levels[f.name])):
            level = levels[f.name]
            if f.domain.kind == "scalar" and level.value is not None:
                inputs[f.name] = level.value
            if level.edit is not None:
                level.edit(inputs, draw)
        self.op.finish(inputs, draw)
        return inputs


def _turn(kind: Kind, level: Level) -> tuple[bool, bool, int]:
    """Return the order of a level: NaN and infinity after other contents, the layout last."""
    return kind == "layout", bool(level.special), ORDER.index(kind)


def _sizes(level: Level) -> tuple[int, ...]:
    """Return the size of each dimension of a factor."""
    return level.value if isinstance(level.value, tuple) else (level.value,)
