"""Measure the calls until the guard demotes a kernel that turns wrong after long use, and the cost of its checks.

    python benchmarks/bench_guard_faults.py [--model llama-1b] [--context 2048] [--json]
    python benchmarks/bench_guard_faults.py --right 1000000 [--op attn] [--load 20] [--most-s 60]

For each op of a decode step, the chance that one spot check sees a fault is measured on real results (PyTorch's, at
the model's shapes). Either the whole output is made wrong (times 1.5, plus 0.5), or one row (one output feature of a
product, one head, one row). The calls until demotion follow from the distribution of the guard's gaps at its default
settings: a call has the fault with the given rate; a shadow check detects a fault in the whole output; a spot check
detects it with the measured chance. `tests/cpu/test_guard_spot.py` does the same with real calls.

The cost is the median time of a spot check, Python included, times the checks of a step. The process's allowance (0.11
% of the time) is an upper limit; above it, checks become rarer in proportion. The step is assumed to last as long as
reading its bytes at the rate measured here, so that a slow step does not reduce the share.

`--right N` makes N calls of the C++ kernel of each op, promoted for the benchmark, with the guard's default settings,
in parallel with `--load` busy processes. It counts the checks of each kind and reports whether the kernel was demoted
(wrong, or slower than the baseline). An op runs for at most `--most-s` seconds; the number of calls is printed.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import bench_busy
import command_line
import torch

from autosel import devices, models, ops
from autosel.candidates import registry
from autosel.devices import this_device
from autosel.dispatch.board import Board
from autosel.guard import Policy, spot
from autosel.models.cost import bytes_per_step
from autosel.native.compile import compile_source
from autosel.native.isa import best_isa
from autosel.testing import serving
from autosel.values import Accepted, Workload

RATES = (1.0, 0.1, 0.01)
LOOKS = 2000  # spot checks of one faulty result
TIMED = 300
eager = import_module("autosel.ops.eager")


def main() -> int:
    parser = command_line.parser(__doc__)
    parser.add_argument("--model", default="llama-1b", help="model of the decode step")
    parser.add_argument("--context", type=int, default=2048, help="tokens in the cache")
    parser.add_argument("--right", type=int, default=0, metavar="N", help="only call correct kernels, N times each")
    parser.add_argument("--op", action="append", default=[], help="with --right: this op; repeatable  [all]")
    parser.add_argument("--load", type=int, default=0, help="with --right: number of busy processes")
    parser.add_argument("--most-s", type=float, default=60.0, help="with --right: maximum seconds of an op")
    options = parser.parse_args()
    if options.right:
        return right_kernels(options)
    model = models.load(options.model)
    here = this_device()
    made = spot.recipe(model.dtype, best_isa(tuple(here.identity["isa"])))
    compile_source(made.source, made.flags)
    named = [
        n
        for n in models.step(model, batch=1, context=options.context)
        if n.chain in ("fused", "both") and n.workload.op in spot.OPS and n.workload.dtype == model.dtype
    ]
    longest = [n for n in named if "L" not in dict(n.workload.dims) or n.workload["L"] == options.context]
    rows = [row(n.label, n.workload, n.calls_per_step) for n in longest]
    read_rate = max(devices.named(devices.HOST).read_windows())
    step_us = bytes_per_step(model, model.dtype, 1, options.context) / read_rate * 1e6
    asked_us = sum(r["calls a step"] * Policy().spot_rate * r["check_us"] for r in rows)
    spot_rate = Policy().spot_rate * min(1.0, spot.SHARE * step_us / asked_us)
    found = {
        "rows": [{**r, "calls until demotion": until_demotion(r["chance"], spot_rate)} for r in rows],
        "step_us": step_us,
        "checks wanted, us a step": asked_us,
        "allowed, us a step": spot.SHARE * step_us,
        "share of the step": min(asked_us, spot.SHARE * step_us) / step_us,
        "share of calls that are spot-checked": spot_rate,
    }
    command_line.show(options, found, of_faults)
    return 0


def row(label: str, w: Workload, calls: int) -> dict[str, Any]:
    op = ops.find(w.op)
    check = spot.find(w, best_isa(tuple(this_device().identity["isa"])))
    assert check is not None
    inputs = op.inputs(w, 1)
    if w.op == "sample":
        inputs |= {"temperature": torch.zeros(w["B"]), "repetition_penalty": torch.ones(w["B"])}
    args, outs = op.arguments(inputs), op.allocate(w)
    returned = getattr(eager, w.op)(*args, *outs)
    results = returned if isinstance(returned, tuple) else (returned,)
    random = Random(1)
    right = max(check(args, outs, random.getrandbits(60)) for _ in range(LOOKS))
    assert right <= 1.0, f"{label}: a correct result is suspected ({right:.2f} times its tolerance)"
    check_us = statistics.median(timed(lambda: check(args, outs, random.getrandbits(60))) for _ in range(TIMED))
    chances = {size: seen(check, args, outs, results, make, random) for size, make in FAULTS.items()}
    return {"op": label, "calls a step": calls, "check_us": check_us, "chance": chances}


def timed(check: Callable[[], float]) -> float:
    """Run the check and return its time in microseconds."""
    begin = time.perf_counter_ns()
    check()
    return (time.perf_counter_ns() - begin) / 1e3


# --- faults ----------------------------------------------------------------------------------------------------------


def whole(out: torch.Tensor) -> None:
    out.copy_(out + 1 if out.dtype == torch.int64 else out * 1.5 + 0.5)


def one_row(out: torch.Tensor) -> None:
    """Make one row wrong: the last feature of results, the last head, or the last batch row of tokens."""
    part = out[-1:] if out.dtype == torch.int64 else out[..., -1:] if out.dim() == 2 else out[:, -1:]
    whole(part)


FAULTS: dict[str, Callable[[torch.Tensor], None]] = {"whole": whole, "one row": one_row}


def seen(
    check: spot.Spot,
    args: Sequence[Any],
    outs: Sequence[Any],
    results: Sequence[torch.Tensor],
    make: Callable[[torch.Tensor], None],
    random: Random,
) -> float:
    """Return the share of spot checks that suspect a result with this fault; the result is restored."""
    kept = [r.clone() for r in results]
    for result in results:
        make(result)
    found = sum(check(args, outs, random.getrandbits(60)) > 1.0 for _ in range(LOOKS)) / LOOKS
    for result, before in zip(results, kept, strict=True):
        result.copy_(before)
    return found


def until_demotion(chances: dict[str, float], spot_rate: float) -> dict[str, Any]:
    return {
        f"{size} {rate:g}": calls_until(rate, chance, size == "whole", spot_rate)
        for size, chance in chances.items()
        for rate in RATES
    }


def calls_until(fault: float, chance: float, shadow_sees: bool, spot_rate: float) -> dict[str, int] | None:
    shadow_rate = Policy().shadow_rate
    return until_seen(fault * (shadow_rate * shadow_sees + (1 - shadow_rate) * spot_rate * chance))


def until_seen(chance: float) -> dict[str, int] | None:
    """Return the median and 95th percentile of the calls until a check detects a fault, if one call has this chance.

    The distribution is geometric, because calls are checked independently of each other.
    """
    if not chance:
        return None
    each = -math.log1p(-min(chance, 1 - 1e-12))
    return {"median": math.ceil(math.log(2) / each), "p95": math.ceil(math.log(20) / each)}


# --- correct kernels --------------------------------------------------------------------------------------------------


SIZES = {"M": 1, "B": 1, "S": 1, "K": 256, "N": 256, "d": 256, "I": 512, "V": 1024, "Hq": 8, "Hkv": 2, "D": 64,
         "R": 64, "L": 128, "page": 16}  # fmt: skip


def right_kernels(options: argparse.Namespace) -> int:
    """Call each op's kernel and renew its inputs every 1,000 calls. Return 1 if one was demoted."""
    made = spot.recipe("bf16", best_isa(tuple(this_device().identity["isa"])))
    compile_source(made.source, made.flags)
    names = options.op or spot.OPS
    with bench_busy.competing(options.load, bench_busy.SPIN):
        found = [one for name in names if (one := right_kernel(name, options.right, options.most_s)) is not None]
    command_line.show(options, found, of_right_kernels)
    return 1 if any(one["given up"] for one in found) else 0


