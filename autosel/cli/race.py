"""Command `race`: prove and time one candidate, also your own. It records nothing, and what serves stays the same."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from autosel import devices, fingerprint, models, settings
from autosel.candidates import registry
from autosel.candidates.base import Candidate, support_of
from autosel.candidates.user import UserCandidate
from autosel.candidates.user_source import UserSource, resources_in
from autosel.cli import completion
from autosel.cli.device import device_option, refuse_absent
from autosel.cli.figures import MARK
from autosel.cli.options import (
    batch_option,
    dtype_option,
    format_option,
    given,
    given_options,
    json_option,
    model_option,
    seed_option,
    seq_option,
    verb,
)
from autosel.cli.output import emit_json, error_json, paragraph, report, table
from autosel.cli.progress import Progress
from autosel.cli.sentences import race_sentence
from autosel.devices.device import Language
from autosel.errors import AutoselError, ParityError, TooNoisy, UnknownName, UsageError
from autosel.formats import PLAIN
from autosel.knobs.gpu.facts import facts
from autosel.ledger.describe import bandwidth, bytes_text, contended_race, microseconds, ratio, shape
from autosel.models.workloads import Named, step
from autosel.native.compile import compile_source, find_artefact, source_digest
from autosel.values import Accepted, DTypeName, Failed, Fingerprint, NativeRecipe, Workload, to_json

if TYPE_CHECKING:
    from autosel.pipeline import Tried

TARGET = "h200"  # the device for which a machine without a GPU compiles CUDA sources
CALL_S = 60.0  # equals parity.session.CALL_S, whose module loads torch
EXAMPLES = (
    "race rmsnorm --candidate mykernels:fast_rmsnorm",
    'race rmsnorm --candidate mykernels:fast_rmsnorm --case "random M2 d512"',
    "race gemv --candidate cpp:gemv --model qwen3-8b",
    "race rmsnorm --candidate kernel.cpp --shape M1.d2048 --watch",
    "race rmsnorm --candidate kernel.cu --fingerprint h200",
)


@verb("race", *EXAMPLES)
@click.argument("op", shell_complete=completion.ops)
@click.option(
    "--candidate",
    "target",
    required=True,
    metavar="CANDIDATE",
    help="module:function, FILE.py:function, FILE.cpp, FILE.cu, or a name such as cpp:rmsnorm",
)
@model_option
@dtype_option()
@batch_option
@seq_option
@format_option()
@click.option("--shape", "shapes", multiple=True, metavar="DIMS", help="race this shape, such as M1.d2048; repeatable")
@device_option()
@click.option(
    "--fingerprint",
    "target_device",
    default=TARGET,
    show_default=True,
    metavar="NAME",
    help="on a machine without a GPU, compile a CUDA source for this known device",
)
@click.option("--watch", is_flag=True, help="race again after each save of the source, until Ctrl-C")
@click.option("--case", default="", metavar="NAME", help="run one case of parity, and show expected and actual values")
@click.option("--inputs", default="", metavar="TEXT", help="repeat the inputs of an earlier proof")
@click.option(
    "--deadline",
    type=click.FloatRange(0.1, 3600),
    default=CALL_S,
    metavar="SECONDS",
    help=f"treat a longer call of the proof as hung  [default: {CALL_S:.0f}]",
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
    weight_format: str | None,
    shapes: Sequence[str],
    device: str,
    target_device: str,
    watch: bool,
    case: str,
    inputs: str,
    deadline: float,
    seed: int | None,
    as_json: bool,
) -> None:
    """Prove and time a candidate for OP against the baseline, as `tune` would. Nothing is recorded.

    Exit codes: 4 if it failed parity or failed in the race, 5 if the race was too noisy to decide, 2 if it accepts none
    of the workloads, or if a machine without a GPU could only compile it.
    """
    from autosel.pipeline import try_candidate

    of = models.stored_as(models.load(model), weight_format)
    if shapes:
        named = _shaped(op, shapes, dtype or of.dtype, weight_format or PLAIN)
    else:
        named = step(of, batch=batch, context=seq, dtype=dtype, ops=[op])
    if not named:
        raise UsageError(f"{model} does not run {op}", todo="choose another --model")
    first = registry.named(op, target)
    refuse_baseline(first)
    language = source_language(first)
    ctx = click.get_current_context()
    if not given(ctx, "device") and language == "C++":
        device = devices.HOST
    refuse_absent(device)
    fp = fingerprint.take(device)
    only_compiles = language == "CUDA" and not devices.runs(fp.kind, language)
    compiled_for = fingerprint.load(target_device) if only_compiles else None
    if compiled_for is None and given(ctx, "target_device"):
        raise UsageError("--fingerprint needs a CUDA source and a machine without a GPU", todo="remove --fingerprint")
    again = again_command(ctx)

    def once() -> AutoselError | None:
        candidate = registry.named(op, target)  # loaded again: an edit may have changed its attributes
        if compiled_for is not None:
            return only_compiled(candidate, named, compiled_for, as_json)
        drawn_from = inputs or secrets.token_hex(8)
        if case:
            said = reproduce_case(candidate, named, fp, case, drawn_from, device)
            emit_json({"passed": said}) if as_json else click.echo(said)
            return None
        with Progress() as progress:
            trial = try_candidate(
                candidate, named, fp, progress, seed, device=device, inputs=drawn_from, call_deadline_s=deadline
            )
            tried = list(trial)
        failure = judge(tried, again, drawn_from)
        if as_json:
            races = [_document(t) for t in tried]
            emit_json({"op": op, "candidate": candidate.name, "races": races, "error": failure and error_json(failure)})
            return failure
        click.echo(table(HEADERS, [_row(t, candidate.name) for t in tried], right=(3,), wrap=1))
        for t in tried:
            for line in explanation(t, candidate.name, built_log(candidate, t.named.workload, fp)):
                click.echo(f"  {line}")
        if noisy := next(filter(None, (contended_race(t.verdict) for t in tried)), ""):
            click.echo(paragraph(f"{MARK} {noisy}", hang="  "))
        if sentence := race_sentence(tried, candidate.name):
            click.echo(paragraph(sentence))
        return failure

    if watch:
        keep_racing(lambda: sources(first), once)
    failure = once()
    if failure is not None:
        report(failure)
        raise click.exceptions.Exit(failure.exit_code)


def refuse_baseline(candidate: Candidate) -> None:
    """Raise UsageError for the baseline: every race includes it."""
    baseline = registry.baseline(candidate.op)
    if candidate.name == baseline.name:
        others = [c.name for c in registry.all_candidates(candidate.op) if c is not baseline]
        raise UsageError(
            f"{baseline.name} is the baseline of {candidate.op}",
            why=f"a race times a candidate against it; the other candidates are {', '.join(others)}",
            todo="name one of these, or a kernel of yours",
        )


def _shaped(op: str, shapes: Sequence[str], dtype: DTypeName, weight: str) -> tuple[Named, ...]:
    """Return the workloads of `--shape M1.d2048`. Raise UsageError that names the op's dimensions."""
    from autosel import ops

    contract, found = ops.find(op), []
    if weight != PLAIN and "weight" not in contract.trait_defaults:
        why = f"{contract.name} has no weights"
        raise UsageError(f"--format {weight} does not apply", why=why, todo="remove --format")
    traits = {"weight": weight} if weight != PLAIN else {}
    for text in shapes:
        told = re.findall(r"([A-Za-z]+)(\d{1,12})", text)
        sizes = {name: int(size) for name, size in told if int(size)}
        written = re.fullmatch(r"[A-Za-z]+\d{1,12}([. ][A-Za-z]+\d{1,12})*", text)
        if not written or len(told) != len(sizes) or set(sizes) != set(contract.dim_names):
            raise UsageError(
                f"--shape {text} is invalid",
                why=f"{contract.name} has the dimensions {', '.join(contract.dim_names)}",
                todo=f"--shape {'.'.join(f'{n}64' for n in contract.dim_names)}",
            )
        w = contract.workload(dtype, sizes, **traits)
        found.append(Named(workload=w, label=contract.label(w), calls_per_step=1))
    return tuple(found)


