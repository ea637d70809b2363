"""Sentences that sum up a race."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autosel.candidates import registry
from autosel.ledger.describe import ratio
from autosel.values import Verdict

if TYPE_CHECKING:
    from autosel.pipeline import Tried


def race_sentence(tried: Sequence[Tried], name: str) -> str:
    """Return one sentence about the decided workloads of a race; "" if there is none: then an error tells why."""
    decided = [t.verdict for t in tried if t.verdict is not None and _is_decided(t.verdict, name)]
    if not decided:
        return ""
    won = [v for v in decided if v.winner == name]
    who = "your kernel" if name.startswith("user:") else name
    if len(tried) == 1:
        told = against_pytorch(decided[0], name)
    else:
        told = f"wins {len(won) or 'none'} of {len(tried)} workloads against PyTorch{_speedups(won)}"
    if not won:
        return f"{who} {told}; PyTorch stays"
    lost = len(tried) - len(won)
    rest = f"PyTorch stays at the other{f' {lost}' if lost > 1 else ''}; " if lost else ""
    return f"{who} {told}; {rest}{_next_step(tried[0].named.workload.op, name)}"


def _speedups(won: Sequence[Verdict]) -> str:
    """Return ` (1.31x to 2.1x as fast)`."""
    told = [ratio(v.effect.median) for v in sorted(won, key=_median) if v.effect is not None]
    ends = dict.fromkeys((told[0], told[-1])) if told else ()
    return f" ({' to '.join(ends)} as fast)" if ends else ""


def _median(verdict: Verdict) -> float:
    return verdict.effect.median if verdict.effect is not None else 0.0


def _is_decided(verdict: Verdict, name: str) -> bool:
    return verdict.outcome != "undecided" and name in verdict.timings


def against_pytorch(verdict: Verdict, name: str) -> str:
    """Return `is 21 % slower than PyTorch's`. The only other arm of the race is the baseline, PyTorch's code."""
    if verdict.winner == name and verdict.effect is not None:
        return f"is {ratio(verdict.effect.median)} as fast as PyTorch's (at least {ratio(verdict.effect.lo)})"
    own = verdict.timings[name].median_us
    base = next(t.median_us for other, t in verdict.timings.items() if other != name)
    slower = own / base - 1
    if verdict.outcome == "tie" or slower < 0.005:
        return f"is not reliably faster than PyTorch's ({base / own:.2f}x)"
    if slower >= 1:
        return f"takes {ratio(own / base)} as long as PyTorch's"
    return f"is {100 * slower:.0f} % slower than PyTorch's"


def _next_step(op: str, name: str) -> str:
    if any(c.name == name for c in registry.all_candidates(op)):
        return "`tune` can choose it"
    return "register it with autosel.candidate, and `tune` can choose it"
