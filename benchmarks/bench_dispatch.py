"""Measure the overhead of `best()`: direct, bound and dispatched by shape, interleaved in one process.

    python benchmarks/bench_dispatch.py [--rounds 31] [--calls 2000]

It prints JSON; figures.py shows it as `best/bound` and `best/shape`. Each round times every variant once, in rotated
order. The overhead is the median over rounds of the difference to the direct call of the same round, with quartiles.
"direct again" is the A/A control: its median must be within 30 ns of zero, or the run is void (exit code 5). The
kernels do nothing, so that the overhead is measured alone. The guard's countdown is on and its checks are off.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autosel import dispatch, ops
from autosel.candidates import arms, registry
from autosel.candidates.load import load
from autosel.guard import Policy
from autosel.ops.contract import Op
from autosel.testing import serving
from autosel.values import Arm, PythonRecipe, digest

NOTHING = """
def rmsnorm(x, weight, eps, offset, out=None):
    return out

def attn(q, k, v, lengths, max_len, scale, window, softcap, out=None):
    return out
"""
CONTROL_NS = 30


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--calls", type=int, default=2000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        lines = [measure(*case, Path(folder), options.rounds, options.calls) for case in cases(Path(folder))]
    print(json.dumps({"calls": lines}, indent=1))
    if any(abs(line["direct again"]["median_ns"]) > CONTROL_NS for line in lines):
        print("void: two timings of the direct call differ beyond the limit", file=sys.stderr)
        return 5
    return 0


# --- cases --------------------------------------------------------------------------------------------------------


def cases(folder: Path) -> list[tuple[str, Op, Arm, tuple[Any, ...]]]:
    """Return (name, op, arm, arguments with the output last)."""
    (folder / "bench_dispatch_nothing.py").write_text(NOTHING)
    rms, attn = ops.find("rmsnorm"), ops.find("attn")
    x, weight = torch.randn(1, 64).bfloat16(), torch.ones(64).bfloat16()
    rms_call = (x, weight, 1e-6, 0.0, torch.empty_like(x))
    q, k = torch.randn(1, 4, 1, 64).bfloat16(), torch.randn(1, 2, 16, 64).bfloat16()
    attn_call = (q, k, k.clone(), None, 16, 0.0, 0, 0.0, torch.empty_like(q))
    return [
        ("rmsnorm", rms, nothing("rmsnorm", folder), rms_call),
        ("attn", attn, nothing("attn", folder), attn_call),
    ]


def nothing(name: str, folder: Path) -> Arm:
    recipe = PythonRecipe(target=f"bench_dispatch_nothing:{name}", path=str(folder))
    source = arms.python_digest(recipe)
    return Arm(
        candidate="nothing", backend="USER", recipe=recipe, knobs={}, digest=digest({"source": source, "knobs": {}})
    )


def arguments(op: Op, call: Sequence[Any]) -> dict[str, Any]:
    return {a.name: value for a, value in zip(op.args, call, strict=False)}


# --- measuring ----------------------------------------------------------------------------------------------------


def measure(
    name: str, op: Op, arm: Arm, call: tuple[Any, ...], folder: Path, rounds: int, calls: int
) -> dict[str, Any]:
    w = op.workload_of(arguments(op, call))
    home = folder / digest(name)[:8]
    serving.publish(home, [replace(serving.pinned(w, registry.baseline(op.name).name), arm=arm)])
    direct = load(op, arm.recipe, arm.build, arm.knobs)
    with dispatch.use(home, Policy(on=False)):
        bound = dispatch.best(op.name, like=arguments(op, call))
        assert bound.candidate == arm.candidate, bound.explain()
        ways = {"direct": direct, "direct again": direct, "bound": bound, "by shape": dispatch.best(op.name)}
        times = interleaved(ways, call, rounds, calls)
    line: dict[str, Any] = {"case": name, "direct_ns": statistics.median(times["direct"])}
    for way in ("direct again", "bound", "by shape"):
        over = [t - d for t, d in zip(times[way], times["direct"], strict=True)]
        low, median, high = statistics.quantiles(over, n=4)
        line[way] = {"median_ns": median, "q25_ns": low, "q75_ns": high}
    return line


def interleaved(
    ways: dict[str, Callable[..., Any]], call: tuple[Any, ...], rounds: int, calls: int
) -> dict[str, list[float]]:
    """Return nanoseconds a call, one entry a round."""
    names = [f"a{i}" for i in range(len(call))]
    scope = dict(zip(names, call, strict=True))
    timers = {n: timeit.Timer(f"f({', '.join(names)})", globals={"f": f, **scope}) for n, f in ways.items()}
    for timer in timers.values():
        timer.timeit(calls)
    order = list(timers)
    times: dict[str, list[float]] = {name: [] for name in order}
    for _ in range(rounds):
        for name in order:
            times[name].append(min(timers[name].repeat(repeat=3, number=calls)) / calls * 1e9)
        order = order[1:] + order[:1]
    return times


def import_times(count: int) -> dict[str, Any]:
    """Time `import autosel` in fresh processes, after one that fills the page cache."""
    code = (
        "import sys, time; t = time.perf_counter(); import autosel; "
        "print(time.perf_counter() - t, 'torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    seconds, torches = [], []
    for _ in range(count + 1):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        took, loaded = done.stdout.split()
        seconds.append(float(took))
        torches.append(loaded == "True")
    kept = seconds[1:]
    return {"median_ms": statistics.median(kept) * 1e3, "most_ms": max(kept) * 1e3, "loads_torch": any(torches)}


if __name__ == "__main__":
    sys.exit(main())
