"""Command `run`: measure a real decode against the eager baseline, and write a certificate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from autosel import devices, fingerprint
from autosel.certify import audit, compare, report
from autosel.certify.audit import Audit
from autosel.certify.capacity import capacity
from autosel.certify.certificate import MOST_STEPS, Certificate, Layers, model_name
from autosel.certify.compare import Change
from autosel.certify.issue import peak_flops, read_rate
from autosel.certify.slo import Objective
from autosel.certify.suite import Level
from autosel.certify.trace import trace
from autosel.cli import completion
from autosel.cli.asked import Asked, earlier, ledger_or_none, refuse_unwritable
from autosel.cli.certificate import changes_text, plan_text, summary, where_line
from autosel.cli.device import device_option
from autosel.cli.options import (
    PATH,
    Known,
    batch_option,
    dtype_option,
    exact,
    format_option,
    json_option,
    priced,
    renamed,
    verb,
)
from autosel.cli.output import emit_json, error_json, leave, noted
from autosel.cli.progress import Progress
from autosel.cli.suite import run_suite
from autosel.cli.untuned import show_untuned
from autosel.decode.run import DecodeRun, Plan, Span
from autosel.models.cost import flops_per_step
from autosel.values import Accepted, to_json

EXAMPLES = (
    "run --model llama-1b --seq 2048",
    "run --model llama-8b --layers 4 --seq 8192 --iters 50",
    "run --model ~/checkpoints/my-llama --report out --audit audit.json",
    'run --model llama-1b --slo "ttft<500ms,p99_itl<40ms"',
    "run --model ~/checkpoints/my-llama --quality text.txt",
    "run --model my-int4 --original ~/checkpoints/my-llama --quality t.txt",
    "run --model llama-8b --plan",
    "run --suite quick --json",
)


@verb("run", *EXAMPLES)
@click.option(
    "--model",
    default="",
    metavar="NAME|DIR|FILE",
    shell_complete=completion.models,
    help="a preset, a checkpoint folder or a GGUF file  [default: llama-8b]",
)
@click.option("--weights", default="", metavar="DIR|FILE|random", help="default: the model's own, else random")
@click.option("--prompt", default="random", metavar="FILE", help="text, token ids (.json), random or synthetic")
@dtype_option()
@format_option()
@batch_option
@click.option("--seq", type=click.IntRange(2, 1 << 24), metavar="N", help="context  [8192, or the model's limit]")
@click.option("--iters", type=click.IntRange(1, MOST_STEPS), default=100, metavar="N", help="timed steps  [100]")
@click.option("--warmup", type=click.IntRange(0, 10**6), default=10, metavar="N", help="untimed steps before  [10]")
@click.option(
    "--layers", type=click.IntRange(1), metavar="N", help="run only the first N layers; every result names them"
)
@click.option(
    "--step",
    type=Known("step", ("auto", "ops", "graph", "whole")),
    default="auto",
    metavar="FORM",
    help="ops, graph (GPU), whole (one thread team or launch), auto (as decided, else raced)  [default: auto]",
)
@click.option("--force", is_flag=True, help="race whole steps again, whatever is decided")
@click.option("--persistent", is_flag=True, help="the same as --step whole")
@click.option(
    "--weights-layout",
    type=Known("weights layout", ("auto", "plain")),
    default="auto",
    metavar="LAYOUT",
    help="plain: a team reads unpacked weights; auto: packed where that wins  [default: auto]",
)
@renamed("--no-persistent", "--step ops")
@renamed("--no-packed", "--weights-layout plain")
@renamed("--graph", "--step graph")
@renamed("--no-graph", "--step ops, or --step whole")
@click.option("--small-batch", type=click.IntRange(1, 4096), metavar="N", help="decode N tokens of one stream at once")
@click.option("--no-prealloc", is_flag=True, help="let ops allocate their results")
@click.option("--paged", type=click.IntRange(1, 4096), metavar="N", help="store the KV cache in pages of N tokens")
@click.option("--no-baseline", is_flag=True, help="run only the optimised steps; keep nothing for PyTorch's")
@click.option("--advance", is_flag=True, help="advance the stream by a token a step; else every step is the same")
@click.option("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy  [default: 0]")
@click.option("--top-k", type=int, default=0, metavar="N", help="0: all  [default: 0]")
@click.option("--top-p", type=float, default=1.0, metavar="X", help="1: all  [default: 1]")
@click.option("--repetition-penalty", type=float, default=1.0, metavar="X", help="1: none  [default: 1]")
@click.option("--speculate", default="", metavar="ngram:K", help="draft K tokens per step from the text so far")
@device_option()
@click.option("--seed", type=int, callback=exact, default=0, help="for weights, prompt and coin flips  [default: 0]")
@click.option("--quality", "score", type=PATH, metavar="TEXT_FILE", help="score this text: perplexity, divergence")
@click.option("--original", default="", metavar="DIR|FILE", help="with --quality: score a format against this model")
@click.option("--accept-quality", is_flag=True, help="certify a format that loses more than its limit")
@click.option("--certify", type=PATH, metavar="FILE", help="append the certificate to FILE, not in autosel's home")
@click.option("--audit", "audit_to", type=PATH, metavar="FILE", help="write time, bytes and limit of each op as JSON")
@click.option(
    "--trace",
    "trace_to",
    type=PATH,
    metavar="FILE",
    help="write a trace of the steps and of each thread's ops, for Perfetto",
)
@click.option(
    "--report", "report_to", type=PATH, metavar="DIR", help="write a page with plots; for a suite, its rows as JSON"
)
@click.option("--compare", type=PATH, metavar="REPORT", help="show speedups against an earlier report")
@click.option("--slo", default="", metavar="TEXT", help='"ttft<500ms,p99_itl<40ms"; exit code 3 if missed')
@click.option(
    "--price-per-hour",
    type=click.FloatRange(0, min_open=True),
    callback=priced,
    metavar="X",
    help="show tokens per dollar",
)
@click.option("--sign", is_flag=True, help="sign the certificate (Ed25519)")
@click.option("--key", type=PATH, metavar="FILE", help="sign with this key, not the one of autosel's home")
@click.option(
    "--suite",
    type=Known("suite", ("quick", "standard", "full")),
    metavar="LEVEL",
    help="measure seven configurations: quick, standard, full (three models)",
)
@click.option("--plan", "only_plan", is_flag=True, help="only show what fits into memory")
@json_option
@click.pass_context
def run_command(ctx: click.Context, /, as_json: bool, only_plan: bool, suite: Level | None, **given: Any) -> None:
    """Measure a decode, with baseline and optimised steps in turn, and certify it.

    Exit code 3: an objective was missed, or a format loses too much quality. 4: tokens or logits were wrong, or a
    kernel has no known proof.
    """
    asked = Asked(ctx)
    if suite:
        run_suite(asked, suite, as_json)
    elif only_plan:
        show_plan(asked, as_json)
    else:
        run_once(asked, as_json)


def run_once(asked: Asked, as_json: bool) -> None:
    """Measure, certify, print, and write the requested files. A later error does not lose the result."""
    from autosel.certify.run import append, failed

    plan, objectives, key = asked.plan(), asked.objectives(), asked.key()
    before = earlier(asked)
    refuse_unwritable(asked)
    made, run = measured(asked, plan, objectives)
    troubles = [trouble] if (trouble := failed(made)) else []
    where: Path | None = None
    changes: Sequence[Change] = []
    with noted(troubles):
        made, where = append(asked.certificates, made, key), asked.certificates
    with noted(troubles):
        changes = compare.compare(compare.of_certificates([made]), before) if before else []
    found = audit.audit(made)
    if not as_json:
        told = [summary(made, found), changes_text(changes), where_line(made, where) if where else ""]
        click.echo("\n".join(filter(None, told)))
    for path, write in writers(asked, made, found, run.timeline):
        with noted(troubles):
            write()
            click.echo(f"{path} written", err=True)
    if as_json:
        emit_json(
            {
                "certificate": to_json(made),
                "file": str(where) if where else None,
                "audit": audit.document(found),
                "compare": compare.document(changes),
                "error": error_json(troubles[0]) if troubles else None,
            }
        )
    leave(troubles)


def measured(asked: Asked, plan: Plan, objectives: Sequence[Objective]) -> tuple[Certificate, DecodeRun]:
    """Measure, with progress on stderr. The certificate is not yet in a file."""
    from autosel.certify.run import RunRequest, certified

    request = RunRequest(
        plan=plan,
        text=asked.text(plan),
        repro_cmd=asked.repro,
        objectives=objectives,
        price_per_hour=asked["price_per_hour"],
        forced=asked["force"],
        traced=asked["trace_to"] is not None,
        original=asked["original"],
        accept_quality=asked["accept_quality"],
    )
    with ledger_or_none() as ledger:
        if ledger is not None:
            show_untuned(asked.ctx, plan)
        with Progress() as listener:
            return certified(request, ledger, listener)


def writers(
    asked: Asked, made: Certificate, found: Audit, timeline: Sequence[Span]
) -> Iterator[tuple[Path, Callable[[], object]]]:
    """Yield the path of each requested file and the function that writes it, so that one failure does not affect the
    others.
    """
    if asked["audit_to"] is not None:
        yield asked["audit_to"], partial(report.write_json, asked["audit_to"], audit.document(found))
    if asked["trace_to"] is not None:
        yield asked["trace_to"], partial(report.write_json, asked["trace_to"], trace(made, timeline))
    if asked["report_to"] is not None:
        yield asked["report_to"] / report.PAGE, partial(report.write, asked["report_to"], made)


def show_plan(asked: Asked, as_json: bool) -> None:
    """Print the memory table."""
    from autosel.decode.packed import supports
    from autosel.decode.weights import memory_need

    plan = asked.plan()
    fp = fingerprint.take(plan.device)
    found = capacity(
        plan,
        memory_need,
        lambda p: flops_per_step(p.shape, p.batch, p.seq),
        name=model_name(plan.model.name, Layers(run=plan.layers_run, of=plan.full_layers)),
        device=fp.name,
        memory_bytes=devices.named(plan.device).free_bytes(),
        read_bytes_per_s=read_rate(fp),
        peak_flops=peak_flops(fp, plan.dtype),
        packs=isinstance(supports(plan.dtype, fp, plan.shape.quantised), Accepted),
    )
    if as_json:
        emit_json(found)
    else:
        click.echo(plan_text(found))
