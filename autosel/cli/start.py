"""Command `start`, which `./run` without a verb calls: fingerprint, tune llama-8b, show the decisions."""

from __future__ import annotations

import time

import click

from autosel import settings
from autosel.cli.device import default_device, unused_gpu
from autosel.cli.options import model_option, verb
from autosel.cli.output import paragraph


@verb("start", "start", "start --model qwen3-1.7b")
@model_option
@click.pass_context
def start_command(ctx: click.Context, model: str) -> None:
    """Fingerprint this machine, tune, and show the decisions. A second start takes seconds and measures nothing."""
    from autosel import fingerprint, models
    from autosel.cli.tune import tune_command
    from autosel.fingerprint.describe import headline

    shape = models.load(model)
    started = time.monotonic()
    device = default_device()
    fp = fingerprint.take(device)
    _step(2, "fingerprint", headline(fp), time.monotonic() - started)
    unused = unused_gpu()
    if unused:
        click.echo(paragraph(f"note: this machine's GPU is not used: {unused}", hang="  "), err=True)
    _step(3, f"tune {model}", f"{shape.dtype}, batch 1, context 8192", None)
    try:
        ctx.invoke(tune_command, model=model, device=device)
    finally:
        where = settings.get("db") or settings.home() / "ledger.db"
        click.echo(f"\nDecisions are in {where}.   Why: {settings.spelling()} explain attn", err=True)


def _step(number: int, name: str, text: str, seconds: float | None) -> None:
    took = f"{seconds:.0f} s" if seconds is not None else ""
    click.echo(paragraph(f"{f'[{number}/3] {name:<14}{text}':<75} {took}".rstrip(), hang=" " * 20), err=True)
