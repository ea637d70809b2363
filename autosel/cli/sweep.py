"""`sweep`: a model's decode step over contexts and batches, tuned on the way; where the winners change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autosel.cli.device import device_option, refuse_absent
from autosel.cli.options import Known, dtype_option, exact, given_options, json_option, verb
from autosel.cli.output import (
    Stopped,
    bandwidth,
    bytes_text,
    emit_json,
    error_json,
    leave,
    noted,
    out_of_memory,
    paragraph,
    table,
)
from autosel.errors import AutoselError, ParityError, UsageError

if TYPE_CHECKING:
    from autosel.certify.sweep import Cell, Change, Figures, Served, Sweep, Traffic
    from autosel.cli.progress import Progress
    from autosel.decode.run import DecodeRun, Plan
    from autosel.models.workloads import Named
    from autosel.values import Decision, DTypeName

EXAMPLES = (
    "sweep --model llama-1b --context 256:8192",
    "sweep --model llama-8b --layers 4 --context 1024:4096 --batch 1:16",
    "sweep --model qwen3-1.7b --trace-file lengths.txt --report out --json",
)
MOST_CONTEXT, MOST_BATCH = 1 << 24, 4096
PICTURE_NAMES = "step-against-context, rate-against-batch"


@verb("sweep", *EXAMPLES)
@click.option("--model", default="llama-8b", show_default=True, metavar="NAME|DIR", help="a preset or a checkpoint")
@click.option("--context", default="256:8192", show_default=True, metavar="A:B", help="tokens attended to, doubling")
@click.option("--batch", default="1", show_default=True, metavar="A:B", help="sequences a step, doubling")
@click.option(
    "--trace-file", type=click.Path(path_type=Path), metavar="FILE", help="your lengths: PROMPT OUTPUT a line"
)
@dtype_option()
@click.option(
    "--layers", type=click.IntRange(1), metavar="N", help="only the first N layers: said wherever it is shown"
)
@click.option("--iters", type=click.IntRange(1, 10_000), default=20, metavar="N", help="timed steps a cell  [20]")
@click.option("--warmup", type=click.IntRange(0, 10_000), default=2, metavar="N", help="untimed ones before  [2]")
@click.option("--tune/--no-tune", "tunes", default=True, help="--no-tune measures with what is decided already")
@click.option("--effort", type=Known("effort", ("quick", "full")), help="of tuning; full also races torch.compile")
@click.option("--budget", default="", metavar="TIME", help="of tuning, for all batches: 90s or 5m")
@device_option()
@click.option("--seed", type=int, callback=exact, default=0, help="of weights, caches and coins  [default: 0]")
@click.option(
    "--report", "report_to", type=click.Path(path_type=Path), metavar="DIR", help="write sweep.json and plots"
)
@json_option
@click.pass_context
def sweep_command(
    ctx: click.Context, /, as_json: bool, report_to: Path | None, trace_file: Path | None, **_: Any
) -> None:
    """Measure a decode step at every context and batch of a grid, baseline and optimised in turn.

    First each batch is tuned (settled decisions are not measured again), and buckets whose winner changes are split
    by bisection. What does not fit into memory is said. Exit code 4: a step's logits were wrong. 5: tuning left some
    undecided.
    """
    from autosel.certify import sweep

    asked = ctx.params
    grid = grid_of(asked)
    requests = sweep.read_traffic(trace_file) if trace_file else ()
    if report_to is not None:
        from autosel.certify.plots import refuse_without
        from autosel.cli.writable import refuse_folder

        refuse_without()
        refuse_folder(report_to)
    found, trouble = swept(asked, grid)
    if trace_file is not None:
        found = replace(found, traffic=sweep.weigh(requests, found.cells, str(trace_file)))
    troubles = [trouble] if (trouble := wrong(found) or trouble) else []
    if not as_json:
        click.echo(text(found))
    if report_to is not None:
        with noted(troubles):
            _write(report_to, found)
    if as_json:
        emit_json({**sweep.document(found), "error": error_json(troubles[0]) if troubles else None})
    leave(troubles)


def grid_of(asked: dict[str, Any]) -> list[Plan]:
    """The plans of the grid, batch by batch. Raises UsageError for what no run can be."""
    from autosel import models
    from autosel.certify.sweep import MOST_CELLS, span
    from autosel.cli.run import weights_of
    from autosel.decode.run import Plan

    contexts = span(asked["context"], "--context", 2, MOST_CONTEXT)
    batches = span(asked["batch"], "--batch", 1, MOST_BATCH)
    if len(contexts) * len(batches) > MOST_CELLS:
        raise UsageError(f"a grid of {len(contexts) * len(batches)} cells", why=f"at most {MOST_CELLS} are measured")
    refuse_absent(asked["device"])
    model = models.load(asked["model"])
    if (asked["layers"] or 0) > model.layers:
        raise UsageError(f"--layers {asked['layers']}", why=f"{model.name} has {model.layers}")
    dtype: DTypeName = asked["dtype"] or model.dtype
    return [
        Plan(
            model=model,
            layers=0 if asked["layers"] == model.layers else asked["layers"] or 0,
            weights=weights_of(asked["model"]),
            prompt="synthetic",
            dtype=dtype,
            batch=batch,
            seq=context,
            iters=asked["iters"],
            warmup=asked["warmup"],
            device=asked["device"],
            seed=asked["seed"],
        )
        for batch in batches
        for context in contexts
    ]


# --- tuning and measuring --------------------------------------------------------------------------------------------


def swept(asked: dict[str, Any], grid: Sequence[Plan]) -> tuple[Sweep, AutoselError | None]:
    """The sweep, and what tuning left undecided."""
    from datetime import UTC, datetime

    from autosel import fingerprint
    from autosel.certify import sweep
    from autosel.certify.certificate import Layers, model_name
    from autosel.certify.issue import git_sha
    from autosel.decode.safetensors import open_folder
    from autosel.decode.weights import free_memory

    if grid[0].weights != "random":
        open_folder(Path(grid[0].weights).expanduser())  # what cannot be loaded is said before minutes of tuning
    started, memory = datetime.now(UTC).isoformat(timespec="seconds"), free_memory(grid[0].device)
    sized = [(plan, *_fits(plan, memory)) for plan in grid]
    trouble: AutoselError | None = None
    decisions: list[Decision] = []
    if asked["tunes"]:
        decisions, trouble = _tuned(asked, [plan for plan, _, why in sized if not why])
    undecided = {d.id for d in decisions if _undecided(d)}
    measured, ended = _measured(sized, decides=asked["tunes"])
    cells = sweep.with_doubts(measured, undecided)
    changes = sweep.changes_of(sweep.served(cells), decisions)
    trouble = ended or trouble
    if asked["tunes"] and not isinstance(ended, Stopped):
        try:
            changes, narrowed = _narrowed(asked, grid[0], cells, changes)
        except AutoselError as error:  # what was measured is still said
            narrowed = error
        trouble = trouble or narrowed
    fp, first = fingerprint.take(grid[0].device), grid[0]
    found = sweep.Sweep(
        model=model_name(first.model.name, Layers(run=first.layers_run, of=first.full_layers)),
        dtype=first.dtype,
        device=fp.name,
        hw_id=fp.hw_id,
        env_id=fp.env_id,
        git_sha=git_sha(),
        timestamp=started,
        memory_bytes=memory,
        iters=first.iters,
        cells=tuple(cells),
        changes=changes,
    )
    return found, trouble


def _undecided(d: Decision) -> bool:
    return d.verdict is not None and d.verdict.outcome == "undecided"


def _fits(plan: Plan, memory_bytes: int) -> tuple[int, str]:
    """(bytes it takes, why it is not measured, or "")."""
    from autosel.decode.weights import memory_need

    need = memory_need(plan)
    if need <= memory_bytes:
        return need, ""
    return need, f"takes {bytes_text(need)} of memory; {bytes_text(memory_bytes)} are free"


def _tuned(asked: dict[str, Any], plans: Sequence[Plan]) -> tuple[list[Decision], AutoselError | None]:
    """Every batch tuned up to the longest context that fits."""
    from autosel.models.workloads import step

    named: list[Named] = []
    for batch in sorted({plan.batch for plan in plans}):
        longest = max(plan.seq for plan in plans if plan.batch == batch)
        named += step(plans[0].shape, batch=batch, context=longest, dtype=plans[0].dtype)
    return _decided(asked, named)


def _decided(asked: dict[str, Any], named: Sequence[Named]) -> tuple[list[Decision], AutoselError | None]:
    from autosel import dispatch, settings
    from autosel.cli.tune import parse_budget, run_to_end, unfinished
    from autosel.pipeline import Request

    if not named:
        return [], None
    again = f"{settings.spelling()} sweep {_again()}".rstrip()
    request = Request(
        workloads=tuple({n.workload.key: n for n in named}.values()),
        effort=asked["effort"] or settings.get("effort"),
        device=asked["device"],
        budget_s=parse_budget(asked["budget"]) if asked["budget"] else float(settings.get("budget")),
        seed=asked["seed"],
    )
    found = run_to_end(request, len(request.workloads), again)
    dispatch.refresh()
    return list(found.decisions), unfinished(found, again)


def _again() -> str:
    """The options of this sweep, to go on with it. A budget that was too short is left out."""
    ctx = click.get_current_context(silent=True)
    cells = ("model", "context", "batch", "trace_file", "dtype", "layers", "iters", "warmup", "device", "seed")
    return " ".join(given_options(ctx, (*cells, "effort", "report_to"))) if ctx is not None else ""


def _measured(sized: Sequence[tuple[Plan, int, str]], *, decides: bool) -> tuple[list[Cell], AutoselError | None]:
    """Each cell that fits, on weights loaded once; and what cost some of them: a cell that fails costs itself alone,
    Ctrl-C all that are left. `decides`: who takes its whole steps too, where nothing says so."""
    from autosel.certify.sweep import Cell
    from autosel.cli.progress import Within
    from autosel.cli.run import ledger_or_none, progress
    from autosel.decode.measure import measure, refuse
    from autosel.decode.weights import load_weights

    titles = [f"cell {i} of {len(sized)}, batch {p.batch}, context {p.seq}" for i, (p, _, _) in enumerate(sized, 1)]
    cells, weights, stopped, failed = [], None, False, 0
    with ledger_or_none() as ledger, progress() as listener:
        _expect([(title, plan) for title, (plan, _, why) in zip(titles, sized, strict=True) if not why], listener)
        for title, (plan, need, too_large) in zip(titles, sized, strict=True):
            figures, why = None, too_large
            if not (why or stopped):
                refuse(plan)
                within = Within(listener, title)
                try:
                    weights = weights or load_weights(plan, within)
                    figures = figures_of(measure(plan, weights, listener=within, ledger=ledger, decides=decides))
                except KeyboardInterrupt:
                    stopped = True
                except Exception as error:
                    why = _cost(error, loaded=weights is not None)
                    failed += isinstance(error, AutoselError)
            told = why or ("" if figures else "it was stopped before")
            cells.append(Cell(batch=plan.batch, context=plan.seq, need_bytes=need, figures=figures, why=told))
    return cells, _ended(cells, failed, stopped=stopped)


def _expect(cells: Sequence[tuple[str, Plan]], listener: Progress) -> None:
    from autosel.cli.run import foreseen

    seconds: dict[tuple[str, str], float] = {}
    for title, plan in cells:
        seconds |= {(title, stage): s for stage, s in foreseen(plan, listener, loads=not seconds).items()}
    listener.expect(seconds)


def _cost(error: Exception, *, loaded: bool) -> str:
    """Why a cell has no figures. Raises again what is not the matter of one cell: weights that cannot be loaded, and
    what is a bug of ours."""
    memory = out_of_memory(error)
    if memory is not None:  # what was free when it was asked has gone to somebody else
        return f"the device ran out of memory: {memory.why}".rstrip(": ")
    if not (loaded and isinstance(error, AutoselError)):
        raise error
    return " ".join("; ".join(filter(None, (error.what, error.why))).split())


def _ended(cells: Sequence[Cell], failed: int, *, stopped: bool) -> AutoselError | None:
    """Ctrl-C, or cells that failed. That memory ran out is an answer, as of a cell that does not fit."""
    done = sum(c.figures is not None for c in cells)
    if stopped:
        return Stopped(f"stopped; {done} of {len(cells)} cells measured", todo="what was decided is kept")
    return AutoselError(f"{failed} of {len(cells)} cells failed", why="each says why in its place") if failed else None


def figures_of(run: DecodeRun) -> Figures:
    """A cell's figures, by the arithmetic of a certificate. Raises ImpossibleRun as one does."""
    from autosel.certify.issue import Request, issue
    from autosel.certify.sweep import Figures, Serving
    from autosel.models.workloads import step

    made, plan = issue(run, {}, Request(repro_cmd="")), run.plan
    v = made.verification
    named = step(plan.shape, batch=plan.batch, context=plan.seq, dtype=plan.dtype)
    buckets = {n.workload.key: n.workload.bucket for n in named}
    return Figures(
        p50_ms=made.latency_ms.med,
        p95_ms=made.latency_ms.p95,
        tokens_per_s=made.tokens_per_sec,
        baseline_ms=made.baseline_ms,
        speedup=made.speedup,
        speedup_interval=made.speedup_interval,
        roofline=made.roofline,
        read_bytes_per_s=made.read_median_bytes_per_s,
        verified=v.max_logit_error <= v.logit_bound,
        chain=next((note for note in run.notes if note.startswith("chain:")), ""),
        serving=tuple(
            Serving(
                op=c.op,
                label=c.label,
                bucket=buckets.get(c.workload_key, c.workload_key),
                calls=c.count_per_step,
                candidate=c.candidate,
                state=c.state,
                decision_id=c.decision_id,
            )
            for c in run.choices
        ),
    )


