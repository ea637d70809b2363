"""`explain` and what it rests on: parity, race, effect, tail, limit, knobs; `--failed` lists who did not make it."""

from __future__ import annotations

import textwrap

import click

from autosel import settings
from autosel.cli.best import serving
from autosel.cli.figures import decision_json, short_shape
from autosel.cli.output import emit_json, json_option, microseconds, rate_text, ratio, table
from autosel.errors import LedgerError, UsageError
from autosel.ledger.store import Evidence, Ledger, open_ledger
from autosel.race.judge import duels
from autosel.values import Decision, Failed, Passed, Race, Session, Verdict, to_json


@click.command("explain")
@click.argument("op", required=False)
@click.option("--id", "decision_id", type=int, help="a decision by its number")
@click.option("--failed", is_flag=True, help="the candidates that failed, and where")
@json_option
def explain_command(op: str | None, decision_id: int | None, failed: bool, as_json: bool) -> None:
    """Why OP is served as it is: the evidence behind each decision.

    \b
    Examples:
      explain attn
      explain --id 41
      explain --failed
    """
    with open_ledger() as ledger:
        if failed:
            _show_failed(ledger, op, as_json)
            return
        if decision_id is None and op is None:
            raise UsageError("explain what?", todo=f"{settings.spelling()} explain OP, --id NUMBER or --failed")
        chosen = [ledger.decision(decision_id)] if decision_id is not None else serving(op)
        if not chosen:
            raise LedgerError(f"no decision for {op} on this device", todo=f"{settings.spelling()} tune --op {op}")
        evidence = [ledger.evidence(d.id) for d in chosen]
    if as_json:
        emit_json([_evidence_json(e) for e in evidence])
        return
    click.echo("\n\n".join(explain_text(e) for e in evidence))


def explain_text(evidence: Evidence) -> str:
    """The decision in about ten lines of at most 80 columns."""
    d, v = evidence.decision, evidence.decision.verdict
    head = f"{d.op}  {short_shape(d)} {d.workload.dtype}   {d.state} {d.arm.backend}   decision {d.id}, {_ago(d)}"
    lines = [*_parity_lines(evidence), *_race_lines(evidence.race, v)]
    if v is not None:
        lines += _effect_lines(d, v)
    lines += _knob_lines(d)
    lines.append(("reproduce", f"{settings.spelling()} export --repro {d.id}      one file that needs only torch"))
    return "\n".join([head, *(_field(name, text) for name, text in lines)])


def _field(name: str, text: str) -> str:
    wrapped = textwrap.wrap(text, 66, break_long_words=False, break_on_hyphens=False) or [""]
    return "\n".join(f"  {name if i == 0 else '':<10}{line}" for i, line in enumerate(wrapped))


def _parity_lines(evidence: Evidence) -> list[tuple[str, str]]:
    lines = []
    for arm, parity in evidence.parities:
        if arm.digest == evidence.decision.arm.digest and isinstance(parity, Passed):
            worst = f"worst error {parity.worst:.2f} of the bound (case: {parity.worst_case})"
            lines.append(("parity", f"passed: {parity.cases} cases, {worst}"))
    return lines[-1:]


def _race_lines(race: Race | None, verdict: Verdict | None) -> list[tuple[str, str]]:
    if race is None or verdict is None:
        return [("race", "none was run")]
    valid = [s for s in race.sessions if not s.voided]
    screening = sum(len(s.pairs) for s in valid if s.kind == "screening")
    confirming = [s for s in valid if s.kind == "confirming"]
    text = f"screening {screening} pairs"
    if confirming and race.finalist:
        won = sum(k for k, _ in verdict.wins)
        of = sum(n for _, n in verdict.wins)
        text += (
            f"; confirming {' + '.join(str(len(s.pairs)) for s in confirming)} pairs, {race.finalist} won {won} of {of}"
        )
    if verdict.false_promotion_bound is not None:
        text += f"; false-promotion bound {verdict.false_promotion_bound:.2g}"
    voided = [s.voided for s in race.sessions if s.voided]
    lines = [("race", text)]
    if voided:
        lines.append(("voided", f"{len(voided)} sessions: {voided[-1]}"))
    return lines


