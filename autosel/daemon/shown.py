"""Collect the data of the pages from view, ledger and disk, without HTML."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import sqlalchemy as sa

from autosel import resources, settings
from autosel.certify.certificate import Certificate
from autosel.certify.certificate import decode as decode_certificate
from autosel.daemon.certificates import stored_lines
from autosel.daemon.hub import Hub
from autosel.daemon.view import View
from autosel.errors import AutoselError, BadConfig
from autosel.fingerprint.describe import headline
from autosel.ledger import faults, snapshot
from autosel.ledger import schema as t
from autosel.ledger.containment import Quarantine
from autosel.ledger.describe import contended, held_text, release_command
from autosel.ledger.store import Evidence, Ledger
from autosel.native.compile import Artefact, find_artefact
from autosel.values import SERVING, Decision, Fingerprint, NativeRecipe, Passed, Race, RaceSession, from_json

MOST_SOURCE_BYTES = 64 << 10
MOST_CERTIFICATES = 200


# --- now --------------------------------------------------------------------------------------------------------------


def device(fingerprint: Mapping[str, Any]) -> str:
    """Return the headline of a device by its fingerprint as JSON, which is empty until it has been examined."""
    if not fingerprint:
        return "being looked at (some seconds after a start)"
    return headline(from_json(Fingerprint, fingerprint))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownOp:
    """Describe one op and its decisions, over all workloads. `speedup`: lowest and highest median; `floor`: lowest
    bound."""

    op: str
    device: str  # if the machine has several
    workloads: int
    candidates: tuple[str, ...]
    speedup: tuple[float, float] | None
    floor: float | None
    roofline: tuple[float, float] | None
    stale: int  # decisions whose baseline runs instead
    again: int  # decisions that serve after a new proof, and wait for a race
    off: int  # demoted or quarantined
    last: Decision
    contended: int = 0  # timed beside other work
    unseen: int = 0  # timed without watching for other work
    read: tuple[float, float] | None = None  # lowest and highest read rate of memory during these races
    measured: tuple[str, str] | None = None  # first and last time of these races


def by_op(view: View) -> list[ShownOp]:
    found: dict[tuple[str, str], list[Decision]] = {}
    for d in view.here:
        found.setdefault((d.op, view.device(d) if view.others else ""), []).append(d)
    return [_op_row(*of, rows, view) for of, rows in sorted(found.items())]


def overall(view: View) -> ShownOp | None:
    """Return all ops in one row; None without a decision."""
    return _op_row("", "", view.here, view) if view.here else None


def _op_row(op: str, device: str, decisions: Sequence[Decision], view: View) -> ShownOp:
    won = [v for d in decisions if (v := view.won(d)) is not None]
    effects = [v.effect for v in won if v.effect is not None]
    roof = [v.roofline for v in won if v.roofline is not None]
    read = [v.read_bytes_per_s for v in won if v.effect is not None and v.read_bytes_per_s]
    times = [d.created_at for d in decisions if (v := view.won(d)) is not None and v.effect is not None]
    stale = [d for d in decisions if str(d.id) in view.stale]
    again = [d for d in decisions if d.stale and d not in stale]
    serving = [d.baseline if d in stale else d.arm for d in decisions]
    return ShownOp(
        op=op,
        device=device,
        workloads=len(decisions),
        candidates=tuple(sorted({arm.candidate for arm in serving})),
        speedup=(min(e.median for e in effects), max(e.median for e in effects)) if effects else None,
        floor=min(e.lo for e in effects) if effects else None,
        roofline=(min(roof), max(roof)) if roof else None,
        read=(min(read), max(read)) if read else None,
        measured=(min(times), max(times)) if times else None,
        contended=sum(bool(contended(d)) for d in decisions if view.won(d) is not None),
        unseen=sum(v.conditions is None for v in won),
        stale=len(stale),
        again=len(again),
        off=sum(d.state not in SERVING for d in decisions),
        last=max(decisions, key=lambda d: d.id),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """A message; `todo` is the fix and may begin with a `command`."""

    level: Literal["bad", "note"]
    text: str
    command: str = ""
    todo: str = ""
    link: str = ""


def quarantines(ledger: Ledger, view: View) -> list[Quarantine]:
    """List the quarantines on the devices of this machine, oldest first."""
    held = [q for hw_id in {view.hw_id, *view.others} for q in ledger.quarantined(hw_id).values()]
    return sorted(held, key=lambda q: q.id)


def warnings(hub: Hub, held: Sequence[Quarantine]) -> list[Remark]:
    """List problems, worst first; none if all is well. `held`: the quarantines in force."""
    found = []
    if hub.writer.read_only:
        todo = f"free some space below {hub.home}; lookups go on"
        found.append(Remark(level="bad", text="the ledger cannot be written", todo=todo, link="/health"))
    off = [d for d in hub.view.here if d.state not in SERVING]
    for d in off[:3]:
        found.append(Remark(level="bad", text=f"{d.op}: {d.told}", link=f"/decisions/{d.id}"))
    if held:
        candidates = {q.id: q.arm.candidate for q in held}
        command, todo = release_command(candidates), f"lets {'them' if len(held) > 1 else 'it'} race again"
        found.append(Remark(level="note", text=held_text(candidates), command=command, todo=todo, link="/health"))
    todo = "raced again when the device is idle" if hub.options.tune else f"{settings.spelling()} tune"
    if hub.view.renewed:
        many, why = len(hub.view.renewed), hub.view.renewed[0].stale
        text = f"{many} of {len(hub.view.here)} decisions serve proven again, not yet raced again: {why}"
        found.append(Remark(level="note", text=text, todo=todo, link="/race"))
    stale = hub.view.off
    if stale:
        why = hub.view.stale[str(stale[0].id)].partition(": ")[2]
        text = f"{len(stale)} of {len(hub.view.here)} decisions are stale, the baseline runs: {why}"
        found.append(Remark(level="note", text=text, todo=todo, link="/race"))
    if hub.jobs.held:
        found.append(Remark(level="note", text=f"tuning waits: {hub.jobs.held}", link="/race"))
    waiting = [f for _, f in faults.pending(hub.home) if not isinstance(f, BadConfig)]
    if waiting:
        found.append(Remark(level="bad", text=f"{len(waiting)} faults wait to be recorded", link="/health"))
    return found


# --- race -------------------------------------------------------------------------------------------------------------


def last_races(ledger: Ledger) -> list[Decision]:
    """Return the last decisions by a race, not by a person, another proof or a timeout."""
    recent = (d for d in ledger.history(limit=60) if d.state in ("promoted", "kept") and not d.stale)
    return [d for d in recent if d.verdict and d.verdict.timings][:12]


def sessions(race: Race | None) -> list[tuple[RaceSession, list[tuple[str, float]]]]:
    """Return a race's sessions; with each, by arm, the median ratio of the baseline's time to its time."""
    from autosel.race.judge import duels

    made = []
    for s in race.sessions if race else ():
        found = []
        for arm in s.arms[1:] if s.pairs else ():
            times = sorted(theirs / own for own, theirs in duels(s, arm, s.arms[0]))
            if times:
                found.append((arm, times[len(times) // 2]))
        made.append((s, found))
    return made


def choosable(e: Evidence) -> list[str]:
    """Return candidates that passed parity for a decision, which may be promoted or pinned by hand."""
    passed = {arm.candidate for arm, p in e.parities if isinstance(p, Passed)}
    return sorted(passed | {e.decision.arm.candidate, e.decision.baseline.candidate})


# --- op ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionFamily:
    """Group decisions that differ in one dimension only, for a line over `axis`."""

    id: str
    name: str
    axis: str
    decisions: tuple[Decision, ...]


def families(decisions: Sequence[Decision], device: Callable[[Decision], str] = lambda _: "") -> list[DecisionFamily]:
    """Group over the context if the op has one, else over the rows; the largest family first. `device`: the device, if
    there are several."""
    found: dict[tuple[str, str], list[Decision]] = {}
    for d in decisions:
        dims = [name for name, _ in d.workload.dims]
        axis = "L" if "L" in dims else "M" if "M" in dims else "B" if "B" in dims else dims[0]
        rest = " ".join(f"{n}{s}" for n, s in d.workload.dims if n != axis)
        traits = " ".join(f"{n}={v}" for n, v in d.workload.traits)
        name = " ".join(x for x in (device(d), rest, d.workload.dtype, traits, d.mode) if x)
        found.setdefault((name, axis), []).append(d)
    order = sorted(found, key=lambda group: (-len(found[group]), group))
    return [
        DecisionFamily(
            id=str(i),
            name=name,
            axis=axis,
            decisions=tuple(sorted(found[name, axis], key=lambda d: d.workload[axis])),
        )
        for i, (name, axis) in enumerate(order)
    ]


def sources(decisions: Sequence[Decision]) -> list[tuple[str, str, str, Artefact | None]]:
    """Return (candidate, path, text, compiled kernel) of each serving kernel, with its source as it is now."""
    found = {}
    for d in decisions:
        name, recipe = d.arm.candidate, d.arm.recipe
        if isinstance(recipe, NativeRecipe) and name not in found:
            found[name] = name, f"kernels/{recipe.source}", _text(recipe.source), find_artefact(d.arm.build)
    return list(found.values())


def _text(source: str) -> str:
    path = (resources.kernels() / source).resolve()
    if path.is_relative_to(resources.kernels().resolve()) and path.is_file():
        return path.read_bytes()[:MOST_SOURCE_BYTES].decode(errors="replace")
    return "not there any more"


# --- certificates and health ------------------------------------------------------------------------------------------


def certificates(hub: Hub) -> tuple[list[Certificate], str]:
    """Return the last certificates, newest first, and why their file cannot be read, if so."""
    try:
        found = [decode_certificate(line) for _, line in stored_lines(hub)]
    except (AutoselError, ValueError) as error:
        return [], str(error)
    return found[-MOST_CERTIFICATES:][::-1], ""


def stores(hub: Hub) -> list[tuple[str, Path, int, str]]:
    """Return (name, path, bytes, content) of the database and of each cache."""
    ledger = Path(hub.ledger.name)
    stored = [
        ("ledger", ledger, _counts(hub.ledger)),
        ("its log", Path(f"{ledger}-wal"), "writes that are not yet moved into the file"),
        ("snapshot", hub.home / snapshot.FILE, f"read by best(): epoch {hub.view.epoch}, {len(hub.view.served)} rows"),
    ]
    found = [(name, path, path.stat().st_size, text) for name, path, text in stored if path.is_file()]
    for name, what in (("native", "compiled kernels"), ("cache", "caches of libraries"), ("fingerprint", "rates")):
        folder = hub.home / name
        if folder.is_dir():
            sizes = [p.stat().st_size for p in folder.rglob("*") if p.is_file()]
            text = f"{what}, {len(sizes)} file{'s' if len(sizes) != 1 else ''}"
            found.append((name, folder, sum(sizes), text))
    return found


def _counts(ledger: Ledger) -> str:
    tables = (t.decisions, t.races, t.parities, t.quarantines)
    with ledger.reading() as c:
        counts = [(table.name, c.execute(sa.select(sa.func.count()).select_from(table)).scalar()) for table in tables]
    return ", ".join(f"{n} {name}" for name, n in counts)