def _narrowed(
    asked: dict[str, Any], base: Plan, cells: Sequence[Cell], changes: Sequence[Change]
) -> tuple[tuple[Change, ...], AutoselError | None]:
    """Changes along the batch, bisected by tuning between: every step of it is a decision kept."""
    from autosel.certify.sweep import changes_of, middles, served
    from autosel.models.workloads import step

    points = [p for p in served(cells) if p.context == base.seq]
    trouble: AutoselError | None = None
    tried: set[int] = {p.batch for p in points}
    while todo := [m for m in middles(changes_of(points)) if m not in tried]:
        for batch in todo:
            tried.add(batch)
            named = step(base.shape, batch=batch, context=base.seq, dtype=base.dtype)
            decisions, left = _decided(asked, named)
            trouble = trouble or left
            points.append(_would_serve(batch, base.seq, named, decisions))
    along = (c for c in changes_of(points) if c.axis == "batch")
    return (*along, *(c for c in changes if c.axis == "context")), trouble


def _would_serve(batch: int, context: int, named: Sequence[Named], decisions: Sequence[Decision]) -> Served:
    from autosel.certify.sweep import Served, Serving

    by_key = {d.workload.key: d for d in decisions}
    found = []
    for n in named:
        if d := by_key.get(n.workload.key):
            found.append(
                Serving(
                    op=n.workload.op,
                    label=n.label,
                    bucket=d.bucket,
                    calls=n.calls_per_step,
                    candidate=d.arm.candidate,
                    state="undecided" if _undecided(d) else d.state,
                    decision_id=d.id,
                )
            )
    return Served(batch=batch, context=context, serving=tuple(found))


