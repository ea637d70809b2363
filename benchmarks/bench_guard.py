"""Measure the guard's cost and its time to detection, on real kernels and by simulation with the guard's own code.

    python benchmarks/bench_guard.py [--steps 200] [--checks 60] [--runs 2000] [--json]

Cost: time a decode-like step (16 layers of nine bound calls) with the guard on and off, interleaved in rotated order.
It reports the countdown alone, the shadow checks of a bucket after long use, and the one-time cost of the first calls.
"off again" is the A/A control. Checks are so rare that a mean over steps contains only a few and mostly reflects other
load. So the mean is also composed of parts: the median cost of the countdown, and for each bound call its probability
of a check times the time that a check adds to its step and the next, measured many times.

Finding: calls until a fault in a share f of the calls is found, compared with ln(100) / (p f). Slowing: pairs until
the detector's alarm, and a real kernel that becomes 1.3 times as slow as the baseline.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import command_line
import torch

from autosel import ops
from autosel.candidates import arms, registry
from autosel.candidates.load import load
from autosel.dispatch.board import Board, this_device
from autosel.errors import BuildError
from autosel.guard import Policy
from autosel.guard.detector import ALARM, Detector
from autosel.guard.rate import CANARY, FRESH_CHECKS, Rate
from autosel.ledger import snapshot
from autosel.ledger.key import current_mode, serving_key
from autosel.native.compile import compile_source
from autosel.ops.contract import Op
from autosel.values import Arm, Decision, Knobs, NativeRecipe, PythonRecipe, Workload, digest, to_json

LAYERS = 16
D, HEADS, KV_HEADS, HEAD_DIM, INNER, CONTEXT = 1024, 16, 4, 64, 2816, 1024
OFF, COUNTDOWN, SHADOW = Policy(on=False), Policy(shadow_rate=0.0), Policy()


def main() -> int:
    parser = command_line.parser(__doc__)
    parser.add_argument("--steps", type=int, default=200, help="decode steps of each variant")
    parser.add_argument("--checks", type=int, default=60, help="timed checks of each bound call")
    parser.add_argument("--runs", type=int, default=2000, help="simulated faults and slowdowns")
    options = parser.parse_args()
    logging.getLogger("autosel").setLevel(logging.CRITICAL)  # the faults are intentional
    with tempfile.TemporaryDirectory() as folder:
        found = {
            "cost": cost(Path(folder), options.steps, options.checks),
            "finding": [finding(f, options.runs) for f in (1.0, 0.1, 0.01)],
            "found for real": [found_for_real(f, Path(folder), 20) for f in (1.0, 0.1)],
            "slowing": [slowing(p, options.runs) for p in (0.9, 0.75, 0.6)],
            "false alarm": false_alarm(min(options.runs, 100)),
            "slowed for real": slowed_for_real(Path(folder)),
        }
    if options.json:
        json.dump(found, sys.stdout, indent=1)
        print()
    else:
        show(found)
    return 0


# --- cost ---------------------------------------------------------------------------------------------------------


def layer() -> list[tuple[Op, Workload]]:
    sizes = {"B": 1, "S": 1, "M": 1, "Hq": HEADS, "Hkv": KV_HEADS, "D": HEAD_DIM, "R": HEAD_DIM, "L": CONTEXT, "d": D}
    wide = HEADS * HEAD_DIM
    named: list[tuple[str, dict[str, int]]] = [
        ("norm_qkv", {"N": wide + 2 * KV_HEADS * HEAD_DIM}),
        ("rope", {}),
        ("kv_append", {}),
        ("attn", {}),
        ("linear", {"K": wide, "N": D}),
        ("add_rmsnorm", {}),
        ("gate_up", {"I": INNER}),
        ("linear", {"K": INNER, "N": D}),
        ("add_rmsnorm", {}),
    ]
    found = []
    for name, own in named:
        op = ops.find(name)
        dims = sizes | own
        found.append((op, op.workload("bf16", {n: dims[n] for n in op.dim_names})))
    return found


def cost(folder: Path, steps: int, checks_each: int) -> dict[str, Any]:
    home = folder / "cost"
    calls = layer()
    arms_found = {w.key: native(op, w) for op, w in calls}
    publish(home, [decision(w, arm) for (_, w) in calls if (arm := arms_found[w.key])])
    inputs = {w.key: op.inputs(w, 1) for op, w in calls}
    boards = {"off": Board(home, OFF), "off again": Board(home, OFF), "countdown": Board(home, COUNTDOWN),
              "shadow": Board(home, SHADOW)}  # fmt: skip
    ways = {name: step_of(board, calls, inputs) for name, board in boards.items()}
    firsts = {name: [timed(way) for _ in range(4)] for name, way in ways.items()}
    for name, way in ways.items():
        for _ in range(4):
            way()
        for watch in boards[name]._watches.values():  # as after long use
            assert watch.fault is None, watch.fault
            watch.rate.checks = max(watch.rate.checks, CANARY + FRESH_CHECKS)
        for held in boards[name]._bound:  # discard the gap that was drawn at the first calls' rate
            if held.watch is not None:
                held.cell.grant(held.watch.gap())
    in_service(boards["shadow"], ways["shadow"])
    times: dict[str, list[float]] = {name: [] for name in ways}
    before = sum(w.rate.checks for w in boards["shadow"]._watches.values())
    order = list(ways)
    for _ in range(steps):
        for name in order:
            times[name].append(timed(ways[name]))
        order = order[1:] + order[:1]
    checks = sum(w.rate.checks for w in boards["shadow"]._watches.values()) - before
    watches = list(boards["shadow"]._watches.values())
    step_ms = statistics.median(times["off"])
    parts = [checked_call(boards["shadow"], ways["shadow"], held, checks_each) for held in guarded(boards["shadow"])]
    for board in boards.values():
        board.close()
    countdown = ratio(times["countdown"], times["off"])
    return {
        "ops guarded": len(arms_found) - sum(arm is None for arm in arms_found.values()),
        "calls a step": LAYERS * len(calls),
        "step_ms": step_ms,
        "off again": ratio(times["off again"], times["off"]),
        "countdown": countdown,
        "shadow": ratio(times["shadow"], times["off"]),
        "shadow mean": statistics.fmean(times["shadow"]) / statistics.fmean(times["off"]),
        "shadow checks": checks,
        "expected share": sum(w.rate.probability * w.rate.extra_ns for w in watches)
        / sum(w.rate.own_ns for w in watches),
        "mean": mean_of(parts, step_ms, countdown["median"] - 1.0, steps),
        "parts": parts,
        "first calls extra_ms": sum(firsts["shadow"]) - sum(firsts["off"]),
        "per bucket": [
            {
                "workload": w.subject.decision.workload.key,
                "own_us": w.rate.own_ns / 1e3,
                "check_us": w.rate.extra_ns / 1e3,
                "one check in": 1 / w.rate.probability,
            }
            for w in watches
        ],
    }


def guarded(board: Board) -> list[Any]:
    """Return the bound calls that are checked."""
    return [held for held in board._bound if held.watch is not None]


def checked_call(board: Board, step: Callable[[], None], held: Any, count: int) -> dict[str, Any]:
    """Measure the time that a check of one bound call adds to its step and to the next one, whose caches differ.

    Also return the call's probability of a check and the guard's own estimate of a check's time.
    """
    added_ms: list[float] = []
    chances: list[float] = []
    allotted_ms: list[float] = []
    while len(added_ms) < count:
        step()
        before = sum(w.rate.checks for w in board._watches.values())
        chances.append(held.watch.rate.probability)
        allotted_ms.append(held.watch.rate.extra_ns / 1e6)
        plain = timed(step)
        held.cell.grant(1)
        checked, after = timed(step), timed(step)
        assert held.watch.fault is None, held.watch.fault
        if sum(w.rate.checks for w in board._watches.values()) == before + 1:  # otherwise the step had another check
            added_ms.append(checked + after - 2 * plain)
    return {
        "workload": held.watch.subject.decision.workload.key,
        "chance": statistics.fmean(chances),
        "added_ms": statistics.fmean(added_ms),
        "added_ms median": statistics.median(added_ms),
        "error_ms": statistics.stdev(added_ms) / math.sqrt(count),
        "allotted_ms": statistics.fmean(allotted_ms),
    }


def mean_of(parts: Sequence[dict[str, Any]], step_ms: float, countdown: float, steps: int) -> dict[str, float]:
    """Return the guard's mean cost after long use as shares of a step; every bound call runs once a layer."""
    found = {
        name: LAYERS * sum(p["chance"] * p[of] for p in parts) / step_ms
        for name, of in (("checks", "added_ms"), ("checks median", "added_ms median"), ("allotted", "allotted_ms"))
    }
    error = LAYERS * math.sqrt(sum((p["chance"] * p["error_ms"]) ** 2 for p in parts)) / step_ms
    expected = LAYERS * sum(p["chance"] for p in parts) * steps
    return {**found, "checks error": error, "countdown": countdown, "together": countdown + found["checks"],
            "expected checks": expected}  # fmt: skip


