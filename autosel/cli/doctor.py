"""Command `doctor`: show what works here, what does not, and how to fix it. Exit code 1 if something is broken."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autosel import devices, fingerprint, settings
from autosel import ledger as ledgers
from autosel.cli import engines
from autosel.cli.device import default_device, here, unused_gpu
from autosel.cli.engines import ENGINES, Finding
from autosel.cli.options import Known, json_option, verb
from autosel.cli.output import emit_json, paragraph, table
from autosel.errors import AutoselError, BuildError, UsageError
from autosel.fingerprint.describe import headline
from autosel.ledger import snapshot
from autosel.ledger.describe import bytes_text, release_command
from autosel.ledger.key import current_mode
from autosel.native.compile import EMPTY_CPP, NO_COMPILER, compiler_trouble, find_compiler
from autosel.race.plan import SAMPLE_NS, margin, quiet_sessions_needed
from autosel.workers.environment import torch_fault

if TYPE_CHECKING:
    from autosel.ledger.store import Ledger
    from autosel.values import Fingerprint


@verb("doctor", "doctor", "doctor --settings", "doctor --engine vllm configs/", "doctor --ranks")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), required=False)
@click.option("--engine", type=Known("engine", ENGINES), help="check that it would read the files exported to FOLDER")
@click.option("--python", metavar="FILE", help="with --engine: the Python that serves, if it is not this one")
@click.option("--settings", "listing", is_flag=True, help="show every setting with its value and origin")
@click.option("--ranks", is_flag=True, help="check that all ranks of a job (torchrun) serve the same decisions")
@json_option
def doctor_command(
    folder: Path | None, engine: str | None, python: str | None, listing: bool, ranks: bool, as_json: bool
) -> None:
    """Check settings, compiler, libraries, worker processes, noise, ledger, snapshot, plug-ins, quarantine; suggest
    fixes.

    With --engine, look up every exported row as that engine does. With --ranks, compare the ranks of a job. Exit code 1
    if something is broken.
    """
    if listing + ranks + (engine is not None) > 1:
        raise UsageError("--settings, --ranks and --engine are mutually exclusive", todo="name one of them")
    if engine is None and (folder or python):
        raise UsageError("FOLDER and --python belong to --engine", todo=f"known engines: {', '.join(ENGINES)}")
    if engine is not None and folder is None:
        todo = (
            f"{settings.spelling()} export --to {engine} DIR, then {settings.spelling()} doctor --engine {engine} DIR"
        )
        raise UsageError("--engine needs the folder of an export", todo=todo)
    if listing:
        show_settings(as_json)
        return
    if ranks:
        from autosel.cli.ranks import show_ranks

        raise click.exceptions.Exit(show_ranks(as_json))
    findings = list(examine() if engine is None or folder is None else engines.examine(engine, folder, python))
    if as_json:
        emit_json(findings)
    else:
        _show(findings)
    if any(f.level == "bad" for f in findings):
        raise click.exceptions.Exit(1)


def _show(findings: Sequence[Finding]) -> None:
    width = max(len(f.what) for f in findings)
    margin = " " * (6 + width + 2)
    for f in findings:
        mark = {"ok": "ok  ", "note": "note", "bad": "BAD "}[f.level]
        colour = {"ok": "green", "note": "yellow", "bad": "red"}[f.level]
        text = paragraph(f"{f.what:<{width}}  {f.text}", indent=" " * 6, hang=margin)
        click.echo(click.style(mark, fg=colour) + text[4:])
        for line in f.todo.splitlines():
            click.echo(f"{margin}-> {line}")


def examine() -> Iterator[Finding]:
    """Run every check; a check that raises becomes a finding and does not end the others."""
    for what, check in CHECKS.items():
        try:
            yield from check(what)
        except AutoselError as error:
            yield _broken(what, error)
        except OSError as error:
            yield Finding(what=what, level="bad", text=str(error))
        except Exception:
            fault = torch_fault()
            if fault is None:
                raise
            yield _broken(what, fault)


def _broken(what: str, error: AutoselError) -> Finding:
    text = f"{error.what}: {error.why}".rstrip(": ").replace("\n", "; ")
    return Finding(what=what, level="bad", text=text, todo=error.todo)


def _settings(what: str) -> Iterator[Finding]:
    changed = [f"{name} from {v.origin}" for name, v in settings.read().items() if v.origin != "default"]
    yield Finding(what=what, level="ok", text=", ".join(changed) or "all at their defaults")
    for name in settings.unknown_variables():
        todo = f"{settings.spelling()} doctor --settings lists them"
        yield Finding(what=what, level="note", text=f"{name} is not a setting of autosel", todo=todo)
    if settings.get("disable"):
        yield Finding(what=what, level="note", text="AUTOSEL_DISABLE is set: best() serves the baseline everywhere")


def _compiler(what: str) -> Iterator[Finding]:
    found, asked = find_compiler(), settings.compiler()
    if asked and shutil.which(asked) is None:
        todo = "AUTOSEL_CXX or CXX names it; correct or unset it"
        yield Finding(what=what, level="note", text=f"{asked} does not exist or cannot be run", todo=todo)
    if found is None:
        yield Finding(what=what, level="note", text="none: the C++ kernels are not eligible", todo=NO_COMPILER)
    elif trouble := compiler_trouble(EMPTY_CPP):
        text = f"{found.path} compiles nothing, not even an empty kernel: {trouble.why or trouble.what}"
        yield Finding(what=what, level="bad", text=text, todo="repair it, or name another in AUTOSEL_CXX")
    else:
        yield Finding(what=what, level="ok", text=f"{found.path}  {found.version}")


def examine_workers(what: str) -> Iterator[Finding]:
    """Start a worker process that calls PyTorch and loads compiled code."""
    from autosel.parity.control import require_workers

    native = find_compiler() is not None
    require_workers(fingerprint.take("cpu"), native=native)
    text = "a worker process starts and calls PyTorch" + (", and a compiled kernel" if native else "")
    yield Finding(what=what, level="ok", text=text)


def _libraries(what: str) -> Iterator[Finding]:
    yield Finding(what=what, level="ok", text=f"torch {version('torch')}, apache-tvm-ffi {version('apache-tvm-ffi')}")


def _device(what: str) -> Iterator[Finding]:
    if unused := unused_gpu():
        yield Finding(what="gpu", level="note", text=f"this machine's GPU is not used: {unused}")
    for place, _ in here():
        fp = fingerprint.take(place)
        yield Finding(what=what, level="ok", text=headline(fp))
        for note in fp.notes:
            yield Finding(what="noise", level="note", text=note)
        if fp.contended:
            todo = f"for cleaner rates close other work, then {settings.spelling()} fingerprint {place} --refresh"
            yield Finding(what="noise", level="note", text="the rates were measured while other work ran", todo=todo)
        yield from _drift(fp, place)


def _drift(fp: Fingerprint, place: str) -> Iterator[Finding]:
    """Report rates that no longer hold. They are measured once and reused, and formulas change only with them."""
    try:
        drift = fingerprint.drifted(fp, place)
    except (BuildError, UsageError):  # reported under "compiler"; a GPU without cupy can still serve
        return
    if drift.moved:
        now = "other work runs here, or ran when they were measured" if drift.shared else "they have changed"
        todo = f"{settings.spelling()} fingerprint {place} --refresh measures again; kernels with new knobs race"
        yield Finding(what="rates", level="note", text=f"{drift.reason}: {now}", todo=todo)


def _home(what: str) -> Iterator[Finding]:
    home = settings.home()
    parent = next(p for p in (home, *home.parents) if p.exists())
    free = shutil.disk_usage(parent).free
    text = f"{home}, {bytes_text(float(free))} free"
    if free < 200 << 20:
        yield Finding(what=what, level="bad", text=text, todo="free some space, or set AUTOSEL_HOME to another disk")
    else:
        yield Finding(what=what, level="ok", text=text)


def _ledger(what: str) -> Iterator[Finding]:
    with ledgers.open_ledger() as ledger:
        ledger.check()
        decisions, served = ledger.history(), ledger.serving()
        text = f"{Path(ledger.name).name}: {len(decisions)} decisions, {len(served)} serve"
        yield Finding(what=what, level="ok", text=text)
        if not ledger.writable:
            todo = "make it writable, or set AUTOSEL_HOME to a folder of your own; reading works"
            yield Finding(what=what, level="note", text="it is read-only: no decisions can be stored", todo=todo)
        known = {fp.hw_id: fp for _, fp in here()}  # equal devices once
        missing = _undecided(known, {s.decision.hw_id for s in served}, default_device())
        if served and missing:
            todo = f"{settings.spelling()} tune"
            yield Finding(what=what, level="note", text=f"none of them was measured on {missing}", todo=todo)
        for hw_id in known:
            for held in ledger.quarantined(hw_id).values():
                text = f"{held.arm.candidate} for {held.op}: {held.cause}: {held.reason}"
                todo = f"{release_command([held.id])} lets it race again"
                yield Finding(what="quarantine", level="note", text=text, todo=todo)
        yield from _fleet(ledger, known)
        for hw_id, fp in known.items():
            of = "" if len(known) == 1 else f" of {fp.name}"
            yield from _calibration(of, ledger.aa(hw_id, "short"), ledger.aa(hw_id, "long"))


def _undecided(known: Mapping[str, Fingerprint], decided: Collection[str], default: str) -> str:
    """Return the default device of verbs if no decision was made on it; else ""."""
    kind = default.partition(":")[0]
    mine = {hw_id: fp.name for hw_id, fp in known.items() if fp.kind == kind}
    if not mine or set(mine) & set(decided):
        return ""
    return "this device" if len(known) == 1 else " or ".join(dict.fromkeys(mine.values()))


def _fleet(ledger: Ledger, here: Collection[str]) -> Iterator[Finding]:
    """Report decisions of other hosts that await a proof, and devices of one kind whose measurements differ."""
    from autosel.ledger.compare import disagreements, words

    waiting = [s for s in ledger.serving(everywhere=True) if not s.usable and s.decision.hw_id in here]
    if waiting:
        todo = f"{settings.spelling()} import proves and adopts them; so does a tuning daemon while the device is idle"
        text = f"{len(waiting)} decisions of other hosts wait for a proof of this one"
        yield Finding(what="fleet", level="note", text=text, todo=todo)
    with ledger.reading() as connection:
        for found in disagreements(connection):
            share = f"{len(found.apart)} of {found.compared} measurements"
            text = f"{found.names[0]} and {found.names[1]} report the same device, but differ in {share}"
            todo = f"check {found.slower}, the slower one (clocks, cooling, other work), then tune --force there"
            yield Finding(what="sick device", level="note", text=text, todo="\n".join([*words(found), todo]))


def _calibration(of: str, short: tuple[int, int], long: tuple[int, int]) -> Iterator[Finding]:
    for name, (sessions, crossings) in (("short ops", short), ("long ops", long)):
        m = margin(sessions, crossings, SAMPLE_NS)
        text = f"{name}{of}: minimum effect {m.delta:.0%}; {crossings} of {sessions} A/A sessions crossed"
        needed = quiet_sessions_needed(sessions, crossings)
        todo = f"{needed} more quiet A/A sessions (each tune adds some)" if needed else ""
        yield Finding(what="margin", level="ok" if m.calibrated else "note", text=text, todo=todo)


def _snapshot(what: str) -> Iterator[Finding]:
    path = settings.home() / snapshot.FILE
    if found := snapshot.read(path):
        yield Finding(what=what, level="ok", text=f"{path.name}: {len(found.rows)} rows, epoch {found.epoch}")
    else:
        text = "no decisions yet: best() serves the baseline"
        yield Finding(what=what, level="note", text=text, todo=f"{settings.spelling()} tune")


def _plugins(what: str) -> Iterator[Finding]:
    from autosel.candidates.plugins import load_allowed

    found = load_allowed()
    if not found:
        yield Finding(what=what, level="ok", text="none installed (entry points of autosel.candidates)")
    for plugin in found:
        text = f"{plugin.name} ({plugin.distribution} {plugin.version})"
        if plugin.allowed:
            names = ", ".join(plugin.candidates)
            yield Finding(what=what, level="bad" if plugin.problem else "ok", text=f"{text}: {plugin.problem or names}")
        else:
            todo = f"to race it: AUTOSEL_ALLOW={plugin.name}"
            yield Finding(what=what, level="note", text=f"{text}: installed, not imported", todo=todo)


def _engines(what: str) -> Iterator[Finding]:
    """Report each serving engine of this environment, and if it finds autosel's plug-in."""
    from autosel.integrations.engines.installed import installed

    found = tuple(installed())
    if not found:
        yield Finding(what=what, level="ok", text="none installed in this environment")
    for one in found:
        text = f"{one.engine} {one.version} ({one.distribution})"
        if one.plugged:
            near = "" if one.version == one.written_for else f", written for {one.written_for}"
            yield Finding(what=what, level="ok", text=f"{text}: it loads autosel's plug-in{near}; {_outlook()}")
        else:
            todo = "install autosel in this environment again: its entry point is missing"
            yield Finding(what=what, level="note", text=f"{text}: it does not find autosel's plug-in", todo=todo)


