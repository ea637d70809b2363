"""`export --to ENGINE` and `doctor --engine ENGINE`: write an engine's files, and check that it would read them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from autosel import devices, fingerprint, models, settings
from autosel import ledger as ledgers
from autosel.cli import device as devices_here
from autosel.cli.bake import bake, here
from autosel.cli.dataset import export_dataset
from autosel.errors import UsageError
from autosel.values import Decision, DTypeName, Fingerprint

if TYPE_CHECKING:
    from autosel.integrations.engines.ask import Reply
    from autosel.integrations.engines.folder import Manifest
    from autosel.integrations.engines.rows import Target

# The ops that the plug-ins serve on a CPU. vLLM's attention backend for CPUs has another cache layout.
_ROWS = ("rmsnorm", "add_rmsnorm", "swiglu", "geglu")
PLUGGED_OPS = {"vllm": (*_ROWS, "linear"), "sglang": (*_ROWS, "paged_attn")}
ENGINES = ("vllm", "sglang", "inductor", "flashinfer", "hf-kernels")


def export_to(engine: str, folder: Path, *, model: str, dtype: DTypeName | None, device: str | None, tp: int) -> None:
    """Write an engine's files. `device` names a known device, for which formulas may derive undecided rows."""
    if str(folder) == "-":
        raise UsageError("--to needs a folder", todo=f"{settings.spelling()} export --to {engine} {engine}/")
    if engine == "flashinfer":
        export_dataset(folder)
        return
    if engine in PLUGGED_OPS and device is None and _only_cpu(engine):
        _export_home(engine, folder)
        return
    made: Manifest
    if engine == "hf-kernels":
        made = _hf_kernels(folder)
    else:
        module = import_module(f"autosel.integrations.engines.{engine}")
        made = module.export(_target(engine, model, dtype, device, tp), folder)
    for line in _written(made, folder):
        click.echo(line, err=True)
    click.echo(f"check it:  {settings.spelling()} doctor --engine {engine} {shlex.quote(str(folder))}", err=True)


def _only_cpu(engine: str) -> bool:
    """Return True if this ledger has decisions that the engine's plug-in serves on this CPU, and none of a GPU."""
    return not _gpu_decisions() and any(row.document.get("op") in PLUGGED_OPS[engine] for row in here())


def _export_home(engine: str, folder: Path) -> None:
    """Write a home for the engine's plug-in: on a CPU, an engine reads no files."""
    made = bake(folder, PLUGGED_OPS[engine])
    for key, reason in made.left:
        click.echo(f"left out: {key}: {reason}", err=True)
    click.echo(f"{engine} on a CPU: {made.decisions} decisions and {made.builds} builds for its plug-in", err=True)
    click.echo(f"serve from it: start the engine with AUTOSEL_HOME={shlex.quote(made.folder)}", err=True)


def _hf_kernels(folder: Path) -> Manifest:
    """Export the decisions of this machine's default device."""
    from autosel.integrations.engines import hf_kernels

    device = devices_here.default_device()
    hw_id = devices_here.identity(device).hw_id
    with ledgers.open_ledger() as ledger:
        decisions = [s.decision for s in ledger.serving() if s.decision.hw_id == hw_id]
    return hf_kernels.export(fingerprint.take(device), decisions, folder)


def _written(made: Manifest, folder: Path) -> Iterator[str]:
    from autosel.integrations.engines.rows import WORDS

    yield f"{made.engine} {made.engine_version}: {len(made.rows)} rows for {made.device} in {folder}"
    for source, count in made.counts.items():
        yield f"  {count} {WORDS[source]}"


def _target(engine: str, model: str, dtype: DTypeName | None, device: str | None, tp: int) -> Target:
    """Return the device of --fingerprint, for which formulas may derive rows; else the GPU that the ledger knows."""
    from autosel.integrations.engines import experts
    from autosel.integrations.engines.rows import Target

    found_experts = experts.read(model)
    shape = None if found_experts else models.load(model)
    found = _gpu_decisions()
    fp = _device(engine, device, [f for f, _ in found.values()])
    known = shape or found_experts
    assert known is not None
    return Target(
        fp=fp,
        decisions=_of_one(fp, found),
        dtype=dtype or known.dtype,
        derives=device is not None,
        model=shape,
        experts=found_experts,
        tp=tp,
    )


