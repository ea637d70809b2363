"""Serve in this process: hold the snapshot, checked in the background, and the callables that were handed out.

When the guard sees a fault, the baseline replaces the arm in this process at once. The fault is then written to the
journal next to the snapshot, where other and later processes of this home find it. The database is never opened.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from autosel import settings
from autosel.candidates.layouts import STORE
from autosel.devices import HOST, accelerated, device_at, ids_of, kind_of, places_here, this_device, unused
from autosel.dispatch import lock, recorded, served
from autosel.dispatch.bound import Bound, Cell, make_bound, make_part, put
from autosel.dispatch.handover import Handover, UseKey
from autosel.dispatch.left import MOST_LEFT, Left
from autosel.dispatch.resolve import Resolution, Serving, index, resolve, whole
from autosel.dispatch.selection import MOST_SHAPES, Selection, TableEntry, calls, grant, key_function, make_selection
from autosel.dispatch.served import UsedFor
from autosel.dispatch.signature import inputs_of, place_of
from autosel.errors import AutoselError, BadConfig, ForeignDecision
from autosel.guard import NEVER, Allowance, Held, Policy, Subject, Watch, spot
from autosel.ledger import conditions, faults, snapshot
from autosel.ledger.faults import Fault
from autosel.ledger.key import current_mode
from autosel.native.isa import best_isa
from autosel.ops.contract import Op
from autosel.values import ELSEWHERE, SERVING, Decision, Fingerprint, Workload

__all__ = ["Board", "UsedFor", "Uses", "this_device"]

log = logging.getLogger(__name__)
LOOK_EVERY_S = 0.5  # a demotion must take effect within a second (design section 9)

Stamp = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Uses:
    """Count how often one resolution ran in this process."""

    op: str
    bucket: str
    candidate: str
    decision_id: int | None
    reason: str
    calls: int


@dataclass(slots=True, kw_only=True)
class _Bound:
    """Refer to a callable from `best(op, like=...)`, as long as its owner keeps it."""

    op: Op
    function: weakref.ref[Any]
    cell: Cell
    resolution: Resolution
    place: str  # place of the tensors that it was bound for
    elsewhere: list[int]  # the function's
    watch: Watch | None = None
    earlier: int = 0  # calls of kernels that it was bound to earlier

    @property
    def calls(self) -> int:
        return self.cell.calls() - self.earlier


REFETCH = "restore it from your repository, or write it again: autosel export --lock"


class Board:
    """Serve from `place`: a home folder or a snapshot file. Threads share it. It writes only faults."""

    def __init__(self, place: Path, policy: Policy | None = None) -> None:
        self.path = place if place.suffix in (".json", ".lock") or place.is_file() else place / snapshot.FILE
        self.home = self.path.parent if self.path.name == snapshot.FILE else settings.home()
        self.policy = policy or Policy.from_settings()
        self.epoch = 0
        self._watches: dict[tuple[Any, ...], Watch] = {}
        self._allowance = Allowance()
        self._seen: dict[str, Fault] = {}  # by this process
        self._lock = threading.RLock()
        self._bound: list[_Bound] = []
        self._selected: dict[str, tuple[Selection, dict[Any, TableEntry]]] = {}  # of each op, with its table
        self._left: dict[tuple[Workload | str, str], Left] = {}
        self._past: dict[UsedFor, int] = {}
        self._inherited: dict[UsedFor, int] = {}  # counted before this process was forked
        self._handover = Handover(self.home)
        self._stamp = _stamp(self.path, self.home)
        self._rows: tuple[snapshot.Row, ...] = ()
        self.digest = ""  # of the snapshot that serves
        self._held_still = False
        self._trouble = ""  # reason if nothing serves on any device
        self._serving: dict[str, Serving] = {}  # by place: the decisions for tensors there
        self._unasked = False  # a lock must be kept, also on GPUs that were not checked at the start
        self._met: set[str] = set()  # the places among them that keep it
        self._told: set[str] = set()  # places already reported as unable to serve
        self._read()
        self._closed = threading.Event()
        self._watch()
        _boards.add(self)

    def refuse_unkept(self) -> None:
        """Raise ForeignDecision unless everything pinned for this host's devices serves here as pinned. Unused GPUs are
        checked when their first tensors arrive: checking them now would start CUDA, and then no forked child could use
        it."""
        self._unasked = unused()
        error = self._unkept((HOST,) if self._unasked else places_here())
        if error is not None and not self._rows and self._trouble and self.path.is_file():
            error = ForeignDecision(f"{self.path} is not a lock file that can serve", why=self._trouble, todo=REFETCH)
        if error is not None:
            self.close()
            raise error

    def _unkept(self, places: Sequence[str]) -> ForeignDecision | None:
        mode, devices = current_mode(), {device_at(place)[0].hw_id: place for place in places}
        here = {hw_id: place for place in devices.values() for hw_id in ids_of(device_at(place)[0])}
        mine = {place: lock.pinned_here(self._rows, hw_id, mode, kind_of(place)) for hw_id, place in here.items()}
        problems = [p for place, rows in mine.items() for p in lock.unkept(rows, self._indexed(place).held)]
        pinned = sum(map(len, mine.values()))
        if self._rows and not pinned and self._unasked and tuple(places) == (HOST,):
            return None  # it may be pinned for a GPU, which is checked at its first tensor
        return lock.refusal(self.path, pinned, problems, mode)

    # --- handing out ------------------------------------------------------------------------------------------------

    def selection(self, op: Op) -> Selection:
        with self._lock:
            if op.name not in self._selected:
                table: dict[Any, TableEntry] = {}
                key = key_function(op)

                def look(inputs: dict[str, Any]) -> TableEntry:
                    return self._entry(op, table, key, inputs)

                def checked(entry: TableEntry, *values: Any) -> Any:
                    return _ask(op, entry[4], entry[2], values, lambda: grant(entry, _gap(entry[4])))

                def failed(entry: TableEntry, error: Exception, *values: Any) -> Any:
                    return _replace(op, entry[4], error, values)

                function = make_selection(op, table, look, checked, failed)
                self._selected[op.name] = function, table
            return self._selected[op.name][0]

    def bind(self, op: Op, like: Sequence[Any] | Mapping[str, Any]) -> Bound:
        """Bind a callable to a workload. Raises BadArguments."""
        inputs = inputs_of(op, like)
        w, place = op.workload_of(inputs), place_of(op, inputs)
        with self._lock:
            resolution = self.resolution(op, w, place)
            held: _Bound

            def checked(*values: Any) -> Any:
                return _ask(op, held.watch, held.resolution, values, lambda: held.cell.grant(_gap(held.watch)))

            def failed(error: Exception, *values: Any) -> Any:
                return _replace(op, held.watch, error, values)

            function, cell = make_bound(op, resolution, checked, failed)
            watch = self._watch_of(op, resolution)
            held = _Bound(
                op=op,
                function=weakref.ref(function),
                cell=cell,
                resolution=resolution,
                place=place,
                elsewhere=function.elsewhere,
                watch=watch,
            )
            put(function, cell, resolution, watch)
            self._forget_dropped()
            self._bound.append(held)
        return function

    def _entry(self, op: Op, table: dict[Any, TableEntry], key: Any, inputs: dict[str, Any]) -> TableEntry:
        """Handle a miss: a microsecond becomes some hundred, once per shape. Raises BadArguments."""
        w = op.workload_of(inputs)
        with self._lock:
            resolution = self.resolution(op, w, place_of(op, inputs))
            watch = self._watch_of(op, resolution)
            left = _gap(watch)
            entry: TableEntry = [resolution.run, left, resolution, left, watch]
            if len(table) >= MOST_SHAPES:
                self._fold(table)
            with suppress(AttributeError, TypeError):  # arguments without a key are looked up at each call
                table[key(inputs)] = entry
            return entry

    def leave(self, op: Op, reason: str, values: Sequence[Any] | None = None) -> Left:
        """Return the counter of calls that an engine runs itself for this reason; `values`: the call's arguments."""
        what: Workload | str = op.name
        place = HOST
        with suppress(AutoselError):
            inputs = inputs_of(op, values or ())
            what, place = op.workload_of(inputs), place_of(op, inputs)
        with self._lock:
            return self._left_to(op, what, reason, place)

    def miss(self, op: Op, w: Workload, place: str = HOST) -> Left:
        """Return the counter of calls of a workload that an engine runs itself, because nothing is decided for it."""
        with self._lock:
            return self._left_to(op, w, self.resolution(op, w, place).reason, place)

    def _left_to(self, op: Op, what: Workload | str, reason: str, place: str) -> Left:
        key = (what, reason) if len(self._left) < MOST_LEFT else (op.name, "other reasons")
        if key not in self._left:
            self._left[key] = Left(what=key[0], reason=key[1], hw_id=device_at(place)[0].hw_id)
        return self._left[key]

    def resolution(self, op: Op, w: Workload, place: str = HOST) -> Resolution:
        """Return the kernel that serves this workload for tensors at a place (`cpu`, `cuda:1`), and the reason."""
        with self._lock:
            serving = self._serving_at(place)
            found = resolve(op, w, serving, lambda part: self._part(op, part), kind=kind_of(place))
        # workloads that a daemon can tune
        ours = kind_of(place) == serving.device.kind and bool(serving.device.identity)
        if ours and found.decision is None and settings.get("mode") == "tune" and not settings.get("disable"):
            self._handover.missed(w, serving.device.hw_id)
        return found

    def whole(self, w: Workload, mode: str) -> Decision | str:
        """Return the decision that serves whole steps of this workload on the CPU, or why a stored one does not; ""
        without one."""
        with self._lock:
            return whole(w, self._serving_at(HOST), mode)

    def ran_whole(self, d: Decision) -> None:
        key = d.op, d.arm.candidate, d.id, d.reason, d.hw_id
        with self._lock:
            self._past[key] = self._past.get(key, 0) + 1

    def _serving_at(self, place: str) -> Serving:
        """Return the decisions for tensors at a place, which is examined when its first tensor arrives."""
        if place not in self._serving:
            if self._unasked and place not in self._met and accelerated(kind_of(place)):
                error = self._unkept((HOST, place))
                if error is not None:
                    raise error
                self._met.add(place)
            self._serving[place] = self._indexed(place)
        return self._serving[place]

    def _indexed(self, place: str) -> Serving:
        device, unknown = device_at(place)
        if unknown and accelerated(device.kind) and place not in self._told:
            self._told.add(place)
            log.warning("%s. No decision can serve there: PyTorch's own kernels do", unknown)
        return index(self._rows, device, self._held(device), trouble=unknown or self._trouble)

    # --- guarding ---------------------------------------------------------------------------------------------------

    def _watch_of(self, op: Op, resolution: Resolution) -> Watch | None:
        """Return the guard of a resolution, shared by all callables of its decision; None if no guard is needed."""
        d, instead = resolution.decision, resolution.instead
        if not self.policy.on or d is None or instead is None:
            return None
        key = (d.id, d.hw_id, d.mode, d.bucket, d.length_range, d.arm.digest)
        if key not in self._watches:
            subject = Subject(
                op=op,
                decision=d,
                candidate=resolution.run,
                baseline=instead,
                at_home=partial(_at_home, op, d.hw_id),
                spot=_spot(resolution) if self.policy.spot_rate else None,
            )
            watch = Watch(subject=subject, policy=self.policy, report=self.report, allowance=self._allowance)
            self._watches[key] = watch
        return self._watches[key]

    def first_checks_ns(self) -> float:
        """Return the time that the guard has added to first calls so far, all of which it checks."""
        return sum(watch.rate.spent_ns for watch in tuple(self._watches.values()))

    def _part(self, op: Op, part: Resolution) -> Callable[..., Any]:
        watch = self._watch_of(op, part)
        if watch is None:
            return part.run

        def checked(regrant: Callable[[int], None], *values: Any) -> Any:
            return _ask(op, watch, part, values, lambda: regrant(_gap(watch)))

        def failed(error: Exception, *values: Any) -> Any:
            return _replace(op, watch, error, values)

        return make_part(op, part.run, watch, checked, failed)

    def report(self, fault: Fault) -> None:
        """Replace this arm by the baseline everywhere in this process, before returning."""
        with self._lock:
            before = self._served()
            self._seen[fault.id] = fault
            self._serving = {p: replace(s, held=self._held(s.device)) for p, s in self._serving.items()}
            self._renew(before)
        log.error("%s for %s no longer serves: %s", fault.arm.candidate, fault.decision.bucket, fault.reason)
        if fault.cause == "unchecked":  # says nothing about the arm
            return
        try:
            faults.write(self.home, fault)
        except OSError as error:
            log.warning("the fault holds for this process only: it cannot be kept in %s: %s", self.home, error)
            self._handover.fault(fault)  # unless a daemon can store it

    def _held(self, device: Fingerprint) -> Held:
        found = []
        for _, fault in faults.pending(self.home):
            if isinstance(fault, BadConfig):
                log.warning("%s", fault)
            else:
                found.append(fault)
        return Held([*found, *self._seen.values()], *ids_of(device))

    def _served(self) -> dict[str, str]:
        """Return the served decisions of every device whose tensors were seen."""
        found: dict[str, str] = {}
        for serving in self._serving.values():
            found |= _served([row for rows in serving.rows.values() for row in rows], serving.held)
        return found

    # --- watching ---------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Check the snapshot. If it changed, all callables serve from the new one when this returns."""
        stamp = _stamp(self.path, self.home)
        with self._lock:
            if stamp == self._stamp:
                return
            self._stamp = stamp
            before = self._served()
            self._read()
            self._renew(before)

    def _renew(self, before: Mapping[str, str]) -> None:
        """Update all callables to the current decisions."""
        for _, table in self._selected.values():
            self._fold(table)
        for held in self._bound:
            self._rebind(held)
        after = self._served()
        if any(after.get(key) != arm for key, arm in before.items()):
            self.epoch += 1

    def _rebind(self, held: _Bound) -> None:
        function = held.function()
        if function is None:
            return
        count = held.calls
        _add(self._past, held.resolution, count)
        held.earlier += count
        held.resolution = self.resolution(held.op, held.resolution.workload, held.place)
        held.watch = self._watch_of(held.op, held.resolution)
        put(function, held.cell, held.resolution, held.watch)

    def _read(self) -> None:
        if not self._held_still:
            self._read_rows()
        places, self._serving = {HOST, *self._serving}, {}
        for place in sorted(places):
            self._serving_at(place)

    def _read_rows(self) -> None:
        self.digest = ""
        try:
            found = snapshot.read(self.path)
        except BadConfig as error:
            log.warning("%s", error)
            self._rows, self._trouble = (), str(error).replace("\n", ": ")
        else:
            self._rows, self.digest = (found.rows, found.digest) if found else ((), "")
            self._trouble = "" if found else f"nothing is decided here yet ({self.path})"

    def hold(self) -> None:
        """Serve the snapshot as it is now until this board is closed; faults still demote."""
        self._held_still = True

    def _watch(self) -> None:
        closed, this = self._closed, weakref.ref(self)
        recorded.note(self.asked_where)

        def look() -> None:
            while not closed.wait(LOOK_EVERY_S):
                board = this()
                if board is None:
                    return
                try:
                    board.refresh()
                    STORE.sweep()
                    board.hand_over()
                    recorded.note(board.asked_where)
                except Exception:  # a watcher that dies would hide every later demotion
                    log.exception("the snapshot could not be looked at")
                del board

        threading.Thread(target=look, name="autosel-snapshot", daemon=True).start()

    def hand_over(self, *, last: bool = False) -> None:
        """Report missed workloads and served calls to a daemon; the watcher's thread calls this after each check."""

        def missed() -> dict[str, int]:
            found: dict[str, int] = {}
            for use in self.uses():
                if use.decision_id is None:
                    found[use.bucket] = found.get(use.bucket, 0) + use.calls
            return found

        def uses() -> dict[UseKey, int]:
            found: dict[UseKey, int] = {}
            for use in self.uses():
                key = (use.op, use.candidate, use.decision_id, conditions.told_in(use.reason))
                found[key] = found.get(key, 0) + use.calls
            return found

        if not settings.get("disable"):
            self._handover.deliver(current_mode, missed, uses, self.coverage, last=last)

    def _after_fork(self) -> None:
        """Replace threads and locks after a fork, which they do not survive."""
        self._lock = threading.RLock()
        self._inherited = {}
        self._inherited = self.counted()
        self._handover = Handover(self.home)
        self._closed = threading.Event()
        for watch in self._watches.values():
            watch.lock = threading.Lock()
        self._watch()

    def close(self) -> None:
        self._closed.set()

    # --- counting ---------------------------------------------------------------------------------------------------

    def _fold(self, table: dict[Any, TableEntry]) -> None:
        """Forget the shapes, keep the counts."""
        entries = list(table.values())
        table.clear()
        for entry in entries:
            _add(self._past, entry[2], calls(entry))

    def _forget_dropped(self) -> None:
        for held in self._bound:
            if held.function() is None:
                _add(self._past, held.resolution, held.calls)
                _add_elsewhere(self._past, held)
        self._bound = [b for b in self._bound if b.function() is not None]

    def uses(self) -> list[Uses]:
        """Return the calls of this process by decision; a miss is a call without a decision."""
        total: dict[tuple[Any, ...], int] = {}
        for (what, *why, _), count in self.counted().items():
            key = (what, "", *why) if isinstance(what, str) else (what.op, what.bucket, *why)
            total[key] = total.get(key, 0) + count
        return [
            Uses(op=o, bucket=b, candidate=c, decision_id=d, reason=r, calls=n) for (o, b, c, d, r), n in total.items()
        ]

    def asked(self) -> dict[Workload, int]:
        """Return the calls of each workload; contexts of one length bucket count as the first one seen."""
        total: dict[Workload, int] = {}
        for calls_there in self.asked_where().values():
            for w, count in calls_there.items():
                total[w] = total.get(w, 0) + count
        return total

    def asked_where(self) -> dict[str, dict[Workload, int]]:
        """Return the same by device (hw_id)."""
        found: dict[str, dict[Workload, int]] = {}
        for (what, *_, hw_id), count in self.counted().items():
            if not isinstance(what, str):
                there = found.setdefault(hw_id, {})
                there[what] = there.get(what, 0) + count
        return found

    def decided(self, op: str) -> frozenset[str]:
        """Return the buckets of an op for which another arm than the baseline is decided on this CPU, for any number of
        threads."""
        return served.beyond_baseline(self._rows, ids_of(this_device()), op)

    def coverage(self) -> served.Coverage:
        """Return the share of time in ops that decisions serve in this process, and why the rest misses."""
        return served.measure(self.counted(), self._rows, engine=served.engine(), mode=current_mode())

    def counted(self) -> dict[UsedFor, int]:
        with self._lock:
            total = dict(self._past)
            now = [(e[2], calls(e)) for _, table in self._selected.values() for e in list(table.values())]
            now += [(b.resolution, b.calls) for b in self._bound]
            for held in self._bound:
                _add_elsewhere(total, held)
            for x in self._left.values():
                key = x.what, ELSEWHERE, None, x.reason, x.hw_id
                total[key] = total.get(key, 0) + x.elsewhere[0]
        for resolution, count in now:
            _add(total, resolution, count)
        for used, count in self._inherited.items():
            total[used] = total.get(used, 0) - count
        return total


