"""Command `whatif`: race this machine's workloads under another Python's torch before anyone deploys it."""

from __future__ import annotations

import json
import shlex
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autosel import settings
from autosel.cli.device import device_option, identity
from autosel.cli.options import json_option, ops_option, seed_option, verb
from autosel.cli.output import emit_json, microseconds, table
from autosel.errors import AutoselError, UsageError
from autosel.values import WHOLE_STEP

if TYPE_CHECKING:
    from autosel.values import Workload

# The other environment's versions; it fails, with the reason, if that environment cannot run autosel.
ASKED = (
    "import json, sys, torch, autosel.pipeline, autosel.ledger; from autosel.ledger.key import current_mode; "
    "print(json.dumps({'python': sys.version.split()[0], 'torch': torch.__version__, 'mode': current_mode()}))"
)
QUICK_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One bucket under both environments. Times are in microseconds, None if nothing was timed."""

    bucket: str
    here: str
    there: str
    here_us: float | None
    there_us: float | None
    baseline_here_us: float | None
    baseline_there_us: float | None
    calls: int

    @property
    def flips(self) -> bool:
        return bool(self.there) and self.here != self.there

    @property
    def gain(self) -> float | None:
        """Return the speedup of a call there over here, each with its own decision; above 1 is faster."""
        return self.here_us / self.there_us if self.here_us and self.there_us else None


@verb(
    "whatif", "whatif --python ~/next/bin/python", "whatif --python ~/next/bin/python --recorded recorded.json --json"
)
@click.option("--python", "python", type=click.Path(path_type=Path), required=True, help="the other bin/python")
@click.option(
    "--recorded",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="try the workloads of a recording  [default: those decided here]",
)
@ops_option
@click.option("--budget", default="", metavar="TIME", help="let the other environment race for 90s or 5m")
@device_option()
@seed_option
@json_option
def whatif_command(
    python: Path,
    recorded: Path | None,
    ops: Sequence[str],
    budget: str,
    device: str,
    seed: int | None,
    as_json: bool,
) -> None:
    """Show what would be decided under another Python's torch and libraries, and the gain or loss.

    It tunes there with a temporary home; decisions here do not change.
    """
    from autosel.cli.tune import parse_budget

    if budget:
        parse_budget(budget)
    hw_id = identity(device).hw_id
    present = ask(python)
    calls = _workloads(recorded, ops, hw_id)
    theirs = _tuned_there(python, calls, budget, device, seed)
    changes = compare(_decided_here(hw_id), theirs, {w.bucket: n for w, n in calls.items()})
    if as_json:
        emit_json({"environment": present, "changes": [_document(c) for c in changes]})
        return
    click.echo(f"{python}: python {present['python']}, torch {present['torch']}")
    click.echo(table(("workload", "here", "us", "there", "us", "change"), [_row(c) for c in changes], (2, 4), wrap=0))
    for line in summary(changes):
        click.echo(line)


# --- the other environment --------------------------------------------------------------------------------------------


def ask(python: Path) -> Mapping[str, str]:
    """Return the other environment's versions. Raises UsageError if it is not a Python, or cannot run this autosel."""
    try:
        done = subprocess.run(
            [str(python), "-P", "-c", ASKED], capture_output=True, text=True, timeout=QUICK_S, env=_environment()
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"cannot run {python}", why=str(error), todo="name an environment's bin/python") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise UsageError(
            f"{python} cannot run autosel",
            why=last,
            todo=f"install what autosel needs there:  {shlex.quote(str(python))} -m pip install {_package()}",
        )
    found: Mapping[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def _package() -> str:
    """Return what to install there: this checkout, or the wheel that this installation is from."""
    root = Path(__file__).resolve().parents[2]
    return shlex.quote(str(root)) if (root / "pyproject.toml").is_file() else "WHEEL  (the one installed here)"


def _environment(home: str = "") -> dict[str, str]:
    """Return this environment with this autosel first on its path, so that only other packages differ."""
    made = settings.passed_to_children() | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    made.pop("AUTOSEL_DB", None)  # measurements there must not reach this ledger
    return made | ({"AUTOSEL_HOME": home} if home else {})


def _tuned_there(
    python: Path, calls: Mapping[Workload, int], budget: str, device: str, seed: int | None
) -> Mapping[str, Mapping[str, Any]]:
    """Return decisions by bucket, from `tune --json`. Its progress goes to this process's stderr."""
    from autosel.dispatch import recorded
    from autosel.ledger.key import current_mode

    with tempfile.TemporaryDirectory(prefix="autosel-whatif-") as folder:
        file = Path(folder) / "recorded.json"
        recorded.save(file, recorded.Recorded(device=identity(device).hw_id, mode=current_mode(), calls=calls))
        words = [str(python), "-P", "-m", "autosel.cli.main", "tune", "--recorded", str(file), "--json"]
        words += ["--device", device]
        words += ["--budget", budget] if budget else []
        words += ["--seed", str(seed)] if seed is not None else []
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, env=_environment(str(Path(folder) / "home")))
    try:
        found = json.loads(done.stdout)
        decisions = found["decisions"]
    except (ValueError, KeyError, TypeError) as error:
        raise AutoselError(
            f"{python} did not tune", why=f"exit code {done.returncode}", todo=" ".join(words)
        ) from error
    return decided_there(decisions, found.get("undecided", ()), calls)


