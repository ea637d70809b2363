"""Measure the effect of other load on decisions: tune a model's workloads in parallel with competing processes.

    python benchmarks/bench_busy.py --load reference            an idle machine, the reference for the other loads;
                                                                run it three times: its runs are averaged
    python benchmarks/bench_busy.py --load 0 --load 2 --load 8 --load 20 [--only sample] [--copy] [--write]
    python benchmarks/bench_busy.py --load 20 --resume             the workloads that load 20 still lacks

Every load is tuned in its own home, with the proofs of the reference and none of its decisions. All workloads are in
one tune, so that minutes lie between the sessions of each. `--load` is the number of competing processes, each in its
own session: endless loops, or with --copy copies of 64 MiB. They end with this script. Each workload is stored in
--home once decided; the output covers all stored results. A decision misses if the interval of its effect excludes the
quiet ratio: the geometric mean of those runs of the reference that had the same winner and in which memory was read at
the decision's rate (of all with this winner if there are none). It misses by more than 10 % if the nearer end of the
interval does. A winner differs if no run of the reference had it.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import command_line
from kept import keep

from autosel.race.judge import ONE_STATE

if TYPE_CHECKING:
    from autosel.ledger.store import Evidence, Ledger
    from autosel.values import Decision

REFERENCE = "reference"
MODEL, CONTEXT = "llama-1b", 8192
STAGE_S = 10.0
FAR = 1.1  # misses by more than this factor are also counted separately
SPIN = "while True: pass"
COPY = "a = bytearray(64 << 20)\nwhile True: b = bytes(a)"
# PR_SET_PDEATHSIG kills the process when its parent ends. The parent may end before that call, hence the check.
TOGETHER = "import ctypes, os; ctypes.CDLL(None).prctl(1, 9); os.getppid() == {} or os._exit(1)\n"
KEPT = Path(__file__).parent / "results" / "cpu" / "busy.json"

Row = Mapping[str, Any]
Rows = Mapping[str, Row]  # by workload


def main() -> int:
    parser = command_line.parser(__doc__, write=f"store the table in {command_line.KEPT}busy.json")
    parser.add_argument("--load", action="append", default=[], help="competing processes, or `reference`; repeatable")
    parser.add_argument("--only", action="append", default=[], help="an op or a workload's key; repeatable  [all]")
    parser.add_argument("--copy", action="store_true", help="competing processes copy memory")
    parser.add_argument("--realtime", action="store_true", help="tune with --realtime")
    parser.add_argument("--resume", action="store_true", help="skip workloads that --home has for this load")
    parser.add_argument("--home", type=Path, default=Path.home() / ".cache" / "autosel-busy", help="folder for results")
    options = parser.parse_args()
    for load in options.load:
        asked = BusyTune(
            only=tuple(options.only),
            realtime=options.realtime,
            without=tuple(_kept(options.home).get(load, {}).get("rows", ())) if options.resume else (),
        )
        run(options.home, load, asked, COPY if options.copy else SPIN)
    kept = _kept(options.home)
    if REFERENCE not in kept:
        sys.exit("no reference: run --load reference on an idle machine first")
    if options.write:
        keep(KEPT, kept)
    print(json.dumps(summaries(kept)) if options.json else text(kept))
    return 0


# --- one load --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyTune:
    """Options of a tune: the workloads, by op or key, and the priority."""

    only: Collection[str] = ()
    without: Collection[str] = ()  # keys
    realtime: bool = False


def run(home: Path, load: str, asked: BusyTune, work: str) -> None:
    """Tune in a fresh process with the load's own home and `load` competing processes.

    Each workload is stored when it is decided.
    """
    place, path = home / f"load-{load}", home / f"{load}.json"
    _furnish(place, home / f"load-{REFERENCE}")
    environment = {**os.environ, "AUTOSEL_HOME": str(place)}
    code = f"import bench_busy; bench_busy.tuned(bench_busy.{asked!r})"
    count, folder = 0 if load == REFERENCE else int(load), Path(__file__).parent
    with competing(count, work), ours(code, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True) as tuner:
        assert tuner.stdout is not None
        for line in tuner.stdout:
            keep(path, _joined(_stored(path), {**json.loads(line), "load": load}))
    if tuner.returncode:
        sys.exit(f"tune with load {load} ended with {tuner.returncode}")


def ours(code: str, *flags: str, **options: Any) -> subprocess.Popen[str]:
    """Run Python code in a process that ends with this one, however this one ends."""
    return subprocess.Popen([sys.executable, *flags, "-c", TOGETHER.format(os.getpid()) + code], **options)


def _furnish(place: Path, reference: Path) -> None:
    """Copy the builds, rates and proofs of the reference; no decision serves yet."""
    if place != reference:
        shutil.rmtree(place, ignore_errors=True)
        left_out = shutil.ignore_patterns("run", "locks", "decisions.json")
        shutil.copytree(reference, place, symlinks=True, ignore=left_out)
    if (place / "ledger.db").exists():
        with sqlite3.connect(place / "ledger.db") as ledger:
            ledger.execute("DELETE FROM serving")


@contextmanager
def competing(count: int, work: str) -> Iterator[list[int]]:
    """Start `count` processes, each in its own session like processes of other users; yield their ids."""
    started = [ours(work, "-S", start_new_session=True) for _ in range(count)]
    try:
        time.sleep(1.0 if started else 0.0)
        yield [process.pid for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


def tuned(asked: BusyTune) -> None:
    """Tune in this process; print a line of JSON for each workload."""
    from autosel import models
    from autosel.ledger.store import open_ledger
    from autosel.models.workloads import step
    from autosel.pipeline import Request, tune

    named = [
        n
        for n in step(models.load(MODEL), batch=1, context=CONTEXT)
        if (not asked.only or {n.workload.op, n.workload.key} & set(asked.only)) and n.workload.key not in asked.without
    ]
    with open_ledger() as ledger:
        if named:
            tune(Request(workloads=tuple(named), force=True, realtime=asked.realtime), ledger, _Decided(ledger))


class _Decided:
    """Prints each decision: a line of JSON, with the seconds since the one before, and a line to stderr. Prints the
    stage to stderr every STAGE_S seconds, because decisions come at the end of a tune."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.since, self.told = ledger, time.monotonic(), time.monotonic()

    def stage(self, name: str, detail: str, done: int, total: int) -> None:
        if time.monotonic() - self.told >= STAGE_S:
            self.told = time.monotonic()
            print(f"  {time.strftime('%H:%M:%S')} {name} {done}/{total} {detail}", file=sys.stderr)

    def rejected(self, *_: object) -> None: ...

    def decided(self, decision: Decision, settled_before: bool) -> None:
        now = time.monotonic()
        found = {"seconds": now - self.since, "load_average": os.getloadavg()[0]}
        self.since = now
        rows = {decision.workload.key: _row(decision, _reads(self.ledger.evidence(decision.id)))}
        print(json.dumps({**found, "rows": rows}), flush=True)
        v = decision.verdict
        effect = f"{v.effect.median:.3g} ({v.effect.lo:.3g} .. {v.effect.hi:.3g})" if v and v.effect else "-"
        print(f"  {decision.workload.key}  {v.outcome if v else ''}  {effect}  {decision.reason}", file=sys.stderr)