def _outlook() -> str:
    from autosel.dispatch import served

    found = snapshot.read(settings.home() / snapshot.FILE)
    return served.outlook(found.rows if found else (), devices.ids_of(devices.this_device()), current_mode())


CHECKS: dict[str, Callable[[str], Iterator[Finding]]] = {
    "settings": _settings,
    "compiler": _compiler,
    "libraries": _libraries,
    "workers": examine_workers,
    "device": _device,
    "home": _home,
    "ledger": _ledger,
    "snapshot": _snapshot,
    "plug-ins": _plugins,
    "engines": _engines,
}


def show_settings(as_json: bool) -> None:
    """Show every setting, its value and its source."""
    values = settings.read()
    if as_json:
        emit_json({n: {"value": _plain(v.value), "origin": v.origin} for n, v in values.items()})
        return
    rows = [[s.variable, _setting_text(values[s.name].value), values[s.name].origin] for s in settings.SETTINGS]
    click.echo(table(("setting", "value", "from"), rows))
    click.echo()
    click.echo(table(("setting", "what it does"), [[s.variable, s.help] for s in settings.SETTINGS], wrap=1))
    file = settings.home() / "config.toml"
    told = f"settings file: {file} (the same names in lower case, without AUTOSEL_; the environment takes precedence)"
    click.echo("\n" + paragraph(told, hang="  "))
    for name in settings.unknown_variables():
        click.echo(f"note: {name} is not a setting of autosel", err=True)


def _setting_text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return f"{value:g}"
    return str(value or "-")


def _plain(value: object) -> str | int | float | bool | None:
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)
