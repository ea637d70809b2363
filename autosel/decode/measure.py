"""Measure a decode: the optimised step and the eager baseline in turn, in coin-flipped order, on one model and one
cache.

Both arms are fed the same tokens in the same state, so that tokens and logits can be compared step by step, and
disturbances of the machine affect both. A plan without a baseline runs the optimised step only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch

from autosel import devices, dispatch, fingerprint
from autosel.candidates.layouts import STORE
from autosel.decode import graph
from autosel.decode.account import (
    UsesSince,
    choices_of,
    overhead_ns,
    proven,
    saved_bytes,
    time_ops,
)
from autosel.decode.arms import Baseline, Choosing, Ours, Remembers, StepArm, WrittenArm, our_arm, step
from autosel.decode.choose import again, choose
from autosel.decode.hold import holding
from autosel.decode.original import Original
from autosel.decode.packed import forget, make_room
from autosel.decode.persistent import kind_of, refuse_unsupported
from autosel.decode.quality import clipped, format_quality, quality
from autosel.decode.rope import frequencies
from autosel.decode.run import EXECUTION, WHOLE, BaselineRun, Chosen, DecodeRun, Listener, Plan, Silent, Text
from autosel.decode.scene import Clock, Scene, set_scene
from autosel.decode.timeline import timeline
from autosel.decode.verdict import Passes, TokenVerdict, verdict
from autosel.decode.weights import Weights
from autosel.devices.cpu.idle import wait_until_idle
from autosel.devices.device import StepTimer, Took
from autosel.devices.energy import Meter
from autosel.errors import ParityError, UsageError
from autosel.ledger.key import current_mode
from autosel.ledger.store import Ledger
from autosel.models.cost import bytes_per_step, flops_per_step
from autosel.ops.eager_stored import keeping_forms
from autosel.values import Accepted, Rejected


def measure(
    plan: Plan,
    weights: Weights,
    *,
    text: Text | None = None,
    listener: Listener | None = None,
    clock: Clock = time.perf_counter_ns,
    ledger: Ledger | None = None,
    decides: bool = True,
    forced: bool = False,
    chosen: Chosen | None = None,
    traced: bool = False,
    original: Original | None = None,
) -> DecodeRun:
    """Run the plan; score the text, if given, with the timed step, also against an `original` model. `clock` gives
    nanoseconds.

    `choose` selects the form of the steps with the ledger; `chosen` is the result of an earlier run on this model and
    layout of the cache, and is used instead. `forced`: whole steps race again, whatever is decided. `traced`: also time
    the threads of a step, for a trace.

    Raises UsageError, BadConfig.
    """
    refuse(plan)
    assert weights.shape == plan.shape and weights.dtype == plan.dtype, "the weights were loaded for another plan"
    listener, fp = listener or Silent(), fingerprint.take(plan.device)
    device = devices.named(plan.device)
    began, started_at = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    plain = plan.layout == "plain" or not plan.listed  # it is not known beforehand what other steps read
    kept_forms = keeping_forms(plan.baseline)
    with torch.inference_mode(), device.current(), STORE.paused(plain), kept_forms, dispatch.measuring():
        make_room(weights, plan)
        scene = set_scene(plan, weights, fp, listener, clock)
        earlier = chosen is not None
        decides = decides and plan.baseline  # a race without PyTorch's step decides nothing for others
        chosen = choose(scene, ledger, decides=decides, forced=forced) if chosen is None else again(scene, chosen)
        if chosen.form != "packed":
            forget(weights)
        ours, theirs = our_arm(scene, chosen), Baseline(scene) if plan.baseline else None
        with holding(ledger, fp, getattr(ours, "list", None)):
            _warm_up(scene, ours, theirs)
            uses, power, timer = UsesSince(), device.meter(), device.timer(clock)
            turns = _pairs(scene, ours, theirs, timer, power) if theirs else _alone(scene, ours, timer, power)
            steps = list(turns)
            refuse_wrong(getattr(ours, "list", None))
            served = uses.served()
            power.after(lambda: step(ours), len(steps))
        written = ours.list if isinstance(ours, WrittenArm) else None
        choices = choices_of(written, plan) if written else uses.choices(plan, len(steps))
        listener.stage("ops", "", 0, 1)
        per_op = time_ops(written, plan, clock) if written else ()
        spans = timeline(written, plan, clock) if written and traced else ()
        idle_ns = overhead_ns(written, clock) if written else None
        found = quality(scene, text, chosen) if text else None
        against = format_quality(scene, original, chosen) if original else None
    context = plan.seq + (len(steps) - 1) // 2 if plan.advance else plan.seq
    return DecodeRun(
        plan=plan,
        fingerprint=fp,
        mode_key=current_mode(EXECUTION[chosen.form]),
        started_at=started_at,
        seconds=time.monotonic() - began,
        optimised_ns=tuple(s.optimised.ns for s in steps),
        baseline=_baseline(steps, scene, timer),
        kept=tuple(s.kept for s in steps),
        timed_by=timer.by,
        optimised_host_ns=tuple(s.optimised.host_ns for s in steps if timer.by != "host"),
        ttft_ns=scene.ttft_ns,
        prompt_tokens=plan.seq - 1,
        prompt=scene.prompt,
        bytes_per_step=bytes_per_step(plan.shape, plan.dtype, plan.batch, context) - saved_bytes(written),
        saved_bytes=saved_bytes(written),
        flops_per_step=flops_per_step(plan.shape, plan.batch, context),
        weights_bytes=weights.bytes,
        kv_cache_bytes=scene.cache.bytes,
        peak_memory_bytes=device.peak_bytes(),
        read_bytes_per_s=scene.ceiling,
        read_probes=tuple(scene.probes),
        choices=proven(choices, served),
        per_op=per_op,
        timeline=spans,
        tokens_checked=sum(s.verdict.checked for s in steps),
        tokens_equal=sum(s.verdict.equal for s in steps),
        tokens_open=sum(s.verdict.open for s in steps),
        max_logit_error=scene.logit_error,
        logit_bound=scene.logit_bound,
        python_overhead_share=None if idle_ns is None else idle_ns / statistics.median(s.optimised.ns for s in steps),
        chosen=chosen,
        quality=found,
        format_quality=against,
        energy_joules=power.joules,
        notes=(
            *_notes(plan, chosen, text),
            *_weights(written),
            *_said((weights.note, power.why or power.told, EARLIER if earlier else "")),
        ),
    )


def refuse(plan: Plan) -> None:
    """Raise UsageError for a plan that cannot be measured, BadConfig for a rope that cannot be decoded.

    Call it before weights are loaded, which takes minutes.
    """
    frequencies(plan.shape, torch.device(devices.HOST))
    support = graph.supports(plan) if plan.step == "graph" else Accepted()
    if isinstance(support, Rejected):
        todo = "use --step ops: the step then runs call by call"
        raise UsageError("--step graph is impossible", why=support.reason, todo=todo)
    if plan.step == "whole":
        refuse_unsupported(plan)
    if plan.speculate and (plan.batch > 1 or not plan.advance or plan.sampling.changes_greedy):
        raise UsageError(
            "speculation excludes a batch, a fixed context and sampling",
            why="it is measured on one greedy, advancing stream",
            todo="use --batch 1, --advance and greedy decoding",
        )


def refuse_wrong(step: Any) -> None:
    """Raise ParityError if the guard found a whole step wrong: its times mix two forms."""
    watch = getattr(step, "watch", None)
    if watch is not None and watch.fault:
        todo = "run again: the step then runs op by op" if watch.decision is not None else "use --step ops"
        raise ParityError(f"{step.candidate} no longer serves the step", why=watch.fault, todo=todo)


ALONE = (
    "no baseline ran: tokens and logits were compared with untimed passes of PyTorch that convert some rows of a "
    "weight at a time"
)
MOST_CHECKED = 0.005  # of a step, by first checks of the guard, for the steps to be timed
EARLIER = "the form of the step was chosen by an earlier run of the same suite"


def _notes(plan: Plan, chosen: Chosen, text: Text | None = None) -> tuple[str, ...]:
    notes = [f"chain: attention {chosen.chain.attn}, feed-forward {chosen.chain.mlp}"]
    if chosen.form in WHOLE:
        notes = [kind_of(plan.device).taken]
    if chosen.form == "torch":
        notes = ["step: PyTorch's own, as before autosel"]
    if chosen.form == "graph":
        notes.append("step: a graph of its ops, replayed")
    if chosen.note:
        notes.append(chosen.note)
    if text is not None and clipped(plan, text):
        notes.append(clipped(plan, text))
    if plan.untimed:
        notes.append(plan.untimed)
    if not plan.baseline:
        notes.append(ALONE)
    if plan.prompt == "synthetic":
        notes.append("the cache was filled with random keys and values; no prompt was run")
    return tuple(notes)


def _said(notes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(filter(None, notes))


def _weights(step: object) -> tuple[str, ...]:
    """Return a note about the weights' layout if it is not plain."""
    told: str = getattr(step, "weights_told", "")
    return (told,) if told else ()


