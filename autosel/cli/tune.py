"""Command `tune`: run the pipeline on a model's workloads, with progress, a table of verdicts and the rejections."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autosel import devices, fingerprint, models, settings
from autosel import ledger as ledgers
from autosel.cli.device import device_option, refuse_absent, unused_gpu
from autosel.cli.figures import decision_table
from autosel.cli.headline import headline as step_headline
from autosel.cli.options import (
    Known,
    batch_option,
    dtype_option,
    format_option,
    given,
    given_options,
    json_option,
    model_option,
    ops_option,
    seed_option,
    seq_option,
    verb,
)
from autosel.cli.output import emit_json, error_json, note_lines, paragraph, report
from autosel.cli.progress import Progress
from autosel.cli.record import mode_note, named_workloads, tuned_on
from autosel.errors import UsageError
from autosel.fingerprint.describe import headline, remarks
from autosel.ledger.describe import bandwidth, decision_json, held_text, release_command
from autosel.ledger.key import threads_of
from autosel.models.workloads import Named, step
from autosel.race.realtime import allowed
from autosel.values import Decision, DTypeName, to_json

if TYPE_CHECKING:
    from autosel.pipeline import Report

EXAMPLES = (
    "tune --model llama-8b",
    "tune --model qwen3-1.7b --op attn --seq 32768",
    "tune --model llama-1b --prompt 1024",
    "tune --model ~/checkpoints/my-llama --budget 5m --json",
    "tune --recorded recorded.json",
    "tune --model llama-1b --threads 1,2",
    "tune --ray 10.0.0.1:6379 --device cuda",
)


@verb("tune", *EXAMPLES)
@model_option
@ops_option
@dtype_option()
@format_option()
@batch_option
@seq_option
@click.option(
    "--prompt",
    type=click.IntRange(1, 1 << 20),
    metavar="N",
    help="also tune the ops of a prompt of N tokens",
)
@click.option(
    "--recorded",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="tune the workloads of a recording (autosel record) instead of a model's",
)
@click.option(
    "--threads", default="", metavar="N,N", help="tune for processes with 1,2 or 1-4 threads  [default: as this one]"
)
@click.option("--budget", default="", metavar="TIME", help="stop after 90s or 5m; unfinished workloads stay undecided")
@click.option("--effort", type=Known("effort", ("quick", "full")), help="`full` also races torch.compile")
@click.option("--resume/--force", "resume", default=True, help="--force measures settled decisions again")
@click.option("--wait", is_flag=True, help="wait until other processes are idle")
@click.option("--realtime", is_flag=True, help="on a busy machine, give races priority over other processes")
@device_option()
@click.option(
    "--ray", default="", metavar="ADDRESS", help="tune on the workers of a Ray cluster; `local` starts one here"
)
@seed_option
@json_option
def tune_command(
    model: str,
    ops: Sequence[str],
    dtype: DTypeName | None,
    weight_format: str,
    batch: int,
    seq: int,
    prompt: int | None,
    recorded: Path | None,
    threads: str,
    budget: str,
    effort: str | None,
    resume: bool,
    wait: bool,
    realtime: bool,
    device: str,
    ray: str,
    seed: int | None,
    as_json: bool,
) -> None:
    """Prove and race the eligible kernels of a model's decode step, decide, and keep the evidence.

    Settled decisions are not measured again. Ctrl-C keeps finished decisions; the same command continues. Exit code 5:
    some workloads stayed undecided.
    """
    from autosel.pipeline import Request

    ctx = click.get_current_context()
    if recorded is not None and not ray and not given(ctx, "device"):
        device = tuned_on(recorded, device)
    if not ray:
        refuse_absent(device)
    if realtime:
        refuse_ordinary()
    counts = parse_threads(threads, device, ray) if threads else (0,)
    seconds = parse_budget(budget) if budget else float(settings.get("budget"))
    told, what = "", str(recorded)
    if recorded is None:
        asked = list(ops) or None
        shape = models.stored_as(models.load(model), weight_format)
        told = f"{', '.join(ops)} in a decode step of {shape.name}" if ops else f"decode step of {shape.name}"
        what = f"{shape.name} {dtype or shape.dtype}, batch {batch}, context {seq}"
        if note := models.weights_note(model, shape, dtype or shape.dtype):
            click.echo(note, err=True)
        named = step(shape, batch=batch, context=seq, dtype=dtype, ops=asked, prompt=prompt or 0)
    else:
        named = recorded_workloads(ctx, recorded)
    request = Request(
        workloads=named,
        effort=effort or settings.get("effort"),
        device=device,
        budget_s=seconds,
        seed=seed,
        force=not resume,
        wait=wait,
        realtime=realtime,
    )
    if not ray:
        introduce(device, what)
    report_on(request, named, again_command(ctx), as_json, step=told, ray=ray, counts=counts)


def introduce(device: str, what: str) -> None:
    """Print the device, why a GPU is not used, and what is tuned, on stderr."""
    lines = [("fingerprint", headline(fingerprint.take(device))), ("tune", what)]
    if unused := unused_gpu():
        lines.insert(1, ("note", f"this machine's GPU is not used: {unused}"))
    for name, text in lines:
        click.echo(paragraph(f"{name:<14}{text}", hang=" " * 14), err=True)


def refuse_ordinary() -> None:
    """Raise UsageError if this process may not raise its priority."""
    if not allowed():
        raise UsageError(
            "--realtime: the system does not allow real-time priority",
            why="the process lacks the capability CAP_SYS_NICE",
            todo="run as root, or tune on a quiet machine without --realtime",
        )


def recorded_workloads(ctx: click.Context, path: Path) -> tuple[Named, ...]:
    """Return the workloads of a recording. Raise UsageError for options that choose the workloads of a model."""
    asked = [n for n in ("model", "ops", "dtype", "weight_format", "batch", "seq", "prompt") if given(ctx, n)]
    if asked:
        raise UsageError(
            f"--recorded and --{asked[0].rstrip('s')} are mutually exclusive",
            why="a recording lists its workloads",
            todo="remove one of them",
        )
    note = mode_note(path)
    if note:
        click.echo(note, err=True)
    return named_workloads(path)


def report_on(
    request: Any,
    named: Sequence[Named],
    again: str,
    as_json: bool,
    *,
    step: str = "",
    ray: str = "",
    counts: Sequence[int] = (0,),
) -> None:
    """Tune, and print the results: the headline of the step that `step` names, the table, the remarks.

    Without `step`, for the calls of a recording, print their times instead of a headline.
    """
    from autosel.tuning.ended import unfinished

    found = run_to_end(request, len(named), again, ray=ray, counts=counts)
    undecided = unfinished(found, again)
    if as_json:
        emit_json({**report_json(found), "error": error_json(undecided) if undecided else None})
    else:
        labels, calls = {n.workload.key: n.label for n in named}, {n.workload.bucket: n.calls_per_step for n in named}
        for mode, decided in by_mode(found.decisions).items():
            if len(counts) > 1:
                click.echo(f"for processes with {threads_of(mode)} thread{'s' if threads_of(mode) > 1 else ''}")
            if step and (told := step_headline(decided, named, step)):
                click.echo(f"{told}\n")
            click.echo(decision_table(decided, labels))
            if not step:
                click.echo(weighted_line(decided, calls))
        show_remarks(found)
    where = "the database of AUTOSEL_DB" if settings.get("db") else settings.home() / "ledger.db"
    click.echo(f"\nDecisions are in {where}.   Why: {settings.spelling()} explain attn", err=True)
    if undecided is not None:
        report(undecided)
        raise click.exceptions.Exit(undecided.exit_code)


def by_mode(decisions: Sequence[Decision]) -> dict[str, list[Decision]]:
    found: dict[str, list[Decision]] = {}
    for decision in decisions:
        found.setdefault(decision.mode, []).append(decision)
    return found


def weighted_line(decisions: Sequence[Decision], calls: Mapping[str, int]) -> str:
    """Return the time of the recorded calls with the baselines and with the decisions, from the times of the races."""
    before = after = 0.0
    timed = 0
    for bucket, row in {d.bucket: decision_json(d) for d in decisions}.items():
        if row["baseline_us"] and row["time_us"]:
            before += calls.get(bucket, 0) * row["baseline_us"]
            after += calls.get(bucket, 0) * row["time_us"]
            timed += calls.get(bucket, 0)
    if not after:
        return "weighted: nothing was timed"
    share = timed / sum(calls.values())
    return (
        f"weighted: {timed:,} of {sum(calls.values()):,} recorded calls ({share:.0%}), {before / 1e6:.3g} s by the "
        f"baselines, {after / 1e6:.3g} s as decided: {before / after:.2f}x"
    )


def run_to_end(request: Any, workloads: int, again: str, *, ray: str = "", counts: Sequence[int] = (0,)) -> Report:
    """Run the pipeline here or on a cluster, with progress. Raise Stopped on Ctrl-C, with the number of decisions."""
    from autosel.pipeline import tune_at
    from autosel.tuning.ended import stoppable

    if ray:
        from autosel.fleet import on_ray

    with (
        ledgers.open_ledger() as ledger,
        Progress(request.budget_s, command=again) as progress,
        stoppable(progress, workloads * len(counts), again) as counted,
    ):
        return on_ray.tune(request, ray, ledger, counted) if ray else tune_at(request, counts, ledger, counted)


def again_command(ctx: click.Context) -> str:
    """Return the command that continues this one: the model, and the options that choose workloads."""
    how = ("threads", "effort", "wait", "realtime", "device", "ray")
    if ctx.params.get("recorded"):
        words = [settings.spelling(), "tune", "--recorded", shlex.quote(str(ctx.params["recorded"]))]
        return " ".join([*words, *given_options(ctx, how)])
    words = [settings.spelling(), "tune", "--model", shlex.quote(str(ctx.params["model"]))]
    return " ".join([*words, *given_options(ctx, ("ops", "dtype", "batch", "seq", "prompt", *how))])


def report_json(found: Report) -> dict[str, Any]:
    return {
        "decisions": [decision_json(d) for d in found.decisions],
        "rejected": [
            {"op": r.workload.op, "workload": r.workload.key, "candidate": r.candidate}
            | {"stage": r.stage, "reason": r.reason, "quarantine": r.quarantine or None}
            for r in found.rejected
        ],
        "undecided": [n.workload.key for n in found.undecided],
        "fingerprint": to_json(found.fingerprint),
        "hw_id": found.fingerprint.hw_id,
        "measured": found.measured,
        "seconds": found.seconds,
    }


def show_remarks(found: Report) -> None:
    """Print the remarks below the table: failed candidates, the roofline's rate, disturbances."""
    for candidate, reason in {r.candidate: r.reason for r in found.rejected if r.stage == "build"}.items():
        click.echo(paragraph(f"{candidate} could not be built: {reason}", hang="  "))
    for line in _baselines_at_fault(found):
        click.echo(paragraph(line, hang="  "))
    failed = {r.candidate for r in found.rejected if r.stage in ("parity", "race")}
    refused = {r.candidate for r in found.rejected if r.stage == "eligible"} - failed
    told = [f"{len(failed)} candidate{'s' if len(failed) > 1 else ''} failed"] if failed else []
    told += [f"{len(refused)} {'were' if len(refused) > 1 else 'was'} not eligible"] if refused else []
    if told:
        click.echo(f"{', '.join(told)}       {settings.spelling()} explain --failed")
    held = {r.quarantine: r.candidate for r in found.rejected if r.quarantine}
    if held:
        click.echo(paragraph(held_text(held), hang="  "))
        click.echo(f"  {release_command(held)}      lets {'them' if len(held) > 1 else 'it'} race again")
    rates = [d.verdict.read_bytes_per_s for d in found.decisions if d.verdict and d.verdict.read_bytes_per_s]
    if rates:
        low, high = bandwidth(min(rates)), bandwidth(max(rates))
        told_rate = low if low == high else f"{low} .. {high}"
        click.echo(f"roof: fraction of {told_rate}, measured during these races")
    if found.fingerprint.contended and found.measured and devices.on_host(found.fingerprint.kind):
        noisy = f"contended: other work ran while the rates were measured ({'; '.join(found.fingerprint.notes)})"
        click.echo(paragraph(noisy, hang="  "))
    for line in note_lines(remarks(found.fingerprint)):
        click.echo(line)
    if found.measured == 0 and found.decisions:
        click.echo(f"nothing measured: all {len(found.decisions)} decisions are still valid ({found.seconds:.1f} s)")


