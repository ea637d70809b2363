"""Command `verify`: check a certificate's bytes, sums and physics; --rerun: measure it again; --compare: two runs."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from autosel import settings
from autosel.certify import compare, sign
from autosel.certify.certificate import Certificate, is_checksum
from autosel.certify.command import translated
from autosel.certify.compare import Change
from autosel.certify.derive import claimed_interval
from autosel.certify.rerun import Compared, Rerun, judge
from autosel.certify.verify import Verified, not_checkable, verify
from autosel.certify.words import interval_text
from autosel.cli.asked import Asked, ledger_or_none
from autosel.cli.options import PATH, json_option, verb
from autosel.cli.output import emit_json, error_json, leave, noted, paragraph, table
from autosel.cli.progress import Progress
from autosel.cli.run import run_command
from autosel.errors import AutoselError, BadConfig, TooNoisy, UsageError
from autosel.ledger.describe import bandwidth
from autosel.values import to_json

EXAMPLES = (
    "verify certificates.jsonl",
    "verify --rerun certificates.jsonl:7",
    "verify --rerun certificates.jsonl:7 --quality text.txt",
    "verify certificates.jsonl --key signer.pem --head 1f3c0a...",
    "verify --compare before.jsonl after.jsonl:7",
)


@verb("verify", *EXAMPLES)
@click.argument("where", metavar="FILE[:LINE]", required=False, default="")
@click.option("--rerun", is_flag=True, help="measure LINE (default: the last) again, and compare")
@click.option("--quality", "score", type=PATH, metavar="TEXT_FILE", help="path of the scored text (--rerun)")
@click.option("--key", default="", metavar="KEY", help="require signatures by this key: a file, or hex digits")
@click.option("--head", default="", metavar="SHA256", help="require this checksum of the last line")
@click.option(
    "--compare",
    "compared",
    nargs=2,
    metavar="A B",
    help="the ratio of two runs: certificates (FILE[:LINE]) or what `run` wrote with --report or --json",
)
@click.option("--strict", is_flag=True, help="refuse certificates that are not checkable")
@json_option
def verify_command(
    where: str,
    rerun: bool,
    score: Path | None,
    key: str,
    head: str,
    compared: tuple[str, str] | None,
    strict: bool,
    as_json: bool,
) -> None:
    """Check a certificate file: bytes, chain, model, device, sums, physics, signatures.

    Without FILE, check the file in autosel's home.

    Exit code 5: a certificate of an earlier version does not describe its model, so it is not checkable.

    With --rerun, exit code 3 if the figure or the score of the text is not reproduced, 5 if the runs are too noisy.

    With --compare, exit code 3 if B is slower, 5 if a condition (device, software, threads, read rate) differs.
    """
    if compared is not None:
        if where or rerun or key or head or strict:
            raise UsageError("--compare accepts no other options and no FILE", todo="verify each file first")
        before, now = (compare.read(*located(one)) for one in compared)
        show_comparison(compare.compare(now, before), compared, as_json)
        return
    if score is not None and not rerun:
        raise UsageError("--quality needs --rerun", todo="add --rerun")
    path, line = located(where)
    found = verify(path, signer=sign.public_key(key) if key else "", head=_head(head), keep=line, strict=strict)
    again = run_again(found.last, score) if rerun else None
    if again is not None:  # the rerun measured with the model that its figures describe
        found = replace(found, unchecked=tuple(u for u in found.unchecked if u.line != found.last.sequence))
    troubles: list[AutoselError] = []
    with noted(troubles):
        if again is not None:
            judge(again)
    if not troubles and (left := not_checkable(path, found)):
        troubles.append(left)
    if as_json:
        emit_json(
            {
                "file": str(path),
                "certificates": found.certificates,
                "signed": found.signed,
                "head": found.head,
                "not_checkable": to_json(found.unchecked),
                "rerun": _rerun_json(again),
                "error": error_json(troubles[0]) if troubles else None,
            }
        )
    else:
        click.echo(words(path, found))
        if again is not None:
            click.echo(rerun_words(found.last, again))
    leave(troubles)


def located(where: str) -> tuple[Path, int]:
    """Split `certificates.jsonl:7` into file and line; line 0 is the last. A file of that whole name comes first."""
    if not where:
        return settings.home() / "certificates.jsonl", 0
    name, colon, number = where.rpartition(":")
    if colon and number.isdigit() and not os.path.lexists(where):
        if not 1 <= int(number) <= 10**9:
            raise UsageError(f"no line {number}", why="lines count from 1")
        return Path(name), int(number)
    return Path(where), 0


def _head(text: str) -> str:
    text = text.removeprefix("sha256:")
    if text and not is_checksum(text):
        raise UsageError(f"--head {text[:80]!r} is invalid", why="a checksum has 64 hex digits, in lower case")
    return text


def words(path: Path, found: Verified) -> str:
    """Return the result as text, with the limits of the checks."""
    count, holding = found.certificates, found.certificates - len(found.unchecked)
    signed = f"{found.signed} signed" if found.signed else "none signed"
    held = f"{count} certificate{'s' if count > 1 else ''} hold{'' if count > 1 else 's'}"
    if holding < count:
        held = f"{holding} of {count} certificates hold, {count - holding} not checkable"
    lines = [
        f"{path}: {held}, {signed}",
        f"head sha256:{found.head}",
        paragraph(
            "The checksums detect accidents and partial edits. A person who rewrites the file can also recompute them, "
            "and a truncated file looks complete: store the head elsewhere, and sign. No check proves that a "
            "measurement was honest; --rerun measures it again."
        ),
    ]
    return "\n".join(lines)


def run_again(certified: Certificate, score: Path | None = None) -> Rerun:
    """Measure the certificate's plan on this device, with progress on stderr. `score` is the path of the text now.

    Raises UsageError if the certificate is another device's, or if the plan, the prompt or the text has changed.
    """
    from autosel.certify import run_again as again
    from autosel.certify.run import RunRequest

    asked = command_of(certified)
    plan = asked.plan()
    again.refuse_others(certified, plan)
    text = again.text_again(certified, plan, named=score, then=asked["score"])
    request = RunRequest(
        plan=plan,
        text=text,
        repro_cmd=certified.repro_cmd,
        original=again.original_again(certified, then=asked["original"]),
        accept_quality=True,  # the certified figures decide
    )
    with ledger_or_none() as ledger, Progress() as listener:
        return again.run_again(certified, request, ledger, listener)


def command_of(certified: Certificate) -> Asked:
    """Parse the certificate's command line as data: read the options of `run`, and execute no command."""
    try:
        parts = shlex.split(certified.repro_cmd)
    except ValueError as error:
        raise BadConfig("the certificate's repro_cmd cannot be read", why=str(error)) from error
    if "run" not in parts[:2] or "--suite" in parts:
        raise BadConfig(
            "--rerun cannot repeat this certificate's command", why=certified.repro_cmd[:200], todo="run it"
        )
    arguments = translated(parts[parts.index("run") + 1 :], certified.mode.partition(".")[0])
    try:
        if {"-h", "--help"} & set(arguments):
            raise BadConfig("the certificate's repro_cmd is a --help command, not a run", why=certified.repro_cmd[:200])
        return Asked(run_command.make_context("run", arguments, default_map={"device": "cpu"}))
    except (click.ClickException, click.exceptions.Exit) as error:
        why = f"{certified.repro_cmd[:200]}: {error}"
        raise BadConfig("this version does not accept the certificate's repro_cmd", why=why) from error