LOOK_EVERY_S = 0.2
WATCHED = (".cpp", ".cc", ".cu", ".h", ".hpp", ".cuh")


def sources(candidate: Candidate) -> tuple[Path, ...]:
    """Return the files to watch: the candidate's own, and files of the same kind in its folder that it may include.

    Raises UsageError for a candidate that has no file to edit.
    """
    if isinstance(candidate, UserSource):
        return _beside(candidate.file, WATCHED)
    if isinstance(candidate, UserCandidate) and candidate.path:
        file = Path(candidate.path).joinpath(*candidate.target.partition(":")[0].split("."))
        return _beside(file.with_suffix(".py"), (".py",))
    raise UsageError(f"--watch cannot follow {candidate.name}", why="it is not in a file of yours", todo="name a file")


def _beside(file: Path, suffixes: Sequence[str]) -> tuple[Path, ...]:
    others = {p for p in file.parent.iterdir() if p.suffix in suffixes}
    return tuple(sorted(others | {file}))  # includes a file that an editor has removed while saving


def keep_racing(files: Callable[[], Sequence[Path]], once: Callable[[], AutoselError | None]) -> NoReturn:
    """Race now and after each save, until Ctrl-C. After an error, report it and wait for the next save.

    A save is complete when two checks in a row find the same files: some editors write in steps or replace the file.
    """
    raced: Stamp | None = None
    before = _stamp(files)
    while True:
        stamp = _stamp(files)
        if stamp is not None and stamp == before and stamp != raced:
            raced = stamp
            try:
                failure = once()
            except AutoselError as error:
                failure = error
            if failure is not None:
                report(failure)
            click.echo("waiting for the next save; Ctrl-C ends", err=True)
        before = stamp
        time.sleep(LOOK_EVERY_S)


