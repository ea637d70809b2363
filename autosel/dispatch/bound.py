"""The bound callable: one op at the shapes it was bound for, behind one swappable cell.

Measured beside calling the kernel itself: benchmarks/bench_dispatch.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from autosel.dispatch.resolve import Resolution
from autosel.dispatch.signature import generate, signature
from autosel.guard import NEVER, Watch
from autosel.ops.contract import Op
from autosel.values import Decision

ELSEWHERE = "engine:own"  # in counts: the kernel of an engine that asked, and ran its own instead of the baseline


class Bound(Protocol):
    """A function with the op's parameters. `decision` is None where nothing is decided: the baseline runs.

    An engine that runs a kernel of its own instead counts such a call in `elsewhere[0]`.
    """

    decision: Decision | None
    candidate: str
    reason: str
    chained: Callable[..., Any] | None  # the same kernel, for a chain of them (candidates.load)
    elsewhere: list[int]

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def explain(self) -> str: ...

    def beyond_baseline(self, length: int | None = None) -> bool:
        """Does something else than the baseline run now, of a bucket split by lengths: at this one? Changes with a
        demotion."""

    def calls(self) -> int:
        """How often it was called; two threads that call at once may count as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What the board keeps of a bound callable: the way to put another kernel behind it, and to be asked again."""

    swap: Callable[[Callable[..., Any]], None]
    grant: Callable[[int], None]  # so many calls go straight to the kernel, the last of them not
    calls: Callable[[], int]


def make_bound(
    op: Op, resolution: Resolution, checked: Callable[..., Any], failed: Callable[..., Any]
) -> tuple[Bound, Cell]:
    """`checked(*values)` takes the call at which the countdown ends, `failed(error, *values)` one whose kernel raised.

    Nothing is watched until `put`.
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
    function, swap, grant, calls = generate(lines, {}, "make")(resolution.run, NEVER, checked, failed)
    bound: Bound = function
    cell = Cell(swap=swap, grant=grant, calls=calls)
    function.calls = calls
    function.elsewhere = [0]
    return bound, cell


def put(bound: Bound, cell: Cell, resolution: Resolution, watch: Watch | None) -> None:
    """From now on the bound callable runs what `resolution` says."""
    cell.swap(resolution.run)
    cell.grant(watch.gap() if watch else NEVER)
    bound.decision, bound.candidate, bound.reason = resolution.decision, resolution.candidate, resolution.reason
    bound.chained = getattr(resolution.run, "chained", None)
    bound.beyond_baseline = resolution.beyond_baseline  # type: ignore[method-assign]  # a function's attribute

    def explain() -> str:
        guard = f"\n  guard     {watch.describe()}" if watch else ""
        return f"{resolution.explain()}{guard}\n  calls     {cell.calls()}"

    bound.explain = explain  # type: ignore[method-assign]  # a function's attribute


def make_part(
    op: Op, run: Callable[..., Any], watch: Watch, checked: Callable[..., Any], failed: Callable[..., Any]
) -> Callable[..., Any]:
    """One arm of a split bucket behind its own countdown; `checked(grant, *values)`."""
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
    made: Callable[..., Any] = generate(lines, {}, "make")(run, watch.gap(), checked, failed)
    return made