def _effect_lines(d: Decision, v: Verdict) -> list[tuple[str, str]]:
    lines = [("verdict", v.reason)]
    base, own = v.timings.get(d.baseline.candidate), v.timings.get(v.winner)
    if v.effect is not None and v.winner != d.baseline.candidate:
        text = f"{ratio(v.effect.median)} ({v.effect.lo:.2f} .. {v.effect.hi:.2f}) over {d.baseline.candidate}"
        if v.next_best and v.next_best[0] != d.baseline.candidate:
            text += f", {ratio(v.next_best[1])} over the next best ({v.next_best[0]})"
        lines.append(("effect", text))
    if own is not None:
        tail = f"median {microseconds(own.median_us)} us, p95 {microseconds(own.p95_us)} us"
        if base is not None and base is not own:
            tail += f" against {microseconds(base.median_us)} and {microseconds(base.p95_us)} us"
        lines.append(("times", tail))
    if v.roofline is not None and own is not None:
        from autosel.ops import find

        moved = find(d.op).bytes_moved(d.workload)
        floor = moved / v.read_bytes_per_s * 1e6
        text = f"memory: {moved / 1e6:.1f} MB at {rate_text(v.read_bytes_per_s, 'bytes/s')} = {microseconds(floor)} us"
        lines.append(("limit", f"{text}, reached {v.roofline:.0%}"))
    return lines


def _knob_lines(d: Decision) -> list[tuple[str, str]]:
    if not d.arm.knobs:
        return []
    text = ", ".join(f"{name} {value}" for name, value in d.arm.knobs.items())
    return [("knobs", f"{text}          {settings.spelling()} knobs --op {d.op} --explain")]


def _ago(d: Decision) -> str:
    from datetime import UTC, datetime

    seconds = (datetime.now(UTC) - datetime.fromisoformat(d.created_at)).total_seconds()
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def _evidence_json(evidence: Evidence) -> dict[str, object]:
    return {
        **decision_json(evidence.decision),
        "serves": evidence.serves,
        "state_recorded": evidence.decision.state,
        "verdict": to_json(evidence.decision.verdict),
        "race": race_json(evidence.race) if evidence.race else None,
        "parities": [
            {"candidate": arm.candidate, "outcome": type(p).__name__.lower(), **to_json(p)}
            for arm, p in evidence.parities
        ],
        "arm": to_json(evidence.decision.arm),
        "baseline": to_json(evidence.decision.baseline),
    }


def race_json(race: Race) -> dict[str, object]:
    """The race without its samples (they are in `export`): who, how many pairs, who won."""
    return {
        "delta": race.delta,
        "finalist": race.finalist,
        "nominees": list(race.nominees),
        "sessions": [_session_json(s) for s in race.sessions],
        "notes": list(race.notes),
    }


def _session_json(session: Session) -> dict[str, object]:
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


def _show_failed(ledger: Ledger, op: str | None, as_json: bool) -> None:
    """Everything whose proof failed, newest first; one line a candidate and check."""
    seen: dict[tuple[str, str, str], dict[str, object]] = {}
    for decision in ledger.history(op):
        for arm, parity in ledger.evidence(decision.id).parities:
            if isinstance(parity, Failed):
                key = (arm.candidate, parity.check, parity.case)
                who = {"op": decision.op, "workload": decision.workload.key, "candidate": arm.candidate}
                seen.setdefault(key, {**who, **to_json(parity)})
    if as_json:
        emit_json(list(seen.values()))
        return
    if not seen:
        click.echo("no candidate has failed parity or fallen while racing")
        return
    rows = [[str(f["op"]), str(f["candidate"]), str(f["check"]), str(f["case"])] for f in seen.values()]
    click.echo(table(("op", "candidate", "check", "case"), rows))
    for found in seen.values():
        click.echo(f"\n{found['candidate']} at {found['workload']}\n  {found['reason']}")
