"""Command `knobs`: show every kernel's settings and their formulas, for this device or a known absent device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

from autosel import devices, models
from autosel.candidates import registry
from autosel.cli import completion
from autosel.cli.device import default_device
from autosel.cli.fingerprint import find
from autosel.cli.options import batch_option, dtype_option, json_option, model_option, ops_option, seq_option, verb
from autosel.cli.output import emit_json, note_lines, paragraph
from autosel.fingerprint.describe import remarks
from autosel.knobs import gpu
from autosel.ledger.describe import shape
from autosel.models.workloads import step
from autosel.values import DTYPES, Accepted, DTypeName, Fingerprint, Knobs, Workload, to_json


@verb("knobs", "knobs --model llama-8b --explain", "knobs --op attn --fingerprint h200 --explain")
@model_option
@ops_option
@dtype_option(DTYPES)
@batch_option
@seq_option
@click.option(
    "--fingerprint",
    "device",
    default=default_device,
    metavar="DEVICE",
    shell_complete=completion.devices,
    help="cpu, cuda, or a known device: h200, l4 ...",
)
@click.option("--explain", is_flag=True, help="show each knob's formula, inputs and reason")
@json_option
def knobs_command(
    model: str,
    ops: Sequence[str],
    dtype: DTypeName | None,
    batch: int,
    seq: int,
    device: str,
    explain: bool,
    as_json: bool,
) -> None:
    """Show the settings of kernels. Formulas derive them from the fingerprint, without a search."""
    fp = find(device)
    named = step(models.load(model), batch=batch, context=seq, dtype=dtype, ops=list(ops) or None)
    found = [(n.workload, n.label, who, knobs) for n in named for who, knobs in settings_of(n.workload, fp)]
    if as_json:
        kernels = [
            {"workload": w.key, "label": label, "candidate": who, "settings": to_json(knobs.settings)}
            for w, label, who, knobs in found
        ]
        emit_json({"device": fp.name, "hw_id": fp.hw_id, "notes": remarks(fp), "knobs": kernels})
        return
    click.echo("\n".join((f"{fp.name}   ({fp.source})", *note_lines(remarks(fp)))))
    for w, label, who, knobs in found:
        click.echo(f"\n{label}  {shape(w)} {w.dtype}  {who}")
        _show(knobs, explain)
    if not found:
        click.echo("no kernel with knobs accepts these workloads")


def settings_of(w: Workload, fp: Fingerprint) -> Iterator[tuple[str, Knobs]]:
    """Yield name and knobs of every kernel with knobs that accepts the workload."""
    if devices.runs(fp.kind, "CUDA"):
        yield from gpu.derive(w, gpu.facts(fp)).items()
        return
    for candidate, support in registry.eligible(w, fp, "full"):
        if isinstance(support, Accepted):
            knobs = candidate.knobs(w, fp)
            if knobs.settings:
                yield candidate.name, knobs


def _show(knobs: Knobs, explain: bool) -> None:
    if not explain:
        click.echo(paragraph(", ".join(f"{k.name} {_short(k.value)}" for k in knobs.settings), indent="  "))
        return
    for knob in knobs.settings:
        inputs = ", ".join(f"{name} {_short(value)}" for name, value in knob.inputs.items())
        click.echo(f"  {knob.name} = {_short(knob.value)}")
        for line in (knob.formula, f"with {inputs}" if inputs else "", knob.reason):
            if line:
                click.echo(paragraph(line, indent="      "))


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
