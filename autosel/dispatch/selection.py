"""Select a kernel by the shapes of each call.

A hit is a tuple key, a dict lookup and the call. A miss asks the board for the decision that serves the workload, and
remembers the answer until the snapshot changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from autosel.candidates.convention import defined
from autosel.dispatch.bound import explained
from autosel.dispatch.resolve import Resolution
from autosel.dispatch.shown import html_table, selection_name
from autosel.dispatch.signature import signature
from autosel.ops.contract import Op

MOST_SHAPES = 4096  # distinct shapes remembered; beyond it the table is cleared

# [kernel, calls left until the guard is asked, reason for the kernel, calls granted so far, guard]: a list, because the
# call itself counts in it
TableEntry = list[Any]


def calls(entry: TableEntry) -> int:
    return int(entry[3] - entry[1])


def grant(entry: TableEntry, count: int) -> None:
    """Let this many calls go straight to the kernel, except the last one."""
    entry[3] += count - entry[1]
    entry[1] = count


class Selection(Protocol):
    """Call the op, selecting the kernel by shapes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def explain(self) -> str: ...

    def _repr_html_(self) -> str: ...

    def uses(self) -> list[tuple[Resolution, int]]:
        """Return the kernels that ran in the present table, with counts."""


def make_selection(
    op: Op,
    table: dict[Any, TableEntry],
    resolve: Callable[[dict[str, Any]], TableEntry],
    checked: Callable[..., Any],
    failed: Callable[..., Any],
) -> Selection:
    """Make a selection. `resolve` takes the arguments by name, and stores its result in `table` by the key under "key".

    `checked(entry, *values)` runs the call at which an entry's countdown ends, `failed(entry, error, *values)` a call
    whose kernel raised.
    """
    s = signature(op)
    inputs = ", ".join(f"{a.name!r}: {a.name}" for a in op.args)
    lines = [
        f"def {s.name}({s.parameters}):",
        *(f"    {line}" for line in s.fill),
        "    try:",
        f"        entry = table[{s.key}]",
        "    except (KeyError, AttributeError, TypeError):",
        "        entry = None",
        "    if entry is None:",
        f"        entry = resolve({{{inputs}}})",
        "    left = entry[1] = entry[1] - 1",
        "    if left < 1:",
        f"        return checked(entry, {s.names})",
        "    try:",
        f"        return entry[0]({s.names})",
        "    except Exception as error:",
        f"        return failed(entry, error, {s.names})",
    ]
    shown: set[str] = set()

    def resolved(inputs: dict[str, Any]) -> TableEntry:
        entry = resolve(inputs)
        if entry[2].candidate not in shown:
            shown.add(entry[2].candidate)
            function.__qualname__ = selection_name(op.name, sorted(shown))
        return entry

    scope = {"table": table, "resolve": resolved, "checked": checked, "failed": failed}
    function: Any = defined(s.name, lines, scope)
    function.__qualname__ = selection_name(op.name, ())

    def uses() -> list[tuple[Resolution, int]]:
        return [(entry[2], calls(entry)) for entry in list(table.values())]

    def explain() -> str:
        found: dict[str, int] = {}
        for entry in list(table.values()):
            key = explained(entry[2], entry[4])
            found[key] = calls(entry) + found.get(key, 0)
        if not found:
            return f"{op.name}: not called yet"
        return "\n".join(f"{text}\n  calls     {count}" for text, count in found.items())

    function.uses, function.explain, function._repr_html_ = uses, explain, lambda: html_table(uses())
    selection: Selection = function
    return selection


def key_function(op: Op) -> Callable[[dict[str, Any]], Any]:
    """Return the function that computes the table's key from arguments by name. It raises the errors of the key
    expression for arguments without a key."""
    s = signature(op)
    lines = ["def key(inputs):", *(f"    {a.name} = inputs[{a.name!r}]" for a in op.args), f"    return {s.key}"]
    return defined("key", lines, {})
