"""Resolve a workload to the kernel that serves it. If a decision is unknown, stale, foreign, missing or broken, the
baseline serves, with the reason. Nothing here derives, compiles or measures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from autosel import settings
from autosel.candidates import registry
from autosel.candidates.convention import defined
from autosel.candidates.load import load, reader_of
from autosel.candidates.validity import staleness
from autosel.devices import ids_of
from autosel.devices.store import of_hardware
from autosel.dispatch.signature import signature
from autosel.errors import AutoselError
from autosel.guard import Held
from autosel.ledger.conditions import other_conditions
from autosel.ledger.describe import measured, shape
from autosel.ledger.key import current_mode, matters, threads_of
from autosel.ledger.snapshot import Row
from autosel.ops.contract import Op
from autosel.values import SERVING, Decision, Fingerprint, Knobs, Recipe, Workload, length_bucket

log = logging.getLogger(__name__)
UNDECIDED, NOTHING = "no decision for", "nothing is decided"
DECIDE = "  to decide it: autosel record -- PROGRAM, then autosel tune --recorded recorded.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """Describe the kernel that runs a workload, and the reason."""

    workload: Workload
    run: Callable[..., Any]
    candidate: str
    decision: Decision | None
    reason: str
    hw_id: str = ""  # of the device that holds its tensors
    instead: Callable[..., Any] | None = None  # the baseline, if another arm runs that may fail
    parts: tuple[Resolution, ...] = ()  # of a bucket split at a crossover; `run` then chooses by max_len
    part_calls: Callable[[], Sequence[tuple[Resolution, int]]] | None = None  # and counts its choices

    @property
    def served(self) -> bool:
        """Return True if a decision's own arm runs (which may be the baseline, kept), and not a fallback."""
        d = self.decision
        return d is not None and d.state in SERVING and self.candidate == d.arm.candidate

    def beyond_baseline(self, length: int | None = None) -> bool:
        """Return True if another arm than the baseline runs; in a split bucket, at this length."""
        if not self.parts:
            return self.instead is not None
        here = self.workload["L"] if length is None else length
        part = next((p for p in self.parts if here <= p.workload["L"]), None)
        return part is not None and part.instead is not None

    def ran(self, calls: int) -> Sequence[tuple[Resolution, int]]:
        """Split `calls` into the parts that ran, each with its count."""
        return ((self, calls),) if self.part_calls is None else self.part_calls()

    def explain(self) -> str:
        d = self.decision
        lines = [f"{self.workload.op}  {shape(self.workload)} {self.workload.dtype}   {self.candidate}"]
        if d is not None:
            lines.append(f"  decision  {d.id}, {d.state}, {d.created_at[:19]}Z")
            if d.effect is not None and self.served:
                e = d.effect
                lines.append(f"  effect    {e.median:.2f}x ({e.lo:.2f} .. {e.hi:.2f}) over {d.baseline.candidate}")
                lines.append(f"  measured  {measured(d)}")
        reader = reader_of(self.run)
        lines += [f"  layout    {reader.told()}"] if reader is not None else []
        lines += [f"  lengths   to {p.workload['L']}: {p.candidate}" for p in self.parts]
        lines.append(f"  reason    {self.reason}")
        return "\n".join([*lines, DECIDE] if self.reason.startswith((UNDECIDED, NOTHING)) else lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """Hold the decisions of this device: the snapshot's rows by (relevant part of the mode, bucket), or the reason for
    none."""

    device: Fingerprint  # identity alone
    rows: dict[tuple[str, str], list[Row]]
    foreign: Mapping[str, Collection[str]]  # bucket -> other devices (hw_id) with a decision for it
    held: Held
    trouble: str = ""


def index(rows: Sequence[Row], device: Fingerprint, held: Held, trouble: str = "") -> Serving:
    own, *former = ids_of(device)
    found: dict[str, dict[tuple[str, str], list[Row]]] = {hw_id: {} for hw_id in (own, *former)}
    foreign: dict[str, set[str]] = {}
    for row in rows:
        hw_id, mode, bucket = (str(row.document.get(name)) for name in ("hw_id", "mode", "bucket"))
        if hw_id in found:
            found[hw_id].setdefault((matters(mode, device.kind, bucket), bucket), []).append(row)
        else:
            foreign.setdefault(bucket, set()).add(hw_id)
    mine = {key: rows for hw_id in reversed(found) for key, rows in found[hw_id].items()}  # its own id comes first
    return Serving(device=device, rows=mine, foreign=foreign, held=held, trouble=trouble)


Guarded = Callable[[Resolution], Callable[..., Any]]


def resolve(
    op: Op, w: Workload, serving: Serving, guarded: Guarded = lambda part: part.run, *, kind: str = "cpu"
) -> Resolution:
    """Resolve a workload. A decision's fault never raises: the baseline serves.

    `guarded` returns the callable for a part of a split bucket; `kind`: of the device that holds the tensors.
    """
    standin = partial(_baseline, op, w, serving.device)
    if kind != serving.device.kind:
        return standin(None, f"the tensors are on {kind}; the decisions here are for {serving.device.kind}")
    mode = current_mode()
    if why := _not_here(serving, mode):
        return standin(None, why)
    try:
        decisions = _of_one_mode([row.decision for row in _rows(w, serving, mode)], mode)
    except AutoselError as error:
        return standin(None, str(error).replace("\n", ": "))
    if not decisions:
        return standin(None, _why_none(w, serving, mode))
    if decisions[0].length_range is None:
        return _serve(op, w, decisions[0], serving)
    return _split(op, w, decisions, serving, guarded)


def whole(w: Workload, serving: Serving, mode: str) -> Decision | str:
    """Return the decision that serves whole steps of this workload, or why a stored one does not; "" without one."""
    rows = _rows(w, serving, mode)
    if rows and (why := _not_here(serving, mode)):
        return why
    try:
        found = [row.decision for row in rows if row.decision.state in SERVING]
    except AutoselError as error:
        log.warning("%s", error)
        return str(error).replace("\n", ": ")
    unfit = {d.id: serving.held.why(d) or staleness(d) for d in found}
    return next((d for d in found if not unfit[d.id]), next(iter(unfit.values()), ""))


def _not_here(serving: Serving, mode: str) -> str:
    """Return why no decision serves in this process."""
    if settings.get("disable"):
        return "AUTOSEL_DISABLE is set"
    if settings.get("mode") == "off":
        return "AUTOSEL_MODE is off"
    return serving.trouble or _crowded(serving.device, mode)


def _crowded(device: Fingerprint, mode: str) -> str:
    """Return why nothing serves a process with more threads than cores: its kernels would wait for each other."""
    threads = min(threads_of(mode), int(device.identity.get("cpus", 0)))
    if not device.threads or threads <= device.threads:
        return ""
    return f"{threads} threads on {device.threads} of {device.identity['cpus']} cores: set as many threads as cores"


def _rows(w: Workload, serving: Serving, mode: str) -> Sequence[Row]:
    return serving.rows.get((matters(mode, serving.device.kind, w.bucket), w.bucket), [])


def _of_one_mode(decisions: Sequence[Decision], mode: str) -> Sequence[Decision]:
    """Choose among several modes of a GPU's decisions: this process's mode, else the last."""
    if len({d.mode for d in decisions}) < 2:
        return decisions
    own = mode if any(d.mode == mode for d in decisions) else max(decisions, key=lambda d: d.id).mode
    return [d for d in decisions if d.mode == own]


def _serve(op: Op, w: Workload, decision: Decision, serving: Serving) -> Resolution:
    standin = partial(_baseline, op, w, serving.device)
    if decision.state not in SERVING:
        return standin(decision, decision.told)
    unfit = serving.held.why(decision) or staleness(decision)
    if unfit:
        return standin(decision, unfit)
    try:
        run = load(op, decision.arm.recipe, decision.arm.build, decision.arm.knobs)
    except Exception as error:  # a module or library that no longer loads costs speed, but never the caller's request
        log.warning("%s cannot be loaded: %s", decision.arm.candidate, error)
        first = (str(error) or type(error).__name__).splitlines()[0]
        return standin(decision, f"{decision.arm.candidate} cannot be loaded: {first}")
    return Resolution(
        workload=w,
        run=run,
        candidate=decision.arm.candidate,
        decision=decision,
        reason=decision.reason,
        hw_id=serving.device.hw_id,
        instead=standin(decision, "").run if decision.arm.digest != decision.baseline.digest else None,
    )


def _split(op: Op, w: Workload, decisions: Sequence[Decision], serving: Serving, guarded: Guarded) -> Resolution:
    """Make one callable for a bucket whose winner changes with the length; lengths without a row get the baseline."""
    device = serving.device
    spans: list[tuple[int, Resolution]] = []  # (longest length, its kernel)
    covered = length_bucket(w["L"])[0] - 1
    for d in sorted(decisions, key=lambda d: d.length_range or (0, 0)):
        low, high = d.length_range or (0, 0)
        if low > covered + 1:
            gap = _baseline(op, w.at(L=low - 1), device, None, f"no decision for lengths to {low - 1}")
            spans.append((low - 1, gap))
        spans.append((high, _serve(op, w.at(L=high), d, serving)))
        covered = high
    rest = _baseline(op, w, device, None, f"no decision for lengths above {covered}")
    now = next((r for high, r in spans if w["L"] <= high), rest)
    run, counts = _choose_by_length(op, [(high, guarded(r)) for high, r in spans], rest.run)
    each = [replace(r, workload=w) for r in (*(r for _, r in spans), rest)]
    return replace(
        now,
        workload=w,
        run=run,
        instead=None,
        parts=(*(r for _, r in spans),),
        part_calls=lambda: [*zip(each, counts(), strict=True)],
    )


def _choose_by_length(
    op: Op, spans: Sequence[tuple[int, Callable[..., Any]]], rest: Callable[..., Any]
) -> tuple[Callable[..., Any], Callable[[], tuple[int, ...]]]:
    """Make the function that chooses by length, and the one that returns the count of each span, the rest last."""
    s = signature(op)
    counters = ", ".join(f"n{number}" for number in range(len(spans) + 1))
    lines = ["def make():", f"    {counters} = {(0,) * (len(spans) + 1)}", f"    def {s.name}({s.parameters}):"]
    lines.append(f"        nonlocal {counters}")
    for number, (high, _) in enumerate(spans):
        lines += [f"        if max_len <= {int(high)}:", f"            n{number} += 1"]
        lines.append(f"            return run{number}({s.names})")
    lines += [f"        n{len(spans)} += 1", f"        return rest({s.names})"]
    lines += ["    def counts():", f"        return {counters}", f"    return {s.name}, counts"]
    scope: dict[str, Any] = {"rest": rest, **{f"run{n}": run for n, (_, run) in enumerate(spans)}}
    made: tuple[Callable[..., Any], Callable[[], tuple[int, ...]]] = defined("make", lines, scope)()
    return made


def _why_none(w: Workload, serving: Serving, mode: str) -> str:
    here = matters(mode, serving.device.kind, w.bucket)
    own = ((m, serving.device.hw_id) for m, bucket in serving.rows if bucket == w.bucket)
    other = (("", hw_id) for hw_id in serving.foreign.get(w.bucket, ()))
    told = other_conditions((*own, *other), mode=here, device=serving.device, identify=of_hardware)
    return told or f"{UNDECIDED} {w.bucket}"


# --- baseline -----------------------------------------------------------------------------------------------------


def _baseline(op: Op, w: Workload, device: Fingerprint, decision: Decision | None, reason: str) -> Resolution:
    candidate = registry.baseline(op.name)
    run = _function(op, candidate.recipe(w, device, Knobs()))
    name, hw_id = candidate.name, device.hw_id
    return Resolution(workload=w, run=run, candidate=name, decision=decision, reason=reason, hw_id=hw_id)


@lru_cache(maxsize=64)
def _function(op: Op, recipe: Recipe) -> Callable[..., Any]:
    return load(op, recipe, "", {})
