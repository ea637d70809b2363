"""Commands `export` and `import`: decisions as a file, a lock, a folder for an image, a script or an engine's files."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autosel import fingerprint, settings
from autosel import ledger as ledgers
from autosel.certify.sign import public_key
from autosel.cli import bundle, completion
from autosel.cli.bake import bake
from autosel.cli.dataset import import_solution, import_traces
from autosel.cli.device import here
from autosel.cli.engines import ENGINES, export_to
from autosel.cli.lock import lock
from autosel.cli.options import PATH, Known, dtype_option, json_option, verb
from autosel.cli.output import emit_json, paragraph
from autosel.cli.progress import Progress
from autosel.errors import BadConfig, UsageError
from autosel.files import is_folder, read_named
from autosel.ledger.key import current_mode
from autosel.values import Decision, DTypeName

if TYPE_CHECKING:
    from autosel.ledger.store import Imported, Ledger
    from autosel.tuning.adopt import Adoption


@verb(
    "export",
    "export decisions.json",
    "export --sign bundle.json",
    "export --repro 41 race41.py",
    "export --lock",
    "export --lock --check",
    "export --lock --frozen -- python serve.py",
    "export --bake image/autosel",
    "export --to flashinfer dataset/",
    "export --to vllm --model qwen3-8b --fingerprint h200 configs/",
)
@click.argument("words", metavar="[PATH]", nargs=-1, type=click.UNPROCESSED)
@click.option("--sign", is_flag=True, help="write a bundle that names this host, signed (Ed25519)")
@click.option("--key", type=PATH, metavar="FILE", help="sign with this key, not this home's")
@click.option("--repro", "decision_id", type=int, help="write a script that reproduces this decision's race")
@click.option(
    "--lock",
    "lock_file",
    type=click.Path(path_type=Path, dir_okay=False),
    is_flag=False,
    flag_value="autosel.lock",
    metavar="[FILE]",
    help="pin by digest what serves here now, in a file to commit  [default: autosel.lock]",
)
@click.option("--check", is_flag=True, help="with --lock: check that exactly the pins serve here; exit code 1 if not")
@click.option("--build", is_flag=True, help="with --lock: compile pinned kernels that are missing here, then check")
@click.option("--frozen", is_flag=True, help="with --lock: run `-- COMMAND` under the lock; fail if it does not hold")
@click.option(
    "--bake",
    "baked",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="write decisions, builds and a lock as a read-only home for an image",
)
@click.option("--to", "engine", type=Known("engine", ENGINES), help="write this engine's files into folder PATH")
@click.option(
    "--model", metavar="NAME|DIR", shell_complete=completion.models, help="with --to: the model  [default: llama-8b]"
)
@dtype_option()
@click.option("--tp", type=click.IntRange(1, 1024), default=1, metavar="N", help="with --to: split over N devices")
@click.option(
    "--fingerprint",
    "device",
    metavar="DEVICE",
    help="with --to: derive undecided rows for h200, l4 ...",
    shell_complete=completion.devices,
)
@click.option("--json", "as_json", is_flag=True, help="with --lock: print one JSON document on stdout")
def export_command(
    words: tuple[str, ...],
    sign: bool,
    key: Path | None,
    decision_id: int | None,
    lock_file: Path | None,
    check: bool,
    build: bool,
    frozen: bool,
    baked: Path | None,
    engine: str | None,
    model: str | None,
    dtype: DTypeName | None,
    tp: int,
    device: str | None,
    as_json: bool,
) -> None:
    """Write what serves now as a file in the snapshot's format (PATH, default stdout), or in the form of an option.

    A program serves from a lock with AUTOSEL_LOCK=FILE. With AUTOSEL_FROZEN=1 it fails to start if the lock does not
    hold.
    """
    forms = {"--lock": lock_file, "--bake": baked, "--to": engine, "--repro": decision_id, "--sign": sign or None}
    named = [name for name, value in forms.items() if value is not None]
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)} are mutually exclusive", todo="name one of them")
    if lock_file is not None:
        lock(lock_file, check=check, build=build, frozen=frozen, command=words, as_json=as_json)
        return
    if check or build or frozen or as_json:
        raise UsageError("--check, --build, --frozen and --json need --lock", todo="add --lock")
    if len(words) > (baked is None):
        raise UsageError(f"unexpected argument {words[-1]!r}", todo=f"{settings.spelling()} export --help")
    path = Path(words[0] if words else "-")
    if baked is not None:
        _export_baked(baked)
        return
    if engine is not None:
        export_to(engine, path, model=model or "llama-8b", dtype=dtype, device=device, tp=tp)
        return
    if model or dtype or device or tp != 1:
        raise UsageError("--model, --dtype, --tp and --fingerprint need --to ENGINE", todo="add --to ENGINE")
    if key and not sign:
        raise UsageError("--key needs --sign", todo="add --sign")

    if not is_folder(path.parent):
        why = f"folder {path.parent} does not exist"
        raise BadConfig(f"cannot write {path}", why=why, todo="create it, or check the path")
    with ledgers.open_ledger() as ledger:
        if decision_id is not None:
            from autosel.cli.repro import script

            text = script(ledger.evidence(decision_id))
            if str(path) == "-":
                click.echo(text, nl=False)
            else:
                _write(path, text)
                click.echo(f"{path}: run it with any Python that has torch and a C++ compiler", err=True)
            return
        if sign:
            _export_signed(ledger.export(), path, key)
        elif str(path) == "-":
            emit_json(ledger.export())
        else:
            made = ledger.export(path)
            click.echo(f"{len(made['rows'])} decisions written to {path}", err=True)


def _export_baked(folder: Path) -> None:
    made = bake(folder)
    for key, reason in made.left:
        click.echo(paragraph(f"left out: {key}: {reason}", hang="  "), err=True)
    click.echo(f"{made.decisions} decisions and {made.builds} builds in {made.folder}")
    click.echo(f"serve from it, read-only: AUTOSEL_HOME={shlex.quote(made.folder)}")
    click.echo(f"and refuse to start otherwise: AUTOSEL_LOCK={shlex.quote(made.folder)}/autosel.lock AUTOSEL_FROZEN=1")


def _export_signed(decisions: dict[str, Any], path: Path, key: Path | None) -> None:
    made = bundle.make(decisions, bundle.own_key(key))
    if str(path) == "-":
        click.echo(bundle.text(made), nl=False)
    else:
        _write(path, bundle.text(made))
    where = "" if str(path) == "-" else f" to {path}"
    click.echo(f"{len(decisions['rows'])} decisions written{where}, signed by {made['signer']}", err=True)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise BadConfig(f"cannot write {path}", why=error.strerror or str(error)) from error


@verb(
    "import",
    "import decisions.json",
    "import bundle.json --key node7.pem",
    "import",
    "import solution.json --definition definition.json --into mine/",
    "import dataset/ --into traffic.json",
)
@click.argument("path", type=PATH, required=False)
@click.option("--key", default="", metavar="KEY", help="require a signature by this key: a file, or hex digits")
@click.option("--check/--no-check", default=True, help="--no-check: leave proofs for later")
@click.option(
    "--definition",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="unpack PATH, a flashinfer-bench solution of this definition, to race it",
)
@click.option(
    "--into",
    type=PATH,
    metavar="PATH",
    help="a solution: the folder to unpack into; a dataset: the recording to write",
)
@json_option
def import_command(
    path: Path | None, key: str, check: bool, definition: Path | None, into: Path | None, as_json: bool
) -> None:
    """Read an export or a bundle; without PATH, the decisions of other hosts in the shared ledger.

    Decisions for this machine's kinds of device serve once their kernel is built and has passed parity here; until then
    the earlier kernel serves. Decisions for other devices are kept as history.

    A folder is read as a flashinfer-bench dataset. Its traces are kept as outside evidence, which does not affect
    decisions, and its workloads are written as a recording for `tune --recorded`.
    """
    if path is not None and is_folder(path):
        if definition is not None or key:
            what = f"--definition and --key do not apply to {path}"
            raise UsageError(what, why="a folder is read as a dataset", todo="remove them")
        import_traces(path, into, as_json)
        return
    if definition is not None or into is not None:
        import_solution(path, definition, into, as_json)
        return
    if path is None and key:
        raise UsageError("--key needs PATH", todo="name the signed bundle")
    with ledgers.open_ledger() as ledger:
        taken = _taken_in(ledger, path, key) if path else None
        adopted = _adopted(ledger) if check else []
        kept = [(ledger.decision(number), why) for number, why in taken.kept] if taken else []
    document = {
        "served": taken.served if taken else (),
        "kept": [{"id": d.id, "reason": why} for d, why in kept],
        "adopted": [a.decision.id for a in adopted if not a.reason],
        "refused": [{"id": a.decision.id, "reason": a.reason} for a in adopted if a.reason],
    }
    if as_json:
        emit_json(document)
        return
    for line in _words(taken, kept, adopted, check):
        click.echo(line)
    if document["served"] or document["adopted"]:
        click.echo(f"look at them: {settings.spelling()} explain --history")


def _taken_in(ledger: Ledger, path: Path, key: str) -> Imported:
    from autosel.ledger.commands import Import

    data = read_named(path, bundle.MOST_BYTES)
    found = bundle.read(data, str(path), signer=public_key(key) if key else "")
    cpu, *gpus = (fp.hw_id for _, fp in here())
    return ledger.write(Import(document=found.decisions, hw_id=cpu, origin=found.host, also=tuple(gpus)))


def _adopted(ledger: Ledger) -> list[Adoption]:
    """Prove and adopt the offered decisions of every device. Two equal GPUs share decisions; the first proves them."""
    from autosel.tuning.adopt import adopt

    found: list[Adoption] = []
    for hw_id, place in {fp.hw_id: place for place, fp in reversed([*here()])}.items():
        if ledger.offered(hw_id, current_mode()):
            with Progress() as progress:
                found += adopt(ledger, fingerprint.take(place), progress, device=place)
    return found


def _words(
    taken: Imported | None, kept: Sequence[tuple[Decision, str]], adopted: Sequence[Adoption], check: bool
) -> Iterator[str]:
    served = (len(taken.served) if taken else 0) + sum(not a.reason for a in adopted)
    yield f"{served} decisions serve here now" + (f", {len(taken.kept)} are kept as history" if taken else "")
    if taken and taken.waiting and not check:
        yield f"{len(taken.waiting)} wait for a proof of this host: {settings.spelling()} import"
    for decision, why in kept:
        yield f"  {decision.workload.key}: {why}"
    for a in adopted:
        if a.reason:
            yield f"  {a.decision.workload.key}: {a.decision.arm.candidate} does not serve here: {a.reason}"