def wrong(found: Sweep) -> AutoselError | None:
    bad = [c for c in found.cells if c.figures is not None and not c.figures.verified]
    if not bad:
        return None
    cells = ", ".join(f"batch {c.batch} context {c.context}" for c in bad[:4])
    return ParityError(
        "steps did not verify: logits beyond their bound", why=cells, todo="run one alone to see how far"
    )


# --- files and words -------------------------------------------------------------------------------------------------


def _write(folder: Path, found: Sweep) -> None:
    from autosel.certify import plots, sweep
    from autosel.certify.report import replace_file
    from autosel.certify.sweep_plots import pictures

    for name, drawing in pictures(found).items():
        replace_file(folder / f"{name}.svg", plots.svg(drawing, for_page=False).encode())
        replace_file(folder / f"{name}.png", plots.png(drawing))
    replace_file(folder / "sweep.json", json.dumps(sweep.document(found), indent=1).encode() + b"\n")
    click.echo(f"{folder}: sweep.json, {PICTURE_NAMES} written", err=True)


def text(found: Sweep) -> str:
    """The grid, what did not fit, where winners change, and what it means for the traffic."""
    lines = [f"{found.model} {found.dtype} on {found.device}: {found.iters} steps each, baseline in turn", ""]
    done = [(c, c.figures) for c in found.cells if c.figures is not None]
    rows = [
        [
            f"{c.batch}",
            f"{c.context}",
            f"{f.tokens_per_s:.4g}",
            f"{f.p50_ms:.4g}",
            f"{f.p95_ms:.4g}",
            f"{f.speedup:.2f}x ({f.speedup_interval.lo:.2f} .. {f.speedup_interval.hi:.2f})",
            f"{f.roofline:.0%}",
        ]
        for c, f in done
    ]
    heads = ("batch", "context", "tok/s", "p50 ms", "p95 ms", "over eager PyTorch", "roofline")
    if rows:
        rates = [f.read_bytes_per_s for _, f in done]
        lines += [table(heads, rows, right=(0, 1, 2, 3, 4, 6))]
        lines += [f"roofline: share of {bandwidth(min(rates))} .. {bandwidth(max(rates))}, read beside each step"]
    for cell in found.cells:
        if cell.why:
            told = f"batch {cell.batch}, context {cell.context}: not measured, {cell.why}"
            lines.append(paragraph(told, hang="  "))
    lines += ["", *_winners(found), *_changes(found)]
    return "\n".join([*lines, *(_traffic(found.traffic) if found.traffic else [])])


