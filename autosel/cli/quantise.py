"""Command `quantise`: write a checkpoint in int8 or int4 codes that transformers, vLLM and autosel read."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autosel import settings
from autosel.cli.options import PATH, Known, json_option, verb
from autosel.cli.output import emit_json, paragraph
from autosel.cli.progress import Progress
from autosel.errors import Stopped, UsageError

if TYPE_CHECKING:
    from autosel.decode.checkpoint import WrittenCheckpoint

FORMATS = (  # as decode.checkpoint, which loads torch
    "int8-row", "int8-g128", "int4-g32", "int4-g64", "int4-g128", "uint4-g32", "uint4-g64", "uint4-g128",
)  # fmt: skip


@verb(
    "quantise",
    "quantise ~/checkpoints/my-llama --format int4-g128 -o my-llama-int4",
    "quantise ~/checkpoints/my-llama --format int8-row -o my-llama-int8",
)
@click.argument("folder", metavar="DIR", type=PATH)
@click.option(
    "--format",
    "weight_format",
    type=Known("weight format", FORMATS),
    required=True,
    metavar="FORMAT",
    help=f"of the layers: {', '.join(FORMATS)}",
)
@click.option("-o", "--output", type=PATH, required=True, metavar="OUT", help="the folder to create; it must not exist")
@json_option
def quantise_command(folder: Path, weight_format: str, output: Path, as_json: bool) -> None:
    """Round the checkpoint in DIR to codes, and write it in compressed-tensors' format pack-quantized.

    int4-g128 has 4 bits per weight and a scale per 128 neighbours, uint4-g128 also a zero point, int8-row 8 bits and a
    scale per row. Weights are rounded to nearest; embedding, output head and norms stay as they are. `run --model OUT`
    and vLLM read the result, transformers all but zero points. Ctrl-C leaves nothing behind.
    """
    from autosel.decode.checkpoint import write_checkpoint

    if not folder.is_dir():
        raise UsageError(
            f"{folder} is not a folder", why="a checkpoint folder is expected", todo="name one with a config.json"
        )
    try:
        with Progress() as listener:
            made = write_checkpoint(folder, weight_format, output, listener)
    except KeyboardInterrupt:
        raise Stopped(f"stopped; {output} was not written") from None
    if as_json:
        emit_json(made)
    else:
        click.echo(_told(made))


def _told(made: WrittenCheckpoint) -> str:
    sizes = f"{made.bytes / 1e9:.2f} GB for {made.source_bytes / 1e9:.2f} GB"
    told = f"{made.folder}: {made.format}, {made.bits_per_weight:.4g} bits per weight in layers, {sizes}"
    again = f"measure it: {settings.spelling()} run --model {shlex.quote(made.folder)}"
    return f"{paragraph(told, hang='  ')}\n{again}"