# --- steps in turn ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timed:
    """One step of the optimised arm, and of the baseline if it runs."""

    optimised: Took
    baseline: tuple[Took, bool] | None  # its step, and if the optimised arm ran first
    verdict: TokenVerdict  # of the tokens
    kept: int  # tokens per row from the optimised step


def _baseline(steps: Sequence[_Timed], scene: Scene, timer: StepTimer) -> BaselineRun | None:
    taken = [s.baseline for s in steps if s.baseline is not None]
    if not scene.plan.baseline:
        return None
    return BaselineRun(
        ns=tuple(took.ns for took, _ in taken),
        optimised_first=tuple(first for _, first in taken),
        ttft_ns=scene.baseline_ttft_ns,
        host_ns=tuple(took.host_ns for took, _ in taken if timer.by != "host"),
    )


def _warm_up(scene: Scene, ours: StepArm, theirs: StepArm | None) -> None:
    """Run the arms until clocks, caches and the allocator have settled, and ours until the guard's first checks have.

    The guard compares the first 32 calls of a kernel with the baseline. For a kernel that a step calls once, as
    `sample`, they are 32 steps: each took twice its time with a vocabulary of 262,144 and eight sequences.
    """
    asked = scene.plan.warmup
    for i in range(asked):
        scene.listener.stage("warmup", "", i, asked)
        step(ours)
        if theirs is not None:
            step(theirs)
    # How many steps the checks take is a matter of time, so they leave the stream of sampled tokens as it was.
    with ours.sampler.rewound() if isinstance(ours, Choosing) else nullcontext():
        while asked and _checked_share(scene, ours) > MOST_CHECKED:
            scene.listener.stage("warmup", "the guard's first checks", asked, asked)


