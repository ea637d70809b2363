"""Measure the project's figures in one command: goal, reached, verdict.

    python benchmarks/figures.py                 all figures: about five minutes on two quiet cores
    python benchmarks/figures.py --only attn     figures whose name contains a word; repeatable
    python benchmarks/figures.py --quick         few rounds and a small tune: a trial, not to be quoted
    python benchmarks/figures.py --write         also store them in benchmarks/results/ and in the documentation

Every speed is a ratio within one run: each round visits every arm and the read probe, if there is one, in random
order; the value is the median over rounds. interleaved.py and bench_dispatch.py do the measuring; row ops are timed by
the race's own instrument (autosel/race/bench.py). No figure is compared with a number of another day.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autosel.values import Fingerprint, Workload

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SCHEMA = 1
CEILING = 1.1  # above this share of the read rate, the machine changed between probe and kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Define a figure's goal: at least, or at most, `limit`. `tie` allows an interval that contains the limit."""

    name: str
    what: str
    limit: float
    unit: str  # "x", "%", "s", "ms", "us"
    at_most: bool = False
    tie: bool = False

    @property
    def text(self) -> str:
        if self.tie:
            return "faster, or a tie"
        return f"{'<=' if self.at_most else '>='} {amount(self.limit, self.unit)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureRow:
    """Hold a result. `lo`..`hi` is the interval of a median; both equal `value` for a single measurement."""

    name: str
    value: float
    lo: float
    hi: float
    note: str = ""


GOALS = (
    Goal(name="gemv/read", what="gemv bf16, M=1, K=N=4096: share of the read rate", limit=90, unit="%"),
    Goal(name="gemv/torch", what="the same: against torch", limit=1.5, unit="x"),
    Goal(name="attn/packed", what="attn bf16, 32/8 heads, D=128, L=8192: against packed torch", limit=3, unit="x"),
    Goal(name="attn/sdpa", what="the same: against SDPA with enable_gqa", limit=8, unit="x"),
    Goal(name="attn/read", what="the same: share of the read rate", limit=70, unit="%"),
    Goal(name="rmsnorm/torch", what="rmsnorm bf16, M=1, d=4096: against torch", limit=1, unit="x", tie=True),
    Goal(name="rope/torch", what="rope bf16, M=1, 32/8 heads, D=128: against torch", limit=1, unit="x", tie=True),
    Goal(name="swiglu/torch", what="swiglu bf16, M=1, I=14336: against torch", limit=1, unit="x", tie=True),
    Goal(name="tune/cold", what="tune llama-8b, without builds and decisions", limit=150, unit="s", at_most=True),
    Goal(name="tune/second", what="tune llama-8b again, nothing changed", limit=5, unit="s", at_most=True),
    Goal(name="best/bound", what="best(op, like=...): over calling the kernel", limit=0.1, unit="us", at_most=True),
    Goal(name="best/shape", what="best(op), dispatched by shape: over the kernel", limit=1, unit="us", at_most=True),
    Goal(name="start/import", what="import autosel, without torch", limit=100, unit="ms", at_most=True),
    Goal(name="start/help", what="autosel --help, whole process", limit=200, unit="ms", at_most=True),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", action="append", default=[], metavar="WORD", help="only figures whose name contains WORD"
    )
    parser.add_argument("--quick", action="store_true", help="few rounds and a small tune; not to be quoted")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--write", action="store_true", help="store the result and update the documentation")
    options = parser.parse_args()
    if options.write and (options.quick or options.only):
        parser.error("--write requires a complete run: omit --quick and --only")
    wanted = [g for g in GOALS if not options.only or any(word in g.name for word in options.only)]
    if not wanted:
        parser.error(f"no figure matches --only. Figures: {', '.join(g.name for g in GOALS)}")
    document = measure(wanted, quick=options.quick)
    if options.json:
        json.dump(document, sys.stdout, indent=1)
        print()
    else:
        print(text_table(document))
    if options.write:
        path = keep(document)
        print(f"written to {path.relative_to(ROOT)}", file=sys.stderr)
        subprocess.run([sys.executable, str(ROOT / "docs" / "generate.py")], check=True)
    return 0


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(wanted: Sequence[Goal], *, quick: bool) -> dict[str, Any]:
    """Run the parts and return the document, in a new AUTOSEL_HOME without builds and decisions."""
    names = {g.name for g in wanted}
    with tempfile.TemporaryDirectory(prefix="autosel-figures-") as folder:
        os.environ["AUTOSEL_HOME"] = str(Path(folder) / "home")
        sys.path.insert(0, str(ROOT))
        from autosel import fingerprint

        say("fingerprint")
        fp = fingerprint.take("cpu")
        found: list[FigureRow] = []
        for part, measured in PARTS.items():
            if any(name.startswith(f"{part}/") for name in names):
                say(part)
                found += [f for f in measured(fp, Path(folder), quick) if f.name in names]
        return describe(fp, found, quick)


