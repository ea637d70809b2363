"""`export --to ENGINE` and `doctor --engine ENGINE`: write an engine's files, and check that it would read them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autosel import devices, settings
from autosel.errors import UsageError

if TYPE_CHECKING:
    from autosel.integrations.engines.ask import Reply
    from autosel.integrations.engines.folder import Manifest
    from autosel.integrations.engines.rows import Target
    from autosel.values import Decision, DTypeName, Fingerprint

# The ops that the plug-ins serve on a CPU. vLLM's attention backend for CPUs has another cache layout.
_ROWS = ("rmsnorm", "add_rmsnorm", "swiglu", "geglu")
PLUGGED_OPS = {"vllm": (*_ROWS, "linear"), "sglang": (*_ROWS, "paged_attn")}
ENGINES = ("vllm", "sglang", "inductor", "flashinfer", "hf-kernels")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of `export --to` other than the engine and the folder."""

    model: str
    dtype: DTypeName | None
    device: str | None
    tp: int


def export_to(engine: str, folder: Path, asked: EngineOptions) -> None:
    if str(folder) == "-":
        raise UsageError("--to needs a folder", todo=f"{settings.spelling()} export --to {engine} {engine}/")
    if engine == "flashinfer":
        from autosel.cli.dataset import export_dataset

        export_dataset(folder)
        return
    from importlib import import_module

    if engine in PLUGGED_OPS and asked.device is None and _only_cpu(engine):
        _export_home(engine, folder)
        return
    made: Manifest
    if engine == "hf-kernels":
        made = _hf_kernels(folder)
    else:
        module = import_module(f"autosel.integrations.engines.{engine}")
        made = module.export(_target(engine, asked), folder)
    for line in _written(made, folder):
        click.echo(line, err=True)
    click.echo(f"check it:  {settings.spelling()} doctor --engine {engine} {shlex.quote(str(folder))}", err=True)


def _only_cpu(engine: str) -> bool:
    """Return True if this ledger has decisions that the engine's plug-in serves on this CPU, and none of a GPU."""
    from autosel.cli.bake import here

    return not _gpu_decisions() and any(row.document.get("op") in PLUGGED_OPS[engine] for row in here())


def _export_home(engine: str, folder: Path) -> None:
    """Write a home for the engine's plug-in: on a CPU, an engine reads no files."""
    from autosel.cli.bake import bake

    made = bake(folder, PLUGGED_OPS[engine])
    for key, reason in made.left:
        click.echo(f"left out: {key}: {reason}", err=True)
    click.echo(f"{engine} on a CPU: {made.decisions} decisions and {made.builds} builds for its plug-in", err=True)
    click.echo(f"serve from it: start the engine with AUTOSEL_HOME={shlex.quote(made.folder)}", err=True)


def _hf_kernels(folder: Path) -> Manifest:
    """Export the decisions of this machine's default device."""
    from autosel import fingerprint
    from autosel.cli.device import default_device, identity
    from autosel.integrations.engines import hf_kernels
    from autosel.ledger.store import open_ledger

    device = default_device()
    with open_ledger() as ledger:
        here = identity(device).hw_id
        decisions = [s.decision for s in ledger.serving() if s.decision.hw_id == here]
    return hf_kernels.export(fingerprint.take(device), decisions, folder)


def _written(made: Manifest, folder: Path) -> Iterator[str]:
    from autosel.integrations.engines.rows import WORDS

    yield f"{made.engine} {made.engine_version}: {len(made.rows)} rows for {made.device} in {folder}"
    for source, count in made.counts.items():
        yield f"  {count} {WORDS[source]}"


def _target(engine: str, asked: EngineOptions) -> Target:
    """Return the device of --fingerprint, for which formulas may derive rows; else the GPU that the ledger knows."""
    from autosel import models
    from autosel.integrations.engines import experts
    from autosel.integrations.engines.rows import Target

    found_experts = experts.read(asked.model)
    shape = None if found_experts else models.load(asked.model)
    found = _gpu_decisions()
    fp = _device(engine, asked.device, [f for f, _ in found.values()])
    decisions = _of_one(fp, found)
    known = shape or found_experts
    assert known is not None
    return Target(
        fp=fp,
        decisions=decisions,
        dtype=asked.dtype or known.dtype,
        derives=asked.device is not None,
        model=shape,
        experts=found_experts,
        tp=asked.tp,
    )


