"""Measure a decode: the optimised step and the eager baseline in turn, in coin-flipped order, on one model and one
cache.

Both arms are fed the same tokens in the same state, so that tokens and logits can be compared step by step, and
disturbances of the machine affect both. A plan without a baseline runs the optimised step only.
"""

from __future__ import annotations

import statistics
import time
from datetime import UTC, datetime
from typing import Any

import torch

from autosel import devices, dispatch, fingerprint
from autosel.candidates.layouts import STORE
from autosel.decode import graph
from autosel.decode.account import choices_of, overhead_ns, proven, saved_bytes, time_ops
from autosel.decode.arms import Baseline, WrittenArm, our_arm, step
from autosel.decode.choose import again, choose
from autosel.decode.hold import holding
from autosel.decode.original import Original
from autosel.decode.packed import forget, make_room
from autosel.decode.persistent import kind_of, refuse_unsupported
from autosel.decode.quality import clipped, format_quality, quality
from autosel.decode.rope import frequencies
from autosel.decode.run import EXECUTION, WHOLE, Chosen, DecodeRun, Listener, Plan, Silent, Text
from autosel.decode.scene import Clock, set_scene
from autosel.decode.timeline import timeline
from autosel.decode.turns import Turns
from autosel.decode.weights import Weights
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
        power = device.meter()
        turns = Turns(scene=scene, ours=ours, theirs=theirs, timer=device.timer(clock), power=power)
        with holding(ledger, fp, getattr(ours, "list", None)):
            turns.warm_up()
            steps = turns.timed()
            refuse_wrong(getattr(ours, "list", None))
            served = turns.uses.served()
            power.after(lambda: step(ours), len(steps))
        written = ours.list if isinstance(ours, WrittenArm) else None
        choices = choices_of(written, plan) if written else turns.uses.choices(plan, len(steps))
        listener.stage("ops", "", 0, 1)
        per_op = time_ops(written, plan, clock) if written else ()
        spans = timeline(written, plan, clock) if written and traced else ()
        idle_ns = overhead_ns(written, clock) if written else None
        found = quality(scene, text, chosen) if text else None
        against = format_quality(scene, original, chosen) if original else None
    told = (getattr(written, "weights_told", ""), turns.told(), weights.note, power.why or power.told)
    context = plan.seq + (len(steps) - 1) // 2 if plan.advance else plan.seq
    return DecodeRun(
        plan=plan,
        fingerprint=fp,
        mode_key=current_mode(EXECUTION[chosen.form]),
        started_at=started_at,
        seconds=time.monotonic() - began,
        optimised_ns=tuple(s.optimised.ns for s in steps),
        baseline=turns.baseline(),
        kept=tuple(s.kept for s in steps),
        waited=turns.waited,
        timed_by=turns.timer.by,
        optimised_host_ns=tuple(s.optimised.host_ns for s in steps if turns.timer.by != "host"),
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
        notes=_notes(plan, chosen, text, *told, EARLIER if earlier else ""),
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
EARLIER = "the form of the step was chosen by an earlier run of the same suite"


def _notes(plan: Plan, chosen: Chosen, text: Text | None = None, *found: str) -> tuple[str, ...]:
    """Return the notes of a run; `found` are those of its parts, "" for none."""
    notes = [f"chain: attention {chosen.chain.attn}, feed-forward {chosen.chain.mlp}"]
    if chosen.form in WHOLE:
        notes = [kind_of(plan.device).taken]
    if chosen.form == "torch":
        notes = ["step: PyTorch's own, as before autosel"]
    if chosen.form == "graph":
        notes.append("step: a graph of its ops, replayed")
    notes += [chosen.note, clipped(plan, text) if text is not None else "", plan.untimed]
    if not plan.baseline:
        notes.append(ALONE)
    if plan.prompt == "synthetic":
        notes.append("the cache was filled with random keys and values; no prompt was run")
    return tuple(filter(None, (*notes, *found)))
