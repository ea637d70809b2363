"""What serves in this process: the snapshot, looked at off the hot path, and the callables that were handed out."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from autosel.dispatch.bound import Bound, Cell, make_bound, put
from autosel.dispatch.resolve import SERVING, Resolution, Serving, index, resolve
from autosel.dispatch.selection import MOST_SHAPES, Entry, Selection, key_function, make_selection
from autosel.dispatch.signature import inputs_of
from autosel.errors import BadConfig
from autosel.fingerprint import machine
from autosel.ledger import snapshot
from autosel.ops.contract import Op
from autosel.values import Fingerprint

log = logging.getLogger(__name__)
LOOK_EVERY_S = 0.5  # a demotion must reach us within a second (design section 9)

Stamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Uses:
    """How often one resolution ran in this process."""

    op: str
    bucket: str
    candidate: str
    decision_id: int | None
    reason: str
    calls: int


@dataclass(slots=True, kw_only=True)
class _Bound:
    """A callable handed out by `best(op, like=...)`, held only as long as its owner holds it."""

    op: Op
    function: weakref.ref[Any]
    cell: Cell
    resolution: Resolution
    earlier: int = 0  # calls that ran what it was bound to before

    @property
    def calls(self) -> int:
        return self.cell.calls() - self.earlier


@dataclass(slots=True, kw_only=True)
class _Selected:
    """The one selection of an op, with its table."""

    op: Op
    function: Selection
    table: dict[Any, Entry]


class Board:
    """Serves from `place`: a home folder or a snapshot file. Threads share it; it never writes."""

    def __init__(self, place: Path) -> None:
        self.path = place if place.suffix == ".json" else place / snapshot.FILE
        self.epoch = 0
        self._lock = threading.RLock()
        self._bound: list[_Bound] = []
        self._selected: dict[str, _Selected] = {}
        self._past: dict[tuple[Any, ...], int] = {}
        self._stamp = _stamp(self.path)
        self._rows: tuple[snapshot.Row, ...] = ()
        self._serving = self._read()
        self._closed = threading.Event()
        self._watch()
        _boards.add(self)

    # --- handing out ------------------------------------------------------------------------------------------------

    def selection(self, op: Op) -> Selection:
        with self._lock:
            if op.name not in self._selected:
                table: dict[Any, Entry] = {}
                key = key_function(op)

                def look(inputs: dict[str, Any]) -> Entry:
                    return self._entry(op, table, key, inputs)

                function = make_selection(op, table, look)
                self._selected[op.name] = _Selected(op=op, function=function, table=table)
            return self._selected[op.name].function

    def bind(self, op: Op, like: Sequence[Any] | Mapping[str, Any]) -> Bound:
        """Raises BadArguments."""
        w = op.workload_of(inputs_of(op, like))
        with self._lock:
            resolution = resolve(op, w, self._serving)
            function, cell = make_bound(op, resolution)
            self._forget_dropped()
            self._bound.append(_Bound(op=op, function=weakref.ref(function), cell=cell, resolution=resolution))
        return function

    def _entry(self, op: Op, table: dict[Any, Entry], key: Any, inputs: dict[str, Any]) -> Entry:
        """The miss: a microsecond's work becomes some hundred, once a shape. Raises BadArguments."""
        w = op.workload_of(inputs)
        with self._lock:
            entry: Entry = [None, 0, resolve(op, w, self._serving)]
            entry[0] = entry[2].run
            if len(table) >= MOST_SHAPES:
                self._fold(table)
            with suppress(AttributeError, TypeError):  # arguments no key can be made of are looked up each time
                table[key(inputs)] = entry
            return entry

    # --- watching ---------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Look at the snapshot; if it changed, everything handed out serves from the new one when this returns."""
        stamp = _stamp(self.path)
        with self._lock:
            if stamp == self._stamp:
                return
            self._stamp = stamp
            before = _served(self._rows)
            self._serving = self._read()
            for selected in self._selected.values():
                self._fold(selected.table)
            for held in self._bound:
                self._rebind(held)
            after = _served(self._rows)
            if any(after.get(key) != arm for key, arm in before.items()):
                self.epoch += 1

    def _rebind(self, held: _Bound) -> None:
        function = held.function()
        if function is None:
            return
        calls = held.calls
        self._count(held.resolution, calls)
        held.earlier += calls
        held.resolution = resolve(held.op, held.resolution.workload, self._serving)
        put(function, held.cell, held.resolution)

    def _read(self) -> Serving:
        device = this_device()
        try:
            found = snapshot.read(self.path)
        except BadConfig as error:
            log.warning("%s", error)
            self._rows = ()
            return index((), device, trouble=str(error).replace("\n", ": "))
        self._rows = found.rows if found else ()
        return index(self._rows, device, trouble="" if found else f"nothing is decided here yet ({self.path})")

    def _watch(self) -> None:
        closed, this = self._closed, weakref.ref(self)

        def look() -> None:
            while not closed.wait(LOOK_EVERY_S):
                board = this()
                if board is None:
                    return
                try:
                    board.refresh()
                except Exception:  # a watcher that dies would hide every later demotion
                    log.exception("the snapshot could not be looked at")
                del board

        threading.Thread(target=look, name="autosel-snapshot", daemon=True).start()

    def _after_fork(self) -> None:
        """Threads and their locks do not survive a fork."""
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._watch()

    def close(self) -> None:
        self._closed.set()

    # --- counting ---------------------------------------------------------------------------------------------------

    def _fold(self, table: dict[Any, Entry]) -> None:
        """Forget the shapes, keep the counts."""
        entries = list(table.values())
        table.clear()
        for _, count, resolution in entries:
            self._count(resolution, count)

    def _forget_dropped(self) -> None:
        """Callables nobody holds any more."""
        for held in self._bound:
            if held.function() is None:
                self._count(held.resolution, held.calls)
        self._bound = [b for b in self._bound if b.function() is not None]

    def _count(self, resolution: Resolution, calls: int) -> None:
        key = _use_key(resolution)
        self._past[key] = self._past.get(key, 0) + calls

    def uses(self) -> list[Uses]:
        """What ran in this process, by what decided it; a miss is one without a decision."""
        with self._lock:
            total = dict(self._past)
            now = [(e[2], e[1]) for s in self._selected.values() for e in list(s.table.values())]
            now += [(b.resolution, b.calls) for b in self._bound]
        for resolution, count in now:
            key = _use_key(resolution)
            total[key] = total.get(key, 0) + count
        return [
            Uses(op=o, bucket=b, candidate=c, decision_id=d, reason=r, calls=n) for (o, b, c, d, r), n in total.items()
        ]


def _use_key(r: Resolution) -> tuple[Any, ...]:
    return r.workload.op, r.workload.bucket, r.candidate, r.decision.id if r.decision else None, r.reason


def _served(rows: Sequence[snapshot.Row]) -> dict[str, str]:
    """Of the keys that something other than the baseline serves: the digest of what serves."""
    found = {}
    for row in rows:
        arm, baseline = row.document.get("arm", {}), row.document.get("baseline", {})
        if row.document.get("state") in SERVING and arm.get("digest") != baseline.get("digest"):
            found[row.key] = str(arm.get("digest"))
    return found


def _stamp(path: Path) -> Stamp:
    try:
        info = path.stat()
    except OSError:
        return (0, 0, 0)
    return (info.st_ino, info.st_mtime_ns, info.st_size)


@cache
def this_device() -> Fingerprint:
    """Identity alone: a few milliseconds, nothing measured."""
    identity = machine.identity()
    return Fingerprint(kind="cpu", name=identity["model"], identity=identity, environment={}, rates={})


_boards: weakref.WeakSet[Board] = weakref.WeakSet()


def _restart_watchers() -> None:
    for board in list(_boards):
        if not board._closed.is_set():
            board._after_fork()


os.register_at_fork(after_in_child=_restart_watchers)
