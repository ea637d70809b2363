"""Turn a measured run into its certificate: copy measured values, derive the others, refuse impossible runs."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from autosel import devices, resources
from autosel.certify import certificate as c
from autosel.certify import device
from autosel.certify.certificate import Certificate, Measured
from autosel.certify.derive import derive, lossy, physics
from autosel.certify.limits import refuse_beyond
from autosel.certify.model import architecture
from autosel.certify.physics import refuse_impossible
from autosel.certify.slo import AskedObjective, Objective
from autosel.decode.run import Choice, DecodeRun, OpTime, PromptDigest
from autosel.errors import LedgerError, UsageError
from autosel.fingerprint.describe import remarks
from autosel.values import Fingerprint, Passed, Scalar, to_json

if TYPE_CHECKING:
    from autosel.ledger.store import Evidence, Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Grounds:
    """The grounds of one decision, as the ledger knows them."""

    knobs: Mapping[str, Scalar]
    baseline: str
    parity: c.ArmProof | None
    runner_up: c.RunnerUp | None


def gather(ledger: Ledger, decision_ids: Iterable[int | None]) -> dict[int, Grounds]:
    """Return the grounds by decision. Decisions that this ledger does not have (another wrote the snapshot) are left
    out.
    """
    found = {}
    for number in {n for n in decision_ids if n is not None}:
        try:
            found[number] = _grounds(ledger.evidence(number))
        except LedgerError:
            continue
    return found


def _grounds(stored: Evidence) -> Grounds:
    d = stored.decision
    proofs = [p for arm, p in stored.parities if arm.digest == d.arm.digest and isinstance(p, Passed)]
    parity = None
    if proofs:
        last = proofs[-1]
        parity = c.ArmProof(cases=last.cases, worst=last.worst, worst_case=last.worst_case)
    second = c.RunnerUp(candidate=d.next_best[0], ratio=d.next_best[1]) if d.next_best else None
    return Grounds(knobs=d.arm.knobs, baseline=d.baseline.candidate, parity=parity, runner_up=second)


@dataclass(frozen=True, slots=True, kw_only=True)
class IssueRequest:
    """Facts that the run itself does not have."""

    repro_cmd: str
    objectives: Sequence[Objective] = ()
    price_per_hour: float | None = None
    accept_quality: bool = False  # certify a format that loses more than its limit


def issue(run: DecodeRun, grounds: Mapping[int, Grounds], request: IssueRequest) -> Certificate:
    """Return the sealed certificate of a run. It is not yet part of a file's chain.

    Raises ImpossibleRun for a time that the memory cannot reach, UsageError for lossy arithmetic without a scored text,
    BeyondLimit for a format that loses too much.
    """
    plan = run.plan
    lost = lossy(plan.dtype, plan.shape.weight, plan.weights, plan.shape.stored)
    refuse_unjudged(lost, judged=run.quality is not None)
    refuse_beyond(plan.shape.weight, run.format_quality, accepted=request.accept_quality)
    stated = measured(run, grounds, request)
    made = Certificate.of(stated, derive(stated))
    for name, found in physics(made).items():
        refuse_impossible(name, found)
    return c.seal(made)


def measured(run: DecodeRun, grounds: Mapping[int, Grounds], request: IssueRequest) -> Measured:
    """Return the measured part of a certificate."""
    layers = c.Layers(run=run.plan.layers_run, of=run.plan.full_layers)
    labels = _labels(run.choices)
    return Measured(
        format=c.FORMAT,
        version=c.VERSION,
        timestamp=run.started_at,
        repro_cmd=request.repro_cmd,
        git_sha=git_sha(),
        **_where(run.fingerprint),
        contended=run.fingerprint.contended or run.contended,
        model=c.model_name(run.plan.model.name, layers),
        layers=layers,
        architecture=architecture(run.plan.model),
        dtype=run.plan.dtype,
        weights=run.plan.weights,
        shape=_shape(run),
        mode=run.mode_key,
        options=_options(run),
        prompt=prompt_of(run.prompt),
        warmup=run.plan.warmup,
        timed_by=run.timed_by,
        samples=_samples(run),
        ttft_ms=_ms(run.ttft_ns),
        baseline_ttft_ms=_ms(run.baseline.ttft_ns) if run.baseline else None,
        cost=c.Paid(price_per_hour=request.price_per_hour, energy_joules=run.energy_joules),
        slo=tuple(AskedObjective(objective=o.text) for o in request.objectives),
        bytes_per_step=run.bytes_per_step,
        flops_per_step=run.flops_per_step,
        read_bytes_per_s=run.read_bytes_per_s,
        read_probes=run.read_probes,
        peak_flops=peak_flops(run.fingerprint, run.plan.dtype),
        weights_bytes=run.weights_bytes,
        kv_cache_bytes=run.kv_cache_bytes,
        peak_memory_bytes=run.peak_memory_bytes,
        python_overhead=run.python_overhead_share,
        autosel={label: choice.backend for label, choice in labels.items()},
        knobs={label: dict(_known(grounds, choice).knobs) for label, choice in labels.items()},
        per_op=_per_op(labels, run.per_op, grounds),
        ways=tuple(c.FormTime(half=w.half, form=w.form, step_us=w.step_us, taken=w.taken) for w in run.ways),
        verification=_verification(run),
        quality={**to_json(run.quality), "suspect": run.quality.suspect} if run.quality else None,
        format_quality=_of_format(run, request),
        notes=(*remarks(run.fingerprint), *run.notes, *_unknown_decisions(run.choices, grounds)),
    )


def _of_format(run: DecodeRun, request: IssueRequest) -> dict[str, Scalar] | None:
    return {**to_json(run.format_quality), "accepted": request.accept_quality} if run.format_quality else None


def _verification(run: DecodeRun) -> c.Verification:
    return c.Verification(
        tokens_checked=run.tokens_checked,
        tokens_equal=run.tokens_equal,
        max_logit_error=run.max_logit_error,
        logit_bound=run.logit_bound,
        tokens_open=run.tokens_open,
        against="baseline" if run.baseline else "passes",
    )


def refuse_unjudged(lost: str, *, judged: bool) -> None:
    """Refuse to certify a lossy run (`derive.lossy` names the loss) without a scored text."""
    if lost and not judged:
        raise UsageError(
            f"{lost} without --quality",
            why="the speed of a lossy run means nothing without the quality of its text",
            todo="add --quality TEXT_FILE",
        )


def chained(made: Certificate, sequence: int, previous: str) -> Certificate:
    """Return the certificate as another line of a file."""
    return c.seal(dataclasses.replace(made, sequence=sequence, previous=previous))


def _where(fp: Fingerprint) -> dict[str, Any]:
    identity = {"kind": fp.kind, **to_json(fp.identity)}
    return {
        "device": fp.name,
        "sm": device.instruction_set(identity),
        "hw_id": fp.hw_id,
        "env_id": fp.env_id,
        "environment": to_json(fp.environment),
        "identity": identity,
        "cache_bytes": device.cache_bytes(identity),
    }


def read_rate(fp: Fingerprint) -> float | None:
    """Return the measured read rate of all cores or the GPU in bytes/s; None if it was not measured."""
    found = fp.rates.get(f"read_bytes_per_s@{fp.cpus}" if devices.on_host(fp.kind) else "read_bytes_per_s")
    return found.value if found else None


def peak_flops(fp: Fingerprint, dtype: str) -> float:
    """Return the measured arithmetic rate of the dtype on all cores; 0 if it was not measured."""
    rates = fp.rates
    if devices.on_host(fp.kind):
        names = ("bf16_dot_flops@1", "fma_flops@1") if dtype == "bf16" else ("fma_flops@1",)
        return int(fp.identity["cpus"]) * max((rates[n].value for n in names if n in rates), default=0.0)
    names = ("bf16_matrix_flops", "peak_bf16_flops") if dtype in ("bf16", "fp16") else ("fp32_flops",)
    return next((rates[n].value for n in names if n in rates), 0.0)


@cache
def git_sha() -> str:
    """Return the commit of this checkout, with `-dirty` if it was edited; "" for an installed wheel. A process asks
    once, because it runs what it has loaded."""
    root, git = resources.root(), shutil.which("git")
    if git is None or not (root / ".git").exists():
        return ""
    sha = _git(git, "rev-parse", "HEAD")
    return sha + ("-dirty" if sha and _git(git, "status", "--porcelain", "--untracked-files=no") else "")


def _git(git: str, *words: str) -> str:
    try:
        done = subprocess.run([git, "-C", str(resources.root()), *words], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _ms(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e6


def _shape(run: DecodeRun) -> c.Shape:
    m = run.plan.model
    sizes = {"d": m.d, "Hq": m.Hq, "Hkv": m.Hkv, "D": m.D, "I": m.I, "V": m.V}
    return c.Shape(batch=run.plan.batch, seq=run.plan.seq, prompt=run.prompt_tokens, **sizes)


def prompt_of(digest: PromptDigest | None) -> c.Prompt | None:
    return c.Prompt(tokens_sha256=digest.tokens_sha256, file_sha256=digest.file_sha256) if digest else None


def _options(run: DecodeRun) -> dict[str, Scalar]:
    plan = run.plan
    chosen: dict[str, Scalar] = {
        "mode": run.mode_key.partition(".")[0],
        "step": plan.step,
        "layout": plan.layout,
        "cache": plan.cache,
        "prompt": plan.prompt,
        "prealloc": plan.prealloc,
        "small_batch": plan.small_batch,
        "advance": plan.advance,
        "speculate": plan.speculate,
        "seed": plan.seed,
        "temperature": plan.sampling.temperature,
        "top_k": plan.sampling.top_k,
        "top_p": plan.sampling.top_p,
        "repetition_penalty": plan.sampling.repetition_penalty,
    }
    chosen |= {"saved_bytes": run.saved_bytes} if run.saved_bytes else {}
    chosen |= {} if plan.baseline else {"baseline": False}
    return chosen | ({"page": plan.page} if plan.cache == "paged" else {})


def _samples(run: DecodeRun) -> c.Samples:
    base = run.baseline
    return c.Samples(
        optimised_ns=run.optimised_ns,
        baseline_ns=base.ns if base else (),
        first="".join("1" if flag else "0" for flag in base.optimised_first) if base else "",
        optimised_host_ns=run.optimised_host_ns,
        baseline_host_ns=base.host_ns if base else (),
        kept=run.kept if run.plan.speculate else (),
    )


def _labels(choices: Sequence[Choice]) -> dict[str, Choice]:
    """Return choices by their name in tables; choices with the same name by name and workload."""
    named: dict[str, Choice] = {}
    for choice in choices:
        twice = sum(other.label == choice.label for other in choices) > 1
        named[f"{choice.label} {choice.workload_key}" if twice else choice.label] = choice
    return named


_NOTHING = Grounds(knobs={}, baseline="", parity=None, runner_up=None)


def _known(grounds: Mapping[int, Grounds], choice: Choice) -> Grounds:
    if choice.decision_id is None:
        return _NOTHING
    return grounds.get(choice.decision_id, dataclasses.replace(_NOTHING, baseline="unknown"))


def _per_op(
    labels: Mapping[str, Choice], times: Sequence[OpTime], grounds: Mapping[int, Grounds]
) -> dict[str, c.OpFigures]:
    timed = {(t.workload_key, t.label): t for t in times}
    made = {}
    for label, choice in labels.items():
        known, time = _known(grounds, choice), timed.get((choice.workload_key, choice.label))
        made[label] = c.OpFigures(
            op=choice.op,
            workload=choice.workload_key,
            calls=choice.count_per_step,
            median_us=time.median_us if time else None,
            bytes=time.bytes_moved if time else None,
            flops=time.flops if time else None,
            candidate=choice.candidate,
            baseline=known.baseline,
            state=choice.state,
            decision_id=choice.decision_id,
            parity=known.parity,
            runner_up=known.runner_up,
            served=dict(choice.served),
            reason=choice.reason if choice.decision_id is None else "",
        )
    return made


def _unknown_decisions(choices: Sequence[Choice], grounds: Mapping[int, Grounds]) -> tuple[str, ...]:
    gone = sorted({o.decision_id for o in choices if o.decision_id is not None} - set(grounds))
    return tuple(f"decision {n} is not in this ledger: its parity is not known" for n in gone)