def gemv(fp: Fingerprint, _: Path, quick: bool) -> Iterator[FigureRow]:
    from interleaved import measure as measured

    from autosel.candidates.cpp.linear import KERNELS
    from autosel.ops import eager

    w = _workload("linear", {"M": 1, "N": 4096, "K": 4096})
    found = measured(KERNELS, w, fp, {"torch": eager.linear}, 1.0 if quick else 10.0)
    note = f"{found.best_us:.0f} us at best, {found.rounds} rounds"
    yield of_rounds("gemv/read", found.over["read"], note, scale=100)
    yield of_rounds("gemv/torch", found.over["torch"], note)


def attn(fp: Fingerprint, _: Path, quick: bool) -> Iterator[FigureRow]:
    """Time PyTorch's SDPA with enable_gqa, and `packed`: the query heads of a KV head as the queries of one head."""
    from interleaved import measure as measured

    from autosel.candidates.cpp.attention import KERNELS
    from autosel.ops import eager

    w = _workload("attn", {"B": 1, "Hq": 32, "Hkv": 8, "S": 1, "D": 128, "L": 8192})
    rivals = {"sdpa": eager.attn, "packed": eager.attn_packed}
    found = measured(KERNELS, w, fp, rivals, 1.0 if quick else 20.0)
    note = f"{found.best_us:.0f} us at best, {found.rounds} rounds"
    yield of_rounds("attn/packed", found.over["packed"], note)
    yield of_rounds("attn/sdpa", found.over["sdpa"], note)
    yield of_rounds("attn/read", found.over["read"], note, scale=100)


def of_rounds(name: str, quartiles: Sequence[float], note: str, *, scale: float = 1.0) -> FigureRow:
    """Return the median over rounds of the round's own ratio, with its quartiles."""
    low, middle, high = (scale * q for q in quartiles)
    return FigureRow(name=name, value=middle, lo=low, hi=high, note=f"quartiles; {note}")


def row_op(op: str, **dims: int) -> Callable[[Fingerprint, Path, bool], Iterator[FigureRow]]:
    def measured(fp: Fingerprint, _: Path, quick: bool) -> Iterator[FigureRow]:
        yield race(_workload(op, dims), fp, f"{op}/torch", f"torch:{op}", 8 if quick else 100)

    return measured


def _workload(op: str, dims: Mapping[str, int]) -> Workload:
    from autosel import ops

    return ops.find(op).workload("bf16", dims)


def tune(_: Fingerprint, folder: Path, quick: bool) -> Iterator[FigureRow]:
    """Time `autosel tune` in child processes, in a home without builds, proofs and decisions, then once more."""
    home, scope = folder / "cold", ["--op", "rmsnorm"] if quick else []
    cold_s, cold = _verb(home, "tune", "--model", "llama-8b", *scope, "--json")
    decided = f"{len(cold['decisions'])} decisions, {cold['measured']} measured, {len(cold['undecided'])} undecided"
    scope_text = "; rmsnorm alone" if quick else ""
    yield once("tune/cold", cold_s, f"{decided}{scope_text}; {cold['shares']}")
    again_s, again = _verb(home, "tune", "--model", "llama-8b", *scope, "--json")
    yield once("tune/second", again_s, f"{again['measured']} measured")


