"""Time whole decode steps in turn: one native call a step, one call an op, and the eager baseline.

    python benchmarks/bench_step.py [--model llama-1b ...] [--layers 4] [--seq 128 --seq 2048] [--batch 1] [--rounds 17]

All of autosel's arms use the same C++ kernels with the knobs of the closed forms, regardless of decisions. So the
difference is the gain of a thread team: no Python and no fork-join between ops, and work sharing between threads. The
arm `packed` adds the gain of lossless packed weights, if the CPU can read them. Weights and cache are random. Each
round measures the read rate with a probe and runs the arms in random order, the baseline every third round; every step
waits until the other arms' threads sleep.

The roofline is the bytes of the step / the rate of its round's probe / time, as the median over rounds. For packed
weights it uses their own bytes; team / packed is the gain on the same step. `waits` is the share of the team's step in
which a thread waits at barriers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from importlib import import_module
from random import Random
from typing import Any

import command_line
import torch
from interleaved import loaded
from kept import device_of

from autosel import dispatch, fingerprint, models
from autosel.candidates import registry
from autosel.certify.statistics import median, speedup_interval
from autosel.decode import packed
from autosel.decode.account import overhead_ns, saved_bytes
from autosel.decode.arms import Baseline, StepArm, WrittenArm, step
from autosel.decode.run import Chosen, Plan, Silent
from autosel.decode.scene import set_scene
from autosel.decode.team import TeamStep
from autosel.decode.weights import load_weights
from autosel.devices.cpu.idle import wait_until_idle
from autosel.dispatch.resolve import Resolution
from autosel.models.cost import bytes_per_step
from autosel.values import Accepted, Fingerprint, Workload


def main() -> int:
    options = _parsed()
    fp = fingerprint.take("cpu")
    torch.set_num_threads(int(fp.identity["cpus"]))
    _serve_our_kernels(fp)
    rows = []
    for name in options.model or ["llama-1b"]:
        model, weights = models.load(name), None
        for seq in options.seq or [128, 2048, 8192]:
            print(f"{name} {seq}", file=sys.stderr, flush=True)
            layers = min(options.layers, model.layers)
            plan = Plan(
                model=model, layers=layers, seq=seq, batch=options.batch, dtype=options.dtype, prompt="synthetic"
            )
            weights = weights or load_weights(plan)
            with torch.inference_mode(), dispatch.measuring():
                rows.append({"model": name, "layers": plan.layers_run, **compared(plan, weights, fp, options)})
    command_line.show(options, {"device": device_of(fp), "torch": torch.__version__, "rows": rows}, _table)
    return 0


def _serve_our_kernels(fp: Fingerprint) -> None:
    """Serve the C++ kernel of every op with the knobs of its formula, as if it had been promoted."""
    board = import_module("autosel.dispatch.board")
    standing_in = board.resolve

    def resolve(op: Any, w: Workload, *rest: Any, **named: Any) -> Resolution:
        for candidate in registry.all_candidates(op.name):
            if candidate.backend == "CPP" and isinstance(candidate.supports(w, fp), Accepted):
                run = loaded(candidate, w, fp)
                return Resolution(workload=w, run=run, candidate=candidate.name, decision=None, reason="benchmark")
        made: Resolution = standing_in(op, w, *rest, **named)
        return made

    board.resolve = resolve


def compared(plan: Plan, weights: Any, fp: Fingerprint, options: argparse.Namespace) -> dict[str, Any]:
    """Time all arms at one context; return medians in milliseconds and ratios with their intervals."""
    scene = set_scene(plan, weights, fp, Silent(), time.perf_counter_ns)
    ops, team, eager = WrittenArm(scene, Chosen()), WrittenArm(scene, Chosen(form="whole")), Baseline(scene)
    arms: dict[str, StepArm] = {"ops": ops, "team": team, "eager": eager}
    if isinstance(packed.supports(plan.dtype, fp), Accepted):
        arms["packed"] = WrittenArm(scene, Chosen(form="packed"))
    times: dict[str, list[float]] = {name: [] for name in arms}
    waits, rng = [], Random(options.seed)
    for arm in arms.values():
        step(arm)
        step(arm)
    for i in range(options.rounds):
        scene.probe()
        for name in rng.sample(list(arms), len(arms)):
            if name == "eager" and i % 3:
                continue
            wait_until_idle()
            begin = time.perf_counter_ns()
            step(arms[name])
            times[name].append((time.perf_counter_ns() - begin) / 1e6)
        assert isinstance(team.list, TeamStep)
        waits.append(waiting_share(team.list))
    assert all(torch.equal(a.logits, team.logits) for n, a in arms.items() if n != "eager"), (
        "same kernels, different bits"
    )
    bytes_read = bytes_per_step(plan.shape, plan.dtype, plan.batch, plan.seq)
    floors = [bytes_read / rate * 1e3 for rate in scene.probes]
    less = {"packed": saved_bytes(arms["packed"].list)} if isinstance(arms.get("packed"), WrittenArm) else {}
    gain, speedup = speedup_interval(times["ops"], times["team"]), median(times["eager"]) / median(times["team"])
    return {
        "seq": plan.seq,
        "batch": plan.batch,
        "rounds": options.rounds,
        "read_median_bytes_per_s": statistics.median(scene.probes),
        "bytes_per_step": bytes_read,
        **{f"{name}_ms": median(found) for name, found in times.items()},
        **{
            f"{n}_roofline": (1 - less.get(n, 0) / bytes_read)
            * median([f / t for f, t in zip(floors, times[n], strict=True)])
            for n in times
            if n != "eager"
        },
        **({} if not less else _packed(times, less["packed"])),
        "ops_over_team": median([a / b for a, b in zip(times["ops"], times["team"], strict=True)]),
        "ops_over_team_interval": [gain.lo, gain.hi],
        "eager_over_team": speedup,
        "waits": median(waits),
        "python_share_ops": overhead_ns(ops.list, time.perf_counter_ns) / 1e6 / median(times["ops"]),
        "python_share_team": overhead_ns(team.list, time.perf_counter_ns) / 1e6 / median(times["team"]),
        "tasks": len(team.list.tasks),
        "threads": team.list.threads,
    }


def _packed(times: dict[str, list[float]], saved: int) -> dict[str, Any]:
    gain = speedup_interval(times["team"], times["packed"])
    return {
        "packed_bytes_saved": saved,
        "team_over_packed": median([a / b for a, b in zip(times["team"], times["packed"], strict=True)]),
        "team_over_packed_interval": [gain.lo, gain.hi],
        "eager_over_packed": median(times["eager"]) / median(times["packed"]),
    }


def waiting_share(step: TeamStep) -> float:
    """Return the share of one more step's time that threads spend at barriers, averaged over the threads."""
    step.through()  # the guard may have run the last step in parts, without timestamps
    done, left = step.times.unbind(-1)
    whole = int(left[0, -1] - left[0, 0])
    return float((left - done)[:, 1:].sum()) / step.threads / whole


def _table(found: dict[str, Any]) -> str:
    heads = ("model", "context", "ops ms", "team ms", "packed ms", "eager ms", "roofline", "ops/team", "team/packed")
    lines = [f"{found['device']}: decode steps, the same C++ kernels as one native call (team), one call an op (ops)"]
    lines += [" ".join([f"{heads[0]:<10}", *(f"{h:>9}" for h in heads[1:])])]
    for r in found["rows"]:
        cells = [f"{r[f'{n}_ms']:.1f}" if f"{n}_ms" in r else "" for n in ("ops", "team", "packed", "eager")]
        gain = f"{r['team_over_packed']:.3f}" if "team_over_packed" in r else ""
        cells = [str(r["seq"]), *cells, f"{r['team_roofline']:.2f}", f"{r['ops_over_team']:.3f}", gain]
        lines += [" ".join([f"{r['model']:<10}", *(f"{c:>9}" for c in cells)])]
    return "\n".join(lines)


def _parsed() -> argparse.Namespace:
    parser = command_line.parser(__doc__)
    command_line.decoding(parser, seqs=(128, 2048, 8192), rounds=17, models=True)
    command_line.dtype(parser)
    parser.add_argument("--batch", type=int, default=1, help="sequences of a step")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
