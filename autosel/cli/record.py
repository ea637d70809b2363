"""Command `record`: run a program and count the workloads that it calls through autosel."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import click

from autosel import devices, settings
from autosel.cli.options import verb
from autosel.cli.output import report, table
from autosel.errors import BadConfig, UsageError
from autosel.files import is_folder
from autosel.ledger.key import current_mode, matters
from autosel.models.workloads import Named
from autosel.values import Workload

SHOWN = 12  # rows of the table; the file has all


@verb("record", "record -- python generate.py", "record -o traffic.json -- ./serve.sh --port 8000")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default="recorded.json",
    show_default=True,
    metavar="FILE",
    help="the recording to write",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND")
def record_command(output: Path, command: Sequence[str]) -> None:
    """Run COMMAND and count its workloads: shapes, ragged or not, and how often each was called.

    Counts calls of all its processes through best(), torch.ops.autosel, activate() and patch(), with any kernel. Keeps
    the command's output and exit code. `tune --recorded FILE` then tunes exactly these workloads.
    """
    from autosel.dispatch import recorded

    if not is_folder(output.absolute().parent):
        raise BadConfig(f"cannot write {output}", why=f"folder {output.parent} does not exist")
    for left in _parts(output):
        left.unlink()
    code = _run(command, output)
    parts = _parts(output)
    if code and not parts:
        report(
            BadConfig("nothing was recorded", why=f"{shlex.join(command)} exited with {code} before it called an op")
        )
        raise click.exceptions.Exit(code)
    try:
        found, *others = recorded.by_device([recorded.read(path) for path in parts])
        recorded.save(output, found)
        for other in others:
            recorded.save(_beside(output, other.device), other)
    finally:
        for path in parts:
            path.unlink(missing_ok=True)
    click.echo(_told(output, found.calls), err=True)
    for other in others:
        click.echo(f"on another device: {_summary(_beside(output, other.device), other.calls)}", err=True)
    raise click.exceptions.Exit(code)


def _beside(output: Path, hw_id: str) -> Path:
    """Return the file for calls on a device other than the one with most calls."""
    return output.with_name(f"{output.stem}-{hw_id[:8]}{output.suffix}")


def _parts(output: Path) -> list[Path]:
    """Return the recordings of the processes: the file's name with a number appended."""
    return sorted(p for p in output.absolute().parent.glob(f"{output.name}.*") if p.suffix[1:].isdigit())


def _run(command: Sequence[str], output: Path) -> int:
    """Run a command and return its exit code as a shell would. Ctrl-C reaches it too; its recording is kept."""
    environment = settings.passed_to_children() | {"AUTOSEL_RECORD": str(output.absolute())}
    try:
        process = subprocess.Popen(list(command), env=environment)
    except OSError as error:
        raise UsageError(
            f"cannot run {shlex.join(command)}", why=error.strerror or str(error), todo="check the command after --"
        ) from error
    while True:
        with suppress(KeyboardInterrupt):  # the process got the signal too, and may need time to shut down
            code = process.wait()
            return code if code >= 0 else 128 - code


def _told(output: Path, calls: Mapping[Workload, int]) -> str:
    ordered = sorted(calls.items(), key=lambda item: -item[1])
    rows = [[w.op, f"{w.shape_text} {w.dtype}", f"{n:,}"] for w, n in ordered[:SHOWN]]
    more = f"\n... and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
    shown = table(("op", "workload", "calls"), rows, right=(2,), wrap=1)
    again = f"tune them: {settings.spelling()} tune --recorded {shlex.quote(str(output))}"
    return f"{shown}{more}\n{_summary(output, calls)}\n{again}"


def _summary(output: Path, calls: Mapping[Workload, int]) -> str:
    count, total = len(calls), sum(calls.values())
    return f"{count} workload{'s' * (count > 1)}, {total:,} call{'s' * (total > 1)}, in {output}"


def named_workloads(path: Path) -> tuple[Named, ...]:
    """Return a recording's workloads, those that move the most bytes first. Raises BadConfig.

    Each bucket has one workload: the one with the most calls, with the calls of all.
    """
    from autosel import ops
    from autosel.dispatch import recorded

    shown: dict[str, Workload] = {}
    calls: dict[str, int] = {}
    for w, n in sorted(recorded.read(path).calls.items(), key=lambda item: -item[1]):
        recorded.refuse_unknown(w, path)
        shown.setdefault(w.bucket, w)
        calls[w.bucket] = calls.get(w.bucket, 0) + n
    named = [Named(workload=w, label=ops.find(w.op).label(w), calls_per_step=calls[b]) for b, w in shown.items()]
    return tuple(sorted(named, key=lambda n: -n.calls_per_step * ops.find(n.workload.op).bytes_moved(n.workload)))


def place_of(path: Path) -> str:
    """Return the recording's device in the terms of `tune --device`; "" if this machine does not have it."""
    from autosel.dispatch import recorded

    wanted = recorded.read(path).device
    if wanted in devices.ids_of(devices.this_device()):
        return devices.HOST
    return next((p for p in devices.places_here() if devices.device_at(p)[0].hw_id == wanted), "")


def tuned_on(path: Path, otherwise: str) -> str:
    """Return the device of a recording; `otherwise`, with a note, if this machine does not have it.

    Raises UsageError if the recording's device could not be identified: the user must name one.
    """
    from autosel.dispatch import recorded

    place = place_of(path)
    if place:
        return place
    if devices.is_nobody(recorded.read(path).device):
        todo = "name the device to tune (--device cuda), or record again where it can be identified"
        raise UsageError(f"{path} does not name its device", why="its GPU could not be identified", todo=todo)
    click.echo(f"note: recorded on a device that is not here, tuned on {otherwise}", err=True)
    return otherwise


def mode_note(path: Path) -> str:
    """Return why decisions made now would not serve the recorded program; "" if they would."""
    from autosel.dispatch import recorded

    found, now, kind = recorded.read(path).mode, current_mode(), place_of(path).partition(":")[0] or devices.HOST
    if matters(found, kind) == matters(now, kind):
        return ""
    threads = found.partition(".t")[2].partition(".")[0]
    hint = f" (recorded with OMP_NUM_THREADS={threads})" if os.environ.get("OMP_NUM_THREADS") != threads else ""
    return f"note: recorded under {found}, tuned under {now}: the decisions will not serve that program{hint}"