def _verb(home: Path, *arguments: str) -> tuple[float, Any]:
    environment = {**os.environ, "AUTOSEL_HOME": str(home), "PYTHONPATH": str(ROOT)}
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "autosel.cli.main", *arguments], env=environment, capture_output=True, text=True
    )
    seconds = time.perf_counter() - started
    if done.returncode not in (0, 5):  # 5: some workloads stayed undecided
        raise SystemExit(f"autosel {' '.join(arguments)} ended with {done.returncode}\n{done.stderr}")
    return seconds, {**json.loads(done.stdout), "shares": stage_shares(done.stderr, seconds)}


def stage_shares(progress: str, seconds: float) -> str:
    """Return each stage's share of the time, from the start times in the progress on stderr."""
    began: list[tuple[float, str]] = []
    for minutes, rest, stage in re.findall(r"^ *(?:(\d+)m)?(\d+)s  ([a-z]+)(?: \d+)? \.\.\.$", progress, re.MULTILINE):
        began.append((60 * int(minutes or 0) + int(rest), stage))
    shares: dict[str, float] = {}
    for (start, stage), (end, _) in zip(began, [*began[1:], (seconds, "")], strict=True):
        shares[stage] = shares.get(stage, 0.0) + (end - start) / seconds
    return ", ".join(f"{stage} {share:.0%}" for stage, share in shares.items())


def best(_: Fingerprint, __: Path, quick: bool) -> Iterator[FigureRow]:
    """Run bench_dispatch.py in a child process, since it uses one thread."""
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_dispatch.py")]
    command += ["--rounds", "5"] if quick else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 5):
        raise SystemExit("bench_dispatch.py failed")
    lines = json.loads(done.stdout)["calls"]
    note = "void: two timings of the direct call differ" if done.returncode == 5 else ""
    for name, way in (("best/bound", "bound"), ("best/shape", "by shape")):
        found = max((line[way] for line in lines), key=lambda over: over["median_ns"])
        values = [found[key] / 1e3 for key in ("median_ns", "q25_ns", "q75_ns")]
        yield FigureRow(name=name, value=values[0], lo=values[1], hi=values[2], note=note or "quartiles over rounds")


def start(_: Fingerprint, __: Path, quick: bool) -> Iterator[FigureRow]:
    from bench_dispatch import import_times

    count = 3 if quick else 11
    imported = import_times(count)
    loads = "loads torch" if imported["loads_torch"] else "torch not loaded"
    yield FigureRow(
        name="start/import",
        value=imported["median_ms"],
        lo=imported["median_ms"],
        hi=imported["most_ms"],
        note=f"median and most of {count} processes; {loads}",
    )
    command = [sys.executable, "-m", "autosel.cli.main", "--help"]
    taken = []
    for _attempt in range(count + 1):
        started = time.perf_counter()
        subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL, check=True)
        taken.append((time.perf_counter() - started) * 1e3)
    kept = taken[1:]  # the first run fills the page cache
    yield FigureRow(
        name="start/help", value=statistics.median(kept), lo=min(kept), hi=max(kept), note=f"{count} processes"
    )


def once(name: str, value: float, note: str = "") -> FigureRow:
    return FigureRow(name=name, value=value, lo=value, hi=value, note=note)


# The figures of a part have its name before the slash.
PARTS: Mapping[str, Callable[[Fingerprint, Path, bool], Iterator[FigureRow]]] = {
    "start": start,
    "best": best,
    "gemv": gemv,
    "attn": attn,
    "rmsnorm": row_op("rmsnorm", M=1, d=4096),
    "rope": row_op("rope", M=1, Hq=32, Hkv=8, D=128, R=128),
    "swiglu": row_op("swiglu", M=1, I=14336),
    "tune": tune,
}


# --- a race without a verdict: the row ops ----------------------------------------------------------------------------