def in_service(board: Board, step: Callable[[], None]) -> None:
    """Check each op several times between unchecked steps, so that the guard knows its time in use."""
    for held in guarded(board):
        for _ in range(8):  # half of them run the candidate first
            step()
            held.cell.grant(1)
            step()


def step_of(board: Board, calls: Sequence[tuple[Op, Workload]], inputs: dict[str, Any]) -> Callable[[], None]:
    bound = []
    for op, w in calls:
        arguments = op.arguments(inputs[w.key])
        bound.append((board.bind(op, inputs[w.key]), (*arguments, *op.allocate(w))))

    def step() -> None:
        for _ in range(LAYERS):
            for run, values in bound:
                run(*values)

    return step


def timed(way: Callable[[], None]) -> float:
    """Run one step and return its time in milliseconds."""
    start = time.perf_counter()
    way()
    return (time.perf_counter() - start) * 1e3


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4)
    return {"median": median, "q25": low, "q75": high}


# --- arms ---------------------------------------------------------------------------------------------------------


def native(op: Op, w: Workload) -> Arm | None:
    """Compile the op's first C++ kernel that supports the workload and return its arm."""
    device = this_device()
    for candidate in registry.all_candidates(op.name):
        if candidate.backend == "CPP" and not hasattr(candidate.supports(w, device), "reason"):
            knobs = candidate.knobs(w, device)
            recipe = candidate.recipe(w, device, knobs)
            assert isinstance(recipe, NativeRecipe)
            try:
                return arms.arm(candidate, w, device, compile_source(recipe.source, recipe.flags).digest, knobs)
            except BuildError as error:
                print(f"{candidate.name}: {error}", file=sys.stderr)
    return None


