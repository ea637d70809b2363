"""Time programs with and without autosel: decode steps of small models, and promoted ops between PyTorch's ops.

    python benchmarks/bench_programs.py steps [--model M ...] [--seq 128 --seq 2048] [--batch 1 --batch 4 --batch 8]
                                              [--tune] [--resume] [--write] [--json]
    python benchmarks/bench_programs.py ops [--rests 0.001 0.02 1] [--json]

`steps`: run one `autosel run` for each cell, in its own process and without flags that choose a step, so that it
measures what a user gets; `--tune` runs `autosel tune` for the cell first. Weights are random; baseline and optimised
steps alternate. The interval is the 99 % one of the median of the ratios of paired steps (order statistics). A cell is
slower if its interval lies wholly below 1.0 or its median below 0.97. Results are stored in --home after each cell;
--resume skips the stored cells, except contended ones.

`ops`: for each short op with a decision in AUTOSEL_HOME, time the kernel that `best` serves: back to back, right after
a PyTorch product that used all threads, and after rests. Goals: p90 back to back within 1.25 times the median; after a
product within 1.5 times the median back to back; after 1 ms of rest at most 30 us more, after longer rests 150 us.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import command_line
from kept import keep

MODELS = ("smollm2-135m", "gemma3-270m", "qwen3-0.6b", "gemma3-1b", "llama-1b", "qwen3-1.7b")
SLOWER = 0.97
CONFIDENCE = 0.99
LEAST_PAIRS = 8
SHORT_US = 1000.0
P90_OVER_MEDIAN, AFTER_OP_OVER_HOT = 1.25, 1.5
MORE_US = {0.001: 30.0}
MORE_LATER_US = 150.0
TURNS, TURNS_AFTER = 400, {0.001: 200, 0.02: 60, 1.0: 8}  # by seconds of rest
KEPT = Path(__file__).parent / "results" / "cpu" / "programs.json"

Cell = tuple[str, int, int]  # model, context, batch


def main() -> int:
    parser = command_line.parser(__doc__, write=f"steps: store the cells in {command_line.KEPT}programs.json")
    parser.add_argument("what", choices=("steps", "ops"))
    parser.add_argument("--model", action="append", default=[], help=f"a preset or folder; repeatable  {MODELS}")
    parser.add_argument("--seq", type=int, action="append", default=[], help="context; repeatable  [128, 2048]")
    parser.add_argument("--batch", type=int, action="append", default=[], help="repeatable  [1, 4, 8]")
    parser.add_argument("--iters", type=int, default=20, help="timed steps of a cell")
    parser.add_argument("--tune", action="store_true", help="tune each cell first")
    parser.add_argument("--resume", action="store_true", help="skip cells in --home, except contended ones")
    parser.add_argument(
        "--home", type=Path, default=Path.home() / ".cache" / "autosel-programs", help="folder of results and ledger"
    )
    parser.add_argument("--rests", type=float, nargs="*", default=[0.001, 0.02, 1.0], help="ops: rests in seconds")
    options = parser.parse_args()
    if options.what == "ops":
        rows: Any = list(promoted(options.rests))
        print(json.dumps(rows) if options.json else text_of_ops(rows))
        return 0
    path = options.home / "cells.json"
    cells = _stored(path) if options.resume else {}
    asked = product(options.model or MODELS, options.seq or (128, 2048), options.batch or (1, 4, 8))
    for cell in (c for c in asked if cells.get(_name(c), {"contended": True}).get("contended")):
        cells[_name(cell)] = measured(cell, options.home, options.iters, tunes=options.tune)
        keep(path, cells)
        print(line_of(_name(cell), cells[_name(cell)]), file=sys.stderr, flush=True)
    if options.write:
        keep(KEPT, cells)
    print(json.dumps(cells) if options.json else text_of_steps(cells))
    return 0


# --- steps -----------------------------------------------------------------------------------------------------------


def measured(cell: Cell, home: Path, iters: int, *, tunes: bool) -> dict[str, Any]:
    """Measure one cell with `autosel run`; return {"failed": reason} if it fails."""
    model, seq, batch = cell
    shape = ["--model", model, "--seq", str(seq), "--batch", str(batch)]
    start = time.monotonic()
    if tunes:
        _autosel(home, "tune", *shape, "--json")
    ran = _autosel(home, "run", *shape, "--prompt", "synthetic", "--iters", str(iters), "--warmup", "3", "--json")
    if not ran.stdout.strip():
        return {"failed": (ran.stderr.strip().splitlines() or ["no output"])[-1]}
    found = judged(json.loads(ran.stdout)["certificate"])
    return {**found, "exit": ran.returncode, "tuned": tunes, "seconds": round(time.monotonic() - start, 1)}


def judged(certificate: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ratio of paired steps with its interval, and the form of the step that ran."""
    from autosel.race.evidence import median_interval

    samples = certificate["samples"]
    ratios = [b / o for b, o in zip(samples["baseline_ns"], samples["optimised_ns"], strict=True)]
    low, high = median_interval(ratios, CONFIDENCE) if len(ratios) >= LEAST_PAIRS else (0.0, float("inf"))
    middle = statistics.median(ratios)
    return {
        "ratio": middle,
        "interval": [low, high],
        "pairs": len(ratios),
        "baseline_ms": statistics.median(samples["baseline_ns"]) / 1e6,
        "optimised_ms": statistics.median(samples["optimised_ns"]) / 1e6,
        "ways": [way["form"] for way in certificate.get("ways", ()) if way["taken"]],
        "mode": certificate.get("mode", ""),
        "contended": bool(certificate.get("contended")),
        "notes": list(certificate.get("notes", ())),
        "slower": high < 1.0 or middle < SLOWER,
    }


