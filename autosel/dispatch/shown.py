"""Show a callable of best() in a Python shell, and as a table in a notebook.

The callables are plain functions, because a class with `__call__` would make every call slower. A function's repr shows
its `__qualname__`, so the kernel's name is put there.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from autosel.dispatch.resolve import Resolution
from autosel.ledger.describe import against_baseline, shape

HEADERS = ("workload", "kernel", "decision", "vs PyTorch", "calls", "reason")


def selection_name(op: str, candidates: Iterable[str]) -> str:
    """Return `autosel.best('attn'): cpp:attn_decode, torch:attn`: the kernels that were selected so far."""
    return f"autosel.best({op!r}): {', '.join(candidates) or 'not called yet'}"


def bound_name(resolution: Resolution) -> str:
    """Return `autosel.best('attn', like=...): cpp:attn_decode, decision 41, 23x ≥22`."""
    d = resolution.decision
    why = f"decision {d.id}, {against_baseline(d)}" if d is not None and resolution.served else "baseline"
    return f"autosel.best({resolution.workload.op!r}, like=...): {resolution.candidate}, {why}"


def html_table(called: Iterable[tuple[Resolution, int]]) -> str:
    """Return what runs, by workload, as an HTML table."""
    rows = [_cells(resolution, calls) for resolution, calls in called]
    if not rows:
        return "<p>not called yet</p>"
    lines = ["<tr>" + "".join(f"<th>{name}</th>" for name in HEADERS) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return f"<table>{''.join(lines)}</table>"


def _cells(r: Resolution, calls: int) -> tuple[str, ...]:
    d = r.decision if r.served else None
    told = (str(d.id), against_baseline(d)) if d is not None else ("", "")
    return f"{r.workload.op} {shape(r.workload)} {r.workload.dtype}", r.candidate, *told, str(calls), r.reason