def decided_there(
    decisions: Iterable[Mapping[str, Any]], undecided: Iterable[str], asked: Iterable[Workload]
) -> Mapping[str, Mapping[str, Any]]:
    """Return decisions by bucket, without those that the budget left undecided: their baseline is not a winner."""
    open_ = set(undecided)
    left = {w.bucket for w in asked if w.key in open_}
    return {d["bucket"]: d for d in decisions if d["bucket"] not in left}


# --- here -------------------------------------------------------------------------------------------------------------


def _workloads(path: Path | None, ops: Sequence[str], hw_id: str) -> dict[Workload, int]:
    """Return the recorded workloads, or those that decisions serve on the device. Raises AutoselError if there are
    none.
    """
    from autosel.candidates.registry import op_name
    from autosel.cli.record import named_workloads

    if path is not None:
        found = {n.workload: n.calls_per_step for n in named_workloads(path)}
    else:
        from autosel.ledger.store import open_ledger

        with open_ledger() as ledger:
            here = [s.decision for s in ledger.serving() if s.decision.hw_id == hw_id]
            found = {d.workload: 1 for d in here if d.op != WHOLE_STEP}
    wanted = {op_name(op) for op in ops}
    found = {w: n for w, n in found.items() if not wanted or w.op in wanted}
    if not found:
        raise AutoselError(
            "no workload to try",
            why="this device has no decisions" if path is None else f"{path} has no such workload",
            todo=f"{settings.spelling()} tune, or name a recording with --recorded",
        )
    return found


def _decided_here(hw_id: str) -> Mapping[str, Mapping[str, Any]]:
    from autosel.ledger.describe import decision_json
    from autosel.ledger.store import open_ledger

    with open_ledger() as ledger:
        here = [s.decision for s in ledger.serving() if s.decision.hw_id == hw_id]
        return {d.bucket: decision_json(d) for d in here}


def compare(
    here: Mapping[str, Mapping[str, Any]], there: Mapping[str, Mapping[str, Any]], calls: Mapping[str, int]
) -> list[Change]:
    """Return a Change for each bucket, those with another winner first, then by cost."""
    changes = []
    for bucket, count in calls.items():
        ours, theirs = here.get(bucket, {}), there.get(bucket, {})
        changes.append(
            Change(
                bucket=bucket,
                here=str(ours.get("candidate") or "(undecided)"),
                there=str(theirs.get("candidate") or ""),
                here_us=ours.get("time_us"),
                there_us=theirs.get("time_us"),
                baseline_here_us=ours.get("baseline_us"),
                baseline_there_us=theirs.get("baseline_us"),
                calls=count,
            )
        )
    return sorted(changes, key=lambda c: (not c.flips, -(c.there_us or 0.0) * c.calls, c.bucket))


def _row(c: Change) -> list[str]:
    gain = f"{c.gain:.2f}x" if c.gain else ""
    change = f"flips {gain}".rstrip() if c.flips else gain or "undecided there"
    times = [microseconds(t) if t else "" for t in (c.here_us, c.there_us)]
    return [c.bucket, c.here, times[0], c.there, times[1], change]


def summary(changes: Sequence[Change]) -> list[str]:
    flips = sum(c.flips for c in changes)
    lines = [f"{flips} of {len(changes)} would be served by another kernel"]
    both = [c for c in changes if c.gain]
    if both:
        here = sum((c.here_us or 0.0) * c.calls for c in both)
        there = sum((c.there_us or 0.0) * c.calls for c in both)
        lines.append(
            f"{len(both)} timed under both: {here / 1e3:.3g} ms here, {there / 1e3:.3g} ms there: {here / there:.2f}x "
            "(two separate runs: a busier machine in one of them changes this too)"
        )
    return lines


def _document(c: Change) -> dict[str, Any]:
    return {
        "bucket": c.bucket,
        "here": c.here,
        "there": c.there or None,
        "here_us": c.here_us,
        "there_us": c.there_us,
        "baseline_here_us": c.baseline_here_us,
        "baseline_there_us": c.baseline_there_us,
        "calls": c.calls,
        "flips": c.flips,
        "gain": c.gain,
    }
