"""`export --lock`: pin what serves now in a file that a project commits, check a machine against it, run under it."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autosel import settings
from autosel.cli.output import emit_json
from autosel.errors import AutoselError, BadConfig, UsageError
from autosel.values import NativeRecipe

if TYPE_CHECKING:
    from autosel.dispatch.lock import Unkept
    from autosel.guard import Held
    from autosel.ledger.snapshot import Row


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
    open_ = _unkept(_pinned_here(path))
    if open_:  # stale decisions are pinned too: the decision stays, and the baseline runs
        click.echo(f"{len(open_)} of them would not serve here as pinned; {_words('--check')} shows why", err=True)
    if as_json:
        emit_json({"file": str(path), "pinned": pinned, "of_other_devices": kept})
        return
    more = f"; {kept} rows of other devices or thread counts are kept" if kept else ""
    click.echo(f"{pinned} decisions pinned in {path}{more}")
    click.echo(f"serve from it: AUTOSEL_LOCK={shlex.quote(str(path))}")
    click.echo(f"check a machine: {_words('--check')}")


def _words(option: str) -> str:
    return f"{settings.spelling()} export --lock {option}"


# --- write -----------------------------------------------------------------------------------------------------------


def _write(path: Path) -> tuple[int, int]:
    """Write the lock file. Return the number of rows of this machine's devices and mode, and of rows of others."""
    from autosel.ledger import snapshot
    from autosel.ledger.key import current_mode
    from autosel.ledger.store import open_ledger

    mode = current_mode()
    with open_ledger() as ledger:
        mine = _of_this_machine(snapshot.validate(ledger.export(), "the ledger").rows)
    if not mine:
        raise AutoselError(
            "nothing serves on this device yet", why=f"no decision under {mode}", todo=f"{settings.spelling()} tune"
        )
    found = snapshot.read(path)
    before = found.rows if found else ()
    here = {r.key for r in _of_this_machine(before)}
    others = [r for r in before if r.key not in here]
    rows = sorted((*mine, *others), key=lambda r: r.key)
    made = snapshot.document(
        max((r.epoch for r in rows), default=0),
        [{"key": r.key, "epoch": r.epoch, "decision": dict(r.document)} for r in rows],
    )
    try:
        path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        path.chmod(0o644)  # best() refuses a file that others may write, because the file says which code runs
    except OSError as error:
        raise BadConfig(f"cannot write {path}", why=error.strerror or str(error)) from error
    return len(mine), len(others)


# --- check -----------------------------------------------------------------------------------------------------------


def _check(path: Path, build: bool, as_json: bool) -> None:
    from autosel.dispatch import lock
    from autosel.ledger.key import current_mode

    mine, built = _pinned_here(path), 0
    if build:
        built = sum(_build(row) for row in mine)
    problems = _unkept(mine)
    error = lock.refusal(path, len(mine), problems, current_mode())
    if as_json:
        emit_json(_json(path, mine, problems, built))
    elif error is None:
        made = f", {built} of them built now" if built else ""
        click.echo(f"{path}: all {len(mine)} decisions for this device serve here as pinned{made}")
    if error is not None:
        if as_json:
            raise click.exceptions.Exit(error.exit_code)
        raise error


def _unkept(mine: Sequence[Row]) -> list[Unkept]:
    from autosel.dispatch import lock

    return [p for hw_id in _devices() for p in lock.unkept(_of(mine, hw_id), _held(hw_id))]


def _pinned_here(path: Path) -> tuple[Row, ...]:
    from autosel.ledger import snapshot

    found = snapshot.read(path)
    if found is None:
        raise BadConfig(f"lock file {path} does not exist", todo=f"write it with `{settings.spelling()} export --lock`")
    return _of_this_machine(found.rows)


def _devices() -> dict[str, str]:
    """Return the identities of this machine's devices, with the kind of each. Equal devices have one identity."""
    from autosel.devices import device_at, ids_of, places_here

    return {hw_id: fp.kind for fp, unknown in map(device_at, places_here()) if not unknown for hw_id in ids_of(fp)}


def _of_this_machine(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return the rows of this machine's devices, in the mode of this process."""
    from autosel.dispatch import lock
    from autosel.ledger.key import current_mode

    mode = current_mode()
    return tuple(row for hw_id, kind in _devices().items() for row in lock.pinned_here(rows, hw_id, mode, kind))


def _of(rows: Sequence[Row], hw_id: str) -> tuple[Row, ...]:
    return tuple(row for row in rows if row.document.get("hw_id") == hw_id)


def _held(hw_id: str) -> Held:
    """Return the state that rows of a device are checked against. A kernel with a fault never serves."""
    from autosel.guard import Held
    from autosel.ledger import faults
    from autosel.ledger.faults import Fault

    seen = [fault for _, fault in faults.pending(settings.home()) if isinstance(fault, Fault)]
    return Held(seen, hw_id)


def _build(row: Row) -> bool:
    """Build the artefact that a row pins if it is missing. Return True if the build has the pinned digest."""
    from autosel.native.compile import compile_source, find_artefact

    arm = row.decision.arm
    if not isinstance(arm.recipe, NativeRecipe) or find_artefact(arm.build) is not None:
        return False
    return compile_source(arm.recipe.source, arm.recipe.flags).digest == arm.build


def _json(path: Path, rows: Sequence[Row], problems: Sequence[Unkept], built: int) -> dict[str, Any]:
    return {
        "file": str(path),
        "pinned": len(rows),
        "built": built,
        "kept": bool(rows) and not problems,
        "unkept": [{"key": p.key, "reason": p.reason} for p in problems],
    }


# --- run -------------------------------------------------------------------------------------------------------------


def _run(path: Path, command: Sequence[str]) -> int:
    """Run a command under the lock, and return its exit code.

    The command checks the lock itself at its first call of `best`, because its threads and libraries may differ.
    """
    if not path.is_file():
        raise BadConfig(f"lock file {path} does not exist", todo=f"write it with `{settings.spelling()} export --lock`")
    environment = settings.passed_to_children() | {"AUTOSEL_LOCK": str(path.absolute()), "AUTOSEL_FROZEN": "1"}
    try:
        done = subprocess.run(list(command), env=environment)
    except OSError as error:
        raise UsageError(
            f"cannot run {shlex.join(command)}", why=error.strerror or str(error), todo="check the command after --"
        ) from error
    return done.returncode if done.returncode >= 0 else 128 - done.returncode