def _add(total: dict[UsedFor, int], resolution: Resolution, calls: int) -> None:
    """Add calls; each part of a bucket split at a crossover counts separately."""
    for ran, count in resolution.ran(calls):
        key = ran.workload, ran.candidate, ran.decision.id if ran.decision else None, ran.reason, ran.hw_id
        total[key] = total.get(key, 0) + count


def _add_elsewhere(total: dict[UsedFor, int], held: _Bound) -> None:
    """Add calls that an engine left to its own kernel, where only the baseline would serve."""
    if held.elsewhere[0]:
        r = held.resolution
        key = r.workload, ELSEWHERE, None, f"kept: {r.reason}" if r.served else r.reason, r.hw_id
        total[key] = total.get(key, 0) + held.elsewhere[0]


def _ask(
    op: Op, watch: Watch | None, resolution: Resolution, values: Sequence[Any], regrant: Callable[[], None]
) -> Any:
    """Handle a call at which a countdown ended: let the guard check it, or start a new countdown without a guard."""
    try:
        if watch is None:
            return resolution.run(*values)
        return watch(values[: len(op.args)], values[len(op.args) :])
    finally:
        regrant()


def _replace(op: Op, watch: Watch | None, error: Exception, values: Sequence[Any]) -> Any:
    if watch is None:
        raise error
    return watch.raised(error, values[: len(op.args)], values[len(op.args) :])


