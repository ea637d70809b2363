"""Try mutants on the hand-made cases and the array of an op, with the judgement of parity."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import prod
from random import Random

from autosel.ops.array import Array, Factor
from autosel.ops.contract import Case, Mismatch, Op
from autosel.parity.truth import Truth
from autosel.testing.mutants.derive import derive, reach_of
from autosel.testing.mutants.mutant import Mutant, Results, exact
from autosel.values import DTypeName, Workload

REFUSED = (RuntimeError, IndexError, ValueError, ArithmeticError)
MOST_RESULTS = 60  # points whose results show the shapes and dtypes of outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    check: str
    case: str


class TrialCall:
    """One call: its inputs, their expected results, and the exact results that mutants change."""

    def __init__(self, op: Op, case: Case, seed: int) -> None:
        self.op, self.case, self.seed = op, case, seed

    @cached_property
    def truth(self) -> Truth:
        return Truth(self.op, self.case.make(self.seed), averages=self.case.averages)

    @cached_property
    def right(self) -> Results:
        return exact(self.op, self.case.workload, dict(self.truth.inputs))

    def results(self, mutant: Mutant) -> Results | None:
        """Return the mutant's results; None if its fault does not show here or makes invalid operands."""
        try:
            return mutant.run(self.op, self.case.workload, dict(self.truth.inputs), self.right)
        except REFUSED:
            return None

    def refuses(self, mutant: Mutant) -> bool:
        """Return True if the reference raises on the mutant's operands."""
        try:
            mutant.run(self.op, self.case.workload, dict(self.truth.inputs), self.right)
        except REFUSED:
            return True
        return False

    def try_on(self, mutant: Mutant) -> Killed | None:
        """Return the check that refuses the mutant here, or None if its results are correct."""
        got = self.results(mutant)
        if got is None:
            return None
        if [(y.shape, y.dtype) for y in got] != [(y.shape, y.dtype) for y in self.right]:
            return Killed(check="result", case=self.case.name)
        found = self.truth.judge(got)
        return Killed(check=found.check, case=self.case.name) if isinstance(found, Mismatch) else None


class TrialCalls:
    """Points of an op's battery. Those that have killed the most mutants are tried first."""

    def __init__(self, points: Sequence[TrialCall]) -> None:
        self.points, self.kills = points, [0] * len(points)

    def killer(self, mutant: Mutant) -> Killed | None:
        """Return the first check that refuses the mutant."""
        for at in sorted(range(len(self.points)), key=lambda at: -self.kills[at]):
            found = self.points[at].try_on(mutant)
            if found is not None:
                self.kills[at] += 1
                return found
        return None


class Trial(TrialCalls):
    """The battery of an op in one dtype with every trait, and the mutants derived from its inputs."""

    def __init__(self, op: Op, dtype: DTypeName, seed: int) -> None:
        self.op, self.dtype, self.seed = op, dtype, seed
        self.plain = plain_workload(op, dtype, seed)
        self.array = Array(op, self.plain, seed, traits=True)
        made, rows = [c for w in self._workloads() for c in op.cases(w)], self.array.cases(lambda _: True)
        super().__init__([TrialCall(op, case, seed + i) for i, case in enumerate([*made, *rows])])
        self.hand_made, self.rows = self.points[: len(made)], self.points[len(made) :]

    def _workloads(self) -> Iterator[Workload]:
        """Yield the plain workload, then one for each other value of each trait, whose cases differ."""
        yield self.plain
        for f in self.array.factors:
            values = [level.value for level in f.levels] if f.domain.kind == "trait" else [False, True]
            name = f.name if f.domain.kind == "trait" else f.domain.presence
            yield from (replace(self.plain, traits=((name, v),)) for v in values[1:] if name)

    @cached_property
    def mutants(self) -> Sequence[Mutant]:
        some = self.points[:: max(1, len(self.points) // MOST_RESULTS)]
        return derive(self.op, self.dtype, reach_of(dict(p.truth.inputs) for p in self.points), [p.right for p in some])

    def is_void(self, mutant: Mutant) -> bool:
        """Return True if the fault makes invalid operands at every point where it shows, so that it has no results."""
        return any(p.refuses(mutant) for p in self.points) and all(p.results(mutant) is None for p in self.points)

    def agrees(self, mutant: Mutant, points: int, seed: int) -> bool:
        """Return True if the mutant is correct at this number of random points of the domains."""
        return all(p.try_on(mutant) is None for p in islice(self.random_points(seed), points))

    def refuses_the_reference(self) -> Sequence[str]:
        """Return the cases that refuse the reference itself. A score is invalid if there are any."""
        itself = Mutant(name="itself", subject="", after=lambda results: results)
        return [p.case.name for p in self.points if p.try_on(itself) is not None]

    def random_points(self, seed: int) -> Iterator[TrialCall]:
        """Yield random points that the contract admits. Sizes are drawn from the smaller half of their values."""
        rng, choices = Random(seed), [self._choices(f) for f in self.array.factors]
        admits: Callable[[Sequence[int | None]], bool] = self.array.admits
        while True:
            row = tuple(rng.choice(some) for some in choices)
            if admits(row):
                yield TrialCall(self.op, self.array.case(self.array.level_of(row)), rng.getrandbits(30))

    @staticmethod
    def _choices(f: Factor) -> Sequence[int]:
        if f.domain.kind != "count":
            return range(len(f.levels))
        sizes = [f.levels[at].value for at in range(len(f.levels))]
        order = sorted(range(len(sizes)), key=lambda at: prod(sizes[at]) if isinstance(sizes[at], tuple) else sizes[at])
        return order[: -(-len(order) // 2)]


def plain_workload(op: Op, dtype: DTypeName, seed: int) -> Workload:
    """Return the workload with the ordinary size of each dimension and default traits."""
    dims: dict[str, int] = {}
    for names, domain in op.domains.items():
        if domain.kind == "count":
            value = domain.levels(dtype, Random(seed))[0].value
            dims |= zip(names.split(), value if isinstance(value, tuple) else (value,), strict=True)
    return op.workload(dtype, dims)
