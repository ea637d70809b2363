"""Command `best`: show what serves an op on this device now, with its figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from autosel import devices, settings
from autosel import ledger as ledgers
from autosel.candidates.registry import baseline, ledger_name
from autosel.candidates.validity import staleness
from autosel.cli import completion
from autosel.cli.device import device_option, identity, told
from autosel.cli.figures import decision_table
from autosel.cli.options import json_option, verb
from autosel.cli.output import emit_json, paragraph
from autosel.devices.store import of_hardware
from autosel.errors import LedgerError, UsageError
from autosel.ledger.conditions import other_device, other_mode
from autosel.ledger.describe import decision_json
from autosel.ledger.key import current_mode, matters
from autosel.values import SERVING, WHOLE_STEP, Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """A decision for this device; `stale` says why the baseline runs instead, if it does."""

    decision: Decision
    stale: str


@verb("best", "best attn", "best gemv --json", "best attn --workload L8192", "best attn --device cuda:1")
@click.argument("op", shell_complete=completion.ops)
@click.option("--workload", default="", metavar="TEXT", help="show only workloads with this in their key: D128.L8192")
@device_option()
@json_option
def best_command(op: str, workload: str, device: str, as_json: bool) -> None:
    """Show what serves OP here.

    --json prints one object, for the longest context if there are several; its `all` lists every one.
    """
    everything = serving(op, device)
    rows = [n for n in everything if workload in n.decision.workload.key]
    if everything and not rows:
        keys = ", ".join(n.decision.workload.key for n in everything)
        raise UsageError(f"no workload of {op} has {workload!r} in its key", why=f"known: {keys}")
    if as_json and rows:
        first = max(rows, key=lambda n: (dict(n.decision.workload.dims).get("L", 0), n.decision.workload.key))
        emit_json({**now_json(first), "all": [now_json(n) for n in rows]})
    elif as_json:
        emit_json(_undecided(op, device))
    elif rows:
        click.echo(decision_table([n.decision for n in rows], {}, {n.decision.id: n.stale for n in rows}))
        show_stale(rows, op, device)
    else:
        found = _undecided(op, device)
        click.echo(f"{op}: {found['reason']}; the baseline serves, {found['candidate']}")
        click.echo(f"measure:  {settings.spelling()} {measured_by(op, device)}", err=True)


def measured_by(op: str, device: str) -> str:
    """Return the verb that decides the op on the device. Whole steps race when a model runs."""
    if op == WHOLE_STEP:
        return f"run --model NAME{told(device)}, once its ops are tuned"
    return f"tune --op {op}{told(device)}"


def now_json(now: Now) -> dict[str, Any]:
    """Return the decision as best() serves it; for a stale decision, the baseline with the reason."""
    made = decision_json(now.decision)
    if not now.stale:
        return made
    base = now.decision.baseline
    instead = {"backend": base.backend, "candidate": base.candidate, "knobs": dict(base.knobs)}
    gone = dict.fromkeys(("speedup", "next_best", "time_interval_us", "roofline"))
    stale = {"state": "baseline", "time_us": made["baseline_us"], "reason": now.stale, "stale": now.stale}
    return made | instead | gone | stale


def _undecided(op: str, device: str) -> dict[str, Any]:
    unknown = dict.fromkeys(
        ("workload", "decision_id", "speedup", "next_best", "baseline_us", "time_us", "roofline", "read_bytes_per_s")
    )
    where = "this device" if device == devices.HOST else device
    why = {"reason": decided_elsewhere(op, device) or f"no decision on {where}", "all": []}
    who = {"op": op, "state": "baseline", "backend": None, "candidate": "op by op"}
    if op != WHOLE_STEP:
        candidate = baseline(op)
        who |= {"op": candidate.op, "backend": candidate.backend, "candidate": candidate.name}
    return {**who, **unknown, **why}


def decided_elsewhere(op: str, device: str) -> str:
    """Return for which other device of the same kind the op is decided, or ""."""
    with ledgers.open_ledger() as ledger:
        found = {s.decision.hw_id: s.decision.id for s in ledger.serving() if is_of(s.decision, op)}
        known = {hw_id: of_hardware(hw_id) or ledger.evidence(number).fingerprint for hw_id, number in found.items()}
    here = identity(device)
    alike = [hw_id for hw_id, fp in known.items() if fp is None or fp.kind == here.kind]
    return other_device(alike, here, known.get) if alike else ""


def is_of(decision: Decision, op: str | None) -> bool:
    """Return True if the decision is of the op; gemv is linear with M = 1, gemm with M > 1. Raises UsageError."""
    named = op is None or decision.op == ledger_name(op)
    return named and (op not in ("gemv", "gemm") or (decision.workload["M"] == 1) == (op == "gemv"))


def show_stale(rows: Sequence[Now], op: str, device: str) -> None:
    """Print below a table which of its decisions do not run, and what to do."""
    for now in rows:
        if now.decision.state not in SERVING:
            text = f"decision {now.decision.id}, {now.decision.told}; the baseline runs instead"
            click.echo(paragraph(text, hang="  "))
    reasons = dict.fromkeys(n.stale for n in rows if n.stale)
    for reason in reasons:
        click.echo(paragraph(f"{reason}; the baseline runs instead", hang="  "))
    again = dict.fromkeys(n.decision.stale for n in rows if n.decision.stale and not n.stale)
    for reason in again:
        click.echo(paragraph(f"stale: {reason}; proven again, and serves until it is raced again", hang="  "))
    if (reasons or again) and not settings.get("disable"):
        click.echo(f"measure again:  {settings.spelling()} {measured_by(op, device)}", err=True)


def serving(op: str | None, device: str) -> list[Now]:
    """Return what serves on the device now, in the ledger's order. Raises UsageError."""
    if op:
        ledger_name(op)  # raises for an unknown op
    ids = devices.ids_of(identity(device))
    with ledgers.open_ledger() as ledger:
        rows = [s.decision for s in ledger.serving() if s.decision.hw_id in ids and is_of(s.decision, op or None)]
    return [Now(decision=d, stale=_elsewhere(d) or (staleness(d) if d.state in SERVING else "")) for d in rows]


def decided(op: str, device: str) -> list[Now]:
    """Return what serves an op on the device now. Raises LedgerError if nothing is decided, UsageError."""
    found = serving(op, device)
    if not found:
        raise LedgerError(
            f"no decision for {op} on {'this device' if device == devices.HOST else device}",
            why="; ".join(filter(None, (decided_elsewhere(op, device), "the baseline serves it"))),
            todo=f"{settings.spelling()} {measured_by(op, device)}",
        )
    return found


def _elsewhere(decision: Decision) -> str:
    """Return why the decision does not apply: other threads or numeric flags, or AUTOSEL_DISABLE. Else return ""."""
    if settings.get("disable"):
        return "AUTOSEL_DISABLE is set"
    mode = current_mode("team" if decision.op == WHOLE_STEP else "eager")
    kind = devices.HOST if decision.hw_id in devices.ids_of(devices.this_device()) else ""
    then, now = (matters(m, kind, decision.bucket) for m in (decision.mode, mode))
    return "" if then == now else other_mode([then], now)