def rerun_words(certified: Certificate, again: Rerun) -> str:
    what = {"reproduced": "reproduced", "faster": "reproduced, and faster"}
    lines = [f"certificate {certified.sequence} run again: {what.get(again.outcome, again.outcome)}"]
    if again.speedup is not None:
        interval, new = claimed_interval(certified), again.speedup.measured
        told = f"{interval.lo:.3g} .. {interval.hi:.3g}" if interval else interval_text(interval)
        within = interval and interval.lo <= new <= interval.hi
        verdict = f": {'within' if within else 'outside'} its interval" if interval else ""
        lines.append(f"  speedup   {new:.3g}x; certified {certified.speedup:.3g}x ({told}){verdict}")
    lines += [_compared_words(one) for one in again.figures]
    for name, than, found in (("text", "reference", again.quality), ("format", "original", again.format)):
        if found is not None:
            now, then = found.measured, found.certified
            lines.append(f"  {name:<9} {now:+.4g} nats a token to the {than}; certified {then:+.4g}")
            now, then = found.measured_divergence, found.certified_divergence
            lines.append(f"            divergence {now:.3g}; certified {then:.3g}")
    return "\n".join([*lines, *(paragraph(f"  {note}", hang="  ") for note in again.notes)])


def _compared_words(one: Compared) -> str:
    i = one.interval
    same = f"{1 - one.margin:.2f} .. {1 + one.margin:.2f} is the same"
    return f"  {one.what:<9} {one.ratio:.3f} of the certified ({i.lo:.3f} .. {i.hi:.3f}); {same}"


