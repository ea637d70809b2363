"""Call a kernel once between profiler start and stop marks: `python profiled.py SCOPE WORKLOAD CANDIDATE`.

On a CPU it prints the measured time and the contract's byte count in ncu's format.
"""

# ruff: noqa: E402  (the checkout first: this file is run by path)

from __future__ import annotations

import csv
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from autosel import fingerprint
from autosel.candidates.registry import find
from autosel.ops import OPS
from benchmarks.gpu.entrants import entrant
from benchmarks.gpu.instrument import Timer
from benchmarks.gpu.profiles import READ, TIME
from benchmarks.gpu.scope import Scope


def main(scope: Scope, key: str, name: str) -> int:
    fp = fingerprint.take(scope.device)
    w = next(n.workload for n in scope.everything() if n.workload.key == key)
    timer = Timer(fp, scope.device)
    timer.seat(w, {name: entrant(find(w.op, name), w, fp)}, copies=2)  # warm: compiled, workspace allocated
    timed = timer.bench.seats[name].timed
    call, arguments = timed.call, timed.calls[1]  # type: ignore[attr-defined]
    begin = mark(scope)
    call(*arguments)
    end = mark(scope)
    if not scope.on_gpu:
        told = {TIME: (end - begin) * 1e9, READ: float(OPS[w.op].bytes_moved(w))}
        writer = csv.writer(sys.stdout, quoting=csv.QUOTE_ALL)
        writer.writerow(("ID", "Kernel Name", "Metric Name", "Metric Unit", "Metric Value"))
        writer.writerows((0, f"{name}()", metric, "", f"{value:,.0f}") for metric, value in told.items())
    return 0


def mark(scope: Scope) -> float:
    """Start the profiler at the first call and stop it at the second; return the time."""
    if scope.on_gpu:
        torch.cuda.synchronize()
        (torch.cuda.profiler.stop if MARKS else torch.cuda.profiler.start)()
    MARKS.append(time.perf_counter())
    return MARKS[-1]


MARKS: list[float] = []

if __name__ == "__main__":
    sys.exit(main(Scope.from_text(sys.argv[1]), sys.argv[2], sys.argv[3]))
