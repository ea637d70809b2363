"""The bound callable: one op at the shapes it was bound for, behind one swappable cell.

Measured beside calling the kernel itself: benchmarks/bench_dispatch.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from autosel.dispatch.resolve import Resolution
from autosel.dispatch.signature import generate, signature
from autosel.ops.contract import Op
from autosel.values import Decision


class Bound(Protocol):
    """A function with the op's parameters. `decision` is None where nothing is decided: the baseline runs."""

    decision: Decision | None
    candidate: str
    reason: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def explain(self) -> str: ...

    def calls(self) -> int:
        """How often it was called; two threads that call at once may count as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What the board keeps of a bound callable: the way to put another kernel behind it."""

    swap: Callable[[Callable[..., Any]], None]
    calls: Callable[[], int]


def make_bound(op: Op, resolution: Resolution) -> tuple[Bound, Cell]:
    s = signature(op)
    lines = [
        "def make(run):",
        "    count = 0",
        f"    def {s.name}({s.parameters}):",
        "        nonlocal count",
        "        count += 1",
        *(f"        {line}" for line in s.fill),
        f"        return run({s.names})",
        "    def swap(other):",
        "        nonlocal run",
        "        run = other",
        "    def calls():",
        "        return count",
        f"    return {s.name}, swap, calls",
    ]
    function, swap, calls = generate(lines, {}, "make")(resolution.run)
    bound: Bound = function
    cell = Cell(swap=swap, calls=calls)
    function.calls = calls
    put(bound, cell, resolution)
    return bound, cell


def put(bound: Bound, cell: Cell, resolution: Resolution) -> None:
    """From now on the bound callable runs what `resolution` says."""
    cell.swap(resolution.run)
    bound.decision, bound.candidate, bound.reason = resolution.decision, resolution.candidate, resolution.reason

    def explain() -> str:
        return f"{resolution.explain()}\n  calls     {cell.calls()}"

    bound.explain = explain  # type: ignore[method-assign]  # a function's attribute
