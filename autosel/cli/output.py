"""Output of the command line: tables of at most 80 columns for people, one JSON document for programs.

Colour only marks states.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from autosel import settings
from autosel.errors import AutoselError, Stopped, TooNoisy
from autosel.values import to_json

WIDTH = 80


def emit_json(value: Any) -> None:
    """Print the JSON document of a verb: indented on a terminal, in one line for a pipe."""
    click.echo(json.dumps(to_json(value), indent=2 if sys.stdout.isatty() else None))


def error_json(error: AutoselError) -> dict[str, Any]:
    """Return the value of "error" in the JSON of a failed verb."""
    return {"what": error.what, "why": error.why, "todo": error.todo, "exit_code": error.exit_code}


def report(error: AutoselError) -> None:
    """Print an error on stderr: what happened, why, and the fix. The fix is often a command, so it is not wrapped."""
    undecided = error.exit_code == TooNoisy.exit_code
    mark = "" if isinstance(error, Stopped) else "undecided: " if undecided else "error: "
    told = [click.style(mark, fg="yellow" if undecided else "red", bold=True) + error.what]
    told += [paragraph(line, indent="  ") for line in error.why.splitlines()]
    told += [f"  {line}" for line in error.todo.splitlines()]
    click.echo("\n".join(told), err=True, color=settings.colour())


@contextmanager
def noted(troubles: list[AutoselError]) -> Iterator[None]:
    """Collect an error that occurs when there is already a result, so that the result is still printed."""
    try:
        yield
    except AutoselError as error:
        troubles.append(error)


def leave(troubles: Sequence[AutoselError]) -> None:
    """Report all errors and exit with the first one's code."""
    for trouble in troubles:
        report(trouble)
    if troubles:
        raise click.exceptions.Exit(troubles[0].exit_code)


def paragraph(text: str, indent: str = "", hang: str | None = None) -> str:
    """Wrap text to the width, between words only."""
    lines = textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent if hang is None else hang,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines)


def note_lines(notes: Sequence[str]) -> list[str]:
    """Format the notes of a device or a run, in the same way everywhere."""
    return [paragraph(f"note: {note}", hang="  ") for note in notes]


def table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = (), wrap: int | None = None
) -> str:
    """Format a table with columns as wide as their widest cell. `right` lists right-aligned columns.

    A table wider than 80 columns gets narrower gaps; then column `wrap` is wrapped.
    """
    shown = [list(headers), *[list(r) for r in rows]]
    widths = [max(_width(r[i]) for r in shown) for i in range(len(headers))]
    gap = 2 if sum(widths) + 2 * (len(widths) - 1) <= WIDTH else 1
    excess = sum(widths) + gap * (len(widths) - 1) - WIDTH
    if wrap is not None and excess > 0:
        widths[wrap] = max(_longest_word(shown, wrap), widths[wrap] - excess)
    lines = []
    for row in shown:
        for part in _continued(row, wrap, widths):
            cells = [_padded(c, w, i in right) for i, (c, w) in enumerate(zip(part, widths, strict=True))]
            lines.append((" " * gap).join(cells).rstrip())
    return "\n".join(lines)


def _continued(row: Sequence[str], wrap: int | None, widths: Sequence[int]) -> list[list[str]]:
    """Return the row, and below it the rest of column `wrap`."""
    if wrap is None or _width(row[wrap]) <= widths[wrap]:
        return [list(row)]
    parts = textwrap.wrap(row[wrap], widths[wrap], break_long_words=False, break_on_hyphens=False)
    first = [*row[:wrap], parts[0], *row[wrap + 1 :]]
    return [first, *([*[""] * wrap, part, *[""] * (len(row) - wrap - 1)] for part in parts[1:])]


def _longest_word(rows: Sequence[Sequence[str]], column: int) -> int:
    return max(len(word) for row in rows for word in row[column].split() or [""])


def _padded(cell: str, width: int, right: bool) -> str:
    space = " " * (width - _width(cell))
    return space + cell if right else cell + space


def _width(text: str) -> int:
    from rich.cells import cell_len  # takes longer to load than a verb's help

    return cell_len(click.unstyle(text))


def state_style(state: str) -> Callable[[str], str]:
    """Return the colour of a state. It only repeats the word, and is removed if the output is not a terminal."""
    colour = {"promoted": "green", "pinned": "cyan", "demoted": "red", "quarantined": "red"}.get(state)
    return lambda text: click.style(text, fg=colour) if colour else text
