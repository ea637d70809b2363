"""Which workloads a running program asks for, and how often: noted in a file while it runs, read back by `tune`.

    {"format": "autosel.recorded", "version": 1, "device": hw_id, "mode": ..., "workloads": [{"workload", "calls"}]}

With AUTOSEL_RECORD set each process keeps a file of its own for each device beside the one named (numbers appended),
because a program may be many; `merge` adds up those of a device. The watcher's thread writes them, and the end of the
process; never a call.
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
    """Calls by workload, on one device in one mode."""

    device: str
    mode: str
    calls: Mapping[Workload, int]


# --- while the program runs ------------------------------------------------------------------------------------------

_last: dict[int, int] = {}  # what this process (by pid: it may have forked) wrote last, as the sum of its calls


Asked = Callable[[], Mapping[str, Mapping[Workload, int]]]


def note(asked: Asked) -> None:
    """Write what was asked for so far, by device (hw_id), if that is wanted and has changed since."""
    path = settings.get("record")
    if path is None:
        return
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
                write(part(Path(path), pid, number), hw_id, calls)
        _last[pid] = total
    except OSError as error:
        log.warning("cannot note the workloads in %s: %s", path, error)


def part(path: Path, pid: int, number: int) -> Path:
    """Of a process, and of the devices that it used."""
    return path.with_name(f"{path.name}.{pid}{number:02}")


def write(path: Path, hw_id: str, calls: Mapping[Workload, int]) -> None:
    """What this process asked for on a device."""
    from autosel.ledger.key import current_mode

    save(path, Recorded(device=hw_id, mode=current_mode(), calls=calls))


def save(path: Path, made: Recorded) -> None:
    making = path.with_name(f".{path.name}.{os.getpid()}")
    making.write_text(json.dumps(document(made), indent=1) + "\n", encoding="utf-8")
    making.replace(path)


def document(made: Recorded) -> dict[str, Any]:
    """Most called first."""
    ordered = sorted(made.calls.items(), key=lambda item: (-item[1], item[0].key))
    rows = [{"workload": to_json(w), "calls": n} for w, n in ordered]
    return {"format": FORMAT, "version": VERSION, "device": made.device, "mode": made.mode, "workloads": rows}


# --- afterwards ------------------------------------------------------------------------------------------------------


def read(path: Path) -> Recorded:
    """Raises BadConfig for what is no recording."""
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
    """The processes of one program, added up for each device; the one most called first. Raises BadConfig."""
    every = list(parts)
    if not every:
        return [merge(every)]
    found = [merge(p for p in every if p.device == device) for device in dict.fromkeys(p.device for p in every)]
    return sorted(found, key=lambda made: -sum(made.calls.values()))


def merge(parts: Iterable[Recorded]) -> Recorded:
    """The processes of one program, added up. Raises BadConfig if there are none, or they ran on several devices.

    Modes may differ (a data loader sets its own threads): the one most calls ran in is kept, with its calls alone.
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
    """Raises BadConfig for a workload that no op could mean."""
    from autosel import ops

    op = ops.OPS.get(w.op)
    known = op is not None and {n for n, _ in w.traits} <= set(op.trait_defaults)
    if op is None or not known or tuple(n for n, _ in w.dims) != op.dim_names or min(n for _, n in w.dims) < 1:
        raise BadConfig(f"{where}: no op has the workload {w.key[:120]}")
    if op.workload(w.dtype, dict(w.dims), **dict(w.traits)) != w:
        raise BadConfig(f"{where}: {w.key[:120]} is not how this workload is written")