Stamp = tuple[tuple[str, int, int], ...]


def _stamp(files: Callable[[], Sequence[Path]]) -> Stamp | None:
    """Return names, times and sizes of the files; None while an editor has removed one."""
    try:
        return tuple((str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in files())
    except OSError:
        return None


def source_language(candidate: Candidate) -> Language | None:
    """Return the language of a C++ or CUDA file, else None: other candidates declare their devices."""
    return candidate.language if isinstance(candidate, UserSource) else None


def only_compiled(candidate: Candidate, named: Sequence[Named], fp: Fingerprint, as_json: bool) -> AutoselError:
    """Compile for an absent device, and show resources and the lower bound of the time. Do not prove or time.

    Raises BuildError with the compiler's output.
    """
    from autosel import ops

    read_bytes_per_s = facts(fp).read
    races, rows, lines = [], [], []
    for n in named:
        w = n.workload
        support = support_of(candidate, w, fp)
        if not isinstance(support, Accepted):
            return UsageError(f"{candidate.name} cannot be compiled for {fp.name}", why=support.reason)
        recipe = candidate.recipe(w, fp, candidate.knobs(w, fp))
        assert isinstance(recipe, NativeRecipe)
        built = compile_source(recipe.source, recipe.flags)
        told, moved = resources_in(built.log), ops.find(w.op).bytes_moved(w)
        floor_us = moved / read_bytes_per_s * 1e6
        races.append({"workload": w.key, "compiled_for": fp.name, "resources": told, "floor_us": floor_us})
        rows.append([n.label, shape(w), "compiled, not run", bytes_text(moved), f"{microseconds(floor_us)} us"])
        lines = [f"resources  {told}"] if told else []
        lines += [f"compiled   for {fp.name}" + (f" in {built.seconds:.1f} s" if built.seconds else ", found compiled")]
    rate = bandwidth(read_bytes_per_s)
    lines.append(f"floor      the bytes at {rate}, the read rate of {fp.name}; caches may be faster")
    failure = UsageError(
        "not run: this machine has no GPU",
        why="the candidate was only compiled; parity and race need the device",
        todo="run the same command on a machine with a GPU, or compile for another device with --fingerprint NAME",
    )
    if as_json:
        emit_json(
            {"op": named[0].workload.op, "candidate": candidate.name, "races": races, "error": error_json(failure)}
        )
    else:
        click.echo(table(("op", "workload", "outcome", "bytes", "floor"), rows, right=(3, 4), wrap=1))
        for line in lines:
            click.echo(f"  {line}")
    return failure


def built_log(candidate: Candidate, w: Workload, fp: Fingerprint) -> str:
    """Return the compiler's log of a candidate; "" for a candidate that is not compiled."""
    if not isinstance(support_of(candidate, w, fp), Accepted):
        return ""
    recipe = candidate.recipe(w, fp, candidate.knobs(w, fp))
    if not isinstance(recipe, NativeRecipe):
        return ""
    with suppress(AutoselError):
        artefact = find_artefact(source_digest(recipe.source, recipe.flags))
        return artefact.log if artefact else ""
    return ""


def explanation(tried: Tried, name: str, log: str) -> list[str]:
    """Return the lines below a workload's row: resources, the rates of candidate and baseline, the reason of the
    verdict.
    """
    from autosel import ops

    lines = [f"resources  {told}"] if (told := resources_in(log)) else []
    verdict, w = tried.verdict, tried.named.workload
    own = verdict.timings.get(name) if verdict else None
    if verdict is None or own is None:
        return lines
    op = ops.find(w.op)
    moved, flops = op.bytes_moved(w), op.flops(w)
    base = next(t for c, t in verdict.timings.items() if c != name)
    for who, t in ((name, own), ("baseline", base)):
        share = (
            f", {moved / (t.median_us * 1e-6) / verdict.read_bytes_per_s:.0%} of it" if verdict.read_bytes_per_s else ""
        )
        rate = f"{bytes_text(moved)} in {microseconds(t.median_us)} us = {bandwidth(moved / (t.median_us * 1e-6))}"
        lines.append(f"reached    {who}: {rate}{share}; {flops / (t.median_us * 1e3):.3g} GFLOP/s")
    if verdict.read_bytes_per_s:
        lines.append(
            f"ceiling    {bandwidth(verdict.read_bytes_per_s)} read from memory during this race (caches read faster)"
        )
    lines.append(f"verdict    {verdict.outcome}: {verdict.reason}")
    return lines


def reproduce_case(
    candidate: Candidate, named: Sequence[Named], fp: Fingerprint, case: str, inputs: str, device: str = devices.HOST
) -> str:
    """Run one case of parity at the first workload that has it. Raises ParityError with the values, UnknownName."""
    from autosel.parity.reproduce import reproduce

    for n in named[:-1]:
        with suppress(UnknownName):
            return reproduce(candidate, n.workload, fp, case, inputs, device)
    return reproduce(candidate, named[-1].workload, fp, case, inputs, device)


SAME = ("model", "dtype", "batch", "seq", "weight_format", "shapes", "device", "deadline")  # in a repetition


def again_command(ctx: click.Context) -> str:
    """Return the command that repeats this race."""
    words = [settings.spelling(), "race", str(ctx.params["op"]), "--candidate", str(ctx.params["target"])]
    return " ".join([*words, *given_options(ctx, SAME)])


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
        return [*start, "failed in the race", "", "", cases, ""]
    base, won = next(t for c, t in verdict.timings.items() if c != name), verdict.winner == name
    faster = verdict.effect.median if won and verdict.effect is not None else base.median_us / own.median_us
    roofline = f"{verdict.roofline:.0%}" if verdict.roofline and won else ""
    return [
        *start,
        verdict.outcome,
        microseconds(own.median_us),
        ratio(faster) + (MARK if contended_race(verdict) else ""),
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


def judge(tried: Sequence[Tried], again: str, inputs: str) -> AutoselError | None:
    """Return the most serious problem of the race as an error with its exit code, or None."""
    for t in tried:
        if isinstance(t.parity, Failed):
            return ParityError(
                f'the candidate failed parity (check "{t.parity.check}", case "{t.parity.case}")',
                why=t.parity.reason,
                todo=""
                if t.parity.case == "load"
                else f'reproduce:  {again} --case "{t.parity.case}" --inputs {inputs}',
            )
        if t.verdict is not None and t.reason:
            return ParityError("the candidate failed in the race", why=t.reason)
    if all(t.parity is None for t in tried):
        return UsageError("the candidate accepts none of these workloads", why=tried[0].reason)
    open_ones = [t for t in tried if t.verdict is not None and t.verdict.outcome == "undecided"]
    if open_ones:
        reasons = "\n".join(
            f"{t.named.label} {shape(t.named.workload)}: {t.verdict.reason}" for t in open_ones if t.verdict
        )
        return TooNoisy(
            f"{len(open_ones)} of {len(tried)} workloads; PyTorch stays there",
            why=reasons,
            todo=f"race again:  {again}",
        )
    return None
