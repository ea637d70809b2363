"""`knobs`: every kernel's settings with the formula that gave each, for this device or one that is not there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

from autosel.cli.output import emit_json, json_option
from autosel.values import DTYPES, Accepted, Fingerprint, Knobs, Workload, to_json


@click.command("knobs")
@click.option(
    "--model", default="llama-8b", show_default=True, help="a preset, a checkpoint folder, or its config.json"
)
@click.option("--op", "ops", multiple=True, help="only this op; may be repeated")
@click.option("--dtype", type=click.Choice(DTYPES), default=None, help="default: the model's own")
@click.option("--batch", type=click.IntRange(1, 4096), default=1, show_default=True)
@click.option("--seq", type=click.IntRange(1, 1 << 20), default=8192, show_default=True, help="longest context, tokens")
@click.option("--fingerprint", "device", default="cpu", show_default=True, help="cpu, or a known device: h200, l4, ...")
@click.option("--explain", is_flag=True, help="show each knob's formula, inputs and reason")
@json_option
def knobs_command(
    model: str,
    ops: Sequence[str],
    dtype: str | None,
    batch: int,
    seq: int,
    device: str,
    explain: bool,
    as_json: bool,
) -> None:
    """Settings in closed form: no search, and nothing is measured but the fingerprint.

    \b
    Examples:
      knobs --model llama-8b --explain
      knobs --model llama-8b --op attn --fingerprint h200 --explain
    """
    from autosel import models
    from autosel.cli.fingerprint import find
    from autosel.models.workloads import step

    fp = find(device)
    shape = models.load(model)
    named = step(shape, batch=batch, context=seq, dtype=dtype, ops=list(ops) or None)  # type: ignore[arg-type]
    found = [(n.workload, n.label, who, knobs) for n in named for who, knobs in settings_of(n.workload, fp)]
    if as_json:
        emit_json(
            {
                "device": fp.name,
                "hw_id": fp.hw_id,
                "knobs": [
                    {"workload": w.key, "label": label, "candidate": who, "settings": to_json(knobs.settings)}
                    for w, label, who, knobs in found
                ],
            }
        )
        return
    click.echo(f"{fp.name}   ({fp.source})")
    for w, label, who, knobs in found:
        click.echo(f"\n{label}  {w.shape_text} {w.dtype}  {who}")
        _show(knobs, explain)


def settings_of(w: Workload, fp: Fingerprint) -> Iterator[tuple[str, Knobs]]:
    """(kernel, its knobs) for every kernel with knobs that accepts the workload."""
    if fp.kind == "cuda":
        from autosel.knobs import gpu

        yield from gpu.derive(w, gpu.facts(fp)).items()
        return
    from autosel.candidates import registry

    for candidate, support in registry.eligible(w, fp, "full"):
        if isinstance(support, Accepted):
            knobs = candidate.knobs(w, fp)
            if knobs.settings:
                yield candidate.name, knobs


def _show(knobs: Knobs, explain: bool) -> None:
    if not explain:
        click.echo("  " + ", ".join(f"{k.name} {_short(k.value)}" for k in knobs.settings))
        return
    for knob in knobs.settings:
        click.echo(f"  {knob.name} = {_short(knob.value)}")
        click.echo(f"      {knob.formula}")
        inputs = ", ".join(f"{name} {_short(value)}" for name, value in knob.inputs.items())
        if inputs:
            click.echo(f"      with {inputs}")
        if knob.reason:
            click.echo(f"      {knob.reason}")


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
