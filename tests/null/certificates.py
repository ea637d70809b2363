"""Build a synthetic decode run whose figures follow from a few numbers, for tests of certificates and reports."""

from __future__ import annotations

import dataclasses
from hashlib import sha256
from random import Random
from typing import Any

from autosel import models, ops
from autosel.certify.certificate import ArmProof, Certificate, RunnerUp, decode, encode, seal, values
from autosel.certify.derive import derive
from autosel.certify.issue import Grounds, IssueRequest, issue
from autosel.decode.run import BaselineRun, Choice, DecodeRun, OpTime, Plan, PromptDigest
from autosel.models import cost
from autosel.values import Fingerprint, Rate, digest

READ = 40e9  # bytes per second, before each pair
CEILING = 42e9  # the best window
# Changes of a run that drafts four tokens per step and keeps 2.5, including its own.
DRAFTED: dict[str, Any] = {"speculate": 4, "advance": True, "iters": 50, "kept": (1, 4, 2, 3) * 5}
UNDECIDED = ("rope", "rmsnorm", "kv_append")


def fingerprint(**changes: Any) -> Fingerprint:
    identity: dict[str, Any] = {
        "vendor": "AuthenticAMD", "model": "Test CPU", "isa": ["avx2", "fma", "f16c"], "cpus": 2, "l3_bytes": 32 << 20,
        "l3_domains": 1,
    }  # fmt: skip
    rate = Rate(value=1e11, unit="FLOP/s", spread=0.0, source="made up")
    return Fingerprint(
        kind="cpu",
        name="Test CPU",
        identity=identity | changes,
        environment={"torch": "2.13.0", "compiler": "g++ 12.2.0"},
        rates={"fma_flops@1": rate},
    )


def decode_run(
    *, seed: int = 1, step_ms: float = 65.0, speedup: float = 2.7, noise: float = 0.02, **changes: Any
) -> DecodeRun:
    """Return a run of llama-1b: steps with log-normal `noise` around the medians; `kept`: the kept drafts."""
    plan_changes = {k: changes.pop(k) for k in list(changes) if k in Plan.__dataclass_fields__}
    plan = Plan(**{"model": models.load("llama-1b"), "seq": 2048, "iters": 50} | plan_changes)
    rng, kept = Random(seed), changes.pop("kept", (1,) * plan.iters)
    assert sum(kept) == plan.iters

    def steps(ms: float) -> tuple[int, ...]:
        return tuple(int(ms * 1e6 * rng.lognormvariate(0, noise)) for _ in kept)

    context = plan.seq + (len(kept) - 1) // 2 if plan.advance else plan.seq
    room, page = plan.longest, plan.page if plan.cache == "paged" else 0
    parts = ops_of(plan)
    made: dict[str, Any] = {
        "plan": plan,
        "fingerprint": fingerprint(),
        "mode_key": "eager.t2.highest",
        "started_at": "2026-11-20T12:00:00+00:00",
        "seconds": 12.0,
        "optimised_ns": steps(step_ms),
        "baseline": None,
        "kept": kept,
        "ttft_ns": 900_000_000,
        "prompt_tokens": plan.seq - 1,
        "prompt": changes.pop("prompt_digest", None) or prompt_digest(plan),
        "bytes_per_step": cost.bytes_per_step(plan.shape, plan.dtype, plan.batch, context),
        "flops_per_step": cost.flops_per_step(plan.shape, plan.batch, context),
        "weights_bytes": plan.shape.weight_bytes(plan.dtype),
        "kv_cache_bytes": cost.cache_bytes(plan.shape, plan.dtype, rows=plan.batch, room=room, page=page),
        "peak_memory_bytes": 4 << 30,
        "read_bytes_per_s": CEILING,
        "read_probes": (READ,) * len(kept),
        "choices": tuple(_choice(i, part, len(kept)) for i, part in enumerate(parts)),
        "per_op": tuple(_time(part, parts, step_ms) for part in parts),
        "tokens_checked": plan.iters * plan.batch,
        "tokens_equal": plan.iters * plan.batch,
        "max_logit_error": 0.01,
        "logit_bound": 0.05,
        "python_overhead_share": 0.01,
    }
    if plan.baseline:
        slower, coins = steps(step_ms * speedup), tuple(rng.random() < 0.5 for _ in kept)
        made["baseline"] = BaselineRun(ns=slower, optimised_first=coins, ttft_ns=1_000_000_000)
    return DecodeRun(**made | changes)


def prompt_digest(plan: Plan) -> PromptDigest | None:
    """Return the digest of the synthetic tokens for such a plan."""
    if plan.prompt == "synthetic":
        return None
    tokens = sha256(f"{plan.prompt} {plan.seed} {plan.seq}".encode()).hexdigest()
    named = plan.prompt != "random"
    return PromptDigest(tokens_sha256=tokens, file_sha256=sha256(plan.prompt.encode()).hexdigest() if named else "")


def ops_of(plan: Plan) -> tuple[models.Named, ...]:
    """Return the ops of a fused step at the plan's context."""
    listed = models.step(plan.shape, batch=plan.batch, context=plan.seq, dtype=plan.dtype)
    taken = [n for n in listed if n.chain != "split" and n.workload.op != "sample"]
    return tuple(n for n in taken if n.workload.op != "attn" or n.workload["L"] == plan.seq)


def _choice(number: int, part: models.Named, steps: int) -> Choice:
    op, calls = part.workload.op, part.calls_per_step
    decided = op not in UNDECIDED
    return Choice(
        op=op,
        label=part.label,
        workload_key=part.workload.key,
        count_per_step=calls,
        backend="CPP" if decided else "TORCH",
        candidate=f"cpp:{op}" if decided else f"torch:{op}",
        decision_id=number + 1 if decided else None,
        state="promoted" if decided else "baseline",
        served=((f"cpp:{op}" if decided else f"torch:{op}", calls * steps),),
    )


def _time(part: models.Named, parts: tuple[models.Named, ...], step_ms: float) -> OpTime:
    w, calls = part.workload, part.calls_per_step
    whole = sum(ops.find(p.workload.op).bytes_moved(p.workload) * p.calls_per_step for p in parts)
    moved = ops.find(w.op).bytes_moved(w)
    return OpTime(
        op=w.op,
        label=part.label,
        workload_key=w.key,
        count_per_step=calls,
        median_us=max(moved * calls / whole * 0.97, 0.005) * step_ms * 1e3 / calls,
        bytes_moved=moved,
        flops=ops.find(w.op).flops(w),
    )


GROUNDS = {
    n: Grounds(
        knobs={"rows": 8, "tile": 128},
        baseline="torch:eager",
        parity=ArmProof(cases=47, worst=0.61, worst_case="one NaN per row"),
        runner_up=RunnerUp(candidate="torch:packed", ratio=1.9),
    )
    for n in range(1, 20)
}


def rewritten(made: Certificate, **fields: Any) -> Certificate:
    """Return the certificate with these fields; recompute every figure that follows from them, and the seal."""
    changed = dataclasses.replace(made, **fields)
    if "identity" in fields:
        changed = dataclasses.replace(changed, hw_id=digest(changed.identity))
        changed = dataclasses.replace(changed, env_id=digest({"hw_id": changed.hw_id, **changed.environment}))
    return decode(encode(seal(dataclasses.replace(changed, **values(derive(changed))))))


def certificate(run: DecodeRun | None = None, **request: Any) -> Certificate:
    asked = {"repro_cmd": "autosel run --model llama-1b --seq 2048 --iters 40", **request}
    return issue(run or decode_run(), GROUNDS, IssueRequest(**asked))