def _rerun_json(again: Rerun | None) -> dict[str, Any] | None:
    if again is None:
        return None
    parts = {c.what: {**to_json(c), "outcome": c.outcome} for c in again.figures}
    quality = to_json(again.quality) if again.quality else None
    parts |= {"format": to_json(again.format)} if again.format else {}
    return {"outcome": again.outcome, "notes": list(again.notes), "quality": quality, **parts}


class Slower(AutoselError):
    """The second of two compared runs is slower."""

    exit_code = 3


def show_comparison(changes: Sequence[Change], names: tuple[str, str], as_json: bool) -> None:
    """Print the changes from A to B. Exit with 3 if B is slower in one, else with 5 if one allows no claim."""
    trouble = _trouble(changes)
    if as_json:
        error = error_json(trouble) if trouble else None
        emit_json({"a": names[0], "b": names[1], "compare": compare.document(changes), "error": error})
    else:
        click.echo(f"A  {names[0]}\nB  {names[1]}")
        for change in changes:
            click.echo("\n".join(["", *_lines(change)]))
    leave([trouble] if trouble else [])


def _trouble(changes: Sequence[Change]) -> AutoselError | None:
    outcomes = [change.outcome for change in changes]
    if "slower" in outcomes:
        return Slower(f"B is slower in {outcomes.count('slower')} of {len(outcomes)} runs")
    if "no claim" in outcomes:
        todo = "measure both again under the same conditions, with at least eight steps or trials"
        return TooNoisy(f"{outcomes.count('no claim')} of {len(outcomes)} runs cannot be compared", todo=todo)
    return None


def _lines(change: Change) -> Iterator[str]:
    before, now = change.stated
    differ = compare.differing(before, now)
    names = [name for name in {**before, **now} if name in compare.ALWAYS or name in differ]
    rows = [[name, *(_shown(stated.get(name, "unknown")) for stated in (before, now))] for name in names]
    yield paragraph(change.what, hang="  ")
    yield table(("", "A", "B"), [["tokens/s", f"{change.before:.4g}", f"{change.now:.4g}"], *rows], wrap=2)
    yield paragraph(_sentence(change, differ), hang="  ")


def _shown(value: str | float) -> str:
    return value if isinstance(value, str) else bandwidth(value)


def _sentence(change: Change, differ: Sequence[str]) -> str:
    if change.interval is None:
        return f"no claim: {change.speedup:.3g}x, but a run has fewer than eight steps or trials"
    ratio = f"{change.speedup:.3g}x (95 %: {change.interval.lo:.3g} .. {change.interval.hi:.3g})"
    if differ:
        return f"no claim: B over A is {ratio}, but these conditions differ: {', '.join(differ)}"
    told = {"faster": "B is faster", "slower": "B is slower"}.get(change.outcome, "no difference is shown")
    return f"{told}: B over A is {ratio}"