def _at_home(op: Op, hw_id: str, args: Sequence[Any]) -> bool:
    place = place_of(op, {a.name: value for a, value in zip(op.args, args, strict=True)})
    return hw_id in ids_of(device_at(place)[0])


def _spot(resolution: Resolution) -> spot.Spot | None:
    """Return the native spot check of the kernel that runs on this CPU, if it is compiled."""
    here = this_device()
    if resolution.hw_id != here.hw_id:
        return None
    return spot.find(resolution.workload, best_isa(tuple(here.identity["isa"])))


def _gap(watch: Watch | None) -> int:
    return watch.gap() if watch else NEVER


def _served(rows: Sequence[snapshot.Row], held: Held) -> dict[str, str]:
    """Return key -> digest of the arms other than the baseline that serve."""
    found = {}
    for row in rows:
        arm, baseline = (served.digest_in(row.document.get(which)) for which in ("arm", "baseline"))
        other = row.document.get("state") in SERVING and arm != baseline
        if other and not (held.faults and _is_held(row, held)):
            found[row.key] = arm
    return found


def _is_held(row: snapshot.Row, held: Held) -> bool:
    try:
        return bool(held.why(row.decision))
    except BadConfig:
        return True


def _stamp(path: Path, home: Path) -> Stamp:
    """Return a value that changes with the snapshot or the journal of faults."""
    try:
        info = path.stat()
    except OSError:
        return (0, 0, 0, faults.stamp(home))
    return (info.st_ino, info.st_mtime_ns, info.st_size, faults.stamp(home))


_boards: weakref.WeakSet[Board] = weakref.WeakSet()


def _restart_watchers() -> None:
    for board in list(_boards):
        if not board._closed.is_set():
            board._after_fork()


def _tell_the_rest() -> None:
    """Report the calls since the last report, at the end of the process."""
    for board in list(_boards):
        if not board._closed.is_set():
            board.close()
            with suppress(Exception):
                board.hand_over(last=True)


os.register_at_fork(after_in_child=_restart_watchers)
atexit.register(_tell_the_rest)
