"""Common parts of verbs: the layout of help, and options with the same meaning everywhere."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from autosel import settings
from autosel.cli import completion
from autosel.errors import UnknownName, UsageError
from autosel.formats import WEIGHT_FORMATS
from autosel.values import DTYPES

Decorator = Callable[[Callable[..., Any]], click.Command]


class Verb(click.Command):
    """A verb whose help ends with examples of its use."""

    def __init__(self, *arguments: Any, examples: Sequence[str] = (), **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.examples = examples

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        show_examples(self.examples, formatter)


class VerbGroup(Verb, click.Group):
    """A verb with subcommands."""

    command_class = Verb


def show_examples(examples: Sequence[str], formatter: click.HelpFormatter) -> None:
    if examples:
        with formatter.section("Examples"):
            for line in examples:
                formatter.write(f"{'':>{formatter.current_indent}}{settings.spelling()} {line}\n")


def verb(name: str, *examples: str) -> Decorator:
    """Return a command with examples, each without the program's name."""
    return click.command(name, cls=Verb, examples=examples)


class Known(click.Choice[str]):
    """Choice of a few names; the error for another name suggests the nearest."""

    def __init__(self, kind: str, known: Sequence[str]) -> None:
        super().__init__(known)
        self.kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self.choices:
            raise UnknownName(self.kind, str(value), tuple(self.choices))
        return str(value)


def exact(ctx: click.Context, param: click.Parameter, value: int | None) -> int | None:
    """Refuse a seed that JSON cannot hold exactly: certificates and decisions store it."""
    if value is not None and abs(value) >= 1 << 53:
        raise click.BadParameter(f"{value} is not between -(2^53 - 1) and 2^53 - 1", ctx, param)
    return value


def priced(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """Refuse a price for which tokens per dollar would be 0 or infinite."""
    if value is not None and not 1e-6 <= value <= 1e9:  # refuses NaN too
        raise click.BadParameter(f"{value} is not between 0.000001 and 1000000000", ctx, param)
    return value


Option = Callable[[Callable[..., Any]], Callable[..., Any]]
PATH = click.Path(path_type=Path)

json_option = click.option("--json", "as_json", is_flag=True, help="print one JSON document on stdout")
model_option = click.option(
    "--model",
    default="llama-8b",
    show_default=True,
    metavar="NAME|DIR|FILE",
    shell_complete=completion.models,
    help="a preset, a Hugging Face checkpoint folder, its config.json, or a GGUF file",
)
ops_option = click.option(
    "--op",
    "ops",
    multiple=True,
    metavar="OP",
    shell_complete=completion.ops,
    help="only this op (gemv, attn ...); repeatable",
)
batch_option = click.option(
    "--batch", type=click.IntRange(1, 4096), default=1, metavar="N", help="sequences decoded together  [default: 1]"
)
seq_option = click.option(
    "--seq", type=click.IntRange(1, 1 << 20), default=8192, metavar="N", help="longest context, tokens  [default: 8192]"
)
seed_option = click.option(
    "--seed", type=int, callback=exact, default=None, help="repeat the same operands and coin flips"
)


def dtype_option(known: Sequence[str] = DTYPES[:3]) -> Option:
    return click.option("--dtype", type=Known("dtype", known), default=None, help="default: the model's own")


def format_option() -> Option:
    return click.option(
        "--format",
        "weight_format",
        type=Known("weight format", tuple(WEIGHT_FORMATS)),
        metavar="FORMAT",
        help=f"store matrices of weights as {', '.join(WEIGHT_FORMATS)}  [default: as the model's file, or plain]",
    )


def renamed(old: str, new: str) -> Option:
    """Return a hidden option of an earlier version whose error names its replacement."""

    def refuse(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value:
            raise UsageError(f"{old} is now {new}", todo=f"use {new}")

    return click.option(old, is_flag=True, hidden=True, expose_value=False, callback=refuse)


def given(ctx: click.Context, name: str) -> bool:
    """Return True unless the option has its default."""
    return ctx.get_parameter_source(name) not in (None, ParameterSource.DEFAULT)


def given_options(ctx: click.Context, names: Sequence[str]) -> list[str]:
    """Return the named options that differ from their default, as words of a command line."""
    words: list[str] = []
    for parameter in ctx.command.params:
        value = ctx.params.get(str(parameter.name))
        if parameter.name in names and value and value != parameter.get_default(ctx):
            for one in value if isinstance(value, (tuple, list)) else (value,):
                words += [parameter.opts[0]] if one is True else [parameter.opts[0], shlex.quote(str(one))]
    return words
