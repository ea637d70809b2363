"""A made-up decode run whose figures follow from a few numbers, for tests of what is made of a run."""

from __future__ import annotations

from hashlib import sha256
from random import Random
from typing import Any

from autosel import models
from autosel.certify.certificate import Certificate, Proof, RunnerUp
from autosel.certify.evidence import Grounds
from autosel.certify.issue import Request, issue
from autosel.decode.run import Choice, DecodeRun, OpTime, Plan, PromptDigest
from autosel.values import Fingerprint, Rate

READ = 40e9  # bytes per second, before each pair
CEILING = 42e9  # the best window
OPS = {  # label: (op, calls a step, share of the bytes)
    "gate_up": ("gate_up", 16, 0.44),
    "gemv down": ("linear", 16, 0.21),
    "norm_qkv": ("norm_qkv", 16, 0.09),
    "gemv o": ("linear", 16, 0.06),
    "lm_head": ("lm_head", 1, 0.16),
    "attn": ("attn", 16, 0.03),
    "rope": ("rope", 16, 0.0001),
}


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
    """A run of llama-1b: steps of log-normal `noise` around the medians asked for."""
    plan_changes = {k: changes.pop(k) for k in list(changes) if k in Plan.__dataclass_fields__}
    plan = Plan(**{"model": models.load("llama-1b"), "seq": 2048, "iters": 40} | plan_changes)
    rng = Random(seed)

    def steps(ms: float) -> tuple[int, ...]:
        return tuple(int(ms * 1e6 * rng.lognormvariate(0, noise)) for _ in range(plan.iters))

    moved = plan.model.weight_bytes_per_step(plan.dtype) + plan.model.kv_bytes_read(plan.seq, plan.dtype)
    made: dict[str, Any] = {
        "plan": plan,
        "fingerprint": fingerprint(),
        "mode_key": "eager.t2.highest",
        "started_at": "2026-11-20T12:00:00+00:00",
        "seconds": 12.0,
        "optimised_ns": steps(step_ms),
        "baseline_ns": steps(step_ms * speedup),
        "optimised_first": tuple(rng.random() < 0.5 for _ in range(plan.iters)),
        "ttft_ns": 900_000_000,
        "baseline_ttft_ns": 1_000_000_000,
        "prompt_tokens": plan.seq - 1,
        "prompt": changes.pop("prompt_digest", None) or prompt_digest(plan),
        "bytes_per_step": moved,
        "flops_per_step": moved,
        "weights_bytes": plan.model.weight_bytes(plan.dtype),
        "kv_cache_bytes": plan.model.kv_bytes_per_token(plan.dtype) * plan.seq,
        "peak_memory_bytes": 4 << 30,
        "read_bytes_per_s": CEILING,
        "read_probes": (READ,) * plan.iters,
        "choices": tuple(_choice(i, label, plan.iters) for i, label in enumerate(OPS)),
        "per_op": tuple(_time(label, moved, step_ms) for label in OPS),
        "tokens_checked": 50,
        "tokens_equal": 50,
        "max_logit_error": 0.01,
        "logit_bound": 0.05,
        "python_overhead_share": 0.01,
    }
    return DecodeRun(**made | changes)


def prompt_digest(plan: Plan) -> PromptDigest | None:
    """Of the made-up tokens that such a plan would be fed."""
    if plan.prompt == "synthetic":
        return None
    tokens = sha256(f"{plan.prompt} {plan.seed} {plan.seq}".encode()).hexdigest()
    named = plan.prompt != "random"
    return PromptDigest(tokens_sha256=tokens, file_sha256=sha256(plan.prompt.encode()).hexdigest() if named else "")


def _choice(number: int, label: str, steps: int) -> Choice:
    op, calls, _ = OPS[label]
    decided = label != "rope"
    return Choice(
        op=op,
        label=label,
        workload_key=f"{op}/{label}/bf16",
        count_per_step=calls,
        backend="CPP" if decided else "TORCH",
        candidate=f"cpp:{op}" if decided else f"torch:{op}",
        decision_id=number + 1 if decided else None,
        state="promoted" if decided else "baseline",
        served=((f"cpp:{op}" if decided else f"torch:{op}", calls * steps),),
    )


def _time(label: str, moved: int, step_ms: float) -> OpTime:
    op, calls, share = OPS[label]
    return OpTime(
        op=op,
        label=label,
        workload_key=f"{op}/{label}/bf16",
        count_per_step=calls,
        median_us=max(share * 0.97, 0.005) * step_ms * 1e3 / calls,
        bytes_moved=int(moved * share / calls),
        flops=int(moved * share / calls * (4 if op == "attn" else 1)),
    )


GROUNDS = {
    n: Grounds(
        knobs={"rows": 8, "tile": 128},
        baseline="torch:eager",
        parity=Proof(cases=47, worst=0.61, worst_case="one NaN per row"),
        runner_up=RunnerUp(candidate="torch:packed", ratio=1.9),
    )
    for n in range(1, len(OPS))
}


def certificate(run: DecodeRun | None = None, **request: Any) -> Certificate:
    asked = {"repro_cmd": "autosel run --model llama-1b --seq 2048 --iters 40", **request}
    return issue(run or decode_run(), GROUNDS, Request(**asked))