def _autosel(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    home.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "AUTOSEL_HOME": str(home / "home")}
    command = [sys.executable, "-m", "autosel", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def _name(cell: Cell) -> str:
    model, seq, batch = cell
    return f"{Path(model).name} {seq} x{batch}"


def _stored(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def line_of(name: str, row: Mapping[str, Any]) -> str:
    if "failed" in row:
        return f"{name:<24}  {row['failed']}"
    low, high = row["interval"]
    told = f"{row['ratio']:.2f}x ({low:.2f} .. {high:.2f})"
    steps = f"{row['baseline_ms']:8.2f} -> {row['optimised_ms']:8.2f} ms"
    marks = ("SLOWER" if row["slower"] else "", "contended" if row.get("contended") else "")
    return "  ".join(filter(None, (f"{name:<24}  {told:<24} {steps}", " ".join(row["ways"]), *marks)))


def text_of_steps(cells: Mapping[str, Any]) -> str:
    lines = [f"{'model, context, batch':<24}  {'eager / autosel':<24} {'eager -> autosel':>23}  form"]
    lines += [line_of(name, row) for name, row in cells.items()]
    ran = [row for row in cells.values() if "failed" not in row]
    lines.append(f"{sum(row['slower'] for row in ran)} of {len(ran)} cells slower; {len(cells) - len(ran)} failed")
    return "\n".join(lines)


# --- ops -------------------------------------------------------------------------------------------------------------


def promoted(rests: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Yield the times of each short decided op, in the situations of a program."""
    import torch

    from autosel.dispatch.board import this_device
    from autosel.ledger.store import open_ledger

    torch.set_grad_enabled(False)
    torch.set_num_threads(int(this_device().identity["cpus"]))
    with open_ledger() as ledger:
        decisions = [s.decision for s in ledger.serving() if s.usable]
    x, w = torch.randn(1, 2048).bfloat16(), torch.randn(2048, 2048).bfloat16()
    ahead: dict[str, tuple[Callable[[], Any], int]] = {"back to back": (lambda: None, TURNS)}
    ahead["after a product"] = (lambda: x @ w.T, TURNS)
    ahead |= {f"after {s * 1e3:g} ms": (partial(time.sleep, s), TURNS_AFTER.get(s, 20)) for s in rests}
    for decision in decisions:
        timing = decision.verdict.timings.get(decision.arm.candidate) if decision.verdict else None
        if decision.state != "promoted" or timing is None or timing.median_us > SHORT_US or decision.op == "step":
            continue
        call = served(decision.workload)
        times = {what: timed(call, before, turns) for what, (before, turns) in ahead.items()}
        yield {"op": decision.op, "workload": decision.workload.key, "candidate": decision.arm.candidate, "us": times}


def served(w: Any) -> Callable[[], Any]:
    """Return the call that `best` serves for a workload, on operands that stay in cache."""
    from autosel import dispatch
    from autosel.ops import find

    op = find(w.op)
    arguments = (*op.arguments(op.inputs(w, 1)), *op.allocate(w))
    with dispatch.measuring():
        bound = dispatch.best(w.op, like=arguments)
    return lambda: bound(*arguments)


def timed(call: Callable[[], Any], before: Callable[[], Any], turns: int) -> dict[str, float]:
    for _ in range(20):
        call()
    times = []
    for _ in range(turns):
        before()
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1e3)
    return {"median": statistics.median(times), "p90": statistics.quantiles(times, n=10)[-1]}


def misses(row: Mapping[str, Any]) -> list[str]:
    times = row["us"]
    hot = times["back to back"]["median"]
    found = []
    if times["back to back"]["p90"] > P90_OVER_MEDIAN * hot:
        found.append(f"p90 {times['back to back']['p90'] / hot:.2f} times the median")
    if times["after a product"]["median"] > AFTER_OP_OVER_HOT * hot:
        found.append(f"after a product {times['after a product']['median'] / hot:.2f} times as long")
    for what, one in times.items():
        if what.endswith("ms"):
            more, allowed = one["median"] - hot, MORE_US.get(float(what.split()[1]) / 1e3, MORE_LATER_US)
            if more > allowed:
                found.append(f"{what} {more:+.0f} us")
    return found


def text_of_ops(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "no short op is promoted on this machine; run autosel tune"
    situations = list(rows[0]["us"])
    lines = [f"{'op':<44}" + "".join(f"{name:>18}" for name in situations) + "  us, median (p90)"]
    for row in rows:
        cells = [f"{t['median']:.1f} ({t['p90']:.1f})" for t in row["us"].values()]
        lines.append(f"{row['op'] + ' ' + row['workload'][:36]:<44}" + "".join(f"{cell:>18}" for cell in cells))
        lines += [f"    missed: {told}" for told in misses(row)]
    reached = sum(not misses(row) for row in rows)
    return "\n".join([*lines, f"{reached} of {len(rows)} ops reach all goals"])


if __name__ == "__main__":
    sys.exit(main())
