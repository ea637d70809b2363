"""Tables of at most 80 columns for people, one JSON document for programs. Colour marks state only."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from autosel.values import to_json

json_option = click.option("--json", "as_json", is_flag=True, help="one JSON document on stdout")


def emit_json(value: Any) -> None:
    click.echo(json.dumps(to_json(value), indent=2 if sys.stdout.isatty() else None))


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = (), indent: str = "") -> str:
    """Columns as wide as their widest cell, never truncated; `right` lists right-aligned columns."""
    shown = [list(headers), *[list(r) for r in rows]]
    widths = [max(_width(r[i]) for r in shown) for i in range(len(headers))]
    lines = []
    for row in shown:
        cells = [
            " " * (w - _width(c)) + c if i in right else c + " " * (w - _width(c))
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def _width(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(click.unstyle(text))


def microseconds(value: float) -> str:
    """`1 010`, `74.1`, `2.31`: three significant digits at least, thin groups."""
    if value >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def ratio(value: float) -> str:
    return f"{value:.0f}x" if value >= 10 else f"{value:.1f}x" if value >= 1.95 else f"{value:.2f}x"


def bytes_text(value: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"


def rate_text(value: float, unit: str) -> str:
    """`46.1 GB/s`, `131 GFLOP/s`, `170 ns`: SI prefixes, three digits."""
    if unit == "s":
        for name, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
            if value >= size:
                return f"{value / size:.3g} {name}"
        return f"{value:.3g} s"
    base = {"bytes/s": "B/s", "FLOP/s": "FLOP/s", "B/s": "B/s"}.get(unit, unit)
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}{base}"
    return f"{value:.3g} {base}"


def state_style(state: str) -> Callable[[str], str]:
    colour = {"promoted": "green", "pinned": "cyan", "demoted": "red", "quarantined": "red"}.get(state)
    return lambda text: click.style(text, fg=colour) if colour and sys.stdout.isatty() else text
