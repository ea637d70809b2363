"""How far apart repeated tunes of the same arms were on a device."""

from __future__ import annotations

from collections.abc import Iterable

from autosel.race.evidence import pooled
from autosel.race.judge import one_state
from autosel.race.plan import SESSIONS
from autosel.values import Decision, Reruns, Verdict

REMEMBERED = 400  # the latest decisions of a device: the caller of `of` reads as many


def of(decisions: Iterable[Decision]) -> Reruns:
    """Return the spread of a device's effects; `decisions`: newest first.

    Runs with the same workload, arms and number of threads are compared if each was confirmed, and memory was read at
    the rate of the newest. A decision that repeats a verdict (a demotion, a renewal) is no further run.
    """
    runs: dict[tuple[str, ...], list[Verdict]] = {}
    for d in decisions:
        v = d.verdict
        if v is None or v.effect is None or len(v.wins) < SESSIONS or v.winner != d.arm.candidate:
            continue
        known = runs.setdefault((d.workload.key, d.mode, d.arm.digest, d.baseline.digest), [])
        if known and v.effect == known[-1].effect:
            continue
        if one_state(run.read_bytes_per_s for run in (v, *known[:1])):
            known.append(v)
    return pooled([v.effect.median for v in known if v.effect] for known in runs.values())
