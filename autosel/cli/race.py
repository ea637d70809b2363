"""`race`: prove and time one candidate, the user's own included. It measures and says; it changes nothing served."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from autosel import settings
from autosel.cli.figures import shape
from autosel.cli.options import (
    batch_option,
    dtype_option,
    given_options,
    json_option,
    model_option,
    seed_option,
    seq_option,
    verb,
)
from autosel.cli.output import emit_json, error_json, microseconds, ratio, report, table
from autosel.errors import AutoselError, ParityError, TooNoisy, UnknownName, UsageError
from autosel.values import DTypeName, Failed, Fingerprint, to_json

if TYPE_CHECKING:
    from autosel.candidates.base import Candidate
    from autosel.models.workloads import Named
    from autosel.pipeline import Tried

CALL_S = 60.0  # as parity.session.CALL_S, which would load torch
EXAMPLES = (
    "race rmsnorm --candidate mykernels:fast_rmsnorm",
    'race rmsnorm --candidate mykernels:fast_rmsnorm --case "random M2 d512"',
    "race gemv --candidate cpp:gemv --model qwen3-8b",
)


@verb("race", *EXAMPLES)
@click.argument("op")
@click.option("--candidate", "target", required=True, metavar="WHO", help="module:function, or a name as cpp:rmsnorm")
@model_option
@dtype_option()
@batch_option
@seq_option
@click.option("--case", default="", metavar="NAME", help="only this case of parity: what was expected, what came")
@click.option(
    "--deadline",
    type=click.FloatRange(0.1, 3600),
    default=CALL_S,
    metavar="SECONDS",
    help=f"a call of the proof that takes longer has hung  [default: {CALL_S:.0f}]",
)
@seed_option
@json_option
def race_command(
    op: str,
    target: str,
    model: str,
    dtype: DTypeName | None,
    batch: int,
    seq: int,
    case: str,
    deadline: float,
    seed: int | None,
    as_json: bool,
) -> None:
    """Prove and time a candidate for OP against the baseline, as `tune` would. Nothing is recorded.

    Exit codes: 4 it failed parity or fell while racing, 5 too noisy to decide, 2 it takes none of the workloads.
    """
    from autosel import fingerprint, models
    from autosel.candidates import registry
    from autosel.cli.progress import Progress
    from autosel.models.workloads import step
    from autosel.pipeline import try_candidate

    named = step(models.load(model), batch=batch, context=seq, dtype=dtype, ops=[op])
    if not named:
        raise UsageError(f"{model} does not run {op}", todo="choose another --model")
    candidate = registry.named(op, target)
    fp = fingerprint.take("cpu")
    if case:
        said = reproduce_case(candidate, named, fp, case)
        emit_json({"passed": said}) if as_json else click.echo(said)
        return
    with Progress() as progress:
        tried = list(try_candidate(candidate, named, fp, progress, seed, call_deadline_s=deadline))
    failure = judge(tried, again_command(click.get_current_context()))
    if as_json:
        races = [_document(t) for t in tried]
        emit_json({"op": op, "candidate": candidate.name, "races": races, "error": failure and error_json(failure)})
    else:
        click.echo(table(HEADERS, [_row(t, candidate.name) for t in tried], right=(3,), wrap=1))
    if failure is not None:
        report(failure)
        raise click.exceptions.Exit(failure.exit_code)


def reproduce_case(candidate: Candidate, named: Sequence[Named], fp: Fingerprint, case: str) -> str:
    """One case of parity at the first workload that has it. Raises ParityError with the values seen, UnknownName."""
    from autosel.parity.reproduce import reproduce

    for n in named[:-1]:
        with suppress(UnknownName):
            return reproduce(candidate, n.workload, fp, case)
    return reproduce(candidate, named[-1].workload, fp, case)


def again_command(ctx: click.Context) -> str:
    """This race's command."""
    words = [settings.spelling(), "race", str(ctx.params["op"]), "--candidate", str(ctx.params["target"])]
    return " ".join([*words, *given_options(ctx, ("model", "dtype", "batch", "seq"))])


HEADERS = ("op", "workload", "outcome", "time us", "vs baseline", "parity", "roofline")


def _row(tried: Tried, name: str) -> list[str]:
    start = [tried.named.label, shape(tried.named.workload)]
    verdict = tried.verdict
    if tried.parity is None:
        return [*start, "not eligible", "", "", "", ""]
    if isinstance(tried.parity, Failed) or verdict is None:
        return [*start, "failed parity", "", "", "", ""]
    own, cases = verdict.timings.get(name), f"{tried.parity.cases} cases"
    if own is None:
        return [*start, "fell while racing", "", "", cases, ""]
    base = next(t for c, t in verdict.timings.items() if c != name)
    roofline = f"{verdict.roofline:.0%}" if verdict.roofline and verdict.winner == name else ""
    return [
        *start,
        verdict.outcome,
        microseconds(own.median_us),
        ratio(base.median_us / own.median_us),
        cases,
        roofline,
    ]


def _document(tried: Tried) -> dict[str, object]:
    parity = {"outcome": type(tried.parity).__name__.lower(), **to_json(tried.parity)} if tried.parity else None
    return {
        "workload": tried.named.workload.key,
        "parity": parity,
        "verdict": to_json(tried.verdict),
        "reason": tried.reason,
    }


def judge(tried: Sequence[Tried], again: str) -> AutoselError | None:
    """What there is to say beside the figures: the worst that was found, with its exit code."""
    for t in tried:
        if isinstance(t.parity, Failed):
            return ParityError(
                f'the candidate failed parity (check "{t.parity.check}", case "{t.parity.case}")',
                why=t.parity.reason,
                todo="" if t.parity.case == "load" else f'reproduce:  {again} --case "{t.parity.case}"',
            )
        if t.verdict is not None and t.reason:
            return ParityError("the candidate fell while racing", why=t.reason)
    if all(t.parity is None for t in tried):
        return UsageError("the candidate takes none of these workloads", why=tried[0].reason)
    open_ones = [t for t in tried if t.verdict is not None and t.verdict.outcome == "undecided"]
    if open_ones:
        reasons = "\n".join(f"{t.named.workload.key}: {t.verdict.reason}" for t in open_ones if t.verdict)
        return TooNoisy(f"{len(open_ones)} of {len(tried)}", why=reasons, todo=f"race again:  {again}")
    return None