def _baselines_at_fault(found: Report) -> list[str]:
    """Return a line for each baseline that fails its proof, with the number of workloads and the first reason."""
    at = [r for r in found.rejected if r.stage == "baseline"]
    lines = []
    for candidate in dict.fromkeys(r.candidate for r in at):
        reasons = [r.reason for r in at if r.candidate == candidate]
        where = f"{len(reasons)} workloads" if len(reasons) > 1 else "one workload"
        why = f"PyTorch's own {candidate} fails its proof at {where}: {reasons[0]}"
        lines.append(f"{why}. It is what runs without autosel, so it stays the baseline.")
    return lines


def parse_threads(text: str, device: str, ray: str) -> tuple[int, ...]:
    """Return the numbers of `1,2` or `1-4`, ascending. Raise UsageError for more threads than cores."""
    import torch

    if ray or not devices.on_host(devices.kind_of(device)):
        raise UsageError(
            f"--threads and --{'ray' if ray else f'device {device}'} are mutually exclusive",
            why="a GPU's decisions do not depend on the host's threads" if not ray else "each worker has its own cores",
        )
    parts = [re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part.strip()) for part in text.split(",")]
    counts = {n for m in parts if m for n in range(int(m[1]), int(m[2] or m[1]) + 1)}
    most = max(devices.this_device().cpus, torch.get_num_threads())
    if not all(parts) or not counts or min(counts) < 1 or max(counts) > most:
        raise UsageError(f"--threads {text!r}: numbers from 1 to {most} are expected", todo="--threads 1,2 or 1-4")
    return tuple(sorted(counts))


def parse_budget(text: str) -> float:
    """Return the seconds of `90s`, `5m`, `1h30m` or a plain number. Raises UsageError."""
    match = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", text.strip())
    found = [float(group or 0) for group in match.groups()] if match and text.strip() else []
    if not sum(found):
        raise UsageError(f"--budget {text!r} is not a duration", todo="write it as 90s, 5m or 1h30m")
    return found[0] * 3600 + found[1] * 60 + found[2]