def right_kernel(name: str, calls: int, most_s: float) -> dict[str, Any] | None:
    """Call an op's kernel under the guard; return None for an op without a C++ kernel here."""
    op = ops.find(name)
    sizes = SIZES | {"S": 16} if name == "prefill_attn" else SIZES
    w = op.workload("bf16", {n: sizes[n] for n in op.dim_names})
    device = this_device()
    kernels = [c.name for c in registry.all_candidates(name) if c.backend == "CPP"]
    kernels = [k for k in kernels if isinstance(registry.find(name, k).supports(w, device), Accepted)]
    if not kernels:
        return None
    with tempfile.TemporaryDirectory() as folder:
        serving.publish(Path(folder), [replace(serving.pinned(w, kernels[0]), state="promoted")])  # a pin is never slow
        board = Board(Path(folder))
        inputs = op.inputs(w, 1)
        run, number, begin = board.bind(op, inputs), 0, time.monotonic()
        while number < calls and time.monotonic() - begin < most_s:
            arguments = op.arguments(op.refresh(w, inputs, number))
            for _ in range(min(1000, calls - number)):
                run(*arguments)
            number += min(1000, calls - number)
        (watch,) = board._watches.values()
        board.close()
    return {
        "op": name,
        "calls": number,
        "load": os.getloadavg()[0],
        "shadow": watch.rate.checks,
        "spot": watch.spot_checks,
        "limit": watch.spot_limit,
        "lost": watch.detector.lost,
        "pairs": watch.detector.pairs,
        "given up": watch.fault.reason if watch.fault is not None else "",
    }


