"""Command `explain`: parity, race, effect, tail, limit and knobs of a decision; `--history`, `--failed`: lists."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING

import click

from autosel import devices, settings
from autosel import ledger as ledgers
from autosel.cli import completion
from autosel.cli.best import decided
from autosel.cli.dataset import elsewhere, elsewhere_lines
from autosel.cli.device import default_device, device_option
from autosel.cli.failed import held_json, show_failed
from autosel.cli.figures import winner
from autosel.cli.history import show_history
from autosel.cli.options import json_option, verb
from autosel.cli.output import emit_json, paragraph
from autosel.errors import UsageError
from autosel.ledger.describe import bandwidth, decision_json, measured, microseconds, ratio, release_command, shape
from autosel.race.drawn import most_faults
from autosel.values import WHOLE_STEP, Decision, Effect, Passed, Race, RaceSession, Verdict, to_json

if TYPE_CHECKING:
    from autosel.ledger.containment import Quarantine
    from autosel.ledger.store import Evidence, Ledger

Line = tuple[str, str]  # name in the margin, text


@verb("explain", "explain attn", "explain --id 41", "explain attn --history -n 5", "explain --failed")
@click.argument("op", required=False, shell_complete=completion.ops)
@click.option("--id", "decision_id", type=int, metavar="N", help="explain the decision with this number")
@click.option("--history", is_flag=True, help="list every decision about OP (or all), newest first")
@click.option("-n", "limit", type=click.IntRange(1), default=30, metavar="N", help="rows of --history  [default: 30]")
@click.option("--failed", is_flag=True, help="list the candidates that failed, and where")
@device_option()
@json_option
def explain_command(
    op: str | None, decision_id: int | None, history: bool, limit: int, failed: bool, device: str, as_json: bool
) -> None:
    """Show why a kernel serves OP: the evidence behind each decision."""
    if not (op is not None or decision_id is not None or history or failed):
        raise UsageError("explain what?", todo=f"{settings.spelling()} explain OP, --id N, --history or --failed")
    with ledgers.open_ledger() as ledger:
        if history:
            show_history(ledger, op, limit, as_json)
            return
        if failed:
            show_failed(ledger, op, device, as_json)
            return
        found = _found(ledger, op, decision_id, device)
    if as_json:
        emit_json([{**_evidence_json(e), "stale": why, "quarantined": held_json(beside)} for e, why, beside in found])
        return
    click.echo("\n\n".join(explain_text(e, why, beside) for e, why, beside in found))


@dataclass(frozen=True, slots=True)
class Explained:
    """The text of an explanation; a shell and a notebook show it as it is."""

    text: str

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.text)}</pre>"


def explain(op: str, device: str = "") -> Explained:
    """Return why a kernel serves `op` on a device (default: the GPU, if there is one), as the command `explain` does.

    Reads the ledger. Raises LedgerError if nothing is decided, UnknownName for an unknown op.
    """
    with ledgers.open_ledger() as ledger:
        found = _found(ledger, op, None, device or default_device())
        return Explained("\n\n".join(explain_text(*one) for one in found))


def _found(
    ledger: Ledger, op: str | None, decision_id: int | None, device: str
) -> list[tuple[Evidence, str, list[Quarantine]]]:
    """Return for each decision its evidence, why it does not serve, and the quarantines of its op."""
    if decision_id is None:
        stale = {now.decision.id: now.stale for now in decided(op or "", device)}
    else:
        stale = {ledger.decision(decision_id).id: ""}
    evidence = [ledger.evidence(number) for number in stale]
    held = [list(ledger.quarantined(e.decision.hw_id, e.decision.op).values()) for e in evidence]
    return [(e, stale[e.decision.id], beside) for e, beside in zip(evidence, held, strict=True)]


def explain_text(evidence: Evidence, stale: str = "", held: Sequence[Quarantine] = ()) -> str:
    """Explain a decision in about ten lines of at most 80 columns. `held` are the quarantines of its op."""
    d, v = evidence.decision, evidence.decision.verdict
    head = f"{d.op}  {shape(d.workload)} {d.workload.dtype}   {d.state} {winner(d)}   decision {d.id}, {_ago(d)}"
    lines: list[Line] = [("stale", f"{stale}; the baseline runs instead")] if stale else []
    if v is None or d.reason != v.reason:
        lines.append(("decided", d.told))
    lines += [*_parity_lines(evidence), *_race_lines(evidence.race, v)]
    if d.standing is not None:
        lines += _effect_lines(d, d.standing)
    elif v is not None:  # about an arm that no longer serves
        effect = f", {_interval(v.effect)} over {d.baseline.candidate}" if v.effect is not None else ""
        lines.append(("history", f"raced before: {v.winner}{effect} ({v.reason})"))
    lines += _held_lines(held)
    lines += [*_knob_lines(d), *elsewhere_lines(d), ("changes", _what_would_change_it(evidence))]
    lines.append(("reproduce", _how_to_reproduce(evidence)))
    return "\n".join([paragraph(head, hang="  "), *(_field(name, text) for name, text in lines)])


def _field(name: str, text: str) -> str:
    wrapped = textwrap.wrap(text, 66, break_long_words=False, break_on_hyphens=False) or [""]
    if text.startswith(f"{settings.spelling()} race "):  # a command to type stays on one line
        wrapped = [text]
    return "\n".join(f"  {name if i == 0 else '':<10}{line}" for i, line in enumerate(wrapped))


def _held_lines(held: Sequence[Quarantine]) -> Iterator[Line]:
    for q in held:
        yield "held", f"{q.arm.candidate} is in quarantine and will not race: {q.cause}: {q.reason}"
        yield "", f"{release_command([q.id])} lets it race again"


def _parity_lines(evidence: Evidence) -> list[Line]:
    lines = []
    for arm, parity in evidence.parities:
        if arm.digest == evidence.decision.arm.digest and isinstance(parity, Passed):
            worst = f"worst error {parity.worst:.2f} of the bound (case: {parity.worst_case})"
            lines.append(("parity", f"passed: {parity.cases} cases, {worst}"))
    return lines[-1:]


def _race_lines(race: Race | None, verdict: Verdict | None) -> list[Line]:
    if race is None or verdict is None:
        return [("race", "not raced")]
    valid = [s for s in race.sessions if not s.voided]
    screening = sum(len(s.pairs) for s in valid if s.kind == "screening")
    confirming = [s for s in valid if s.kind == "confirming"]
    text = f"screening {screening} pairs"
    if confirming and race.finalist:
        won = sum(k for k, _ in verdict.wins)
        of = sum(n for _, n in verdict.wins)
        pairs = " + ".join(str(len(s.pairs)) for s in confirming)
        text += f"; confirming {pairs} pairs, {race.finalist} won {won} of {of}"
    if verdict.false_promotion_bound is not None:
        text += f"; false-promotion bound {verdict.false_promotion_bound:.2g}"
    voided = [s.voided for s in race.sessions if s.voided]
    lines = [("race", text)]
    if verdict.checked is not None:
        lines.append(("calls", _checked(*verdict.checked)))
    if voided:
        lines.append(("voided", f"{len(voided)} session{'s' if len(voided) > 1 else ''}: {voided[-1]}"))
    return lines


def _checked(checked: int, timed: int) -> str:
    """Return what the compared calls show, with 95 % confidence."""
    text = f"{checked:,} of {timed:,} timed calls were compared in full"
    return f"{text}: no fault, a rate below {most_faults(checked):.2g} (95 %)" if checked else text


def _effect_lines(d: Decision, v: Verdict) -> Iterator[Line]:
    yield "verdict", v.reason
    base, own = v.timings.get(d.baseline.candidate), v.timings.get(v.winner)
    if v.effect is not None and v.winner != d.baseline.candidate:
        text = f"{_interval(v.effect)} over {d.baseline.candidate}"
        if v.next_best and v.next_best[0] != d.baseline.candidate:
            text += f", {ratio(v.next_best[1])} over the next best ({v.next_best[0]})"
        yield "effect", text
    if told := measured(d):
        yield "measured", told
    if own is None:
        return
    other = base if base is not None and base is not own else None
    yield "median", f"{microseconds(own.median_us)} us" + (f" against {microseconds(other.median_us)}" if other else "")
    yield "tail", f"p95 {microseconds(own.p95_us)} us" + (f" against {microseconds(other.p95_us)}" if other else "")
    if v.deployed and other:
        each = (
            f"{s.situation} {microseconds(s.winner_us)} us against {microseconds(s.baseline_us)}" for s in v.deployed
        )
        yield "deployed", "; ".join(each)
    if v.prepared is not None:
        yield "layout", f"{v.prepared.told}; in service at the second call with a weight"
    if v.roofline is not None:
        floor = v.roofline * own.median_us
        moved = floor / 1e6 * v.read_bytes_per_s
        text = f"memory: {moved / 1e6:.3g} MB at {bandwidth(v.read_bytes_per_s)} = {microseconds(floor)} us"
        yield "limit", f"{text}, reached {v.roofline:.0%}"


def _interval(effect: Effect) -> str:
    return f"{ratio(effect.median)} ({ratio(effect.lo)[:-1]} .. {ratio(effect.hi)[:-1]})"


def _knob_lines(d: Decision) -> list[Line]:
    if not d.arm.knobs:
        return []
    text = ", ".join(f"{name} {value}" for name, value in d.arm.knobs.items())
    if d.op == WHOLE_STEP:
        return [("knobs", text)]
    return [("knobs", f"{text}          {settings.spelling()} knobs --op {d.op} --explain")]


def _what_would_change_it(evidence: Evidence) -> str:
    d, fp, lengths = evidence.decision, evidence.fingerprint, ""
    if d.length_range is not None:
        low, high = d.length_range
        lengths = f"a context below {low} or above {high} tokens (measured crossover), "
    kernel = "an edited kernel, " if d.arm.build else ""
    if d.op == WHOLE_STEP:
        kernel += "another decision about one of its ops, "
    return f"{lengths}{kernel}another torch, another {devices.KINDS[fp.kind if fp is not None else devices.HOST].noun}"


def _how_to_reproduce(evidence: Evidence) -> str:
    from autosel.cli.repro import again

    d, fp = evidence.decision, evidence.fingerprint
    if d.op == WHOLE_STEP:
        return f"{settings.spelling()} run --force, with that model, --seq and --batch: whole steps race again"
    if d.arm.recipe.layout is not None or (fp is not None and not devices.on_host(fp.kind)):
        return again(d)
    return f"{settings.spelling()} export --repro {d.id}      one file that needs only torch"


def _ago(d: Decision) -> str:
    seconds = (datetime.now(UTC) - datetime.fromisoformat(d.created_at)).total_seconds()
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def _evidence_json(evidence: Evidence) -> dict[str, object]:
    """Return the evidence as JSON. `verdict` is about the arm that serves; after a demotion the old one is in
    `history`.
    """
    d = evidence.decision
    return {
        **decision_json(d),
        "serves": evidence.serves,
        "state_recorded": d.state,
        "verdict": to_json(d.standing),
        "history": to_json(d.verdict) if d.standing is None else None,
        "race": race_json(evidence.race) if evidence.race else None,
        "parities": [
            {"candidate": arm.candidate, "outcome": type(p).__name__.lower(), **to_json(p)}
            for arm, p in evidence.parities
        ],
        "elsewhere": [to_json(e) for e in elsewhere(d)],
        "arm": to_json(d.arm),
        "baseline": to_json(d.baseline),
    }


def race_json(race: Race) -> dict[str, object]:
    """Return the race without its samples: arms, numbers of pairs, the finalist."""
    return {
        "delta": race.delta,
        "finalist": race.finalist,
        "nominees": list(race.nominees),
        "sessions": [_session_json(s) for s in race.sessions],
        "notes": list(race.notes),
    }


def _session_json(session: RaceSession) -> dict[str, object]:
    from autosel.race.judge import duels

    ratios = {
        arm: sorted(theirs / own for own, theirs in duels(session, arm, session.arms[0]))
        for arm in session.arms[1:]
        if session.pairs
    }
    return {
        "kind": session.kind,
        "arms": list(session.arms),
        "pairs": len(session.pairs),
        "voided": session.voided,
        "read_bytes_per_s": session.read_bytes_per_s,
        "median_ratio": {arm: r[len(r) // 2] for arm, r in ratios.items() if r},
        "aa_crossed": session.aa_crossed,
    }