def race(w: Workload, fp: Fingerprint, name: str, rival: str, rounds: int) -> FigureRow:
    """Time every PyTorch and C++ candidate in random order each round; return the rival's over the best C++ time."""
    from autosel.candidates import registry
    from autosel.race.evidence import median, median_interval
    from autosel.values import Accepted
    from benchmarks.gpu.entrants import entrant
    from benchmarks.gpu.instrument import Timer

    eligible = registry.eligible(w, fp)
    arms = {c.name: entrant(c, w, fp) for c, support in eligible if isinstance(support, Accepted)}
    timer, coin = Timer(fp, "cpu"), Random(20)
    timer.seat(w, arms, lead=rival)
    taken: list[dict[str, float]] = []
    dropped = 0
    while len(taken) < rounds and dropped < rounds:
        times = timer.visit(coin.sample(list(arms), len(arms)), timer.plan.samples)
        if times is None:
            dropped += 1
        else:
            taken.append(times)
    timer.close()
    if not taken:
        return FigureRow(name=name, value=0.0, lo=0.0, hi=0.0, note="void: every round was disturbed")
    ours = min((a for a in arms if a.startswith("cpp:")), key=lambda a: median([r[a] for r in taken]))
    ratios = [r[rival] / r[ours] for r in taken]
    low, high = median_interval(ratios)
    note = f"95 % interval; {ours} {median([r[ours] for r in taken]):.3g} us, {len(taken)} rounds"
    return FigureRow(name=name, value=median(ratios), lo=low, hi=high, note=note)


# --- the document -----------------------------------------------------------------------------------------------------


def describe(fp: Fingerprint, figures: Sequence[FigureRow], quick: bool) -> dict[str, Any]:
    from autosel.fingerprint.describe import headline

    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "device": headline(fp),
        "hw_id": fp.hw_id,
        "torch": fp.environment["torch"],
        "compiler": fp.environment["compiler"],
        "load": round(os.getloadavg()[0], 2),
        "notes": list(fp.notes),
        "quick": quick,
        "figures": [asdict(f) | {"verdict": verdict(goal(f.name), f)} for f in figures],
    }


def goal(name: str) -> Goal:
    return next(g for g in GOALS if g.name == name)


def verdict(g: Goal, f: FigureRow) -> str:
    """Return reached, missed or void; with `tie`, faster, tie or slower."""
    if f.note.startswith("void") or (g.unit == "%" and f.value > 100 * CEILING):
        return "void"
    if g.tie:
        return "faster" if f.lo > g.limit else "tie" if f.hi >= g.limit else "slower"
    return "reached" if (f.value <= g.limit if g.at_most else f.value >= g.limit) else "missed"


def commit() -> str:
    """Return the commit of the working tree, and whether relevant files had changes."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    dirty = git("status", "--porcelain", "--untracked-files=no", "--", "autosel", "kernels", "benchmarks")
    return git("rev-parse", "--short=10", "HEAD") + (" with changes" if dirty else "")


def keep(document: Mapping[str, Any]) -> Path:
    """Write benchmarks/results/<device>/figures.json and replace the former file."""
    from autosel.json_rows import in_rows

    device = document["device"].partition("   ")[0]
    path = RESULTS / re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") / "figures.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(in_rows(document) + "\n")
    return path


def stored() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*/figures.json"))]


# --- showing ----------------------------------------------------------------------------------------------------------


def amount(value: float, unit: str) -> str:
    digits = f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    return digits + {"x": "x", "%": " %"}.get(unit, f" {unit}")


def rows(document: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return (what, goal, reached, verdict) for each figure."""
    found = []
    for f in document["figures"]:
        g = goal(f["name"])
        reached = amount(f["value"], g.unit)
        if f["lo"] != f["hi"]:
            reached += f" ({amount(f['lo'], g.unit)} .. {amount(f['hi'], g.unit)})"
        found.append((g.what, g.text, reached, f["verdict"]))
    return found


def heading(document: Mapping[str, Any]) -> str:
    quick = "quick: not to be quoted; " if document["quick"] else ""
    return (
        f"{document['device']}; torch {document['torch']}; {document['date']}, commit {document['commit']} "
        f"({quick}load average {document['load']})"
    )


def markdown(document: Mapping[str, Any]) -> str:
    lines = ["| what | goal | reached | verdict |", "| --- | --- | --- | --- |"]
    lines += ["| " + " | ".join(row) + " |" for row in rows(document)]
    return f"{heading(document)}\n\n" + "\n".join(lines)


def text_table(document: Mapping[str, Any]) -> str:
    shown = [("what", "goal", "reached", "verdict"), *rows(document)]
    widths = [max(len(row[i]) for row in shown) for i in range(4)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in shown]
    notes = [f"  {f['name']}: {f['note']}" for f in document["figures"] if f["note"]]
    return "\n".join([heading(document), "", *lines, "", *notes])


def say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {what} ...", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