def _reads(evidence: Evidence) -> list[float]:
    """Return the lowest and highest read rate of the valid sessions in GB/s; empty if memory is not read."""
    sessions = evidence.race.sessions if evidence.race is not None else ()
    found = [s.read_bytes_per_s / 1e9 for s in sessions if s.kind == "confirming" and not s.voided]
    return [min(found), max(found)] if any(found) else []


def _row(decision: Decision, reads: list[float]) -> dict[str, Any]:
    v = decision.verdict
    assert v is not None
    baseline, conditions = decision.baseline.candidate, v.conditions
    return {
        "outcome": v.outcome,
        "winner": decision.arm.candidate,
        "baseline_us": v.timings[baseline].median_us if baseline in v.timings else None,
        "effect": [v.effect.median, v.effect.lo, v.effect.hi] if v.effect else None,
        "reason": v.reason,
        "read_gb_per_s": reads,
        "again": conditions.again if conditions else None,
        "busy_cores": conditions.busy_cores if conditions else None,
    }


# --- all loads -------------------------------------------------------------------------------------------------------


def _stored(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": {}, "seconds": 0.0}
    return found


def _joined(before: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Add new workloads to those tuned earlier under this load; a decided one is not replaced by an undecided one.

    `runs` of a row has (winner, ratio, read rates) of each time that it was decided.
    """
    rows = dict(before["rows"])
    for key, row in found["rows"].items():
        former = rows.get(key, {})
        if row["outcome"] == "undecided" and former:
            continue
        runs = [[row["winner"], row["effect"][0], row["read_gb_per_s"]]] if row["effect"] else []
        rows[key] = {**row, "runs": [*former.get("runs", ()), *runs]}
    return {**found, "rows": rows, "seconds": before["seconds"] + found["seconds"]}


def _kept(home: Path) -> dict[str, Any]:
    found = [json.loads(path.read_text()) for path in home.glob("*.json")]
    return {
        one["load"]: one for one in sorted(found, key=lambda one: -1 if one["load"] == REFERENCE else int(one["load"]))
    }


def summaries(kept: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each load except the reference."""
    reference: Rows = kept[REFERENCE]["rows"]
    return [
        {"load": load, "seconds": one["seconds"], **summary(one["rows"], reference)}
        for load, one in kept.items()
        if load != REFERENCE
    ]


def summary(rows: Rows, reference: Rows) -> dict[str, Any]:
    """Count decided workloads, intervals that contain the reference's ratio, and different winners.

    Workloads that the reference left undecided are ignored.
    """
    known = {key: row for key, row in rows.items() if key in reference and reference[key]["outcome"] != "undecided"}
    decided = {key: row for key, row in known.items() if row["outcome"] != "undecided"}
    quiet_winners = {key: {winner for winner, *_ in reference[key]["runs"]} for key in decided}
    differ = [key for key, row in decided.items() if row["winner"] not in quiet_winners[key]]
    quiet = {key: quiet_ratio(row, reference[key]) for key, row in decided.items() if key not in differ}
    misses = {key: miss(decided[key], ratio) for key, ratio in quiet.items() if ratio is not None}
    return {
        "workloads": len(known),
        "decided": len(decided),
        "compared": len(misses),
        "cover": sum(off == 1 for off in misses.values()),
        "far": sorted(key for key, off in misses.items() if off > FAR),
        "differ": differ,
        "worst": max(misses.values(), default=1.0),
    }


def quiet_ratio(row: Row, reference: Row) -> float | None:
    """Return the reference's ratio of this winner: from its runs at the row's read rate, else from all; None for no
    effect.

    If a hypervisor moves its guest's cores apart, the rate doubles and barriers slow down, and ratios change.
    """
    if not row["effect"]:
        return None
    now, runs = row["read_gb_per_s"], [run[1:] for run in reference["runs"] if run[0] == row["winner"]]
    same = [ratio for ratio, then in runs if not then or (_alike(then, then) and _alike(now, then))]
    return statistics.geometric_mean(same or [ratio for ratio, _ in runs])


def _alike(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return True if no two read rates of these ranges are two states of the machine."""
    return max(*one, *other) <= ONE_STATE * min(*one, *other)


def miss(row: Row, quiet: float) -> float:
    """Return the factor between the quiet ratio and the nearer end of the row's interval; 1 if it is inside."""
    _, lo, hi = row["effect"]
    return float(max(1.0, quiet / hi, lo / quiet))


def text(kept: Mapping[str, Any]) -> str:
    lines = ["load  decided  intervals that cover  worst miss  misses > 10 %  other winner  minutes"]
    for s in summaries(kept):
        lines.append(
            f"{s['load']:>4}  {s['decided']:>2} of {s['workloads']}"
            f"  {s['cover']:>15} of {s['compared']:>2}"
            f"  {s['worst'] - 1:>13.1%}  {len(s['far']):>13}  {len(s['differ']):>12}  {s['seconds'] / 60:>7.1f}"
        )
        lines += [f"      {key} misses by more than 10 %" for key in s["far"]]
        lines += [f"      {key} has another winner" for key in s["differ"]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
