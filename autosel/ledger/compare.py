"""Find hosts with one kind of device whose measurements disagree: one of the devices differs from its identity.

It compares the time of one arm (same build, same knobs, same libraries) at one workload in one mode, measured by two
hosts with the same hw_id. They disagree if the intervals of their medians do not overlap, and differ by more than the
margin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from autosel.ledger import rows
from autosel.ledger import schema as t
from autosel.values import Arm, Decision, Timing

MARGIN = 1.05  # the smallest effect that a race promotes before calibration; smaller differences are ignored
MOST = 5000  # decisions examined, newest first


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTiming:
    """Hold one arm's time on one host, and the decision with the evidence."""

    host: str
    decision_id: int
    timing: Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """Pair two measurements that one kind of device cannot both produce. `ratio`: the second's time over the
    first's."""

    workload: str
    candidate: str
    first: HostTiming
    second: HostTiming

    @property
    def ratio(self) -> float:
        return self.second.timing.median_us / self.first.timing.median_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Discrepancy:
    """Report a disagreement of two hosts (ids, then names): `apart` of `compared` measurements, the largest first."""

    hw_id: str
    hosts: tuple[str, str]
    names: tuple[str, str]
    compared: int
    apart: tuple[Apart, ...]

    @property
    def slower(self) -> str:
        """Return the name of the host that is slower in most of the differing measurements."""
        second = sum(a.ratio > 1 for a in self.apart)
        return self.names[1] if 2 * second >= len(self.apart) else self.names[0]


_Cell = tuple[str, str, str, str]  # hw_id, mode, workload, digest of the arm


def hosts(connection: Connection) -> list[dict[str, Any]]:
    """Describe every host that has written to the ledger, in the order of their first write: its numbers of decisions
    and proofs, and its first and last write."""
    written: dict[int, dict[str, list[Any]]] = {}  # by host and kind: (host, hw_id, rows, time of the last)
    for kind, table in (("decisions", t.decisions), ("proofs", t.parities)):
        query = sa.select(table.c.host_id, table.c.hw_id, sa.func.count(), sa.func.max(table.c.created_at))
        for row in connection.execute(query.group_by(table.c.host_id, table.c.hw_id)):
            written.setdefault(row[0], {"decisions": [], "proofs": []})[kind].append(row)
    found = []
    for host in connection.execute(sa.select(t.hosts).order_by(t.hosts.c.id)):
        own = written.get(host.id, {"decisions": [], "proofs": []})
        both = [*own["decisions"], *own["proofs"]]
        about = {"id": host.host, "name": host.name, "hw_ids": sorted({row[1] for row in both})}
        counts = {kind: sum(row[2] for row in rows_of) for kind, rows_of in own.items()}
        last = max([host.created_at, *(row[3] for row in both)])
        found.append({**about, **counts, "since": host.created_at, "last": last})
    return found


def disagreements(connection: Connection) -> list[Discrepancy]:
    """Return every pair of hosts whose latest measurements on the same kind of device differ."""
    several = sa.select(t.decisions.c.hw_id).group_by(t.decisions.c.hw_id)
    several = several.having(sa.func.count(sa.distinct(t.decisions.c.host_id)) > 1)
    query = rows.stored().where(t.decisions.c.hw_id.in_(several), t.decisions.c.verdict_id.is_not(None))
    cells: dict[_Cell, tuple[str, dict[str, HostTiming]]] = {}
    for s in rows.fetch(connection, query.order_by(t.decisions.c.id.desc()).limit(MOST)):
        for cell, arm, timing in _timed(s.decision) if s.host else ():
            _, by_host = cells.setdefault(cell, (arm.candidate, {}))
            by_host.setdefault(s.host, HostTiming(host=s.host, decision_id=s.decision.id, timing=timing))
    names = {row.host: row.name for row in connection.execute(sa.select(t.hosts.c.host, t.hosts.c.name))}
    return _by_pair(cells, names)


def _timed(d: Decision) -> Iterator[tuple[_Cell, Arm, Timing]]:
    """Return the times that a decision states for its arms. Digests identify the arms, so stale decisions are left out:
    their digests are not those of the timed arms."""
    timings = d.verdict.timings if d.verdict and not d.stale else {}
    for arm in {d.arm.digest: d.arm, d.baseline.digest: d.baseline}.values():
        if arm.candidate in timings:
            yield (d.hw_id, d.mode, d.workload.key, arm.digest), arm, timings[arm.candidate]


def _by_pair(cells: dict[_Cell, tuple[str, dict[str, HostTiming]]], names: dict[str, str]) -> list[Discrepancy]:
    compared: dict[tuple[str, str, str], list[Apart]] = {}
    for (hw_id, _, workload, _), (candidate, by_host) in cells.items():
        for one, other in combinations(sorted(by_host), 2):
            both = Apart(workload=workload, candidate=candidate, first=by_host[one], second=by_host[other])
            compared.setdefault((hw_id, one, other), []).append(both)
    found = []
    for (hw_id, one, other), pairs in compared.items():
        apart = sorted((p for p in pairs if are_apart(p.first.timing, p.second.timing)), key=_width, reverse=True)
        if apart:
            who, known = (one, other), (names.get(one, one), names.get(other, other))
            made = Discrepancy(hw_id=hw_id, hosts=who, names=known, compared=len(pairs), apart=tuple(apart))
            found.append(made)
    return found


def are_apart(a: Timing, b: Timing) -> bool:
    low, high = sorted((a, b), key=lambda timing: timing.median_us)
    return low.hi_us * MARGIN < high.lo_us


def _width(pair: Apart) -> float:
    return max(pair.ratio, 1 / pair.ratio)


def words(found: Discrepancy) -> Sequence[str]:
    """Describe the three largest differences."""
    return [
        f"{a.workload} {a.candidate}: {a.first.timing.median_us:.4g} us ({a.first.timing.lo_us:.4g} .. "
        f"{a.first.timing.hi_us:.4g}) on {found.names[0]}, {a.second.timing.median_us:.4g} us "
        f"({a.second.timing.lo_us:.4g} .. {a.second.timing.hi_us:.4g}) on {found.names[1]}; decisions "
        f"{a.first.decision_id} and {a.second.decision_id}"
        for a in found.apart[:3]
    ]
