"""`start`: what `./run` without a verb does: fingerprint, tune llama-8b, show the decisions."""

from __future__ import annotations

import time

import click

from autosel import settings


@click.command("start")
@click.option("--model", default="llama-8b", show_default=True)
@click.pass_context
def start_command(ctx: click.Context, model: str) -> None:
    """First contact: fingerprint, tune, show. A second start takes seconds and measures nothing."""
    from autosel import fingerprint
    from autosel.cli.tune import tune_command
    from autosel.fingerprint.describe import headline

    started = time.monotonic()
    fp = fingerprint.take("cpu")
    _step(2, "fingerprint", headline(fp), time.monotonic() - started)
    _step(3, f"tune {model}", "bf16, batch 1, context 8192", None)
    ctx.invoke(tune_command, **{p.name: p.get_default(ctx) for p in tune_command.params if p.name}, model=model)
    click.echo(
        f"\nDecisions are in {settings.db_url().removeprefix('sqlite:///')}.   Why: {settings.spelling()} explain attn"
    )


def _step(number: int, name: str, text: str, seconds: float | None) -> None:
    took = f"{seconds:.0f} s" if seconds is not None else ""
    click.echo(f"{f'[{number}/3] {name:<14}{text}':<75} {took}".rstrip(), err=True)
