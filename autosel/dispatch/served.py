"""Report the share of a process's time in ops that decisions serve, and why the other calls miss.

Serving calls are counted, not timed. The time of a call comes from its race; without a race for these conditions from
one for others; without any from the bytes that it moves at the measured read rate, which is the least time it can take.
Each row names its origin. An engine's own kernel has the time of the baseline in the race: nothing has timed it here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autosel import devices, ops
from autosel.devices.store import of_hardware
from autosel.errors import AutoselError
from autosel.ledger.key import matters, threads_of
from autosel.ledger.snapshot import Row
from autosel.values import ELSEWHERE, SERVING, Decision, Origin, ServedCalls, Workload, to_json

# (workload or op alone, candidate that ran, decision, reason, device (hw_id)): a key of Board.counted
UsedFor = tuple[Workload | str, str, int | None, str, str]
MOST_TEXT = 240


_engine = ""


def engine() -> str:
    """Return the serving engine that this process runs, as its plug-in named it; "" if none did."""
    return _engine


def name_engine(name: str) -> None:
    global _engine  # noqa: PLW0603  (a process runs one engine)
    _engine = name


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Hold the parts of one process, most time first. `engine` is empty outside a serving engine."""

    engine: str
    mode: str
    parts: tuple[ServedCalls, ...]

    @property
    def share(self) -> float | None:
        """Return the share of time that decisions serve; None without a timed call."""
        total = sum(p.us for p in self.parts)
        return sum(p.us for p in self.parts if not p.why) / total if total else None


def measure(counted: Mapping[UsedFor, int], rows: Sequence[Row], *, engine: str, mode: str) -> Coverage:
    """Return the coverage of the counted calls; `rows`: of the snapshot that serves them."""
    times = _Times(rows, mode)
    parts = [_part(key, calls, times) for key, calls in counted.items() if calls > 0]
    return Coverage(engine=engine, mode=mode, parts=tuple(sorted(parts, key=lambda p: (-p.us, -p.calls, p.bucket))))


def _part(key: UsedFor, calls: int, times: _Times) -> ServedCalls:
    what, candidate, number, reason, hw_id = key
    served = number is not None and times.serves(number, candidate)
    us, origin = times.of(what, candidate, number, hw_id)
    return ServedCalls(
        op=what if isinstance(what, str) else what.op,
        bucket="" if isinstance(what, str) else what.bucket,
        candidate=candidate,
        why="" if served else reason[:MOST_TEXT] or "no reason",
        calls=calls,
        us_per_call=us,
        origin=origin,
    )


class _Times:
    """Look up times in the races of a snapshot's decisions."""

    def __init__(self, rows: Sequence[Row], mode: str) -> None:
        self.mode = mode
        self.by_id = {row.document.get("id"): row for row in rows}
        self.by_bucket: dict[str, list[Row]] = {}
        for row in rows:
            self.by_bucket.setdefault(str(row.document.get("bucket")), []).append(row)

    def serves(self, number: int, candidate: str) -> bool:
        """Return True if the decision's own arm ran, not a fallback."""
        d = _decision(self.by_id.get(number))
        return d is None or (d.state in SERVING and d.arm.candidate == candidate)  # None: the snapshot has moved on

    def of(self, what: Workload | str, candidate: str, number: int | None, hw_id: str) -> tuple[float | None, Origin]:
        """Return microseconds per call, and where they come from."""
        own = _decision(self.by_id.get(number)) if number is not None else None
        if own is not None and (us := _raced(own, candidate)):
            return us, "raced"
        if isinstance(what, str):
            return None, "unknown"
        others = [d for row in self.by_bucket.get(what.bucket, ()) if (d := _decision(row)) is not None]
        others.sort(key=lambda d: (d.hw_id != hw_id, d.mode != self.mode, -d.id))
        for d in others:
            if us := _raced(d, d.baseline.candidate if candidate == ELSEWHERE else candidate):
                alike = d.hw_id == hw_id and d.mode == self.mode
                return us, "raced" if alike else "raced under other conditions"
        return _derived(what, hw_id, self.mode)


def _decision(row: Row | None) -> Decision | None:
    try:
        return row.decision if row is not None else None
    except AutoselError:
        return None


def _raced(d: Decision, candidate: str) -> float | None:
    timing = d.verdict.timings.get(candidate) if d.verdict is not None else None
    return timing.median_us if timing is not None else None


def _derived(w: Workload, hw_id: str, mode: str) -> tuple[float | None, Origin]:
    """Return the time in which the workload's bytes are read at the measured rate of this device."""
    fp = of_hardware(hw_id)
    if fp is None:
        return None, "unknown"
    threads = min(threads_of(mode), fp.cpus)
    rate = fp.rates.get(f"read_bytes_per_s@{threads}" if devices.on_host(fp.kind) else "read_bytes_per_s")
    return (1e6 * ops.find(w.op).bytes_moved(w) / rate.value, "derived") if rate else (None, "unknown")


def document(found: Coverage, *, most: int) -> dict[str, Any]:
    """Return at most so many parts as JSON; the rest, which take the least time, are added up in one."""
    parts, rest = found.parts[:most], found.parts[most:]
    return {
        "engine": found.engine,
        "mode": found.mode,
        "share": found.share,
        "parts": to_json(parts),
        "left_out": sum(p.calls for p in rest),
    }


# --- before the first call -------------------------------------------------------------------------------------------


def outlook(rows: Iterable[Row], ids: Sequence[str], mode: str, kind: str = "cpu") -> str:
    """Say what is decided here for a process in this mode, and for which other numbers of threads something is."""
    here: dict[str, int] = {}
    otherwise: dict[int, int] = {}
    for row in rows:
        d, bucket = row.document, str(row.document.get("bucket"))
        if not _is_beyond_baseline(row, ids):
            continue
        if matters(str(d.get("mode")), kind, bucket) == matters(mode, kind, bucket):
            here[str(d.get("op"))] = here.get(str(d.get("op")), 0) + 1
        else:
            threads = threads_of(str(d.get("mode")))
            otherwise[threads] = otherwise.get(threads, 0) + 1
    served = ", ".join(f"{op} {count}" for op, count in sorted(here.items())) or "nothing"
    more = "".join(f"; {n} decisions for {t} threads" for t, n in sorted(otherwise.items()))
    return f"decided for {mode}: {served}{more}"


def beyond_baseline(rows: Iterable[Row], ids: Sequence[str], op: str) -> frozenset[str]:
    """Return the buckets of an op for which another arm than the baseline is decided here, in any mode."""
    mine = (row.document for row in rows if row.document.get("op") == op and _is_beyond_baseline(row, ids))
    return frozenset(str(d.get("bucket")) for d in mine)


def _is_beyond_baseline(row: Row, ids: Sequence[str]) -> bool:
    d = row.document
    arm, baseline = (digest_in(d.get(name)) for name in ("arm", "baseline"))
    return d.get("hw_id") in ids and d.get("state") in SERVING and arm != baseline


def digest_in(arm: Any) -> str:
    """Return the digest of an arm in the snapshot that is not resolved yet."""
    return str(arm.get("digest")) if isinstance(arm, dict) else ""
