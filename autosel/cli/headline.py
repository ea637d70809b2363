"""The headline of a tune: how much faster a decode step becomes, from the decided times of its ops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autosel import settings
from autosel.cli.output import paragraph
from autosel.ledger.describe import contended, decision_json, ratio
from autosel.models.workloads import Named
from autosel.values import SERVING, Decision

MOST_NAMES = 4
CHAINS = ("fused", "split")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Sum of the ops' times in one decode step, in us, by PyTorch and as decided; `untimed` ops are in neither."""

    pytorch_us: float
    decided_us: float
    untimed: tuple[str, ...]


def headline(decisions: Sequence[Decision], named: Sequence[Named], step: str) -> str:
    """Return `decode step of llama-8b: about 2.1x faster than PyTorch; 22 of 22 ops improved`, and how it was derived.

    `step` names the step. Return "" if no op of a step was timed, or if the decisions are for several devices.
    """
    ops = [n for n in named if n.calls_per_step]
    times = step_times(decisions, ops)
    if times is None or len({d.hw_id for d in decisions}) > 1:
        return ""
    speedup = times.pytorch_us / times.decided_us
    told = f"about {ratio(speedup)} faster than PyTorch" if speedup >= 1.05 else "about as fast as PyTorch"
    derived = f"derived from these races' times{_contended(decisions)}; `{settings.spelling()} run` measures a step"
    if times.untimed:
        step += f" without {_few(times.untimed)} (not timed)"
    return "\n".join([paragraph(f"{step}: {told}; {counts(decisions, ops)}"), paragraph(derived, indent="  ")])


def _contended(decisions: Sequence[Decision]) -> str:
    """Return ` (3 of 22 timed beside other work)`; "" if none was."""
    marked = sum(bool(contended(d)) for d in decisions)
    return f" ({marked} of {len(decisions)} timed beside other work)" if marked else ""


def step_times(decisions: Sequence[Decision], ops: Sequence[Named]) -> StepTimes | None:
    """Add up the times of one step, each op as often as the step calls it; None if nothing was timed.

    A step runs the fused or the split ops, and attention at one length: the longest. PyTorch and the decided kernels
    each take their faster chain, among those with the fewest untimed ops.
    """
    longest = max((n.workload["L"] for n in ops if n.workload.op == "attn"), default=0)
    one = [n for n in ops if n.workload.op != "attn" or n.workload["L"] == longest]
    sums = [_sum(decisions, [n for n in one if n.chain in ("both", chain)]) for chain in CHAINS]
    fewest = min(len(s.untimed) for s in sums)
    sums = [s for s in sums if len(s.untimed) == fewest and s.decided_us]
    if not sums:
        return None
    return StepTimes(
        pytorch_us=min(s.pytorch_us for s in sums), decided_us=min(s.decided_us for s in sums), untimed=sums[0].untimed
    )


def _sum(decisions: Sequence[Decision], ops: Iterable[Named]) -> StepTimes:
    pytorch = decided = 0.0
    untimed = []
    for n in ops:
        found = decision_of(decisions, n)
        row = decision_json(found) if found is not None else {"baseline_us": None, "time_us": None}
        if row["baseline_us"] is None or row["time_us"] is None:
            untimed.append(n.label)
            continue
        serves = found is not None and found.state in SERVING
        pytorch += n.calls_per_step * row["baseline_us"]
        decided += n.calls_per_step * (row["time_us"] if serves else row["baseline_us"])
    return StepTimes(pytorch_us=pytorch, decided_us=decided, untimed=tuple(untimed))


def decision_of(decisions: Sequence[Decision], n: Named) -> Decision | None:
    """Return the decision that serves this workload; a bucket may be split by lengths."""
    for d in decisions:
        if d.bucket == n.workload.bucket and (
            d.length_range is None or d.length_range[0] <= n.workload["L"] <= d.length_range[1]
        ):
            return d
    return None


def counts(decisions: Sequence[Decision], ops: Sequence[Named]) -> str:
    """Return `20 of 22 ops improved, PyTorch stays for 1, 1 undecided`."""
    found = [decision_of(decisions, n) for n in ops]
    improved = sum(d is not None and d.state in SERVING and d.arm.digest != d.baseline.digest for d in found)
    undecided = sum(d is None or _is_undecided(d) for d in found)
    told = f"{improved} of {len(found)} ops improved"
    if kept := len(found) - improved - undecided:
        told += f", PyTorch stays for {kept}"
    return told + (f", {undecided} undecided" if undecided else "")


def _is_undecided(d: Decision) -> bool:
    """Return True for an undecided race that leaves PyTorch's kernel; an earlier winner keeps serving."""
    undecided = d.verdict is not None and d.verdict.outcome == "undecided"
    return undecided and d.arm.digest == d.baseline.digest


def _few(names: Sequence[str]) -> str:
    rest = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")
