"""Describe a decision for people and programs: as one JSON object, a short shape, and figures in a uniform format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from autosel import settings
from autosel.values import SERVING, WHOLE_STEP, Conditions, Decision, Timing, Verdict, Workload, to_json

MOST_NAMES = 4


def decision_json(decision: Decision) -> dict[str, Any]:
    """Return the JSON of `best OP --json`, of each decision of `tune --json`, and of the daemon's answers."""
    verdict, standing = decision.verdict, decision.standing
    timing = verdict.timings.get(decision.arm.candidate) if verdict else None
    base = verdict.timings.get(decision.baseline.candidate) if verdict else None
    effect = standing.effect if standing else None
    seen = standing.conditions if standing else None
    next_best = decision.next_best
    found = {
        "op": decision.op,
        "workload": decision.workload.key,
        "bucket": decision.bucket,
        "length_range": decision.length_range,
        "state": served_state(decision),
        "recorded": decision.state,
        "backend": decision.arm.backend,
        "candidate": decision.arm.candidate,
        "decision_id": decision.id,
        "speedup": {"median": effect.median, "lo": effect.lo, "hi": effect.hi} if effect else None,
        "next_best": {"candidate": next_best[0], "speedup": next_best[1]} if next_best else None,
        "baseline_us": base.median_us if base else None,
        "time_us": timing.median_us if timing else None,
        "time_interval_us": [timing.lo_us, timing.hi_us] if timing else None,
        "roofline": standing.roofline if standing else None,
        "read_bytes_per_s": standing.read_bytes_per_s if standing else None,
        "conditions": {"contended": seen.contended, **to_json(seen)} if seen else None,
        "outcome": standing.outcome if standing else None,
        "reason": decision.reason,
        "stale": decision.stale,
        "knobs": dict(decision.arm.knobs),
        "created_at": decision.created_at,
    }
    return found if standing is None or standing.prepared is None else found | {"prepared": to_json(standing.prepared)}


def held_text(held: Mapping[int, str]) -> str:
    """Return how many kernels are in quarantine, and which; `held`: candidates by the number of their quarantine."""
    names = list(dict.fromkeys(held.values()))
    rest = len(names) - MOST_NAMES
    told = ", ".join(names[:MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")
    return f"{len(held)} kernel{'s are' if len(held) > 1 else ' is'} in quarantine and will not race: {told}"


def release_command(held: Iterable[int]) -> str:
    """Return the command that ends these quarantines."""
    return f"{settings.spelling()} db release {' '.join(map(str, sorted(held)))}"


def served_state(decision: Decision) -> str:
    """Return promoted, kept, pinned or baseline: the state that a caller of best() sees."""
    return decision.state if decision.state in SERVING else "baseline"


def contended(decision: Decision) -> str:
    """Say beside what other work the decision's effect was measured; empty for a quiet machine, if nobody looked, and
    where there is no effect: then the reason says what kept the machine busy."""
    return contended_race(decision.standing) if decision.effect is not None else ""


def contended_race(verdict: Verdict | None) -> str:
    """Say the same for a race that is not recorded."""
    found = verdict.conditions if verdict is not None else None
    return f"timed beside other work: {conditions_text(found)}" if found is not None and found.contended else ""


def measured(decision: Decision) -> str:
    """Return when and under which conditions the decision's effect was measured; "" without an effect.

    `2026-11-26 01:20 UTC, memory read at 46.1 GB/s, quiet machine (0.02 cores busy)`
    """
    v = decision.standing
    if decision.effect is None or v is None:
        return ""
    told = [f"{decision.created_at[:16].replace('T', ' ')} UTC"]
    told += [f"memory read at {bandwidth(v.read_bytes_per_s)}"] if v.read_bytes_per_s else []
    if v.conditions is None:
        return ", ".join([*told, "load of other processes not observed"])
    return ", ".join([*told, contended(decision) or f"quiet machine ({v.conditions.busy_cores:.2f} cores busy)"])


def conditions_text(found: Conditions) -> str:
    """`cc1plus 0.9 cores, 12 % of CPU time to other guests; 160 samples taken again`."""
    told = list(found.by) or [f"{found.busy_cores:.1f} cores"]
    told += [f"{100 * found.stolen:.0f} % of CPU time to other guests"] if found.stolen >= 0.01 else []
    kept = f"{found.again} samples taken again" if found.watched else "samples kept as they came"
    return f"{', '.join(told)}; {kept}"


def against_baseline(decision: Decision) -> str:
    """Return `23x ≥22`: the speedup and its lower confidence bound, or that it is a tie."""
    if decision.state in ("pinned", "demoted", "quarantined"):
        return decision.state
    verdict = decision.standing
    if decision.stale and decision.arm.digest != decision.baseline.digest:
        return f"{ratio(verdict.effect.median)} stale" if verdict and verdict.effect else "stale"
    if verdict is None:
        return "by hand" if decision.verdict else "not raced"
    if verdict.outcome == "promote" and verdict.effect is not None:
        return f"{ratio(verdict.effect.median)} ≥{ratio(verdict.effect.lo)[:-1]}"
    if decision.arm.digest != decision.baseline.digest and verdict.effect is not None:
        return f"{ratio(verdict.effect.median)} kept"
    return {"lose": "baseline"}.get(verdict.outcome, verdict.outcome)


def shape(w: Workload) -> str:
    """Return `B1 H32/8 D128 L8192`, `M1 K4096 N28672`: only the well-known dimensions."""
    dims = dict(w.dims)
    if w.op == WHOLE_STEP:
        return f"B{dims['B']} layers{dims['layers']} d{dims['d']} L{dims['L']}"
    if "Hq" in dims and "Hkv" in dims:
        dims = {"H": f"{dims.pop('Hq')}/{dims.pop('Hkv')}", **dims}  # type: ignore[dict-item]
    for dull in ("S", "R"):
        if dull in dims and (dull == "R" or dims[dull] == 1):
            dims.pop(dull)
    first = [n for n in ("B", "M") if n in dims]
    order = [*first, *(n for n in dims if n not in first)]
    traits = "".join(f" {n}={v}" for n, v in w.traits if n not in ("residual",))
    return " ".join(f"{n}{dims[n]}" for n in order) + traits


def spread(timing: Timing) -> str:
    """Return half the interval of the median, right-aligned to five characters."""
    half = max(timing.hi_us - timing.median_us, timing.median_us - timing.lo_us) / timing.median_us
    return f"{f'±{half:.1%}' if half < 0.0995 else f'±{half:.0%}' if half < 1 else 'noisy':>5}"


# --- figures ------------------------------------------------------------------------------------------------------


def microseconds(value: float) -> str:
    """Return `1 010`, `74.1`, `2.31`: at least three significant digits, with thin spaces between groups."""
    if value >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def ratio(value: float) -> str:
    return f"{value:.0f}x" if value >= 10 else f"{value:.1f}x" if value >= 1.95 else f"{value:.2f}x"


def bytes_text(value: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"


def bandwidth(value: float) -> str:
    """Return `46.1 GB/s`."""
    return f"{value / 1e12:.3g} TB/s" if value >= 1e12 else f"{value / 1e9:.3g} GB/s"
