"""How often the race's rules err, and how often the usual rules do, on simulated arms whose speed is known.

    python benchmarks/bench_error_rates.py                   4,000 races a cell: about ten minutes on two cores
    python benchmarks/bench_error_rates.py --races 200       a glance
    python benchmarks/bench_error_rates.py --only power      studies whose name contains a word; may be repeated
    python benchmarks/bench_error_rates.py --json            a document on stdout
    python benchmarks/bench_error_rates.py --write           also keep it in benchmarks/results/simulated/

The rules are those of autosel/race/{session,judge}.py; only the instrument is synthetic (tests/null/synthetic.py). The
cells and what each must show are in tests/null/error_rates.py. Seeded: the same numbers on every machine. Exit code 1
if a promise does not hold, or if a usual rule fails to fail.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "simulated"
SCHEMA = 1
SAYS = {
    "identical": "Two identical arms: false promotions",
    "boundary": "A candidate exactly as much faster as the margin: promotions",
    "power": "Candidates that are truly faster: promotions",
    "three arms": "A challenger no faster than the incumbent, twice as fast as the baseline, nominated: promotions",
    "session bias": "Identical arms whose luck is fixed inside a session (SD of the luck; margin 2 %)",
    "lifetime": "False promotions in the life of a key: a candidate exactly at the margin, tried twenty times",
    "tail": "A candidate 20 % faster with slow samples; 3 % of the baseline's are slow",
    "controls": "Two identical arms under the usual rules: false promotions",
}
NOTES = {
    "power": "\\* Not promised. Slot: coming second costs 3 %, as much as the effect beyond the margin, so half of the "
    "pairs are lost whoever is faster. Spikes, long form: where one sample in twenty is slow in both arms, the tail "
    "gate is still undecided after 720 samples in one attempt of thirty.",
    "tail": "A candidate with as many slow samples as the gate allows, 10 %, may pass in 1 % of all attempts, and in "
    "5 % more where the baseline's percentile was overestimated.",
    "controls": "Blocks of 100 samples, the baseline's first; the t test: 100 pairs, the candidate first. A rule "
    "fails if it exceeds .05 under one noise.",
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--races", type=int, default=4_000, help="races a cell (default 4000)")
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="studies whose name contains it")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--write", action="store_true", help="keep the result in benchmarks/results/simulated/")
    options = parser.parse_args()
    if options.write and (options.only or options.races < 4_000):
        parser.error("--write keeps whole results of at least 4,000 races only")
    document = measured(options.races, options.only, options.jobs)
    print(json.dumps(document, indent=1) if options.json else markdown(document))
    if options.write:
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / "error_rates.json").write_text(json.dumps(document, indent=1) + "\n")
        (RESULTS / "error_rates.md").write_text(markdown(document) + "\n")
    for line in document["broken"]:
        print(f"does not hold: {line}", file=sys.stderr)
    return 1 if document["broken"] else 0


def measured(races: int, only: Sequence[str], jobs: int) -> dict[str, Any]:
    sys.path.insert(0, str(ROOT))
    from tests.null import error_rates

    names = [name for name in error_rates.STUDIES if not only or any(word in name for word in only)]
    rates = []
    for name in names:
        print(f"{time.strftime('%H:%M:%S')}  {name} ...", file=sys.stderr)
        rates += error_rates.measure(list(error_rates.STUDIES[name]()), races, jobs)
    lengths = error_rates.demotion(races // 4) if not only else []
    return {
        "schema": SCHEMA,
        "races": races,
        "broken": error_rates.broken(rates) + [f"demotion: {found}" for found in lengths if not found.holds],
        "rates": [rate.as_json() for rate in rates],
        "demotion": [{"lost": n.lost, "mean": n.mean, "error": n.error, "p95": n.p95, "runs": n.runs} for n in lengths],
    }


# --- showing ----------------------------------------------------------------------------------------------------------


def markdown(document: Mapping[str, Any]) -> str:
    parts = [f"Simulated, seeded, {document['races']:,} races a cell unless said otherwise."]
    shapes = {"lifetime": plain, "tail": plain, "session bias": bias}
    for study, title in SAYS.items():
        rates = [r for r in document["rates"] if r["study"] == study]
        if rates:
            parts += [f"**{title}**", shapes.get(study, by_noise)(rates)]
            parts += [NOTES[study]] if study in NOTES else []
    if document["demotion"]:
        parts += ["**Demotion: shadow pairs until the guard speaks**", demotion(document["demotion"])]
    return "\n\n".join(parts)


def by_noise(rates: Sequence[Mapping[str, Any]]) -> str:
    """One row a rule, one column a noise."""
    rows = [["rule", "allowed", *COLUMNS.values()]]
    for what in dict.fromkeys(r["what"] for r in rates):
        found = {r["noise"]: r for r in rates if r["what"] == what}
        first = next(r for r in found.values() if r["must"] != "shown")
        rows.append([what, allowed(first), *(figure(found[noise], star="\\*") for noise in COLUMNS)])
    return table(rows)


def bias(rates: Sequence[Mapping[str, Any]]) -> str:
    """One row a setting: pi, one session, the attempt, its bound."""
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


def demotion(lengths: Sequence[Mapping[str, Any]]) -> str:
    rows = [["pairs it loses", "mean", "95th percentile", "runs"]]
    for n in lengths:
        mean = f"{n['mean']:,.0f}" + (f" +- {n['error']:,.0f}" if n["error"] else "")
        rows.append([f"{n['lost']:.0%}", mean, f"{n['p95']:,.0f}", f"{n['runs']:,}"])
    return table(rows)


def allowed(rate: Mapping[str, Any]) -> str:
    sign = {"at most": "<= ", "at least": ">= ", "fail": "fails: > ", "shown": ""}[rate["must"]]
    return f"{sign}{number(rate['limit'])}" if sign else "-"


def figure(rate: Mapping[str, Any], star: str = "") -> str:
    return number(rate["rate"]) + (star if rate["must"] == "shown" else "")


def number(value: float) -> str:
    """A probability: at least two digits that count, no leading zero."""
    if value in (0.0, 1.0):
        return f"{value:.0f}"
    return (f"{value:.3g}" if value < 0.001 else f"{value:.4f}" if value < 0.1 or value > 0.9 else f"{value:.3f}")[1:]


def table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in body])


if __name__ == "__main__":
    sys.exit(main())
