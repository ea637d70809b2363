"""`verify --compare A B`: the ratio of two runs' tokens per second, and the conditions of both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from autosel.cli.output import bandwidth, emit_json, error_json, leave, paragraph, table
from autosel.errors import AutoselError, TooNoisy

if TYPE_CHECKING:
    from autosel.certify.compare import Change


class Slower(AutoselError):
    """The second of two compared runs is slower."""

    exit_code = 3


def show_comparison(changes: Sequence[Change], names: tuple[str, str], as_json: bool) -> None:
    """Print the changes from A to B. Exit with 3 if B is slower in one, else with 5 if one allows no claim."""
    from autosel.certify.compare import document

    trouble = _trouble(changes)
    if as_json:
        error = error_json(trouble) if trouble else None
        emit_json({"a": names[0], "b": names[1], "compare": document(changes), "error": error})
    else:
        click.echo(f"A  {names[0]}\nB  {names[1]}")
        for change in changes:
            click.echo("\n".join(["", *_lines(change)]))
    leave([trouble] if trouble else [])


def _trouble(changes: Sequence[Change]) -> AutoselError | None:
    outcomes = [change.outcome for change in changes]
    if "slower" in outcomes:
        return Slower(f"B is slower in {outcomes.count('slower')} of {len(outcomes)} runs")
    if "no claim" in outcomes:
        todo = "measure both again under the same conditions, with at least eight steps or trials"
        return TooNoisy(f"{outcomes.count('no claim')} of {len(outcomes)} runs cannot be compared", todo=todo)
    return None


def _lines(change: Change) -> Iterator[str]:
    from autosel.certify.conditions import ALWAYS, differing

    before, now = change.stated
    differ = differing(before, now)
    names = [name for name in {**before, **now} if name in ALWAYS or name in differ]
    rows = [[name, *(_shown(stated.get(name, "unknown")) for stated in (before, now))] for name in names]
    yield paragraph(change.what, hang="  ")
    yield table(("", "A", "B"), [["tokens/s", f"{change.before:.4g}", f"{change.now:.4g}"], *rows], wrap=2)
    yield paragraph(_sentence(change, differ), hang="  ")


def _shown(value: str | float) -> str:
    return value if isinstance(value, str) else bandwidth(value)


def _sentence(change: Change, differ: Sequence[str]) -> str:
    if change.interval is None:
        return f"no claim: {change.speedup:.3g}x, but a run has fewer than eight steps or trials"
    ratio = f"{change.speedup:.3g}x (95 %: {change.interval.lo:.3g} .. {change.interval.hi:.3g})"
    if differ:
        return f"no claim: B over A is {ratio}, but these conditions differ: {', '.join(differ)}"
    told = {"faster": "B is faster", "slower": "B is slower"}.get(change.outcome, "no difference is shown")
    return f"{told}: B over A is {ratio}"
