"""`export --lock`: pin what serves now in a file that a project commits, check a machine against it, run under it."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autosel import ledger as ledgers
from autosel import settings
from autosel.cli.bake import document_of
from autosel.cli.device import ids_here
from autosel.cli.output import emit_json
from autosel.errors import AutoselError, BadConfig, UsageError
from autosel.ledger import faults, snapshot
from autosel.ledger.faults import Fault
from autosel.ledger.key import current_mode
from autosel.ledger.snapshot import Row
from autosel.native.compile import compile_source, find_artefact
from autosel.values import NativeRecipe

if TYPE_CHECKING:
    from autosel.dispatch.lock import Unkept
    from autosel.guard import Held


def lock(path: Path, *, check: bool, build: bool, frozen: bool, command: Sequence[str], as_json: bool) -> None:
    """Pin by digest what serves on this machine now, check the pins, or run a command under them.

    Rows of other devices stay in the file.
    """
    if bool(command) != frozen:
        raise UsageError(
            "--frozen needs a COMMAND" if frozen else f"--lock FILE replaces PATH, got {shlex.join(command)}",
            todo=f"{settings.spelling()} export --lock --frozen -- python serve.py",
        )
    if frozen:
        raise click.exceptions.Exit(_run(path, command))
    if check or build:
        _check(path, build, as_json)
        return
    pinned, kept = _write(path)
    check_command = f"{settings.spelling()} export --lock --check"
    open_ = _unkept(_pinned_here(path))
    if open_:  # stale decisions are pinned too: the decision stays, and the baseline runs
        click.echo(f"{len(open_)} of them would not serve here as pinned; {check_command} shows why", err=True)
    if as_json:
        emit_json({"file": str(path), "pinned": pinned, "of_other_devices": kept})
        return
    more = f"; {kept} rows of other devices or thread counts are kept" if kept else ""
    click.echo(f"{pinned} decisions pinned in {path}{more}")
    click.echo(f"serve from it: AUTOSEL_LOCK={shlex.quote(str(path))}")
    click.echo(f"check a machine: {check_command}")


def _write(path: Path) -> tuple[int, int]:
    """Write the lock file. Return the number of rows of this machine's devices and mode, and of rows of others."""
    with ledgers.open_ledger() as ledger:
        mine = _of_this_machine(snapshot.validate(ledger.export(), "the ledger").rows)
    if not mine:
        why = f"no decision under {current_mode()}"
        raise AutoselError("nothing serves on this device yet", why=why, todo=f"{settings.spelling()} tune")
    found = snapshot.read(path)
    before = found.rows if found else ()
    here = {r.key for r in _of_this_machine(before)}
    others = [r for r in before if r.key not in here]
    rows = sorted((*mine, *others), key=lambda r: r.key)
    try:
        path.write_text(json.dumps(document_of(rows), indent=1) + "\n", encoding="utf-8")
        path.chmod(0o644)  # best() refuses a file that others may write, because the file says which code runs
    except OSError as error:
        raise BadConfig(f"cannot write {path}", why=error.strerror or str(error)) from error
    return len(mine), len(others)


def _check(path: Path, build: bool, as_json: bool) -> None:
    from autosel.dispatch import lock

    mine = _pinned_here(path)
    built = sum(_build(row) for row in mine) if build else 0
    problems = _unkept(mine)
    error = lock.refusal(path, len(mine), problems, current_mode())
    if as_json:
        unkept = [{"key": p.key, "reason": p.reason} for p in problems]
        kept = bool(mine) and not problems
        emit_json({"file": str(path), "pinned": len(mine), "built": built, "kept": kept, "unkept": unkept})
        raise click.exceptions.Exit(error.exit_code if error else 0)
    if error is not None:
        raise error
    made = f", {built} of them built now" if built else ""
    click.echo(f"{path}: all {len(mine)} decisions for this device serve here as pinned{made}")


def _unkept(mine: Sequence[Row]) -> list[Unkept]:
    from autosel.dispatch import lock

    by_device = {hw_id: tuple(r for r in mine if r.document.get("hw_id") == hw_id) for hw_id in ids_here()}
    return [p for hw_id, rows in by_device.items() for p in lock.unkept(rows, _held(hw_id))]


def _pinned_here(path: Path) -> tuple[Row, ...]:
    found = snapshot.read(path)
    if found is None:
        raise _missing(path)
    return _of_this_machine(found.rows)


def _missing(path: Path) -> BadConfig:
    todo = f"write it with `{settings.spelling()} export --lock`"
    return BadConfig(f"lock file {path} does not exist", todo=todo)


def _of_this_machine(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return the rows of this machine's devices, in the mode of this process."""
    from autosel.dispatch import lock

    mode = current_mode()
    return tuple(row for hw_id, kind in ids_here().items() for row in lock.pinned_here(rows, hw_id, mode, kind))


def _held(hw_id: str) -> Held:
    """Return the state that rows of a device are checked against. A kernel with a fault never serves."""
    from autosel.guard import Held

    seen = [fault for _, fault in faults.pending(settings.home()) if isinstance(fault, Fault)]
    return Held(seen, hw_id)


def _build(row: Row) -> bool:
    """Build the artefact that a row pins if it is missing. Return True if the build has the pinned digest."""
    arm = row.decision.arm
    if not isinstance(arm.recipe, NativeRecipe) or find_artefact(arm.build) is not None:
        return False
    return compile_source(arm.recipe.source, arm.recipe.flags).digest == arm.build


def _run(path: Path, command: Sequence[str]) -> int:
    """Run a command under the lock, and return its exit code.

    The command checks the lock itself at its first call of `best`, because its threads and libraries may differ.
    """
    if not path.is_file():
        raise _missing(path)
    environment = settings.passed_to_children() | {"AUTOSEL_LOCK": str(path.absolute()), "AUTOSEL_FROZEN": "1"}
    try:
        done = subprocess.run(list(command), env=environment)
    except OSError as error:
        raise UsageError(
            f"cannot run {shlex.join(command)}", why=error.strerror or str(error), todo="check the command after --"
        ) from error
    return done.returncode if done.returncode >= 0 else 128 - done.returncode