def _of_one(fp: Fingerprint, found: Mapping[str, tuple[Fingerprint, list[Decision]]]) -> tuple[Decision, ...]:
    """Return the decisions made on devices with this fingerprint's name.

    Devices of one name can differ (memory, ECC, a slice of a GPU). If several have decisions, choose the device of the
    fingerprint, else a device of this machine: a file with rows of two devices would fit neither of them.
    """
    from autosel.cli.device import here

    alike = {hw_id: of for hw_id, (known, of) in found.items() if known.name == fp.name}
    if len(alike) < 2:
        return tuple(d for of in alike.values() for d in of)
    chosen = next((hw_id for hw_id in (fp.hw_id, *(f.hw_id for _, f in here())) if hw_id in alike), "")
    if not chosen:
        raise _which(fp.name, len(alike))
    return tuple(alike[chosen])


def _which(name: str, count: int) -> UsageError:
    why = f"decisions exist for {count} different devices of this name, and this machine has none of them"
    return UsageError(f"ambiguous device: {name}", why=why, todo="export on the machine that has the device")


def _device(engine: str, asked: str | None, known: Sequence[Fingerprint]) -> Fingerprint:
    from autosel.fingerprint import known as files

    if asked is not None:
        return files.load(asked)
    names = sorted({f.name for f in known})
    if len(known) == 1:
        return known[0]
    if len(names) == 1:
        from autosel.cli.device import here

        ours = {f.hw_id for _, f in here()}
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
    from autosel.ledger.store import open_ledger

    found: dict[str, tuple[Fingerprint, list[Decision]]] = {}
    with open_ledger() as ledger:
        for served in ledger.serving():
            d = served.decision
            if d.hw_id not in found:
                fp = ledger.evidence(d.id).fingerprint
                if fp is None or not devices.runs(fp.kind, "CUDA"):
                    continue
                found[d.hw_id] = fp, []
            found[d.hw_id][1].append(d)
    return found


# --- doctor ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ExamLine:
    """One result of the examination. `ok` is False if the files would not serve."""

    what: str
    ok: bool
    text: str
    todo: str = ""


def examine(engine: str, folder: Path, python: str | None) -> Iterator[ExamLine]:
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
        yield ExamLine(what="files", ok=False, text=text, todo="export again, or ignore this if you changed it")
    reply = ask.ask(engine, folder, made, python or sys.executable)
    yield from _versions(made, reply)
    yield from _hits(made, reply)


def _versions(made: Manifest, reply: Reply) -> Iterator[ExamLine]:
    if reply.version == made.engine_version:
        yield ExamLine(what="version", ok=True, text=f"{made.engine} {reply.version}, the version of the files")
        return
    stale = sum(not row.same for row in reply.rows)
    moved = f"; {stale} rows hold defaults that it no longer has" if stale else ""
    yield ExamLine(
        what="version",
        ok=not stale,
        text=f"{made.engine} {reply.version} is installed, the files were written for {made.engine_version}{moved}",
        todo="export again, with an autosel that supports this version" if stale else "",
    )


def _hits(made: Manifest, reply: Reply) -> Iterator[ExamLine]:
    total = len(made.rows)
    whys = sorted({row.why for row in reply.rows if row.why})
    text = f"{reply.here} of {total} rows would be loaded here"
    why = f": {'; '.join(whys[:3])}" + (f"; {len(whys) - 3} more reasons" if len(whys) > 3 else "") if whys else ""
    yield ExamLine(what="here", ok=reply.here == total, text=text + why, todo=reply.setting)
    if reply.here < total:
        there = f"{reply.there} of {total} rows are found on {made.device} by {made.engine}'s own lookup"
        yield ExamLine(what="there", ok=reply.there == total, text=there)
