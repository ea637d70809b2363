"""Record the workloads of a running program, and how often it calls them, in a file that `tune` reads.

    {"format": "autosel.recorded", "version": 1, "device": hw_id, "mode": ..., "workloads": [{"workload", "calls"}]}

With AUTOSEL_RECORD set, each process writes a separate file for each device next to the named one (with a number
appended), because a program may have many processes; `merge` adds up the files of a device. The watcher's thread writes
them, and the end of the process; a call never does.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autosel import settings
from autosel.errors import BadConfig
from autosel.files import read_named
from autosel.values import Workload, from_json, parse_json, to_json

log = logging.getLogger(__name__)

FORMAT, VERSION = "autosel.recorded", 1
MOST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Hold the calls by workload, on one device in one mode."""

    device: str
    mode: str
    calls: Mapping[Workload, int]


# --- while the program runs ------------------------------------------------------------------------------------------

# the sum of calls in the last file written by this process (by pid, because it may have forked)
_last: dict[int, int] = {}


CallCounts = Callable[[], Mapping[str, Mapping[Workload, int]]]


def note(asked: CallCounts) -> None:
    """Write the workloads so far, by device (hw_id), if recording is on and they have changed."""
    path = settings.get("record")
    if path is None:
        return
    from autosel.ledger.key import current_mode

    pid = os.getpid()
    if pid not in _last:
        _last[pid] = 0
        atexit.register(note, asked)
    where = {hw_id: {w: n for w, n in calls.items() if n} for hw_id, calls in asked().items()}
    total = sum(sum(calls.values()) for calls in where.values())
    if total == _last[pid]:
        return
    try:
        for number, (hw_id, calls) in enumerate(sorted(where.items())):
            if calls:
                save(part(Path(path), pid, number), Recorded(device=hw_id, mode=current_mode(), calls=calls))
        _last[pid] = total
    except OSError as error:
        log.warning("cannot note the workloads in %s: %s", path, error)


def part(path: Path, pid: int, number: int) -> Path:
    return path.with_name(f"{path.name}.{pid}{number:02}")


def save(path: Path, made: Recorded) -> None:
    making = path.with_name(f".{path.name}.{os.getpid()}")
    making.write_text(json.dumps(document(made), indent=1) + "\n", encoding="utf-8")
    making.replace(path)


def document(made: Recorded) -> dict[str, Any]:
    """Return the recording as a document, most called first."""
    ordered = sorted(made.calls.items(), key=lambda item: (-item[1], item[0].key))
    rows = [{"workload": to_json(w), "calls": n} for w, n in ordered]
    return {"format": FORMAT, "version": VERSION, "device": made.device, "mode": made.mode, "workloads": rows}


# --- afterwards ------------------------------------------------------------------------------------------------------


def read(path: Path) -> Recorded:
    """Read a recording. Raises BadConfig if it is invalid."""
    content = read_named(path, MOST_BYTES)
    try:
        return _decoded(parse_json(content, what=str(path)))
    except ValueError as error:
        raise BadConfig(
            f"{path} is not a recording", why=str(error), todo="autosel record -- COMMAND writes one"
        ) from error


def _decoded(data: Any) -> Recorded:
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
        raise ValueError(f'its "format" is not "{FORMAT}", version {VERSION}')
    rows = data.get("workloads")
    if not isinstance(rows, list) or not all(isinstance(r, dict) and set(r) == {"workload", "calls"} for r in rows):
        raise ValueError("workloads is not a list of {workload, calls}")
    calls: dict[Workload, int] = {}
    for row in rows:
        w, count = from_json(Workload, row["workload"]), from_json(int, row["calls"])
        if count < 1:
            raise ValueError(f"{w.key}: called {count} times")
        calls[w] = calls.get(w, 0) + count
    return Recorded(device=from_json(str, data.get("device")), mode=from_json(str, data.get("mode")), calls=calls)


def by_device(parts: Iterable[Recorded]) -> list[Recorded]:
    """Add up the processes of a program for each device, most calls first. Raises BadConfig."""
    every = list(parts)
    if not every:
        return [merge(every)]
    found = [merge(p for p in every if p.device == device) for device in dict.fromkeys(p.device for p in every)]
    return sorted(found, key=lambda made: -sum(made.calls.values()))


def merge(parts: Iterable[Recorded]) -> Recorded:
    """Add up the processes of a program. Raises BadConfig if there are none, or if they ran on several devices.

    Modes may differ (a data loader sets its own number of threads): only the calls in the most frequent mode are kept.
    """
    every = list(parts)
    if not every:
        raise BadConfig(
            "nothing was recorded",
            why="the program called nothing of autosel's: no best(), no torch.ops.autosel, no patched model",
            todo="call autosel.patch(model) or autosel.activate() in it",
        )
    if len({p.device for p in every}) > 1:
        raise BadConfig("these recordings are of several devices", todo="record on one")
    by_mode: dict[str, dict[Workload, int]] = {}
    for one in every:
        calls = by_mode.setdefault(one.mode, {})
        for w, n in one.calls.items():
            calls[w] = calls.get(w, 0) + n
    mode = max(by_mode, key=lambda m: sum(by_mode[m].values()))
    return Recorded(device=every[0].device, mode=mode, calls=by_mode[mode])


def refuse_unknown(w: Workload, where: Path) -> None:
    """Raise BadConfig for a workload that no op matches."""
    from autosel import ops

    op = ops.OPS.get(w.op)
    known = op is not None and {n for n, _ in w.traits} <= set(op.trait_defaults)
    if op is None or not known or tuple(n for n, _ in w.dims) != op.dim_names or min(n for _, n in w.dims) < 1:
        raise BadConfig(f"{where}: no op has the workload {w.key[:120]}")
    if op.workload(w.dtype, dict(w.dims), **dict(w.traits)) != w:
        raise BadConfig(f"{where}: {w.key[:120]} is not how this workload is written")
