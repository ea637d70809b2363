"""Measure the guard of a thread team's steps: the cost of a check, and the steps until a fault is found.

    python benchmarks/bench_guard_step.py [--model llama-1b] [--context 2048] [--rounds 60] [--json]
    python benchmarks/bench_guard_step.py --model smollm2-135m --right 100000      # correct steps: no demotion expected

Weights and cache are random; ops are served by this home's decisions. Steps with and without a stop after a random
task alternate: the median of their differences is the cost of a stop, and the check is timed separately. Steps during
which a thread waited for a core are discarded. The checks of a step follow from the guard's allowance (0.27 % of the
time).

For each kind of task a fault is planted in the program of the native step, in all layers or in the last one, and the
chance that a check of a random task sees it is measured. The steps until demotion follow a geometric distribution, for
faults in every step, in one of 10 and in one of 100.

`--right N` runs N steps with the guard's default settings at the present load. It reports the number of checks, the
largest ratio of an error to its tolerance, and whether the team was demoted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import struct
import sys
import time
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import command_line
import torch
from bench_guard_faults import RATES, shown, until_seen

from autosel import dispatch, fingerprint, models
from autosel.certify.statistics import median_interval
from autosel.decode.arms import WrittenArm
from autosel.decode.run import Chosen, Plan, Silent
from autosel.decode.scene import Scene, set_scene
from autosel.decode.team import ATTEND, EMBED, PROJECT, TeamStep
from autosel.decode.watch import SHARE, STOP_NS, StepWatch
from autosel.decode.weights import load_weights
from autosel.guard import Allowance, Policy
from autosel.race.waits import WaitWatch, watch

TIMED = 60  # checks of random tasks
LOOKS = 60  # checks of each task with a planted fault
DOUBLED = struct.unpack("q", struct.pack("d", 2.0))[0]


def main() -> int:
    parser = command_line.parser(__doc__)
    parser.add_argument("--model", default="llama-1b", help="model of the decode step")
    parser.add_argument("--layers", type=int, default=0, help="use only the first N layers")
    parser.add_argument("--context", type=int, default=2048, help="tokens in the cache")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--right", type=int, default=0, metavar="N", help="only run N correct steps")
    options = parser.parse_args()
    model = models.load(options.model)
    plan = Plan(model=model, layers=options.layers, seq=options.context, prompt="synthetic")
    with torch.inference_mode(), dispatch.measuring():
        scene = set_scene(plan, load_weights(plan), fingerprint.take("cpu"), Silent(), time.perf_counter_ns)
        step = WrittenArm(scene, Chosen(form="whole")).list
        assert isinstance(step, TeamStep) and step.watch is not None
        found = right_steps(step, options.right) if options.right else measured(scene, step, options)
    command_line.show(options, found, told)
    return 1 if found.get("given up") else 0


# --- cost ------------------------------------------------------------------------------------------------------------


def measured(scene: Scene, step: TeamStep, options: argparse.Namespace) -> dict[str, Any]:
    rng, watching = Random(1), watch()
    through_us, stop_us = [], []
    for _ in range(options.rounds):
        task, took = rng.randrange(len(step.tasks)), {}
        for stops in rng.sample([False, True], 2):
            took[stops] = sample_us(watching, partial(in_two, step, task) if stops else step.through)
        if (through := took[False]) is not None and (stopped := took[True]) is not None:
            through_us.append(through)
            stop_us.append(stopped - through)
    checks_us = [check_us(step, rng.randrange(len(step.tasks)), rng, watching) for _ in range(TIMED)]
    step_us, stop = statistics.median(through_us), median_interval(stop_us)
    a_check_us = statistics.fmean(checks_us)
    checks = min(Policy().spot_rate * len(step.tasks), SHARE * step_us / (a_check_us + STOP_NS / 1e3))
    return {
        "step_us": step_us,
        "pairs of clean steps": len(stop_us),
        "tasks": len(step.tasks),
        "check_us": {"mean": a_check_us, "median": statistics.median(checks_us), "largest": max(checks_us)},
        "stop_us": [statistics.median(stop_us), stop.lo, stop.hi],
        "checks a step": checks,
        "share of the step": checks * (a_check_us + STOP_NS / 1e3) / step_us,
        "faults": [fault(step, name, everywhere, checks) for name in FAULTS for everywhere in (True, False)],
    }


def in_two(step: TeamStep, task: int) -> None:
    step.part(0, task + 1)
    step.part(task + 1, len(step.tasks))


def sample_us(watching: WaitWatch, call: Callable[[], object]) -> float | None:
    """Return the time of a call without waits for a core used by another process; None if none succeeds in two
    seconds."""

    def timed() -> float:
        begin = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - begin) / 1e3

    watching.begin()
    found = watching.samples(timed, 1, lambda: None)
    return found[0] if found else None


def check_us(step: TeamStep, task: int, rng: Random, watching: WaitWatch) -> float:
    """Return the time of a check of a task that has just run."""
    check = step.checks[task]
    assert check is not None
    step.part(0, task + 1)
    found = None
    while found is None:
        found = sample_us(watching, lambda: check(rng.getrandbits(60)))
    return found


# --- faults ----------------------------------------------------------------------------------------------------------

# task kind, index among a layer's tasks of this kind, word of the task (kernels/cpu/step.cpp), its faulty value
FAULTS: dict[str, tuple[int, int, int, Callable[[list[int]], int]]] = {
    "embedding: another row": (EMBED, 0, 5, lambda words: words[5] + 2 * words[6]),
    "qkv: weights shifted by one row": (PROJECT, 0, 14, lambda words: words[14] + 2 * words[16]),
    "attention: scores doubled": (ATTEND, 0, 23, lambda words: DOUBLED),
    "attention: keys of one head": (ATTEND, 0, 21, lambda words: 0),
    "o: weights shifted by one row": (PROJECT, 1, 14, lambda words: words[14] + 2 * words[16]),
    "gate_up: weights shifted by one row": (PROJECT, 2, 14, lambda words: words[14] + 2 * words[16]),
    "down: weights shifted by one row": (PROJECT, 3, 14, lambda words: words[14] + 2 * words[16]),
    "lm_head: eps a million times": (PROJECT, 4, 11, lambda words: struct.unpack("q", struct.pack("d", 10.0))[0]),
}


def fault(step: TeamStep, name: str, everywhere: bool, checks: float) -> dict[str, Any]:
    kind, place, word, other = FAULTS[name]
    kept, chance = step.program.clone(), 0.0
    tasks = tasks_of(kept.tolist(), kind, place)
    tasks = tasks if everywhere else tasks[-1:]
    for task in tasks:
        step.program[task, word] = other(kept[task].tolist())
    rng = Random(2)
    for task in tasks:
        check = step.checks[task]
        assert check is not None
        step.part(0, task + 1)
        looks = max(1, LOOKS // len(tasks))
        chance += sum(check(rng.getrandbits(60)) > 2.0 for _ in range(looks)) / looks
    step.program.copy_(kept)
    return {
        "fault": name,
        "layers": len(tasks),
        "seen by a check of its tasks": chance / len(tasks),
        "steps": {f"{rate:g}": until_seen(rate * checks * chance / len(step.tasks)) for rate in RATES},
    }


def tasks_of(program: list[list[int]], kind: int, place: int) -> list[int]:
    """Return the tasks of a kind; of projections those at one index of their layer; the output head separately."""
    found = [i for i, words in enumerate(program) if words[0] == kind]
    if kind != PROJECT:
        return found
    return found[-1:] if place == 4 else found[:-1][place::4]


# --- correct steps ---------------------------------------------------------------------------------------------------


def right_steps(step: TeamStep, count: int) -> dict[str, Any]:
    """Run correct steps and record the ratios of all checks."""
    ratios: list[float] = []

    def heard(check: Callable[[int], float]) -> Callable[[int], float]:
        def looked(seed: int) -> float:
            ratios.append(check(seed))
            return ratios[-1]

        return looked

    step.checks = tuple(heard(check) if check is not None else None for check in step.checks)
    step.watch = StepWatch(
        policy=dispatch.board().policy, allowance=Allowance(share=SHARE), decision=None, report=lambda fault: None
    )
    begin = time.monotonic()
    for _ in range(count):
        step.run()
    return {
        "steps": count,
        "tasks": count * len(step.tasks),
        "load": os.getloadavg()[0],
        "seconds": time.monotonic() - begin,
        "checks": step.watch.checks,
        "largest ratio": max(ratios, default=0.0),
        "given up": step.watch.fault,
    }


# --- output ----------------------------------------------------------------------------------------------------------


def told(found: dict[str, Any]) -> str:
    if "faults" not in found:
        return ", ".join(f"{name} {value}" for name, value in found.items())
    check, (stop, low, high) = found["check_us"], found["stop_us"]
    lines = [
        (
            f"step {found['step_us'] / 1e3:.2f} ms, {found['tasks']} tasks; a check {check['mean']:.1f} us"
            f" (median {check['median']:.1f}, largest {check['largest']:.1f}), a stop {stop:.1f} us"
            f" ({low:.1f} .. {high:.1f});"
            f" {found['checks a step']:.2f} checks a step, {found['share of the step']:.2%} of it"
        ),
        "",
        "| fault | layers | seen by a check of its tasks | every step | 1 step in 10 | 1 in 100 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in found["faults"]:
        steps = " | ".join(shown(row["steps"][f"{rate:g}"]) for rate in RATES)
        lines += [f"| {row['fault']} | {row['layers']} | {row['seen by a check of its tasks']:.0%} | {steps} |"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
