"""Measure a decode: our step and the eager baseline's, in turn, in a coin-flipped order, on one model and one cache.

Both arms are fed the same tokens in the same state, so that their tokens and logits can be compared step by step, and
so that whatever the machine does meets both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from random import Random

import torch

from autosel import fingerprint
from autosel.decode import graph
from autosel.decode.account import (
    Uses,
    choices_of,
    overhead_ns,
    proven,
    saved_bytes,
    time_ops,
)
from autosel.decode.arms import Arm, Baseline, Ours, Written, our_arm, step
from autosel.decode.chain import choose_chain
from autosel.decode.device import StepTimer, Took, current, forget_peak, peak_memory, step_timer
from autosel.decode.hold import holding
from autosel.decode.model import FUSED, Chain
from autosel.decode.packed import forget, make_room
from autosel.decode.persistent import kind_of, refuse_unsupported
from autosel.decode.power import Meter, meter
from autosel.decode.quality import clipped, quality
from autosel.decode.rope import frequencies
from autosel.decode.run import EXECUTION, WHOLE, DecodeRun, Listener, Plan, Silent, Text, Way
from autosel.decode.scene import Clock, Scene, set_scene
from autosel.decode.standing import Standing, stand
from autosel.decode.verdict import Verdict, verdict
from autosel.decode.weights import Weights
from autosel.decode.whole import Whole, choose_team
from autosel.errors import UsageError
from autosel.ledger.key import current_mode
from autosel.ledger.store import Ledger
from autosel.models.cost import bytes_per_step, flops_per_step
from autosel.race.idle import wait_until_idle
from autosel.values import Accepted, Fingerprint, Rejected


def measure(
    plan: Plan,
    weights: Weights,
    *,
    text: Text | None = None,
    listener: Listener | None = None,
    clock: Clock = time.perf_counter_ns,
    ledger: Ledger | None = None,
    decides: bool = True,
    chosen: Chosen | None = None,
) -> DecodeRun:
    """Run the plan; score the text with what was timed, if one is given. `clock` gives nanoseconds.

    In the ledger stands who takes the whole step; what is not decided yet is raced and recorded. Without one, or where
    it is not to decide, it is raced for this run alone, and shortly. `chosen` is for several runs on one model and
    layout of the cache: what the first of them found is not asked again, and the most memory is each one's own.

    Raises UsageError, BadConfig.
    """
    refuse(plan)
    assert weights.shape == plan.shape and weights.dtype == plan.dtype, "the weights were loaded for another plan"
    listener, rng = listener or Silent(), Random(plan.seed)
    fp = fingerprint.take(plan.device)
    began, started_at = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    if chosen is not None:
        forget_peak(plan.device)  # an earlier run's
    with torch.inference_mode(), current(plan.device):
        make_room(weights, plan)
        scene = set_scene(plan, weights, listener, clock)
        chosen = chosen or Chosen()
        earlier = chosen.whole is not None
        if not earlier:
            _choose(chosen, scene, fp, ledger, rng, clock, listener, decides=decides)
        chain, ways, whole = chosen.chain, chosen.ways, chosen.whole
        assert whole is not None
        whole = _packed_again(scene, whole, fp) if earlier and whole.form == "packed" else whole
        if whole.form != "packed":
            forget(weights)
        ours, theirs = our_arm(scene, chain, whole.form, fp), Baseline(scene)
        with holding(ledger, fp, getattr(ours, "list", None)):
            _warm_up(scene, ours, theirs, listener)
            uses, power, timer = Uses(), meter(plan.device), step_timer(plan.device, clock)
            pairs = list(_pairs(scene, ours, theirs, rng, listener, timer, power))
            served = uses.served()
            power.after(lambda: step(ours), len(pairs))
        written = ours.list if isinstance(ours, Written) else None
        choices = choices_of(written, plan) if written else uses.choices(plan, len(pairs))
        listener.stage("ops", "", 0, 1)
        per_op = time_ops(written, plan, clock) if written else ()
        idle_ns = overhead_ns(written, clock) if written else None
        found = quality(scene.decoder, plan, text, chain, listener, whole.form, fp) if text else None
    context = plan.seq + (len(pairs) - 1) // 2 if plan.advance else plan.seq
    return DecodeRun(
        plan=plan,
        fingerprint=fp,
        mode_key=current_mode(EXECUTION[whole.form]),
        started_at=started_at,
        seconds=time.monotonic() - began,
        optimised_ns=tuple(p.optimised.ns for p in pairs),
        baseline_ns=tuple(p.baseline.ns for p in pairs),
        optimised_first=tuple(p.optimised_first for p in pairs),
        kept=tuple(p.kept for p in pairs),
        timed_by=timer.by,
        optimised_host_ns=tuple(p.optimised.host_ns for p in pairs if timer.by != "host"),
        baseline_host_ns=tuple(p.baseline.host_ns for p in pairs if timer.by != "host"),
        ttft_ns=scene.ttft_ns,
        baseline_ttft_ns=scene.baseline_ttft_ns,
        prompt_tokens=plan.seq - 1,
        prompt=scene.prompt,
        bytes_per_step=bytes_per_step(plan.shape, plan.dtype, plan.batch, context) - saved_bytes(written),
        saved_bytes=saved_bytes(written),
        flops_per_step=flops_per_step(plan.shape, plan.batch, context),
        weights_bytes=weights.bytes,
        kv_cache_bytes=scene.cache.bytes,
        peak_memory_bytes=peak_memory(plan.device),
        read_bytes_per_s=scene.ceiling,
        read_probes=tuple(scene.probes),
        choices=proven(choices, served),
        per_op=per_op,
        tokens_checked=sum(p.verdict.checked for p in pairs),
        tokens_equal=sum(p.verdict.equal for p in pairs),
        tokens_open=sum(p.verdict.open for p in pairs),
        max_logit_error=scene.logit_error,
        logit_bound=scene.logit_bound,
        python_overhead_share=None if idle_ns is None else idle_ns / statistics.median(p.optimised.ns for p in pairs),
        ways=whole.ways if whole.form in WHOLE else (*ways, *whole.ways),
        quality=found,
        energy_joules=power.joules,
        notes=(
            *_notes(plan, chain, whole, text),
            *_weights(written),
            *_said((power.why or power.told, EARLIER if earlier else "")),
        ),
    )


def refuse(plan: Plan) -> None:
    """Raises UsageError for what cannot be measured, BadConfig for a rope that cannot be decoded. To be asked before
    weights are loaded, which takes minutes."""
    frequencies(plan.shape, torch.device("cpu"))
    support = graph.supports(plan) if plan.step == "graph" else Accepted()
    if isinstance(support, Rejected):
        raise UsageError("--graph", why=support.reason, todo="leave it out: the step then runs call by call")
    if plan.step == "whole":
        refuse_unsupported(plan)
    if plan.speculate and (plan.batch > 1 or not plan.advance or plan.sampling.changes_greedy):
        raise UsageError(
            "speculation with a batch, a fixed context or sampling",
            why="it is measured on one greedy stream that goes on",
            todo="use --batch 1 and greedy decoding",
        )


EARLIER = "how a step is taken was chosen by an earlier run of the same suite"


@dataclass(slots=True)
class Chosen:
    """How steps are taken. Empty, `whole` None, until a run was measured with it."""

    chain: Chain = FUSED
    ways: tuple[Way, ...] = ()
    whole: Whole | None = None


def _choose(
    chosen: Chosen,
    scene: Scene,
    fp: Fingerprint,
    ledger: Ledger | None,
    rng: Random,
    clock: Clock,
    listener: Listener,
    *,
    decides: bool,
) -> None:
    plan, standing = scene.plan, None
    if ledger is not None and plan.step == "auto" and _may_choose(plan):
        standing = stand(scene, fp, ledger, rng, clock, listener, decides=decides)
    listener.stage("chain", "whole steps", 0, 1)
    if _may_choose(plan) and not _teams(standing):
        chosen.chain, chosen.ways = choose_chain(scene, rng, clock)
    chosen.whole = _whole(scene, chosen.chain, fp, rng, clock, standing, ledger)


def _may_choose(plan: Plan) -> bool:
    return plan.prealloc and not plan.speculate


def _teams(standing: Standing | None) -> bool:
    """Is it decided that the device takes the step whole? Then no race asks which chain would be faster without it."""
    return standing is not None and standing.form in WHOLE


def _whole(
    scene: Scene,
    chain: Chain,
    fp: Fingerprint,
    rng: Random,
    clock: Clock,
    standing: Standing | None,
    ledger: Ledger | None,
) -> Whole:
    if standing is not None and standing.form in ("ops", "graph"):
        return standing.kept()
    if standing is None:
        return choose_team(scene, chain, fp, rng, clock, None, ledger)
    return choose_team(scene, chain, fp, rng, clock, standing.judge, ledger, standing.form)


def _packed_again(scene: Scene, whole: Whole, fp: Fingerprint) -> Whole:
    """For a run that may have taken the room back; where there is none, as they are."""
    try:
        kind_of(scene.plan.device).prepare(scene.plan, scene.decoder.weights, fp)
        return whole
    except UsageError as error:
        return replace(whole, form="whole", note="; ".join(filter(None, (whole.note, f"no {error.what}: {error.why}"))))


def _notes(plan: Plan, chain: Chain, whole: Whole, text: Text | None = None) -> tuple[str, ...]:
    notes = [f"chain: attention {chain.attn}, feed-forward {chain.mlp}"]
    if whole.form in WHOLE:
        notes = [kind_of(plan.device).taken]
    if whole.form == "graph":
        notes.append("step: a graph of its ops, replayed")
    if whole.note:
        notes.append(whole.note)
    if text is not None and clipped(plan, text):
        notes.append(clipped(plan, text))
    if plan.untimed:
        notes.append(plan.untimed)
    if plan.prompt == "synthetic":
        notes.append("the cache was filled with random keys and values; no prompt was run")
    return tuple(notes)


def _said(notes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(filter(None, notes))


def _weights(step: object) -> tuple[str, ...]:
    """In what form the step reads them, where that is not their own."""
    told: str = getattr(step, "weights_told", "")
    return (told,) if told else ()


# --- steps in turn ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    optimised: Took
    baseline: Took
    optimised_first: bool
    verdict: Verdict  # of its tokens
    kept: int  # tokens our step gave a row


def _warm_up(scene: Scene, ours: Arm, theirs: Arm, listener: Listener) -> None:
    """Where the first timed step stands: clocks, caches, the guard's first checks and the allocator settle."""
    for i in range(scene.plan.warmup):
        listener.stage("warmup", "", i, scene.plan.warmup)
        step(ours)
        step(theirs)


