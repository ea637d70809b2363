"""Compute the mutation score of an op: how many of its mutants the checks kill, and which survive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from autosel.ops.contract import Op
from autosel.ops.one_thread import one_thread
from autosel.testing.mutants.calls import killers
from autosel.testing.mutants.equivalent import REASONS
from autosel.testing.mutants.mutant import Mutant
from autosel.testing.mutants.trial import Killed, Trial
from autosel.values import DTypeName

DTYPES: Sequence[DTypeName] = ("bf16", "fp32", "fp16")  # a mutant that survives in one is tried in the next
POINTS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The mutation score of an op.

    `killed`: number of mutants that each check kills. `equivalent`: mutants that are correct kernels, and why.
    `points`: number of points of the domains at which each of these agrees with the reference. `survived`: mutants
    that show gaps in the checks.
    """

    op: str
    mutants: int
    killed: Mapping[str, int]
    equivalent: Mapping[str, str]
    points: int
    survived: Sequence[str]


def score(
    op: Op, seed: int, *, share: float = 1.0, points: int = POINTS, calls: bool = True, late: bool = False
) -> Score:
    """Try an op's mutants, or a share of them drawn from `seed`, in one dtype after the other until they are killed.

    `calls`: also try faults that need several calls (habitual.py). `late`: also faults after thousands of calls.
    """
    killed: dict[str, Killed] = {}
    left: dict[str, Mutant] = {}
    with one_thread():
        for dtype in DTYPES:
            if killed and not left:
                break
            trial = Trial(op, dtype, seed)
            wrong = trial.refuses_the_reference()
            assert not wrong, f"{op.name} in {dtype}: these cases refuse the reference: {wrong}"
            tried: Sequence[Mutant] = [m for m in trial.mutants if m.name in left]
            if dtype == DTYPES[0]:
                tried = Random(seed).sample(trial.mutants, max(1, round(share * len(trial.mutants))))
            for mutant in tried:
                found = trial.killer(mutant)
                if found is not None:
                    killed[mutant.name] = found
                    left.pop(mutant.name, None)
                elif not trial.is_void(mutant):
                    left[mutant.name] = mutant
        scored = _score(op, killed, left, seed, points)
    return with_calls(scored, killers(op, seed, late=late)) if calls else scored


def with_calls(found: Score, by: Mapping[str, str]) -> Score:
    """Return the score with the faults over several calls added. `by`: the check that kills each, or ""."""
    more = Counter(check for check in by.values() if check)
    return replace(
        found,
        mutants=found.mutants + len(by),
        killed=dict((Counter(found.killed) + more).most_common()),
        survived=[*found.survived, *(f"over several calls: {fault}" for fault, check in by.items() if not check)],
    )


def _score(op: Op, killed: Mapping[str, Killed], left: Mapping[str, Mutant], seed: int, points: int) -> Score:
    told = {name: why for name in left if (why := REASONS.get((op.name, name)))}
    trial = Trial(op, DTYPES[0], seed)
    agrees = [name for name in told if trial.agrees(left[name], points, seed)]
    return Score(
        op=op.name,
        mutants=len(killed) + len(left),
        killed=dict(Counter(k.check for k in killed.values()).most_common()),
        equivalent={name: told[name] for name in agrees},
        points=points,
        survived=[name for name in left if name not in agrees],
    )
