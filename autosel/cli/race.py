"""`race`: prove and time one candidate, the user's own included. It measures and says; it changes nothing served."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from autosel import settings
from autosel.cli.output import emit_json, json_option, microseconds, ratio, table
from autosel.errors import ParityError, TooNoisy, UsageError
from autosel.values import DTYPES, Failed, to_json

if TYPE_CHECKING:
    from autosel.pipeline import Tried


@click.command("race")
@click.argument("op")
@click.option("--candidate", "target", required=True, help="module:function, or a candidate's name as cpp:rmsnorm")
@click.option("--model", default="llama-8b", show_default=True, help="whose shapes to race at")
@click.option("--dtype", type=click.Choice(DTYPES[:3]), default=None)
@click.option("--batch", type=click.IntRange(1, 4096), default=1, show_default=True)
@click.option("--seq", type=click.IntRange(1, 1 << 20), default=8192, show_default=True)
@click.option("--case", default="", help="only this hostile case of parity: what was expected, what came")
@click.option("--seed", type=int, default=None, help="repeat the same operands and coin flips")
@json_option
def race_command(
    op: str,
    target: str,
    model: str,
    dtype: str | None,
    batch: int,
    seq: int,
    case: str,
    seed: int | None,
    as_json: bool,
) -> None:
    """Prove and time a candidate for OP against the baseline, exactly as `tune` would. Nothing is recorded.

    \b
    Examples:
      race rmsnorm --candidate mykernels:fast_rmsnorm
      race rmsnorm --candidate mykernels:fast_rmsnorm --case "strided input"
      race gemv --candidate cpp:gemv --model qwen3-8b
    """
    from autosel import fingerprint, models
    from autosel.candidates import registry, user
    from autosel.cli.progress import Progress
    from autosel.models.workloads import step
    from autosel.pipeline import try_candidate

    named = step(models.load(model), batch=batch, context=seq, dtype=dtype, ops=[op])  # type: ignore[arg-type]
    if not named:
        raise UsageError(f"{model} does not run {op}", todo="choose another --model")
    known = {c.name for c in registry.all_candidates(op)}
    candidate = registry.find(op, target) if target in known else user.from_target(target, registry.op_name(op))
    fp = fingerprint.take("cpu")
    if case:
        from autosel.parity.reproduce import reproduce

        click.echo(reproduce(candidate, named[0].workload, fp, case))
        return
    progress = Progress()
    tried = list(try_candidate(candidate, named, fp, progress, seed))
    progress.clear()
    if as_json:
        emit_json([_document(t) for t in tried])
    else:
        click.echo(table(HEADERS, [_row(t, candidate.name) for t in tried], right=(3,)))
    _judge(tried, f"{settings.spelling()} race {op} --candidate {target}")


HEADERS = ("op", "workload", "outcome", "time us", "vs baseline", "parity", "roofline")


def _row(tried: Tried, name: str) -> list[str]:
    start = [tried.named.label, tried.named.workload.shape_text]
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


def _judge(tried: list[Tried], again: str) -> None:
    """Exit codes: 4 where parity failed, 5 where it was too noisy, 2 where nothing was eligible."""
    for t in tried:
        if isinstance(t.parity, Failed):
            raise ParityError(
                f'the candidate failed parity (check "{t.parity.check}", case "{t.parity.case}")',
                why=t.parity.reason,
                todo=f'reproduce:   {again} --case "{t.parity.case}"',
            )
        if t.verdict is not None and t.reason:
            raise ParityError("the candidate fell while racing", why=t.reason)
    if all(t.parity is None for t in tried):
        raise UsageError("the candidate accepts none of these workloads", why=tried[0].reason)
    if any(t.verdict is not None and t.verdict.outcome == "undecided" for t in tried):
        raise TooNoisy("too noisy to decide", todo="close other work on this machine and race again")
