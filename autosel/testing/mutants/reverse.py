"""Test that each domain is needed: without it, some mutant that an op's array kills must survive.

A domain is removed by giving it its ordinary value in every row of the array. A hand-made case is needed if only it
kills some mutant. The other hand-made cases exist because they run first and their names describe a fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autosel.ops.array import Factor
from autosel.ops.contract import Op
from autosel.ops.one_thread import one_thread
from autosel.testing.mutants.equivalent import REDUNDANT
from autosel.testing.mutants.mutant import Mutant
from autosel.testing.mutants.trial import Trial, TrialCall, TrialCalls
from autosel.values import DTypeName

DTYPES: Sequence[DTypeName] = ("bf16", "fp32")  # the search for a survivor tries them in this order


@dataclass(frozen=True, slots=True, kw_only=True)
class Reverse:
    """The effect of removing each domain of an op.

    `survivors`: for each domain a mutant that survives without it, with its dtype; "" if there is none. `redundant`:
    why a domain without a survivor stays. `hand_made`: the cases that are needed, each with a mutant that only it
    kills.
    """

    op: str
    survivors: Mapping[str, str]
    redundant: Mapping[str, str]
    cases: int
    hand_made: Mapping[str, str]

    @property
    def lacking(self) -> list[str]:
        """Return the domains without a survivor or a reason to stay."""
        return [name for name, survivor in self.survivors.items() if not survivor and not self.redundant[name]]


def reverse(op: Op, seed: int) -> Reverse:
    """Remove each domain alone and search for a survivor."""
    trial = Trial(op, DTYPES[0], seed)
    found = dict.fromkeys([f.name for f in trial.array.factors if len(f.levels) > 1], "")
    with one_thread():
        for dtype in DTYPES:
            trial = Trial(op, dtype, seed)
            for name in [name for name, survivor in found.items() if not survivor]:
                survivor = next(_survivors(trial, name, seed), "")
                found[name] = f"{survivor} ({dtype})" if survivor else ""
        hand_made = _needed_cases(Trial(op, DTYPES[0], seed))
    return Reverse(
        op=op.name,
        survivors=found,
        redundant={name: REDUNDANT.get((op.name, name), "") for name, survivor in found.items() if not survivor},
        cases=len(trial.hand_made),
        hand_made=hand_made,
    )


def _survivors(trial: Trial, domain: str, seed: int) -> Iterator[str]:
    """Yield names of mutants that the array kills only with the domain."""
    without = TrialCalls(_points_without(trial, domain, seed))
    rows = TrialCalls(trial.rows)
    factor = next(f for f in trial.array.factors if f.name == domain)
    for mutant in sorted(trial.mutants, key=lambda m: not _is_about(m, factor)):
        if without.killer(mutant) is None and rows.killer(mutant) is not None:
            yield mutant.name


def _points_without(trial: Trial, domain: str, seed: int) -> list[TrialCall]:
    array = trial.array
    at = next(i for i, f in enumerate(array.factors) if f.name == domain)
    rows = dict.fromkeys((*row[:at], 0, *row[at + 1 :]) for row in array.rows)
    kept = [row for row in rows if array.admits(row)]
    return [TrialCall(trial.op, array.case(array.level_of(row)), seed + i) for i, row in enumerate(kept)]


def _is_about(mutant: Mutant, factor: Factor) -> bool:
    """Return True for mutants of the domain's argument or layout, which are tried first."""
    return mutant.subject in (factor.name, factor.name.partition(".")[0]) or (
        factor.domain.kind == "layout" and ("contiguous" in mutant.name or "aligned" in mutant.name)
    )


def _needed_cases(trial: Trial) -> dict[str, str]:
    rows, found = TrialCalls(trial.rows), dict[str, str]()
    for mutant in trial.mutants:
        if rows.killer(mutant) is not None:
            continue
        killing = [p.case.name for p in trial.hand_made if p.try_on(mutant) is not None]
        if len(killing) == 1:
            found.setdefault(killing[0], mutant.name)
    return found
