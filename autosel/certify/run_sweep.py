"""Measure a sweep: tune each batch, measure each cell of the grid, then bisect where winners change along the batch.

request (grid) -> cells that fit -> tuned -> cells -> changes -> changes bisected by tuning between -> sweep
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from autosel import devices, dispatch, fingerprint, pipeline
from autosel.certify import issue, run, sweep
from autosel.certify.certificate import Layers, model_name
from autosel.certify.derive import against_baseline, baseline_interval_ms, claimed_interval, headline_roofline
from autosel.certify.run import Stage, Within, foreseen
from autosel.certify.sweep import MOST_CELLS, CellServing, Crossing, Figures, OpServing, Sweep, SweepCell
from autosel.decode.measure import measure, refuse
from autosel.decode.run import DecodeRun, Plan
from autosel.decode.safetensors import open_folder
from autosel.decode.weights import load_weights, memory_need
from autosel.errors import AutoselError, ParityError, Stopped, UsageError, out_of_memory
from autosel.ledger.describe import bytes_text
from autosel.ledger.store import Ledger
from autosel.models import ModelShape
from autosel.models.workloads import Named, step
from autosel.tuning.ended import stoppable, unfinished
from autosel.values import Decision, DTypeName


class SweepListener(Protocol):
    """Listener of a sweep's progress. Each tuning, and the measuring, has its own context manager."""

    def tuning(self, budget_s: float) -> AbstractContextManager[pipeline.TuneListener]: ...

    def measuring(self) -> AbstractContextManager[run.RunListener]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A grid to measure. Raises UsageError for values that no run can have. `again` is the command to continue."""

    model: ModelShape
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    dtype: DTypeName
    weights: str = "random"
    layers: int = 0
    iters: int = 20
    warmup: int = 2
    device: str = devices.HOST
    seed: int = 0
    tunes: bool = True
    effort: str = "quick"
    budget_s: float = 0.0  # budget of tuning
    again: str = ""
    traffic: Sequence[sweep.Lengths] = ()  # the user's own lengths, and their file
    traffic_file: str = ""

    def __post_init__(self) -> None:
        cells = len(self.contexts) * len(self.batches)
        if cells > MOST_CELLS:
            raise UsageError(f"a grid of {cells} cells", why=f"at most {MOST_CELLS} are measured")
        assert self.plans()

    def plans(self) -> list[Plan]:
        """Return the plans of the grid, batch by batch."""
        return [
            Plan(
                model=self.model,
                layers=self.layers,
                weights=self.weights,
                prompt="synthetic",
                dtype=self.dtype,
                batch=batch,
                seq=context,
                iters=self.iters,
                warmup=self.warmup,
                device=self.device,
                seed=self.seed,
            )
            for batch in self.batches
            for context in self.contexts
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSweep:
    """A sweep and its `trouble`: wrong results first, then an early end, then undecided workloads."""

    sweep: Sweep
    trouble: AutoselError | None


def measure_sweep(request: Grid, ledger: Ledger | None, listener: SweepListener) -> MeasuredSweep:
    """Measure a decode step at every context and batch, baseline and optimised in turn.

    Settled decisions are not measured again. A cell that does not fit or fails does not stop the others; Ctrl-C skips
    the remaining ones. Raises UsageError, LedgerError; Stopped for Ctrl-C before the first cell.
    """
    plans = request.plans()
    first = plans[0]
    if first.weights != "random":
        open_folder(Path(first.weights).expanduser())  # fails before minutes of tuning if weights cannot be loaded
    started, memory = datetime.now(UTC).isoformat(timespec="seconds"), devices.named(first.device).free_bytes()
    sized = [(plan, _sized(plan, memory)) for plan in plans]
    decisions, left = _tuned(request, [plan for plan, cell in sized if not cell.why], ledger, listener)
    measured, ended = _measured(request, sized, ledger, listener)
    cells = sweep.with_doubts(measured, {d.id for d in decisions if _is_undecided(d)})
    changes, narrowed = sweep.changes_of(sweep.served(cells), decisions), None
    if request.tunes and not isinstance(ended, Stopped):
        try:
            changes, narrowed = _narrowed(request, cells, changes, ledger, listener)
        except AutoselError as error:  # the measurements are still reported
            narrowed = error
    fp = fingerprint.take(first.device)
    found = Sweep(
        model=model_name(first.model.name, Layers(run=first.layers_run, of=first.full_layers)),
        dtype=first.dtype,
        device=fp.name,
        hw_id=fp.hw_id,
        env_id=fp.env_id,
        git_sha=issue.git_sha(),
        timestamp=started,
        memory_bytes=memory,
        iters=first.iters,
        cells=tuple(cells),
        changes=changes,
        traffic=sweep.weigh(request.traffic, cells, request.traffic_file) if request.traffic else None,
    )
    return MeasuredSweep(sweep=found, trouble=wrong(found) or ended or left or narrowed)


def _sized(plan: Plan, memory_bytes: int) -> SweepCell:
    """Return the cell before it is measured; `why` says why it does not fit, or is ""."""
    need = memory_need(plan)
    why = "" if need <= memory_bytes else f"takes {bytes_text(need)} of memory; {bytes_text(memory_bytes)} are free"
    return SweepCell(batch=plan.batch, context=plan.seq, need_bytes=need, figures=None, why=why)


def _is_undecided(d: Decision) -> bool:
    return d.verdict is not None and d.verdict.outcome == "undecided"


def wrong(found: Sweep) -> AutoselError | None:
    """Return the steps that did not verify as an error; None if all did."""
    bad = [c for c in found.cells if c.figures is not None and not c.figures.verified]
    if not bad:
        return None
    cells = ", ".join(f"batch {c.batch} context {c.context}" for c in bad[:4])
    return ParityError(
        "steps did not verify: logits beyond their bound", why=cells, todo="measure one with `run` to see the error"
    )


Tuned = tuple[list[Decision], AutoselError | None]  # decisions, and what stayed undecided


def _tuned(request: Grid, plans: Sequence[Plan], ledger: Ledger | None, listener: SweepListener) -> Tuned:
    """Tune every batch up to the longest context that fits."""
    named: list[Named] = []
    for batch in sorted({plan.batch for plan in plans}) if request.tunes else ():
        longest = max(plan.seq for plan in plans if plan.batch == batch)
        named += step(plans[0].shape, batch=batch, context=longest, dtype=request.dtype)
    return _decided(request, named, ledger, listener)


def _decided(request: Grid, named: Sequence[Named], ledger: Ledger | None, listener: SweepListener) -> Tuned:
    """Tune these workloads. Raises Stopped, LedgerError."""
    if not named:
        return [], None
    if ledger is None:
        raise UsageError("a sweep that tunes needs a ledger", todo="use --no-tune to measure with existing decisions")
    asked = pipeline.Request(
        workloads=tuple({n.workload.key: n for n in named}.values()),
        effort=request.effort,
        device=request.device,
        budget_s=request.budget_s,
        seed=request.seed,
    )
    with listener.tuning(request.budget_s) as told, stoppable(told, len(asked.workloads), request.again) as counted:
        found = pipeline.tune(asked, ledger, counted)
    dispatch.refresh()
    return list(found.decisions), unfinished(found, request.again)


def _measured(
    request: Grid, sized: Sequence[tuple[Plan, SweepCell]], ledger: Ledger | None, listener: SweepListener
) -> tuple[list[SweepCell], AutoselError | None]:
    """Measure each cell that fits, with weights loaded once; also return the error that cost some of them.

    A sweep that tunes also decides the form of whole steps if that is undecided.
    """
    titles = [f"cell {i} of {len(sized)}, batch {p.batch}, context {p.seq}" for i, (p, _) in enumerate(sized, 1)]
    cells, weights, stopped, failed = [], None, False, 0
    with listener.measuring() as told:
        _expect([(title, plan) for title, (plan, cell) in zip(titles, sized, strict=True) if not cell.why], told)
        for title, (plan, cell) in zip(titles, sized, strict=True):
            figures, why = None, cell.why
            if not (why or stopped):
                refuse(plan)
                within = Within(told, title)
                try:
                    weights = weights or load_weights(plan, within)
                    run_ = measure(plan, weights, listener=within, ledger=ledger, decides=request.tunes)
                    figures = figures_of(run_)
                except KeyboardInterrupt:
                    stopped = True
                except Exception as error:
                    why = _cost(error, loaded=weights is not None)
                    failed += isinstance(error, AutoselError)
            why = why or ("" if figures else "stopped before it was measured")
            cells.append(replace(cell, figures=figures, why=why))
    return cells, _ended(cells, failed, stopped=stopped)


def _expect(cells: Sequence[tuple[str, Plan]], listener: run.RunListener) -> None:
    seconds: dict[Stage, float] = {}
    for title, plan in cells:
        seconds |= {(title, stage): s for stage, s in foreseen(plan, listener, loads=not seconds).items()}
    listener.expect(seconds)


def _cost(error: Exception, *, loaded: bool) -> str:
    """Return why a cell has no figures. Raise again any error that concerns all cells, and bugs of autosel."""
    memory = out_of_memory(error)
    if memory is not None:  # another process took memory that was free when the cells were sized
        return f"the device ran out of memory: {memory.why}".rstrip(": ")
    if not (loaded and isinstance(error, AutoselError)):
        raise error
    return " ".join("; ".join(filter(None, (error.what, error.why))).split())


def _ended(cells: Sequence[SweepCell], failed: int, *, stopped: bool) -> AutoselError | None:
    """Return Stopped after Ctrl-C, or an error if cells failed. A cell that ran out of memory is a result, not a
    failure.
    """
    done = sum(c.figures is not None for c in cells)
    if stopped:
        return Stopped(f"stopped; {done} of {len(cells)} cells measured", todo="what was decided is kept")
    return AutoselError(f"{failed} of {len(cells)} cells failed", why="the table gives each reason") if failed else None


def figures_of(run_: DecodeRun) -> Figures:
    """Return a cell's figures, computed as in a certificate. Raises ImpossibleRun as a certificate does."""
    made, plan = issue.issue(run_, {}, issue.IssueRequest(repro_cmd="")), run_.plan
    v, base = made.verification, against_baseline(made)
    named = step(plan.shape, batch=plan.batch, context=plan.seq, dtype=plan.dtype)
    buckets = {n.workload.key: n.workload.bucket for n in named}
    return Figures(
        p50_ms=made.latency_ms.med,
        p95_ms=made.latency_ms.p95,
        tokens_per_s=made.tokens_per_sec,
        baseline_ms=base.med,
        speedup=base.speedup,
        speedup_interval=claimed_interval(made),
        roofline=headline_roofline(made),
        read_bytes_per_s=made.read_bytes_per_s,
        p50_interval_ms=made.latency_interval_ms if claimed_interval(made) else None,
        baseline_interval_ms=baseline_interval_ms(made) if claimed_interval(made) else None,
        contended=made.contended,
        verified=v.max_logit_error <= v.logit_bound,
        chain=next((note for note in run_.notes if note.startswith("chain:")), ""),
        serving=tuple(
            OpServing(
                op=c.op,
                label=c.label,
                bucket=buckets.get(c.workload_key, c.workload_key),
                calls=c.count_per_step,
                candidate=c.candidate,
                state=c.state,
                decision_id=c.decision_id,
            )
            for c in run_.choices
        ),
    )


