"""Where a step's time goes: each op's share, its part of the device's limit, and what limits it.

floor max(bytes / median read rate in the run, FLOPs / arithmetic rate) of all calls of one step roofline floor / time
limit memory or compute, whichever floor is higher; overhead where neither explains a quarter of the time
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from autosel.certify.certificate import Certificate, OpFigures
from autosel.decode.run import untimed
from autosel.values import to_json

Limit = Literal["memory", "compute", "overhead", "cache", "unknown"]
EXPLAINED = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow:
    """One op of the step: all its calls together, in microseconds. `share` is of all timed ops and the rest."""

    label: str
    calls: int
    call_us: float
    time_us: float
    share: float
    bytes: int
    flops: int
    bytes_per_s: float
    roofline: float
    limit: Limit
    backend: str
    candidate: str
    decision_id: int | None
    runner_up: str
    runner_up_ratio: float | None


FUSED_OPS = {"attn": "norm_qkv", "mlp": "gate_up", "step": "step"}
INSTEAD = {
    "fused": "",
    "normed": "norm and projections apart",
    "added": "residual and norm in one, projections apart",
    "team": "one call for all of it",
    "packed": "one call for all of it, from packed weights",
    "graph": "a graph of its ops",
    "ops": "a call an op",
    "torch": "PyTorch alone",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Effect of one form of half a layer: time of the whole step with it, over the time with the form that was taken.

    A ratio below 1 occurs only within noise.
    """

    op: str  # the fused op in question
    taken: str  # the form that serves
    other: str
    step_over_taken: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Times of a step's ops.

    `rest_us` is the part of the median step that belongs to no op (autosel's Python, norms inside fused ops, gaps); it
    is 0 if the ops timed alone add up to more than the step.
    """

    model: str
    step_us: float
    rows: tuple[AuditRow, ...]
    rest_us: float
    read_bytes_per_s: float
    peak_flops: float
    untimed: tuple[str, ...]
    untimed_because: str = ""  # why no op was timed
    attribution: tuple[Attribution, ...] = ()

    @property
    def rest_share(self) -> float:
        return self.rest_us / self.whole_us

    @property
    def whole_us(self) -> float:
        return sum(r.time_us for r in self.rows) + self.rest_us


def proof_of_use(made: Certificate) -> str:
    """Return how many calls the timed steps made, and if candidates other than the named ones served some."""
    counts = [(o.candidate, name, n) for o in made.per_op.values() for name, n in o.served.items()]
    total, others = sum(n for *_, n in counts), sum(n for named, name, n in counts if name != named)
    if not total:
        return ""
    by = f"{others} of them by candidates that no longer serve" if others else "all by the candidates named"
    return f"{total} calls counted in {made.iters} steps, {by}"


def audit(made: Certificate) -> Audit:
    """Compute the audit from the certificate, slowest op first."""
    step_us = made.latency_ms.med * 1e3
    timed = {label: o for label, o in made.per_op.items() if o.median_us}
    spent = sum(_time_us(o) for o in timed.values())
    whole = max(step_us, spent)
    rows = [_row(label, o, made, whole) for label, o in timed.items()]
    return Audit(
        model=made.model,
        step_us=step_us,
        rows=tuple(sorted(rows, key=lambda r: -r.time_us)),
        rest_us=whole - spent,
        read_bytes_per_s=made.read_median_bytes_per_s,
        peak_flops=made.peak_flops,
        untimed=tuple(label for label in made.per_op if label not in timed),
        untimed_because="" if timed else _untimed(made),
        attribution=attribution(made),
    )


def _untimed(made: Certificate) -> str:
    if made.mode.startswith("torch."):
        return "no op was timed separately: PyTorch runs the step"
    return untimed(prealloc=made.options.get("prealloc") is not False, drafts=bool(made.options.get("speculate")))


def attribution(made: Certificate) -> tuple[Attribution, ...]:
    """Return an attribution for every form that was not taken."""
    taken = {w.half: w for w in made.ways if w.taken}
    return tuple(
        Attribution(
            op=FUSED_OPS[w.half],
            taken=taken[w.half].form,
            other=w.form,
            step_over_taken=w.step_us / taken[w.half].step_us,
        )
        for w in made.ways
        if not w.taken
    )


def document(found: Audit) -> dict[str, Any]:
    """Return the audit as JSON, with computed shares."""
    return {**to_json(found), "rest_share": found.rest_share}


def _time_us(o: OpFigures) -> float:
    return (o.median_us or 0.0) * o.calls


def _row(label: str, o: OpFigures, made: Certificate, whole_us: float) -> AuditRow:
    time_us = _time_us(o)
    moved, flops = (o.bytes or 0) * o.calls, (o.flops or 0) * o.calls
    roofline, limit = _limits(time_us, moved, flops, made)
    return AuditRow(
        label=label,
        calls=o.calls,
        call_us=o.median_us or 0.0,
        time_us=time_us,
        share=time_us / whole_us,
        bytes=moved,
        flops=flops,
        bytes_per_s=moved / time_us * 1e6,
        roofline=roofline,
        limit=limit,
        backend=made.autosel[label],
        candidate=o.candidate,
        decision_id=o.decision_id,
        runner_up=o.runner_up.candidate if o.runner_up else "",
        runner_up_ratio=o.runner_up.ratio if o.runner_up else None,
    )


def _limits(time_us: float, moved: int, flops: int, made: Certificate) -> tuple[float, Limit]:
    """Return the fraction of the roofline and its limit. Above 1.1 the bytes came from a cache."""
    memory = moved / made.read_median_bytes_per_s * 1e6 if made.read_median_bytes_per_s else 0.0
    compute = flops / made.peak_flops * 1e6 if made.peak_flops else 0.0
    fraction = max(memory, compute) / time_us
    if not memory and not compute:
        return 0.0, "unknown"
    if fraction < EXPLAINED:
        return fraction, "overhead"
    if compute > memory:
        return fraction, "compute"
    return fraction, "memory" if fraction <= 1.1 else "cache"
