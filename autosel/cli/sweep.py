"""Command `sweep`: tune and measure a decode step over contexts and batches, and show where winners change."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autosel import ledger as ledgers
from autosel import models, settings
from autosel.certify import sweep
from autosel.certify.plots import refuse_without
from autosel.certify.sweep import Sweep, Traffic
from autosel.certify.sweep_plots import write
from autosel.certify.words import interval_text
from autosel.cli import completion
from autosel.cli.asked import ledger_or_none
from autosel.cli.device import device_option, refuse_absent
from autosel.cli.options import PATH, Known, dtype_option, exact, given_options, json_option, verb
from autosel.cli.output import emit_json, error_json, leave, noted, paragraph, table
from autosel.cli.progress import Progress
from autosel.cli.tune import parse_budget
from autosel.cli.writable import refuse_folder
from autosel.errors import UsageError
from autosel.ledger.describe import bandwidth

if TYPE_CHECKING:
    from autosel.certify.run_sweep import Grid

EXAMPLES = (
    "sweep --model llama-1b --context 256:8192",
    "sweep --model llama-8b --layers 4 --context 1024:4096 --batch 1:16",
    "sweep --model qwen3-1.7b --trace-file lengths.txt --report out --json",
)
MOST_CONTEXT, MOST_BATCH = 1 << 24, 4096


@verb("sweep", *EXAMPLES)
@click.option(
    "--model",
    default="llama-8b",
    show_default=True,
    metavar="NAME|DIR",
    shell_complete=completion.models,
    help="a preset or a checkpoint",
)
@click.option("--context", default="256:8192", show_default=True, metavar="A:B", help="tokens attended to, doubling")
@click.option("--batch", default="1", show_default=True, metavar="A:B", help="sequences per step, doubling")
@click.option("--trace-file", type=PATH, metavar="FILE", help="your lengths: PROMPT OUTPUT on each line")
@dtype_option()
@click.option(
    "--layers", type=click.IntRange(1), metavar="N", help="run only the first N layers; every result names them"
)
@click.option("--iters", type=click.IntRange(1, 10_000), default=20, metavar="N", help="timed steps per cell  [20]")
@click.option("--warmup", type=click.IntRange(0, 10_000), default=2, metavar="N", help="untimed steps before  [2]")
@click.option("--tune/--no-tune", "tunes", default=True, help="--no-tune measures with existing decisions")
@click.option("--effort", type=Known("effort", ("quick", "full")), help="`full` also races torch.compile")
@click.option("--budget", default="", metavar="TIME", help="stop tuning of all batches after 90s or 5m")
@device_option()
@click.option("--seed", type=int, callback=exact, default=0, help="for weights, caches and coin flips  [default: 0]")
@click.option("--report", "report_to", type=PATH, metavar="DIR", help="write sweep.json and plots")
@json_option
@click.pass_context
def sweep_command(
    ctx: click.Context, /, as_json: bool, report_to: Path | None, trace_file: Path | None, **_: Any
) -> None:
    """Measure a decode step at every context and batch of a grid, baseline and optimised in turn.

    Each batch is tuned first (settled decisions are not measured again), and buckets whose winner changes are split by
    bisection. Cells that do not fit into memory are reported. Exit code 4: a step's logits were wrong. 5: tuning left
    some workloads undecided.
    """
    from autosel.certify.run_sweep import measure_sweep

    request = request_of(ctx.params, trace_file)
    if report_to is not None:
        refuse_without()
        refuse_folder(report_to)
    with ledgers.open_ledger() if request.tunes else ledger_or_none() as ledger:
        measured = measure_sweep(request, ledger, Told())
    found, troubles = measured.sweep, [measured.trouble] if measured.trouble else []
    if not as_json:
        click.echo(text(found))
    if report_to is not None:
        with noted(troubles):
            names = ", ".join(["sweep.json", *write(report_to, found)])
            click.echo(f"{report_to}: {names} written", err=True)
    if as_json:
        emit_json({**sweep.document(found), "error": error_json(troubles[0]) if troubles else None})
    leave(troubles)


def request_of(asked: dict[str, Any], trace_file: Path | None) -> Grid:
    """Return the grid to measure. Raises UsageError, UnknownName, BadConfig for impossible values."""
    from autosel.certify.run_sweep import Grid

    contexts = sweep.span(asked["context"], "--context", 2, MOST_CONTEXT)
    batches = sweep.span(asked["batch"], "--batch", 1, MOST_BATCH)
    refuse_absent(asked["device"])
    model = models.load(asked["model"])
    if (asked["layers"] or 0) > model.layers:
        raise UsageError(f"--layers {asked['layers']} is too large", why=f"{model.name} has {model.layers} layers")
    return Grid(
        model=model,
        contexts=contexts,
        batches=batches,
        dtype=asked["dtype"] or model.dtype,
        weights=models.weights_of(asked["model"]),
        layers=0 if asked["layers"] == model.layers else asked["layers"] or 0,
        iters=asked["iters"],
        warmup=asked["warmup"],
        device=asked["device"],
        seed=asked["seed"],
        tunes=asked["tunes"],
        effort=asked["effort"] or settings.get("effort"),
        budget_s=parse_budget(asked["budget"]) if asked["budget"] else float(settings.get("budget")),
        again=f"{settings.spelling()} sweep {_again()}".rstrip(),
        traffic=sweep.read_traffic(trace_file) if trace_file else (),
        traffic_file=str(trace_file or ""),
    )


def _again() -> str:
    """Return the options that continue this sweep, without a budget that was too short."""
    ctx = click.get_current_context(silent=True)
    cells = ("model", "context", "batch", "trace_file", "dtype", "layers", "iters", "warmup", "device", "seed")
    return " ".join(given_options(ctx, (*cells, "effort", "report_to"))) if ctx is not None else ""


class Told:
    """Listener with a progress line for each part."""

    def tuning(self, budget_s: float) -> Progress:
        return Progress(budget_s)

    def measuring(self) -> Progress:
        return self.tuning(0.0)


def text(found: Sweep) -> str:
    """Format the grid, cells that did not fit, changes of winners, and the effect on the traffic."""
    when = f"{found.timestamp[:16].replace('T', ' ')} UTC"
    title = f"{found.model} {found.dtype} on {found.device}, {when}: {found.iters} steps each, baseline in turn"
    lines = [paragraph(title, hang="  "), ""]
    done = [(c, c.figures) for c in found.cells if c.figures is not None]
    rows = [
        [
            f"{c.batch}",
            f"{c.context}",
            f"{f.tokens_per_s:.4g}",
            f"{f.p50_ms:.4g}",
            f"{f.p95_ms:.4g}",
            f"{f.speedup:.2f}x ({interval_text(f.speedup_interval)})",
            f"{f.roofline:.0%}",
        ]
        for c, f in done
    ]
    heads = ("batch", "context", "tok/s", "p50 ms", "p95 ms", "over eager PyTorch", "roofline")
    if rows:
        rates = [f.read_bytes_per_s for _, f in done]
        lines += [table(heads, rows, right=(0, 1, 2, 3, 4, 6))]
        lines += [f"roofline: share of {bandwidth(min(rates))} .. {bandwidth(max(rates))}, measured with each step"]
        busy = sum(f.contended for _, f in done)
        lines += [f"contended: other work ran during {busy} of {len(done)} measurements"] if busy else []
    for cell in found.cells:
        if cell.why:
            told = f"batch {cell.batch}, context {cell.context}: not measured, {cell.why}"
            lines.append(paragraph(told, hang="  "))
    lines += ["", *_winners(found), *_changes(found)]
    return "\n".join([*lines, *(_traffic(found.traffic) if found.traffic else [])])


def _winners(found: Sweep) -> list[str]:
    """Return a table with the candidates of each op and where they serve."""
    served: dict[str, dict[str, list[str]]] = {}
    for c in found.cells:
        for s in c.figures.serving if c.figures is not None else ():
            where = f"{c.batch}x{c.context}"
            served.setdefault(sweep.route(s.label), {}).setdefault(s.candidate, []).append(where)
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
        lines += ["  0% of its tokens are in the measured range: no figure applies to it"]
    for w in found.by_batch:
        speedup = w.tokens_per_s / w.baseline_tokens_per_s
        part = "" if w.covered == 1 else f"   {w.covered:.0%} of its tokens are in the measured range"
        best = "   fastest" if w.batch == found.best_batch and len(found.by_batch) > 1 else ""
        lines.append(f"  batch {w.batch:>4}  {w.tokens_per_s:>8.4g} tok/s of decoding  {speedup:.2f}x{best}{part}")
    return lines
