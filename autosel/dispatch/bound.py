"""Bind one op to a shape, behind one replaceable cell.

benchmarks/bench_dispatch.py compares its cost with calling the kernel directly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from autosel.candidates.convention import defined
from autosel.candidates.layouts import Reader
from autosel.candidates.load import reader_of
from autosel.dispatch.resolve import Resolution
from autosel.dispatch.shown import bound_name, html_table
from autosel.dispatch.signature import signature
from autosel.guard import NEVER, Watch
from autosel.ops.contract import Op
from autosel.values import Decision


class Bound(Protocol):
    """Call the op like its function. `decision` is None if nothing is decided: the baseline runs.

    An engine that runs its own kernel instead counts such a call in `elsewhere[0]`.
    """

    decision: Decision | None
    candidate: str
    reason: str
    chained: Callable[..., Any] | None  # the same kernel, for use in a chain (candidates.load)
    reader: Reader | None  # what looks up its prepared weights (candidates.layouts); None: it reads them as they are
    elsewhere: list[int]

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def explain(self) -> str: ...

    def _repr_html_(self) -> str: ...

    def beyond_baseline(self, length: int | None = None) -> bool:
        """Return True if another arm than the baseline runs now; in a bucket split by lengths, at this length. A
        demotion changes it."""

    def calls(self) -> int:
        """Return the number of calls; two threads that call at once may count as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Let the board replace the kernel of a bound callable, and set when it is asked again."""

    swap: Callable[[Callable[..., Any]], None]
    grant: Callable[[int], None]  # this many calls go straight to the kernel, except the last one
    calls: Callable[[], int]


def make_bound(
    op: Op, resolution: Resolution, checked: Callable[..., Any], failed: Callable[..., Any]
) -> tuple[Bound, Cell]:
    """Make a bound callable. `checked(*values)` runs the call at which the countdown ends, `failed(error, *values)` a
    call whose kernel raised.

    Nothing is checked until `put`.
    """
    s = signature(op)
    lines = [
        "def make(run, left, checked, failed):",
        "    granted = left",
        f"    def {s.name}({s.parameters}):",
        "        nonlocal left",
        "        left -= 1",
        *(f"        {line}" for line in s.fill),
        "        if left < 1:",
        f"            return checked({s.names})",
        "        try:",
        f"            return run({s.names})",
        "        except Exception as error:",
        f"            return failed(error, {s.names})",
        "    def swap(other):",
        "        nonlocal run",
        "        run = other",
        "    def grant(calls):",
        "        nonlocal left, granted",
        "        granted += calls - left",
        "        left = calls",
        "    def calls():",
        "        return granted - left",
        f"    return {s.name}, swap, grant, calls",
    ]
    function, swap, grant, calls = defined("make", lines, {})(resolution.run, NEVER, checked, failed)
    bound: Bound = function
    cell = Cell(swap=swap, grant=grant, calls=calls)
    function.calls = calls
    function.elsewhere = [0]
    return bound, cell


def put(bound: Bound, cell: Cell, resolution: Resolution, watch: Watch | None) -> None:
    """Make the bound callable run `resolution` from now on."""
    cell.swap(resolution.run)
    cell.grant(watch.gap() if watch else NEVER)
    bound.decision, bound.candidate, bound.reason = resolution.decision, resolution.candidate, resolution.reason
    bound.chained, bound.reader = getattr(resolution.run, "chained", None), reader_of(resolution.run)
    bound.beyond_baseline = resolution.beyond_baseline  # type: ignore[method-assign]  # a function's attribute

    def explain() -> str:
        return f"{explained(resolution, watch)}\n  calls     {cell.calls()}"

    def as_html() -> str:
        return html_table([(resolution, cell.calls())])

    bound.explain = explain  # type: ignore[method-assign]  # a function's attribute
    bound._repr_html_ = as_html  # type: ignore[method-assign]
    bound.__qualname__ = bound_name(resolution)  # type: ignore[attr-defined]


def explained(resolution: Resolution, watch: Watch | None) -> str:
    """Return what runs and why, and how the guard checks it; the baseline needs none."""
    return f"{resolution.explain()}\n  guard     {watch.describe()}" if watch else resolution.explain()


def make_part(
    op: Op, run: Callable[..., Any], watch: Watch, checked: Callable[..., Any], failed: Callable[..., Any]
) -> Callable[..., Any]:
    """Make one arm of a split bucket with its own countdown; `checked(grant, *values)`."""
    s = signature(op)
    lines = [
        "def make(run, left, checked, failed):",
        f"    def {s.name}({s.names}):",
        "        nonlocal left",
        "        left -= 1",
        "        if left < 1:",
        f"            return checked(grant, {s.names})",
        "        try:",
        f"            return run({s.names})",
        "        except Exception as error:",
        f"            return failed(error, {s.names})",
        "    def grant(calls):",
        "        nonlocal left",
        "        left = calls",
        f"    return {s.name}",
    ]
    made: Callable[..., Any] = defined("make", lines, {})(run, watch.gap(), checked, failed)
    return made