def decision(w: Workload, arm: Arm) -> Decision:
    device = this_device()
    return Decision(
        id=1,
        state="promoted",
        hw_id=device.hw_id,
        op=w.op,
        bucket=w.bucket,
        mode=current_mode(),
        workload=w,
        arm=arm,
        baseline=arms.arm(registry.baseline(w.op), w, device, "", Knobs()),
        verdict=None,
        reason="for the benchmark",
        created_at="2026-01-01T00:00:00+00:00",
    )


def publish(home: Path, decisions: Sequence[Decision]) -> None:
    rows = {serving_key(d.hw_id, d.mode, d.bucket): d for d in decisions}
    made = [{"key": key, "epoch": 1, "decision": to_json(d)} for key, d in rows.items()]
    snapshot.write(home / snapshot.FILE, snapshot.document(1, made))


def python_arm(folder: Path, name: str, source: str) -> Arm:
    (folder / f"{name}.py").write_text(source)
    recipe = PythonRecipe(target=f"{name}:kernel", path=str(folder))
    found = digest({"source": arms.python_digest(recipe), "knobs": {}})
    return Arm(candidate=f"user:{name}", backend="USER", recipe=recipe, knobs={}, digest=found)


# --- finding ------------------------------------------------------------------------------------------------------


def finding(f: float, runs: int) -> dict[str, Any]:
    """Return the calls until a fault of rate f is found, present from the first call or after long use."""
    p = SHADOW.shadow_rate
    chance = Random(5)
    late = sorted(calls_until(f, seed, chance, CANARY + FRESH_CHECKS) for seed in range(runs))
    early = sorted(calls_until(f, seed, chance, 0) for seed in range(runs))
    return {
        "rate": f,
        "theory_99": math.log(100) / (p * f),
        "late_50": late[runs // 2],
        "late_99": late[int(runs * 0.99)],
        "early_50": early[runs // 2],
        "early_99": early[int(runs * 0.99)],
    }


def calls_until(f: float, seed: int, chance: Random, checks: int) -> int:
    rate, calls = Rate(policy=SHADOW, random=Random(seed), checks=checks), 0
    while True:
        calls += rate.gap()
        if chance.random() < f:
            return calls
        rate.checks += 1


WRONG = """
import random, torch
chance, rate = random.Random(1), 0.0
def kernel(x, weight, eps, offset):
    y = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
    return y * 1.01 if chance.random() < rate else y
"""


def found_for_real(f: float, folder: Path, runs: int) -> dict[str, Any]:
    """Count the real calls until a kernel that is wrong in a share f of them is found; shadow rate 1/100."""
    policy = Policy(shadow_rate=0.01, max_share=math.inf)
    op = ops.find("rmsnorm")
    w = op.workload("fp32", {"M": 1, "d": 64})
    arm = python_arm(folder, "bench_guard_wrong", WRONG)
    x, weight = torch.randn(1, 64), torch.ones(64)
    counts = []
    for run in range(runs):
        home = folder / f"found-{f}-{run}"
        publish(home, [decision(w, arm)])
        board = Board(home, policy)
        bound = board.bind(op, (x, weight))
        module = sys.modules["bench_guard_wrong"]
        module.rate = 0.0  # type: ignore[attr-defined]
        for _ in range(CANARY):
            bound(x, weight)
        (watch,) = board._watches.values()
        watch.rate.checks = CANARY + FRESH_CHECKS
        while watch.rate.checks == CANARY + FRESH_CHECKS:  # the gap that was drawn at the first calls' rate
            bound(x, weight)
        module.rate = f  # type: ignore[attr-defined]
        before = bound.calls()
        while board.epoch == 0:
            bound(x, weight)
        counts.append(bound.calls() - before)
        board.close()
    counts.sort()
    return {"rate": f, "runs": runs, "mean": statistics.fmean(counts), "most": counts[-1],
            "theory_mean": 100 / f, "theory_99": math.log(100) * 100 / f}  # fmt: skip


# --- slowing ------------------------------------------------------------------------------------------------------


def pairs_until_alarm(p_lost: float, seed: int) -> int:
    detector, coin = Detector(), Random(seed)
    while not detector.alarm:
        detector.add(coin.random() < p_lost)
    return detector.pairs


def slowing(p_lost: float, runs: int) -> dict[str, Any]:
    pairs = sorted(pairs_until_alarm(p_lost, seed) for seed in range(runs))
    return {"loses": p_lost, "mean": statistics.fmean(pairs), "p99": pairs[int(runs * 0.99)]}


def false_alarm(runs: int) -> dict[str, Any]:
    pairs = [pairs_until_alarm(0.5, seed) for seed in range(runs)]
    error = statistics.stdev(pairs) / math.sqrt(runs)
    return {"mean": statistics.fmean(pairs), "standard error": error, "promised": ALARM, "runs": runs}


SLOW = """
import time, torch
until_ns = 0
def kernel(x, weight, eps, offset):
    start = time.perf_counter_ns()
    y = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
    while time.perf_counter_ns() - start < until_ns:
        pass
    return y
"""


def slowed_for_real(folder: Path) -> dict[str, Any]:
    """Demote a real kernel: first faster than the baseline (which is delayed here), then 1.3 times as slow."""
    op = ops.find("rmsnorm")
    w = op.workload("fp32", {"M": 1, "d": 1024})
    inputs = op.inputs(w, 1)
    home = folder / "slow"
    publish(home, [decision(w, python_arm(folder, "bench_guard_slow", SLOW))])
    board = Board(home, Policy(shadow_rate=1.0, max_share=math.inf))
    bound = board.bind(op, inputs)
    values = op.arguments(inputs)
    for _ in range(CANARY):
        bound(*values)
    (watch,) = board._watches.values()
    plain = load(op, registry.baseline("rmsnorm").recipe(w, this_device(), Knobs()), "", {})
    base_ns = int(20 * statistics.median(ns(lambda: plain(*values)) for _ in range(200)))

    def delayed(*arguments: Any) -> Any:
        start = time.perf_counter_ns()
        made = plain(*arguments)
        while time.perf_counter_ns() - start < base_ns:
            pass
        return made

    object.__setattr__(watch.subject, "baseline", delayed)
    module = sys.modules["bench_guard_slow"]
    module.until_ns = int(0.7 * base_ns)  # type: ignore[attr-defined]
    for _ in range(400):
        bound(*values)
    won, fast = watch.detector.pairs - watch.detector.lost, watch.detector.pairs
    early = board.epoch
    module.until_ns = int(1.3 * base_ns)  # type: ignore[attr-defined]
    while board.epoch == early and watch.detector.pairs - fast < 2000:
        bound(*values)
    board.close()
    return {
        "base_us": base_ns / 1e3,
        "pairs won while faster": f"{won} of {fast}",
        "demoted while faster": bool(early),
        "pairs until demotion": watch.detector.pairs - fast,
        "reason": watch.fault.reason if watch.fault else "",
    }


def ns(call: Callable[[], Any]) -> int:
    start = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - start


# --- showing ------------------------------------------------------------------------------------------------------


def show(found: dict[str, Any]) -> None:
    c = found["cost"]
    print(f"a decode-like step of {c['calls a step']} bound calls, {c['step_ms']:.2f} ms: time over guard off\n")
    for name in ("off again", "countdown", "shadow"):
        r = c[name]
        print(f"  {name:12}{r['median']:.4f}  ({r['q25']:.4f} .. {r['q75']:.4f})")
    m, control = c["mean"], c["off again"]["median"] - 1
    print(f"  shadow, mean{c['shadow mean']:.4f}  ({c['shadow checks']} checks, expected {m['expected checks']:.1f})\n")
    print("the mean from its parts, as shares of a step\n")
    print(f"  countdown   {m['countdown']:+.2%}   from the median above; A/A control {control:+.2%}")
    print(f"  checks      {m['checks']:+.2%}   +- {m['checks error']:.2%}, by medians {m['checks median']:+.2%}")
    print(f"  allotted    {m['allotted']:+.2%}   estimated by the guard for the checks")
    print(f"  together    {m['together']:+.2%}   goal <= +0.50%\n")
    print(f"  first {CANARY} calls of {c['ops guarded']} buckets: {c['first calls extra_ms']:.0f} ms more, once\n")
    for b in c["per bucket"]:
        print(
            f"  {b['workload']:48} {b['own_us']:8.1f} us, check {b['check_us']:9.1f} us, 1 in {b['one check in']:.0f}"
        )
    print("\n  a check adds to its step and the next: the guard's estimate, measured")
    for p in c["parts"]:
        print(f"  {p['workload']:48} {p['allotted_ms']:8.2f} ms {p['added_ms']:8.2f} +- {p['error_ms']:.2f} ms")
    print("\ncalls until a fault is found (p = 1/2000)")
    print("  in calls   ln(100)/(p f)   after long use 50 %, 99 %   from the first call 50 %, 99 %")
    for x in found["finding"]:
        print(f"  {x['rate']:8.0%}  {x['theory_99']:14,.0f}   {x['late_50']:12,} {x['late_99']:12,}"
              f"   {x['early_50']:15,} {x['early_99']:12,}")  # fmt: skip
    for x in found["found for real"]:
        print(f"  {x['rate']:8.0%}  real calls, p = 1/100: mean {x['mean']:,.0f} of {x['runs']} runs "
              f"(expected {x['theory_mean']:,.0f}), most {x['most']:,}")  # fmt: skip
    print("\nshadow pairs until a slower arm is detected")
    for x in found["slowing"]:
        print(f"  loses {x['loses']:.0%}: mean {x['mean']:.0f}, 99 %: {x['p99']}")
    a = found["false alarm"]
    print(f"  loses half: mean {a['mean']:,.0f} +- {a['standard error']:,.0f} (promised >= {a['promised']:,.0f})")
    s = found["slowed for real"]
    print(f"  real kernel at 0.7 of the baseline's {s['base_us']:.0f} us: won {s['pairs won while faster']}; "
          f"at 1.3: demoted after {s['pairs until demotion']} pairs")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
