"""Measure how often the race's rules and the usual rules err, on simulated arms with known speed.

    python benchmarks/bench_error_rates.py                   4,000 races a cell: about twenty minutes on two cores
    python benchmarks/bench_error_rates.py --races 200       a quick look
    python benchmarks/bench_error_rates.py --only power      studies whose name contains a word; repeatable
    python benchmarks/bench_error_rates.py --json            a document on stdout
    python benchmarks/bench_error_rates.py --write           also store it in benchmarks/results/cpu/
    python benchmarks/bench_error_rates.py --parts FILE --minutes 3    stop after 3 minutes; the next call continues

The rules are those of autosel/race/{session,judge}.py; only the instrument is synthetic. autosel/testing/rates/ has the
instrument (noise.py), and the cells with their limits (studies.py). Runs are seeded: the same numbers on every machine.
Exit code 1 if a limit is exceeded, or if a usual rule unexpectedly passes; 5 if the minutes were over first.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from figures import commit

if TYPE_CHECKING:
    from autosel.testing.rates.studies import Rate

import command_line
from kept import keep

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "benchmarks" / "results" / "cpu" / "error_rates.json"
SCHEMA = 2
UNFINISHED = 5
# The numbers depend on these sources; parts measured with other sources are ignored.
SOURCES = (
    "autosel/race/evidence.py",
    "autosel/race/judge.py",
    "autosel/race/plan.py",
    "autosel/race/session.py",
    "autosel/guard/detector.py",
    "autosel/testing/rates/common.py",
    "autosel/testing/rates/studies.py",
    "autosel/testing/rates/noise.py",
)
SAYS = {
    "identical": "Two identical arms: false promotions",
    "boundary": "A candidate exactly as much faster as the margin: promotions",
    "power": "Candidates that are truly faster: promotions",
    "three arms": "A challenger no faster than the incumbent, twice as fast as the baseline, nominated: promotions",
    "selection": "Eight candidates exactly as much faster as the margin, the favourite of screening: promotions",
    "session bias": "Identical arms whose luck is fixed inside a session (SD of the luck; margin 2 %)",
    "calibration": "A device whose A/A sessions cross with probability pi: conclusions that pi <= .05",
    "lifetime": "False promotions in the life of a key: a candidate exactly at the margin, tried twenty times",
    "tail": "A candidate 20 % faster with slow samples; 3 % of the baseline's are slow",
    "controls": "Two identical arms under the usual rules: false promotions",
    "demotion": "A served kernel: demotions",
}
NOTES = {
    "power": "\\* No limit: coming second costs 3 %, as much as the effect beyond the margin, so half of the pairs "
    "are lost regardless of speed.",
    "session bias": "pi: A/A sessions that cross, in either direction. The rates are measured; only the "
    "attempt has a limit, its bound.",
    "calibration": "The estimate is read after each of 400 A/A sessions. Interval: the Clopper-Pearson limit at "
    "95 %, valid for a number of sessions fixed in advance.",
    "tail": "A candidate with 10 % slow samples, the most that the gate allows, may pass in 1 % of all attempts, and "
    "in 5 % more if the baseline's percentile was overestimated.",
    "controls": "Blocks of 100 samples, the baseline's first; the t test: 100 pairs, the candidate first. A rule "
    "fails if it exceeds .05 under one noise.",
    "demotion": "Shadow pairs of one call an arm, in random order. The detector may raise an alarm in n of 10^4 pairs.",
}
COLUMNS = {
    "iid": "iid",
    "warm_up_drift": "warm-up",
    "ar1": "AR(1)",
    "two_clock_states": "clocks",
    "linear_drift": "drift",
    "pareto_spikes": "spikes",
    "period_two": "period 2",
    "position_effect": "slot",
    "quantised": "ticks",
}


def main() -> int:
    parser = command_line.parser(__doc__, write="store the result in benchmarks/results/cpu/")
    parser.add_argument("--races", type=int, default=4_000, help="races a cell (default 4000)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="WORD", help="only studies whose name contains WORD"
    )
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--parts", type=Path, metavar="FILE", help="continue with the cells in FILE and add to them")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no new cell after this time")
    options = parser.parse_args()
    if options.write and (options.only or options.races < 4_000):
        parser.error("--write requires all studies and at least 4,000 races")
    if options.minutes < float("inf") and not options.parts:
        parser.error("--minutes requires --parts FILE, which stores the cells measured so far")
    document = measured(options, time.monotonic() + 60 * options.minutes)
    if document is None:
        return UNFINISHED
    print(json.dumps(document, indent=1) if options.json else markdown(document))
    if options.write:
        KEPT.parent.mkdir(parents=True, exist_ok=True)
        keep(KEPT, document)
        say(f"written to {KEPT.relative_to(ROOT)}; python docs/generate.py puts it into docs/method.md")
    for line in document["broken"]:
        print(f"does not hold: {line}", file=sys.stderr)
    return 1 if document["broken"] else 0


def measured(options: argparse.Namespace, deadline: float) -> dict[str, Any] | None:
    """Return the document; None if the time was over first."""
    from autosel.testing.rates import studies as error_rates

    names = [n for n in error_rates.STUDIES if not options.only or any(word in n for word in options.only)]
    cells = [cell for name in names for cell in error_rates.STUDIES[name]()]
    parts = Parts(options.parts, options.races)
    missing = [cell for cell in cells if cell.name not in parts.found]
    for number, rate in enumerate(error_rates.measured(missing, options.races, options.jobs), 1):
        parts.add(rate)
        say(f"{len(cells) - len(missing) + number} of {len(cells)}  {rate.name}: {number_of(rate)}")
        if number < len(missing) and time.monotonic() > deadline:
            return None
    rates = [parts.found[cell.name] for cell in cells]
    lengths = error_rates.run_lengths(options.races // 4) if not options.only else []
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "sources": parts.sources,
        "races": options.races,
        "broken": error_rates.broken(rates) + [f"demotion: {found}" for found in lengths if not found.holds],
        "rates": [rate.as_json() for rate in rates],
        "demotion": [{"lost": n.lost, "mean": n.mean, "error": n.error, "p95": n.p95, "runs": n.runs} for n in lengths],
    }


class Parts:
    """Store the cells measured so far, one a line, if there is a file."""

    def __init__(self, path: Path | None, races: int) -> None:
        self.path, self.races = path, races
        self.sources = hashlib.sha256(b"".join((ROOT / source).read_bytes() for source in SOURCES)).hexdigest()[:16]
        self.found = dict(self._read()) if path and path.is_file() else {}

    def _read(self) -> Iterator[tuple[str, Rate]]:
        from autosel.testing.rates.studies import Rate

        assert self.path is not None
        for line in self.path.read_text().splitlines():
            part = json.loads(line)
            if (part["sources"], part["asked"]) == (self.sources, self.races):
                rate = Rate(**part["rate"])
                yield rate.name, rate

    def add(self, rate: Rate) -> None:
        self.found[rate.name] = rate
        if self.path:
            part = {"sources": self.sources, "asked": self.races, "rate": asdict(rate)}
            with self.path.open("a") as file:
                file.write(json.dumps(part) + "\n")


def stored() -> dict[str, Any] | None:
    """Return the stored document."""
    return json.loads(KEPT.read_text()) if KEPT.is_file() else None


def number_of(rate: Rate) -> str:
    return f"{number(rate.rate)}, {rate.must} {number(rate.limit)}" + ("" if rate.holds else " (beyond)")


def say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {what}", file=sys.stderr)


# --- showing ----------------------------------------------------------------------------------------------------------


def markdown(document: Mapping[str, Any]) -> str:
    races = f"{document['races']:,} races a cell unless noted otherwise"
    parts = [f"Simulated, seeded, {races}; {document['date']}, commit {document['commit']}."]
    shapes = {"lifetime": plain, "tail": plain, "calibration": plain, "session bias": bias}
    for study, title in SAYS.items():
        rates = [r for r in document["rates"] if r["study"] == study]
        if rates:
            parts += [f"**{title}**", shapes.get(study, by_noise)(rates)]
            parts += [NOTES[study]] if study in NOTES else []
    if document["demotion"]:
        parts += ["**Shadow pairs until the guard's detector raises an alarm**", lengths(document["demotion"])]
    return "\n\n".join(parts)


def by_noise(rates: Sequence[Mapping[str, Any]]) -> str:
    """Format one row a rule, one column a noise."""
    rows = [["rule", "allowed", *COLUMNS.values()]]
    for what in dict.fromkeys(r["what"] for r in rates):
        found = {r["noise"]: r for r in rates if r["what"] == what}
        first = next(r for r in found.values() if r["must"] != "shown")
        cells = [figure(found[noise], star="\\*") if noise in found else "" for noise in COLUMNS]
        rows.append([what, allowed(first), *cells])
    return table(rows)


def bias(rates: Sequence[Mapping[str, Any]]) -> str:
    """Format one row a setting: pi, one session, the attempt, its bound."""
    rows = [["luck", "noise", "pi", "one session", "attempt", "bound max(pi, .05)^3"]]
    keys = dict.fromkeys((r["what"].rpartition(":")[0], r["noise"]) for r in rates)
    for luck, noise in keys:
        found = {
            r["what"].rpartition(": ")[2]: r
            for r in rates
            if (r["what"].rpartition(":")[0], r["noise"]) == (luck, noise)
        }
        cells = [figure(found[name]) for name in ("pi", "session", "attempt")]
        rows.append([luck, COLUMNS[noise], *cells, number(found["attempt"]["limit"])])
    return table(rows)


def plain(rates: Sequence[Mapping[str, Any]]) -> str:
    rows = [["what", "allowed", "seen", "95 % interval", "races"]]
    for r in rates:
        interval = f"{number(r['lo'])} .. {number(r['hi'])}"
        rows.append([r["what"], allowed(r), figure(r), interval, f"{r['races']:,}"])
    return table(rows)


def lengths(found: Sequence[Mapping[str, Any]]) -> str:
    rows = [["pairs it loses", "mean", "95th percentile", "runs"]]
    for n in found:
        mean = f"{n['mean']:,.0f}" + (f" +- {n['error']:,.0f}" if n["error"] else "")
        rows.append([f"{n['lost']:.0%}", mean, f"{n['p95']:,.0f}", f"{n['runs']:,}"])
    return table(rows)


def allowed(rate: Mapping[str, Any]) -> str:
    sign = {"at most": "<= ", "at least": ">= ", "fail": "fails: > ", "shown": ""}[rate["must"]]
    return f"{sign}{number(rate['limit'])}" if sign else "-"


def figure(rate: Mapping[str, Any], star: str = "") -> str:
    return number(rate["rate"]) + (star if rate["must"] == "shown" else "")


def number(value: float) -> str:
    """Format a probability with at least two significant digits and no leading zero."""
    if value in (0.0, 1.0):
        return f"{value:.0f}"
    if value < 0.0001:
        return f"{value:.1e}"
    if value < 0.001 or value >= 0.99995:  # keep values near 0 and 1 distinct from them
        return f"{value:.3g}"[1:] if value < 0.001 else f"{math.floor(value * 1e6) / 1e6:.6f}"[1:]
    return (f"{value:.4f}" if value < 0.1 or value > 0.9 else f"{value:.3f}")[1:]


def table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in body])


if __name__ == "__main__":
    sys.exit(main())