def _of_one(fp: Fingerprint, found: Mapping[str, tuple[Fingerprint, list[Decision]]]) -> tuple[Decision, ...]:
    """Return the decisions made on devices with this fingerprint's name.

    Devices of one name can differ (memory, ECC, a slice of a GPU). If several have decisions, choose the device of the
    fingerprint, else a device of this machine: a file with rows of two devices would fit neither of them.
    """
    alike = {hw_id: of for hw_id, (known, of) in found.items() if known.name == fp.name}
    if len(alike) < 2:
        return tuple(d for of in alike.values() for d in of)
    ours = (fp.hw_id, *(f.hw_id for _, f in devices_here.here()))
    chosen = next((hw_id for hw_id in ours if hw_id in alike), "")
    if not chosen:
        raise _which(fp.name, len(alike))
    return tuple(alike[chosen])


def _which(name: str, count: int) -> UsageError:
    why = f"decisions exist for {count} different devices of this name, and this machine has none of them"
    return UsageError(f"ambiguous device: {name}", why=why, todo="export on the machine that has the device")


def _device(engine: str, asked: str | None, known: Sequence[Fingerprint]) -> Fingerprint:
    if asked is not None:
        return fingerprint.load(asked)
    names = sorted({f.name for f in known})
    if len(known) == 1:
        return known[0]
    if len(names) == 1:
        ours = {f.hw_id for _, f in devices_here.here()}
        found = next((f for f in known if f.hw_id in ours), None)
        if found is None:
            raise _which(names[0], len(known))
        return found
    example = f"{settings.spelling()} export --to {engine} --fingerprint h200 {engine}/"
    if not names:
        raise UsageError(
            f"nothing to export to {engine}",
            why="it runs on GPUs, and this ledger has no decisions of a GPU",
            todo=f"{example}\nderives the rows by formula, without measurements",
        )
    raise UsageError(f"ambiguous device: decisions exist for {', '.join(names)}", todo=example)


def _gpu_decisions() -> Mapping[str, tuple[Fingerprint, list[Decision]]]:
    """Return the fingerprint and the serving decisions of each CUDA device, by hw_id."""
    found: dict[str, tuple[Fingerprint, list[Decision]]] = {}
    with ledgers.open_ledger() as ledger:
        for served in ledger.serving():
            d = served.decision
            if d.hw_id not in found:
                fp = ledger.evidence(d.id).fingerprint
                if fp is None or not devices.runs(fp.kind, "CUDA"):
                    continue
                found[d.hw_id] = fp, []
            found[d.hw_id][1].append(d)
    return found


Level = Literal["ok", "note", "bad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One result of a check of `doctor`. `todo` is empty if nothing needs to be done."""

    what: str
    level: Level
    text: str
    todo: str = ""


def examine(engine: str, folder: Path, python: str | None) -> Iterator[Finding]:
    """Check with the engine's own lookup that it would read the folder's files. Raises AutoselError if it fails."""
    from autosel.integrations.engines import ask
    from autosel.integrations.engines import folder as folders

    made = folders.read(folder)
    if made.engine != engine:
        raise UsageError(
            f"{folder} holds an export to {made.engine}, not to {engine}",
            todo=f"{settings.spelling()} doctor --engine {made.engine} {shlex.quote(str(folder))}",
        )
    for name in folders.changed(folder, made):
        text = f"{name} has been changed or removed"
        yield Finding(what="files", level="bad", text=text, todo="export again, or ignore this if you changed it")
    reply = ask.ask(engine, folder, made, python or sys.executable)
    yield from _versions(made, reply)
    yield from _hits(made, reply)


def _versions(made: Manifest, reply: Reply) -> Iterator[Finding]:
    if reply.version == made.engine_version:
        yield Finding(what="version", level="ok", text=f"{made.engine} {reply.version}, the version of the files")
        return
    text = f"{made.engine} {reply.version} is installed, the files were written for {made.engine_version}"
    if stale := sum(not row.same for row in reply.rows):
        text += f"; {stale} rows hold defaults that it no longer has"
        todo = "export again, with an autosel that supports this version"
        yield Finding(what="version", level="bad", text=text, todo=todo)
    else:
        yield Finding(what="version", level="ok", text=text)


def _hits(made: Manifest, reply: Reply) -> Iterator[Finding]:
    total = len(made.rows)
    whys = sorted({row.why for row in reply.rows if row.why})
    text = f"{reply.here} of {total} rows would be loaded here"
    why = f": {'; '.join(whys[:3])}" + (f"; {len(whys) - 3} more reasons" if len(whys) > 3 else "") if whys else ""
    whole: Level = "ok" if reply.here == total else "bad"
    yield Finding(what="here", level=whole, text=text + why, todo=reply.setting)
    if reply.here < total:
        there = f"{reply.there} of {total} rows are found on {made.device} by {made.engine}'s own lookup"
        yield Finding(what="there", level="ok" if reply.there == total else "bad", text=there)
