"""Stage 6: time every candidate of every op with cold operands, next to the read rate of the same minute."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import TYPE_CHECKING

from autosel.values import Accepted, Fingerprint, Workload
from benchmarks.gpu.entrants import entrant
from benchmarks.gpu.scope import Scope, is_ours
from benchmarks.gpu.stages import Found, Table

if TYPE_CHECKING:
    from autosel.race.contest import Entrant
    from benchmarks.gpu.instrument import Timer

UNIT_S = 600.0


def units(scope: Scope, fp: Fingerprint) -> list[str]:
    return [named.workload.key for named in scope.everything()]


def run(unit: str, scope: Scope, fp: Fingerprint) -> Found:
    """Return the times of all arms. Wrong results are listed by arm.

    `ok` is true if no arm of autosel is wrong or broken.
    """
    from benchmarks.gpu.instrument import Timer, spread

    w = next(n.workload for n in scope.everything() if n.workload.key == unit)
    arms, refused = _arms(w, fp, scope.effort)
    timer = Timer(fp, scope.device)
    broken = _seat(timer, w, arms)
    before = timer.read_bytes_per_s()
    times = timer.rounds(list(arms), seconds=scope.cell_seconds, rng=Random(1))
    read = max(before, timer.read_bytes_per_s())
    wrong = {arm: why for arm in arms if (why := timer.wrong(arm))}
    floor_us = timer.op.bytes_moved(w) / read * 1e6 if read else 0.0
    base = next(arm for arm in arms if arm.startswith("torch:"))
    found = {arm: spread(t) for arm, t in times.items()}
    for one in found.values():
        one |= {"read": round(floor_us / one["us"], 3), "speedup": round(found[base]["us"] / one["us"], 3)}
    timer.close()
    ours = [arm for arm in (*wrong, *broken) if is_ours(arm)]
    return {
        "ok": not ours,
        "arms": found,
        "wrong": wrong,
        "broken": broken,
        "refused": refused,
        "timing": "calls" if timer.bench.device.on_host else "graph",
        "bytes": timer.op.bytes_moved(w),
        "flops": timer.op.flops(w),
        "read_bytes_per_s": read,
        "floor_us": round(floor_us, 3),
        **({"reason": "; ".join(f"{arm}: {(wrong | broken)[arm]}" for arm in ours)} if ours else {}),
    }


def _arms(w: Workload, fp: Fingerprint, effort: str) -> tuple[dict[str, Entrant], dict[str, str]]:
    """Return eligible candidates by name, baseline first, with cuBLASLt rivals; and why the others are refused."""
    from autosel.candidates.registry import eligible
    from autosel.errors import BuildError
    from benchmarks.cublaslt import by_cublaslt

    arms: dict[str, Entrant] = {}
    refused: dict[str, str] = {}
    for candidate, support in eligible(w, fp, effort):
        if not isinstance(support, Accepted):
            refused[candidate.name] = support.reason
            continue
        try:
            arms[candidate.name] = entrant(candidate, w, fp)
        except BuildError as error:
            refused[candidate.name] = str(error)
    return arms | by_cublaslt(w, fp), refused


def _seat(timer: Timer, w: Workload, arms: dict[str, Entrant]) -> dict[str, str]:
    """Seat all arms, and drop those that raise at their first call. Return the dropped arms and their errors.

    Raises RuntimeError if an arm leaves the device unusable, since nothing can be timed after it.
    """
    from benchmarks.gpu.child import fault_of_device

    broken: dict[str, str] = {}
    for name in list(arms):
        try:
            timer.seat(w, {name: arms[name]})
        except Exception as error:  # any kernel may raise; the other arms are still timed
            broken[name] = f"{type(error).__name__}: {str(error)[:200]}"
            del arms[name]
            if fault_of_device():
                raise RuntimeError(f"{name} left the device unusable: {broken[name]}") from error
    timer.seat(w, arms)
    return broken


def table(found: Mapping[str, Found]) -> Table:
    rows, rates = [], []
    for name, one in found.items():
        arms = one.get("arms", {})
        rates += [one["read_bytes_per_s"]] if one.get("read_bytes_per_s") else []
        for arm, t in sorted(arms.items(), key=lambda item: item[1]["us"]):
            right = "WRONG" if arm in one["wrong"] else ""
            times = (f"{t['us']:.1f}", f"{t['lo_us']:.1f}", f"{t['hi_us']:.1f}")
            beyond = f"{t['us'] - one['floor_us']:.1f}"
            rows.append((name, arm, *times, f"{t['speedup']:.2f}", f"{t['read']:.0%}", beyond, right))
    told = (f"read rate during these: {min(rates) / 1e9:.1f} to {max(rates) / 1e9:.1f} GB/s",) if rates else ()
    columns = ("workload", "arm", "us", "25 %", "75 %", "x torch", "of read rate", "us above it", "")
    return Table(columns=columns, rows=tuple(rows), remarks=told)
