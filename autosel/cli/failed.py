"""List the candidates that failed, are in quarantine, or cannot run on this device (`explain --failed`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import click

from autosel import devices, fingerprint, settings
from autosel.candidates import registry
from autosel.cli.device import identity
from autosel.cli.output import emit_json, paragraph, table
from autosel.ledger.describe import release_command
from autosel.values import WHOLE_STEP, Decision, Failed, Rejected, to_json

if TYPE_CHECKING:
    from autosel.ledger.containment import Quarantine
    from autosel.ledger.store import Ledger

Found = Mapping[str, object]
FEW = 3  # names shown of a group; more are counted by backend
# End of a candidate's reason -> what it needs.
NEEDS = (("the device is a CPU", "need a CUDA device"), ("the device is a GPU", "need a CPU"))


def held_json(held: Sequence[Quarantine]) -> list[dict[str, object]]:
    return [
        {"op": q.op, "candidate": q.arm.candidate, "stage": "quarantine", "check": q.cause, "reason": q.reason}
        | {"id": q.id, "created_at": q.created_at, "release": release_command([q.id])}
        for q in held
    ]


def show_failed(ledger: Ledger, op: str | None, device: str, as_json: bool) -> None:
    """Print everything that failed or may not race on the device, newest first."""
    name, ids = registry.ledger_name(op) if op else None, devices.ids_of(identity(device))
    decisions = [d for d in ledger.history(name) if d.hw_id in ids]
    held = held_json([q for hw_id in ids for q in ledger.quarantined(hw_id, name).values()])
    found = [*held, *_failures(ledger, decisions), *_ineligible(decisions, device)]
    if as_json:
        emit_json(found)
    else:
        click.echo(failed_text(found))


def failed_text(found: Sequence[Found]) -> str:
    """Return a table of what failed, then one line for each reason why other candidates cannot run here."""
    failed = [f for f in found if f["stage"] != "eligible"]
    absent = [f for f in found if f["stage"] == "eligible"]
    lines = ["no candidate has failed parity, failed in a race or been put in quarantine"]
    if failed:
        rows = [[str(f["op"]), str(f["candidate"]), str(f["stage"]), _where_and_why(f)] for f in failed]
        lines = [table(("op", "candidate", "stage", "reason"), rows, wrap=3)]
    if absent:
        count = len({(f["op"], f["candidate"]) for f in absent})
        told = f"{count} candidate{'s' if count > 1 else ''} cannot run here, or not at every workload:"
        lines += ["", told, *_absent_lines(absent)]
        lines.append(f"each with its reason:  {settings.spelling()} explain --failed --json")
    return "\n".join(lines)


def _absent_lines(absent: Sequence[Found]) -> list[str]:
    """Return `44 need a CUDA device (cuda 20, triton 24)` for each reason, the most frequent first."""
    groups: dict[str, dict[tuple[object, str], None]] = {}
    for f in absent:
        groups.setdefault(_need(str(f["reason"])), {})[f["op"], str(f["candidate"])] = None
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    return [paragraph(f"{len(who)}{need} ({_backends(who)})", indent="  ", hang="    ") for need, who in ordered]


def _need(reason: str) -> str:
    """Return ` need a CUDA device` for a kernel of other devices, else `: ` and the reason."""
    return next((f" {need}" for ending, need in NEEDS if reason.endswith(ending)), f": {reason}")


def _backends(who: Iterable[tuple[object, str]]) -> str:
    """Return the candidates' names if they are few, else the number of each backend's."""
    names = [name for _, name in who]
    if len(set(names)) <= FEW:
        return ", ".join(dict.fromkeys(names))
    return ", ".join(f"{backend} {count}" for backend, count in Counter(n.partition(":")[0] for n in names).items())


def _failures(ledger: Ledger, decisions: Sequence[Decision]) -> list[dict[str, object]]:
    """Return failed proofs: one for each candidate, check and case."""
    seen: dict[tuple[str, str, str], dict[str, object]] = {}
    for decision in decisions:
        for arm, parity in ledger.evidence(decision.id).parities:
            if isinstance(parity, Failed):
                who = {"op": decision.op, "workload": decision.workload.key, "candidate": arm.candidate}
                stage = {"while racing": "race", "compile": "build"}.get(parity.case, "parity")
                if arm.candidate == decision.baseline.candidate:
                    stage = "baseline"  # PyTorch's own op is at fault, and serves on
                seen.setdefault((arm.candidate, parity.check, parity.case), {**who, "stage": stage, **to_json(parity)})
    return list(seen.values())


def _ineligible(decisions: Sequence[Decision], device: str) -> list[dict[str, object]]:
    """Return candidates that cannot run the decided workloads, as determined now: one for each reason."""
    seen: dict[tuple[str, str, str], dict[str, object]] = {}
    workloads = {d.workload.key: d.workload for d in decisions if d.op != WHOLE_STEP}  # `run` reports whole steps
    if not workloads:
        return []
    fp = fingerprint.take(device)
    for w in workloads.values():
        for candidate, support in registry.eligible(w, fp, "full"):
            if isinstance(support, Rejected):
                who = {"op": w.op, "workload": w.key, "candidate": candidate.name, "stage": "eligible"}
                seen.setdefault((w.op, candidate.name, support.reason), {**who, "reason": support.reason})
    return list(seen.values())


def _where_and_why(found: Mapping[str, object]) -> str:
    if found["stage"] == "quarantine":
        return f"{found['check']}: {found['reason']}; `{found['release']}` lets it race again"
    return f"{found['check']}, case {found['case']}, at {found['workload']}: {found['reason']}"
