"""Write to the ledger in a single thread. Waiting writes are committed together, then published, then acknowledged.

A commit is one fsync, regardless of its number of writes: with many clients, the group grows and the wait does not.

The event loop and the writing thread share one interpreter. While both have work, they switch at every statement, and
each switch waits for a core. So the loop gathers a group and hands it over at once: when as many writers wait as were
active recently, or when none has arrived for `LINGER_S`. A lone write does not wait.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from autosel.errors import AutoselError, LedgerError
from autosel.ledger.store import Ledger

log = logging.getLogger(__name__)

MOST_TOGETHER = 256
MOST_WAITING = 4096
LINGER_S, MOST_LINGER_S = 0.001, 0.010
REOPEN_S = 5.0  # pause after a disk failure, before the next attempt
WRITES_A_LOG = 4000  # commits before SQLite's log is moved into the file: some 30 MiB
IDLE_S = 0.5  # time without a write after which the log is moved, at any size

Work = Callable[[Ledger], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """A queued write. `alone`: not in a group, because it also does something that a transaction cannot undo."""

    work: Work
    future: asyncio.Future[Any]  # in which its caller waits
    alone: bool


class Busy(AutoselError):
    """Raised if so many writes wait already that one more would only wait longer."""


class Writer:
    """Write groups. `open_again` opens the ledger again after its disk failed, because a second fsync through the same
    file may lie. `committed` is called for each group: how many writes, and whether the snapshot was published."""

    def __init__(
        self, ledger: Ledger, open_again: Callable[[], Ledger], committed: Callable[[int, bool], None]
    ) -> None:
        self.ledger, self._open_again, self._committed = ledger, open_again, committed
        self._queue: queue.SimpleQueue[Sequence[_Item] | None] = queue.SimpleQueue()
        self._waiting, self._counting = 0, threading.Lock()
        self._gathering = _Gathering(self._queue.put)
        self._failed_at = 0.0
        self._logged = 0  # writes since the log was moved
        self._thread = threading.Thread(target=self._run, name="autosel-writer", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return self._waiting

    @property
    def read_only(self) -> bool:
        return self.ledger.failed or not self.ledger.writable

    def submit(self, work: Work, *, alone: bool = False) -> asyncio.Future[Any]:
        """Submit a write from an event loop, always the same one. Writes that arrive together form one group. The
        result arrives when it is on disk and published. Raises Busy."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._count(1)
        self._gathering.add(_Item(work=work, future=future, alone=alone), loop)
        return future

    def _count(self, more: int) -> None:
        with self._counting:
            if more > 0 and self._waiting >= MOST_WAITING:
                raise Busy("the daemon is busy", why=f"{MOST_WAITING} writes wait", todo="try again in a second")
            self._waiting += more

    def close(self) -> None:
        """Write everything submitted, then end the thread."""
        self._gathering.hand_over()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        over = False
        while not over:
            items, over = self._next()
            self._count(-len(items))
            for alone, some in groupby(items, lambda item: item.alone):
                group, most = list(some), 1 if alone else MOST_TOGETHER
                for at in range(0, len(group), most):
                    self._write(group[at : at + most], alone=alone)
            if self._logged >= WRITES_A_LOG or (not items and self._logged):
                self.ledger.move_log()  # after they are acknowledged, because it takes as long as some commits
                self._logged = 0

    def _next(self) -> tuple[list[_Item], bool]:
        """Return the waiting writes, and whether no more will come; an empty group if none came for a while."""
        found: list[_Item] = []
        wait_s = IDLE_S if self._logged else None
        while True:
            try:
                more = self._queue.get(timeout=wait_s) if not found else self._queue.get_nowait()
            except queue.Empty:
                return found, False
            if more is None:
                return found, True
            found += more

    def _write(self, group: Sequence[_Item], *, alone: bool) -> None:
        try:
            ledger = self._healthy()
            before = ledger.publications
            calls = [partial(item.work, ledger) for item in group]
            found = [call() for call in calls] if alone else ledger.together(calls)
        except BaseException as error:  # for any error, because no caller may wait for ever
            if self.ledger.failed and not self._failed_at:
                self._failed_at = time.monotonic()
            log.error("%d writes failed: %s", len(group), error)
            self._resolve([(item.future, error) for item in group])
            return
        self._logged += len(group)
        self._committed(len(group), ledger.publications != before)
        self._resolve([(item.future, value) for item, value in zip(group, found, strict=True)])

    def _healthy(self) -> Ledger:
        """Return the ledger, opened again if its disk failed a while ago. Raises LedgerError."""
        if self.ledger.failed and time.monotonic() - self._failed_at > REOPEN_S:
            self._failed_at = time.monotonic()
            fresh = self._open_again()
            if not fresh.writable:
                raise LedgerError(f"the ledger {fresh.name} is read-only", todo="free some space on its disk")
            self.ledger.close()
            self.ledger, self._failed_at = fresh, 0.0
            log.warning("the ledger can be written again")
        return self.ledger

    def _resolve(self, outcomes: Sequence[Outcome]) -> None:
        """Notify all callers, waking the event loop once."""
        with suppress(RuntimeError):  # the loop has ended, and its callers with it
            outcomes[0][0].get_loop().call_soon_threadsafe(self._gathering.settle, outcomes)


Outcome = tuple[asyncio.Future[Any], Any]  # (future, its result)


class _Gathering:
    """Gather the writes of the event loop, to hand them over as one group. All of it runs in the loop's thread."""

    def __init__(self, put: Callable[[Sequence[_Item]], None]) -> None:
        self._put = put
        self._items: list[_Item] = []
        self._under_way = 0  # handed over, not settled
        self._handed = 0  # at the last time
        self._expected = 1  # as many as were active recently
        self._timer: asyncio.TimerHandle | None = None

    def add(self, item: _Item, loop: asyncio.AbstractEventLoop) -> None:
        self._items.append(item)
        if self._under_way:
            return
        if len(self._items) >= self._expected:
            self.hand_over()
        elif self._timer is None:
            self._linger(loop, loop.time() + MOST_LINGER_S)

    def hand_over(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._items:
            items, self._items = self._items, []
            self._handed = len(items)
            self._under_way += self._handed
            self._put(items)

    def _linger(self, loop: asyncio.AbstractEventLoop, until_s: float) -> None:
        self._timer = loop.call_later(LINGER_S, self._look, loop, len(self._items), until_s)

    def _look(self, loop: asyncio.AbstractEventLoop, seen: int, until_s: float) -> None:
        self._timer = None
        if len(self._items) > seen and loop.time() < until_s:
            self._linger(loop, until_s)
        else:
            self.hand_over()

    def settle(self, outcomes: Sequence[Outcome]) -> None:
        for future, value in outcomes:
            if future.done():  # its caller went away
                continue
            if isinstance(value, BaseException):
                future.set_exception(value)
            else:
                future.set_result(value)
        self._under_way -= len(outcomes)
        if not self._under_way:
            self._expected = self._handed + len(self._items)
            if self._items:
                loop = outcomes[0][0].get_loop()
                self._linger(loop, loop.time() + MOST_LINGER_S)