def _pairs(
    scene: Scene, ours: Ours, theirs: Arm, rng: Random, listener: Listener, timer: StepTimer, power: Meter
) -> Iterator[_Pair]:
    plan, done = scene.plan, 0
    while done < plan.iters:
        listener.stage("decode", "", done, plan.iters)
        scene.probe()
        first = rng.random() < 0.5
        times, chosen = {}, {}
        for arm in (ours, theirs) if first else (theirs, ours):
            wait_until_idle()  # the other arm's threads look for work for some milliseconds, and would take our cores
            if arm is ours:
                power.begin()
            timer.begin()
            arm.enqueue()
            timer.enqueued()
            chosen[arm] = arm.tokens()
            times[arm] = timer.took()
            if arm is ours:
                power.end()
        kept = [row[: plan.iters - done] for row in chosen[ours]]
        ends = done == 0 or (plan.advance and done + len(kept[0]) >= plan.iters)
        told = verdict(scene, ours, theirs, kept, chosen[theirs], always=ends)
        yield _Pair(
            optimised=times[ours],
            baseline=times[theirs],
            optimised_first=first,
            verdict=told,
            kept=len(kept[0]),
        )
        done += len(kept[0])
        if plan.advance and done < plan.iters:
            scene.advance(kept)
            for arm in (ours, theirs):
                arm.remember([row[-1] for row in kept])
    listener.stage("decode", "", plan.iters, plan.iters)