# --- output ----------------------------------------------------------------------------------------------------------


def of_faults(found: dict[str, Any]) -> str:
    heads = [f"{size} {rate:g}" for size in FAULTS for rate in RATES]
    lines = ["| op | calls a step | check, us | " + " | ".join(heads) + " |", "|" + " --- |" * (3 + len(heads))]
    for r in found["rows"]:
        told = [shown(r["calls until demotion"][head]) for head in heads]
        lines += [f"| {r['op']} | {r['calls a step']} | {r['check_us']:.1f} | {' | '.join(told)} |"]
    wanted, allowed = found["checks wanted, us a step"], found["allowed, us a step"]
    told = (
        f"calls until demotion: median (p95). Step {found['step_us'] / 1e3:.1f} ms by its bytes; checks take "
        f"{found['share of the step']:.2%} of it ({wanted:.0f} us wanted, {allowed:.0f} allowed); "
        f"1 call in {1 / found['share of calls that are spot-checked']:.0f} is spot-checked"
    )
    return "\n".join([*lines, "", told])


def shown(calls: dict[str, int] | None) -> str:
    return f"{calls['median']} ({calls['p95']})" if calls else "not seen"


def of_right_kernels(found: Sequence[dict[str, Any]]) -> str:
    lines = ["| op | calls | load | shadow checks | spot checks | pairs lost | demoted |", "|" + " --- |" * 7]
    for f in found:
        checks, lost = f"{f['shadow']} | {f['spot']}", f"{f['lost']} of {f['pairs']}"
        lines += [f"| {f['op']} | {f['calls']:,} | {f['load']:.1f} | {checks} | {lost} | {f['given up'] or 'no'} |"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
