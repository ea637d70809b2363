"""Time a kernel between PyTorch's ops and after rests: on PyTorch's threads or its own, placed or not.

    python benchmarks/bench_pool.py [--threads 2] [--seconds 3] [--rests 0.001 0.02 1] [--arm ARM ...] [--json]

The kernel is decode attention, 32/8 heads, D = 64, L = 512, bf16, operands in cache. Situations: back to back; right
after a PyTorch linear that used all threads; after rests. Arms alternate within each situation. The figures are
microseconds, median (p90).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import command_line
import torch

from autosel import fingerprint
from autosel.candidates.cpp.attention import KERNELS
from autosel.candidates.load import load
from autosel.native import threads
from autosel.native.compile import compile_source
from autosel.ops import OPS
from autosel.values import Fingerprint, NativeRecipe

ARMS = {  # (uses PyTorch's threads, places the workers)
    "helpers": (False, False),
    "helpers, placed": (False, True),
    "pool": (True, False),
    "pool, placed": (True, True),
    "one thread": (True, True),  # shows the cost of cold caches and clocks of a single core after a rest
}
WARM_CALLS = 20


def main() -> int:
    options = parsed()
    fp = fingerprint.take("cpu")
    torch.set_num_threads(options.threads or int(fp.identity["cpus"]))
    kernels = {arm: attention(fp, 1 if arm == "one thread" else options.threads) for arm in options.arm or ARMS}
    x, w = torch.randn(1, 2048).bfloat16(), torch.randn(2048, 2048).bfloat16()
    before: dict[str, Callable[[], Any]] = {"back to back": lambda: None, "after a linear": lambda: x @ w.T}
    before |= {f"after {rest_s * 1e3:g} ms": (lambda s=rest_s: time.sleep(s)) for rest_s in options.rests}
    table = {what: measure(kernels, ahead, options.seconds) for what, ahead in before.items()}
    if options.json:
        json.dump({"device": fp.name, "threads": torch.get_num_threads(), "us": table}, sys.stdout, indent=1)
        print()
    else:
        show(table, fp)
    return 0


def parsed() -> argparse.Namespace:
    parser = command_line.parser(__doc__)
    parser.add_argument("--threads", type=int, default=0, help="threads of PyTorch and the kernel; default: all cores")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of each situation and arm")
    parser.add_argument("--rests", type=float, nargs="*", default=[0.001, 0.02, 1.0], help="rests in seconds")
    parser.add_argument("--arm", choices=tuple(ARMS), action="append", default=[], help="repeatable; default: all")
    return parser.parse_args()


def attention(fp: Fingerprint, threads_wanted: int) -> Callable[[], Any]:
    op, kernel = OPS["attn"], next(k for k in KERNELS if k.op == "attn")
    w = op.workload("bf16", {"B": 1, "Hq": 32, "Hkv": 8, "S": 1, "D": 64, "L": 512})
    knobs = kernel.knobs(w, fp)
    values = dict(knobs.values) | ({"threads": threads_wanted} if threads_wanted else {})
    recipe = kernel.recipe(w, fp, knobs)
    assert isinstance(recipe, NativeRecipe)
    function = load(op, recipe, compile_source(recipe.source, recipe.flags).digest, values)
    arguments = (*op.arguments(op.inputs(w, 1)), *op.allocate(w))
    return lambda: function(*arguments)


def measure(kernels: dict[str, Callable[[], Any]], ahead: Callable[[], Any], seconds: float) -> dict[str, list[float]]:
    """Return the times in microseconds by arm, in eight turns each, so that a short disturbance hits several arms."""
    times: dict[str, list[float]] = {arm: [] for arm in kernels}
    for _ in range(8):
        for arm, kernel in kernels.items():
            threads.use(openmp=ARMS[arm][0], place=ARMS[arm][1])
            for _ in range(WARM_CALLS):
                kernel()
            end = time.perf_counter() + seconds / 8
            while True:
                ahead()
                start = time.perf_counter_ns()
                kernel()
                times[arm].append((time.perf_counter_ns() - start) / 1e3)
                if time.perf_counter() > end:
                    break
    threads.use(openmp=True, place=True)
    return times


def show(table: dict[str, dict[str, list[float]]], fp: Fingerprint) -> None:
    arms = list(next(iter(table.values())))
    print(f"{fp.name}   threads {torch.get_num_threads()}   us, median (p90); n of the last arm")
    print(f"{'':<16}" + "".join(f"{arm:>22}" for arm in arms))
    for what, times in table.items():
        cells = [f"{statistics.median(t):.1f} ({statistics.quantiles(t, n=10)[-1]:.1f})" for t in times.values()]
        print(f"{what:<16}" + "".join(f"{cell:>22}" for cell in cells) + f"   {len(times[arms[-1]])}")


if __name__ == "__main__":
    sys.exit(main())