def _checked_share(scene: Scene, ours: StepArm) -> float:
    """Run a step. Return the share of its time that the guard's first checks took."""
    board = dispatch.board()
    spent_ns, began_ns = board.first_checks_ns(), scene.clock()
    step(ours)
    return (board.first_checks_ns() - spent_ns) / max(1, scene.clock() - began_ns)


def _pairs(scene: Scene, ours: Ours, theirs: StepArm, timer: StepTimer, power: Meter) -> Iterator[_Timed]:
    plan, done = scene.plan, 0
    while done < plan.iters:
        scene.listener.stage("decode", "", done, plan.iters)
        scene.probe()
        first = scene.rng.random() < 0.5
        times, chosen = {}, {}
        for arm in (ours, theirs) if first else (theirs, ours):
            times[arm], chosen[arm] = _timed(arm, timer, power if arm is ours else None)
        kept = [row[: plan.iters - done] for row in chosen[ours]]
        ends = done == 0 or (plan.advance and done + len(kept[0]) >= plan.iters)
        told = verdict(scene, ours, theirs, kept, chosen[theirs], always=ends)
        yield _Timed(optimised=times[ours], baseline=(times[theirs], first), verdict=told, kept=len(kept[0]))
        done += len(kept[0])
        _advance(scene, kept, (ours, theirs), done)
    scene.listener.stage("decode", "", plan.iters, plan.iters)


def _alone(scene: Scene, ours: Ours, timer: StepTimer, power: Meter) -> Iterator[_Timed]:
    """Run the optimised steps only, and judge their tokens by untimed passes."""
    plan, done, passes = scene.plan, 0, Passes(scene, ours)
    while done < plan.iters:
        scene.listener.stage("decode", "", done, plan.iters)
        scene.probe()
        took, chosen = _timed(ours, timer, power)
        kept = [row[: plan.iters - done] for row in chosen]
        last = plan.advance and done + len(kept[0]) >= plan.iters
        told = passes.verdict(kept, first=done == 0, last=last)
        yield _Timed(optimised=took, baseline=None, verdict=told, kept=len(kept[0]))
        done += len(kept[0])
        _advance(scene, kept, (ours, passes), done)
    scene.listener.stage("decode", "", plan.iters, plan.iters)


def _timed(arm: StepArm, timer: StepTimer, power: Meter | None) -> tuple[Took, list[list[int]]]:
    """Run one step. Return its time and tokens; `power` measures its energy."""
    wait_until_idle()  # the other arm's threads poll for work for some milliseconds and would use these cores
    if power is not None:
        power.begin()
    timer.begin()
    arm.enqueue()
    timer.enqueued()
    tokens = arm.tokens()
    took = timer.took()
    if power is not None:
        power.end()
    return took, tokens


def _advance(scene: Scene, kept: list[list[int]], streams: Sequence[Remembers], done: int) -> None:
    """Advance the stream and all that remember it, if the plan requires it and more steps follow."""
    if scene.plan.advance and done < scene.plan.iters:
        scene.advance(kept)
        for one in streams:
            one.remember([row[-1] for row in kept])
