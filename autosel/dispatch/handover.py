"""Report to the daemon of this home: workloads without a decision, faults that this process could not store, and calls
by candidate.

The thread that watches the snapshot sends the reports; the calls themselves only leave a note.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autosel.client import Client, Refused, Unreachable, socket_path
from autosel.dispatch.served import Coverage, document
from autosel.errors import AutoselError
from autosel.ledger.faults import Fault, plain
from autosel.values import Workload, to_json

log = logging.getLogger(__name__)

MOST_NOTED = 1024
MOST_FAULTS = 256  # faults waiting; a failed arm is already disabled here, so further failures add nothing
TOGETHER = 32  # misses in one message
AGAIN_S = 5.0  # after a daemon did not answer
USES_EVERY_S = 2.0
LAST_S = 1.0  # time that the end of a process waits for a running delivery
MOST_USES = 512  # rows in one report
MOST_PARTS = 96  # rows of coverage in one report

# (op, candidate, decision); without a decision, the conditions of another one
UseKey = tuple[str, str, int | None, str]


Missed = tuple[str, str]  # a device (hw_id), and a bucket without a decision there

_measurements: list[None] = []  # one entry for each measurement under way in this process


@contextmanager
def measuring() -> Iterator[None]:
    """Report no misses of this process inside: runs and benchmarks measure what is decided, and serve nobody."""
    _measurements.append(None)
    try:
        yield
    finally:
        _measurements.pop()


class Handover:
    def __init__(self, home: Path) -> None:
        self._client = Client(socket_path(home), timeout_s=2.0)
        self._missed: dict[Missed, Workload] = {}
        self._told: set[Missed] = set()
        self._faults: dict[str, Fault] = {}  # by id, oldest first
        self._one = threading.Lock()
        self._daemon = (0, 0)
        self._not_before = 0.0
        self._client_name = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._serial = 0
        self._told_uses: dict[UseKey, int] = {}
        self._unsure: list[tuple[UseKey, int]] = []  # a report without an answer, which is repeated unchanged
        self._next_uses = 0.0
        self._turn = threading.Lock()  # one delivery at a time: the watcher's, or the last

    def missed(self, w: Workload, hw_id: str) -> None:
        """Note a workload without a decision for this device, unless a measurement calls it."""
        if _measurements:
            return
        with self._one:
            if len(self._missed) < MOST_NOTED:
                self._missed.setdefault((hw_id, w.bucket), w)

    def fault(self, fault: Fault) -> None:
        """Note a fault that could not be written to the journal. Duplicates and faults beyond the limit are dropped."""
        with self._one:
            if len(self._faults) < MOST_FAULTS:
                self._faults.setdefault(fault.id, fault)

    def deliver(
        self,
        mode: Callable[[], str],
        calls: Callable[[], Mapping[str, int]],
        uses: Callable[[], Mapping[UseKey, int]],
        coverage: Callable[[], Coverage],
        *,
        last: bool = False,
    ) -> None:
        """Send the daemon everything new; do nothing without a daemon.

        `mode`: the mode to measure in. `calls`: numbers of calls by bucket; `uses`, `coverage`: of all calls of this
        process so far. `last`: the process ends.
        """
        try:
            info = self._client.path.stat()
        except OSError:
            return
        if not self._turn.acquire(timeout=LAST_S if last else -1):
            return
        try:
            daemon, now = (info.st_ino, info.st_mtime_ns), time.monotonic()
            if daemon != self._daemon:  # another daemon: reports to the last one may be lost
                self._daemon = daemon
                self._told.clear()
                self._not_before = 0.0
            if now < self._not_before:
                return
            if self._missed or self._faults:
                self._tell_faults()
                self._tell_misses(mode, calls)
            if last or now >= self._next_uses:
                self._next_uses = now + USES_EVERY_S
                self._tell_uses(uses(), coverage)
        except Unreachable as error:
            log.info("the report to the daemon is postponed: %s", error.why)
            self._not_before = time.monotonic() + AGAIN_S
        finally:
            self._client.close()
            self._turn.release()

    def _post(self, target: str, body: Any, what: str, *, repeats: bool, level: int = logging.INFO) -> dict[str, Any]:
        """Return the daemon's answer; log a refusal. `repeats`: a busy daemon gets the report again later.

        Raises Unreachable.
        """
        try:
            found: dict[str, Any] = self._client.post(target, body)
            return found
        except Unreachable:
            raise
        except AutoselError as error:
            if repeats and isinstance(error, Refused) and error.status == 503:
                raise Unreachable("the daemon is busy", why=error.why) from error
            log.log(level, "the daemon does not take %s: %s", what, error)
            return {}

    def _tell_uses(self, uses: Mapping[UseKey, int], coverage: Callable[[], Coverage]) -> None:
        """Report the calls since the last report, and the coverage of all of them."""
        if self._unsure:
            self._report(self._unsure)
        fresh = [(key, n - self._told_uses.get(key, 0)) for key, n in uses.items()]
        fresh = [(key, n) for key, n in fresh if n > 0]
        for start in range(0, len(fresh), MOST_USES):
            self._serial += 1
            self._report(fresh[start : start + MOST_USES])
        if fresh:
            self._tell_coverage(coverage())

    def _tell_coverage(self, found: Coverage) -> None:
        body = {"client": self._client_name, "process": os.getpid(), **document(found, most=MOST_PARTS)}
        # refused by an earlier version, or by a busy daemon: the next report holds these calls too
        self._post("/v1/coverage", body, "the coverage", repeats=False)

    def _report(self, rows: list[tuple[UseKey, int]]) -> None:
        self._unsure = rows
        told = [
            {"op": o, "candidate": c, "decision_id": d, "calls": n} | ({"conditions": other} if other else {})
            for (o, c, d, other), n in rows
        ]
        body = {"client": self._client_name, "serial": self._serial, "uses": told}
        self._post("/v1/uses", body, "what served", repeats=True)
        for key, n in rows:
            self._told_uses[key] = self._told_uses.get(key, 0) + n
        self._unsure = []

    def _tell_faults(self) -> None:
        while self._faults:
            with self._one:
                number, fault = next(iter(self._faults.items()))
            self._post("/v1/faults", plain(to_json(fault)), "a fault", repeats=False, level=logging.WARNING)
            with self._one:
                del self._faults[number]

    def _tell_misses(self, mode: Callable[[], str], calls: Callable[[], Mapping[str, int]]) -> None:
        with self._one:
            fresh = [(missed, w) for missed, w in self._missed.items() if missed not in self._told]
        if not fresh:
            return
        often, how = calls(), mode()
        for hw_id in sorted({hw_id for (hw_id, _), _ in fresh}):
            own = [(missed, w) for missed, w in fresh if missed[0] == hw_id]
            for start in range(0, len(own), TOGETHER):
                self._tell_some(hw_id, how, own[start : start + TOGETHER], often)

    def _tell_some(
        self, hw_id: str, mode: str, part: Sequence[tuple[Missed, Workload]], often: Mapping[str, int]
    ) -> None:
        misses = [{"workload": to_json(w), "calls": often.get(bucket, 0)} for (_, bucket), w in part]
        body = {"hw_id": hw_id, "mode": mode, "misses": misses}
        found = self._post("/v1/misses", body, "our misses", repeats=True, level=logging.WARNING)
        if found.get("refused"):
            log.info("the daemon does not tune what we miss: %s", found["refused"])
        self._told.update(missed for missed, _ in part)