def _winners(found: Sweep) -> list[str]:
    """Of each op, who serves it where; one line where one serves everywhere."""
    from autosel.certify.sweep import route

    served: dict[str, dict[str, list[str]]] = {}
    for c in found.cells:
        for s in c.figures.serving if c.figures is not None else ():
            where = f"{c.batch}x{c.context}"
            served.setdefault(route(s.label), {}).setdefault(s.candidate, []).append(where)
    rows = []
    for label, by_candidate in served.items():
        for candidate, places in by_candidate.items():
            rows.append([label, candidate, "everywhere" if len(by_candidate) == 1 else " ".join(places)])
    return [table(("op", "served by", "batch x context"), rows, wrap=2)] if rows else []


def _changes(found: Sweep) -> list[str]:
    told = []
    for c in found.changes:
        point = f"{c.axis} {c.first}" if c.first == c.last + 1 else f"{c.axis} {c.last} .. {c.first}"
        kept = "" if c.decided else " (not decided)"
        told.append(paragraph(f"crossover: {c.label}: {c.below} -> {c.above} at {point}{kept}", hang="  "))
    return told


def _traffic(found: Traffic) -> list[str]:
    lines = ["", f"your traffic: {found.requests} requests, {found.prompt_tokens} tokens in, {found.output_tokens} out"]
    if not found.by_batch:
        lines += ["  0% of its tokens lie within what was measured: no figure holds for it"]
    for w in found.by_batch:
        speedup = w.tokens_per_s / w.baseline_tokens_per_s
        part = "" if w.covered == 1 else f"   {w.covered:.0%} of its tokens lie within what was measured"
        best = "   fastest" if w.batch == found.best_batch and len(found.by_batch) > 1 else ""
        lines.append(f"  batch {w.batch:>4}  {w.tokens_per_s:>8.4g} tok/s of decoding  {speedup:.2f}x{best}{part}")
    return lines