def _narrowed(
    request: Grid,
    cells: Sequence[SweepCell],
    changes: Sequence[Crossing],
    ledger: Ledger | None,
    listener: SweepListener,
) -> tuple[tuple[Crossing, ...], AutoselError | None]:
    """Bisect changes along the batch by tuning batches between; every step stores a decision."""
    base = request.plans()[0]
    points = [p for p in sweep.served(cells) if p.context == base.seq]
    trouble: AutoselError | None = None
    tried: set[int] = {p.batch for p in points}
    while todo := [m for m in sweep.middles(sweep.changes_of(points)) if m not in tried]:
        for batch in todo:
            tried.add(batch)
            named = step(base.shape, batch=batch, context=base.seq, dtype=base.dtype)
            decisions, left = _decided(request, named, ledger, listener)
            trouble = trouble or left
            points.append(_would_serve(batch, base.seq, named, decisions))
    along = (c for c in sweep.changes_of(points) if c.axis == "batch")
    return (*along, *(c for c in changes if c.axis == "context")), trouble


def _would_serve(batch: int, context: int, named: Sequence[Named], decisions: Sequence[Decision]) -> CellServing:
    by_key = {d.workload.key: d for d in decisions}
    found = []
    for n in named:
        if d := by_key.get(n.workload.key):
            found.append(
                OpServing(
                    op=n.workload.op,
                    label=n.label,
                    bucket=d.bucket,
                    calls=n.calls_per_step,
                    candidate=d.arm.candidate,
                    state="undecided" if _is_undecided(d) else d.state,
                    decision_id=d.id,
                )
            )
    return CellServing(batch=batch, context=context, serving=tuple(found))
