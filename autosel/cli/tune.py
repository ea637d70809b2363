"""`tune`: the pipeline on a model's workloads, with progress, a verdict table and the rejected with reasons."""

from __future__ import annotations

from collections.abc import Sequence

import click

from autosel import settings
from autosel.cli.figures import decision_json, decision_table
from autosel.cli.output import emit_json, json_option, rate_text
from autosel.errors import UsageError
from autosel.values import DTYPES, to_json


@click.command("tune")
@click.option(
    "--model",
    default="llama-8b",
    show_default=True,
    help="a preset, a Hugging Face checkpoint folder, or its config.json",
)
@click.option("--op", "ops", multiple=True, help="only this op (gemv, attn, rmsnorm ...); may be repeated")
@click.option("--dtype", type=click.Choice(DTYPES[:3]), default=None, help="default: the model's own")
@click.option("--batch", type=click.IntRange(1, 4096), default=1, show_default=True, help="sequences decoded together")
@click.option("--seq", type=click.IntRange(1, 1 << 20), default=8192, show_default=True, help="longest context, tokens")
@click.option("--budget", default="", help="time allowed, as 90s or 5m; what is unfinished stays undecided")
@click.option("--effort", type=click.Choice(["quick", "full"]), default=None, help="full also races torch.compile")
@click.option("--resume/--force", "resume", default=True, help="--force measures again what is settled")
@click.option("--device", default="cpu", show_default=True, help="what to tune for")
@click.option("--seed", type=int, default=None, help="repeat the same operands and coin flips")
@json_option
def tune_command(
    model: str,
    ops: Sequence[str],
    dtype: str | None,
    batch: int,
    seq: int,
    budget: str,
    effort: str | None,
    resume: bool,
    device: str,
    seed: int | None,
    as_json: bool,
) -> None:
    """Race what is eligible for a model's decode step, prove it right, decide, and keep the evidence.

    Settled decisions are not measured again. Ctrl-C keeps what is decided; the same command continues.

    \b
    Examples:
      tune --model llama-8b
      tune --model qwen3-1.7b --op attn --seq 32768
      tune --model ~/checkpoints/my-llama --budget 5m --json
    """
    from autosel import models
    from autosel.cli.progress import Progress
    from autosel.ledger.store import open_ledger
    from autosel.models.workloads import step
    from autosel.pipeline import Request, tune

    seconds = parse_budget(budget) if budget else float(settings.get("budget"))
    shape = models.load(model)
    named = step(shape, batch=batch, context=seq, dtype=dtype, ops=list(ops) or None)  # type: ignore[arg-type]
    request = Request(
        workloads=named,
        effort=effort or settings.get("effort"),
        device=device,
        budget_s=seconds,
        seed=seed,
        force=not resume,
    )
    progress = Progress(seconds)
    with open_ledger() as ledger:
        try:
            report = tune(request, ledger, progress)
        except KeyboardInterrupt:
            progress.clear()
            done = progress.settled + progress.decided_now
            again = f"{settings.spelling()} tune --model {model}"
            click.echo(f"stopped; {done} of {len(named)} decided and kept; `{again}` continues", err=True)
            raise click.exceptions.Exit(130) from None
        progress.clear()
    if as_json:
        emit_json(
            {
                "decisions": [decision_json(d) for d in report.decisions],
                "rejected": [
                    {
                        "op": r.workload.op,
                        "workload": r.workload.key,
                        "candidate": r.candidate,
                        "stage": r.stage,
                        "reason": r.reason,
                    }
                    for r in report.rejected
                ],
                "fingerprint": to_json(report.fingerprint),
                "hw_id": report.fingerprint.hw_id,
                "measured": report.measured,
                "seconds": report.seconds,
            }
        )
        return
    labels = {n.workload.key: n.label for n in named}
    click.echo(decision_table(report.decisions, labels))
    show_remarks(report)


def show_remarks(report: object) -> None:
    from autosel.pipeline import Report

    assert isinstance(report, Report)
    me = settings.spelling()
    failed = {r.candidate for r in report.rejected if r.stage in ("parity", "race", "build")}
    ineligible = {r.candidate for r in report.rejected if r.stage == "eligible"}
    if failed or ineligible:
        words = []
        if failed:
            words.append(f"{len(failed)} candidate{'s' if len(failed) > 1 else ''} failed")
        if ineligible:
            words.append(f"{len(ineligible)} {'were' if len(ineligible) > 1 else 'was'} not eligible")
        click.echo(f"{', '.join(words)}       {me} explain --failed")
    rates = [d.verdict.read_bytes_per_s for d in report.decisions if d.verdict and d.verdict.read_bytes_per_s]
    if rates:
        low, high = rate_text(min(rates), "bytes/s"), rate_text(max(rates), "bytes/s")
        click.echo(f"roofline: fraction of {low if low == high else f'{low} .. {high}'}, read beside these races")
    if report.fingerprint.contended:
        click.echo("contended: other work ran on this machine; best windows are reported, never an average")
    if report.measured == 0:
        click.echo(f"nothing measured: all {len(report.decisions)} decisions hold ({report.seconds:.1f} s)")


def parse_budget(text: str) -> float:
    """Seconds of `90s`, `5m`, `1h30m` or a plain number. Raises UsageError."""
    import re

    match = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", text.strip())
    if not text.strip() or match is None or not any(match.groups()):
        raise UsageError(f"--budget {text!r} is no time", todo="write it as 90s, 5m or 1h30m")
    hours, minutes, seconds = (float(g or 0) for g in match.groups())
    return hours * 3600 + minutes * 60 + seconds
