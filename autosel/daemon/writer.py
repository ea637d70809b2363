"""The one thread that writes to the ledger. Writes that wait are committed together, then published, then acknowledged.

A commit is one fsync, however many it holds: with many clients that wait their turn, the group grows and the wait does
not.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from autosel.errors import AutoselError, LedgerError
from autosel.ledger.store import Ledger

log = logging.getLogger(__name__)

MOST_TOGETHER = 256
MOST_WAITING = 4096
REOPEN_S = 5.0  # after the disk failed us, before it is tried again

Work = Callable[[Ledger], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """`alone`: not in a group, because it also does what no transaction can take back."""

    work: Work
    future: Any  # a concurrent one, or the event loop's: who waits for it, waits there
    alone: bool


class Busy(AutoselError):
    """So many writes wait already that one more would only wait longer."""


class Writer:
    """`open_again` opens the ledger anew once its disk has failed: a second fsync through the same file may lie.
    `committed` hears of each group: how many writes, and whether what serves was published."""

    def __init__(
        self, ledger: Ledger, open_again: Callable[[], Ledger], committed: Callable[[int, bool], None]
    ) -> None:
        self.ledger, self._open_again, self._committed = ledger, open_again, committed
        self._waiting: queue.Queue[_Item | None] = queue.Queue(MOST_WAITING)
        self._failed_at = 0.0
        self._over = False
        self._thread = threading.Thread(target=self._run, name="autosel-writer", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return self._waiting.qsize()

    @property
    def read_only(self) -> bool:
        return self.ledger.failed or not self.ledger.writable

    def submit(self, work: Work, *, alone: bool = False) -> Future[Any]:
        """Resolves when the work is on disk and published. Raises Busy."""
        future: Future[Any] = Future()
        self._put(work, future, alone)
        return future

    def submit_here(self, work: Work, *, alone: bool = False) -> asyncio.Future[Any]:
        """The same in an event loop, which is woken once for a group, however many wait in it."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._put(work, future, alone)
        return future

    def _put(self, work: Work, future: Any, alone: bool) -> None:
        try:
            self._waiting.put_nowait(_Item(work=work, future=future, alone=alone))
        except queue.Full:
            raise Busy("the daemon is busy", why=f"{MOST_WAITING} writes wait", todo="try again in a second") from None

    def close(self) -> None:
        """What was submitted is written; then the thread ends."""
        self._over = True
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        group: list[_Item] = []
        while True:
            item = self._waiting.get() if not group else self._next()
            if item is not None and not item.alone and len(group) < MOST_TOGETHER:
                group.append(item)
                continue
            if group:
                self._write(group, self._together)
                group = []
            if item is None and self._over:
                return
            if item is not None:
                if item.alone:
                    self._write([item], self._single)
                else:
                    group = [item]

    def _next(self) -> _Item | None:
        try:
            return self._waiting.get_nowait()
        except queue.Empty:
            return None

    def _together(self, ledger: Ledger, group: Sequence[_Item]) -> list[Any]:
        return ledger.together([partial(item.work, ledger) for item in group])

    def _single(self, ledger: Ledger, group: Sequence[_Item]) -> list[Any]:
        return [item.work(ledger) for item in group]

    def _write(self, group: Sequence[_Item], how: Callable[[Ledger, Sequence[_Item]], list[Any]]) -> None:
        try:
            ledger = self._healthy()
            before = ledger.publications
            found = how(ledger, group)
        except BaseException as error:  # whatever it was, nobody may wait for ever
            if self.ledger.failed and not self._failed_at:
                self._failed_at = time.monotonic()
            log.error("%d writes failed: %s", len(group), error)
            _resolve([(item.future, error) for item in group])
            return
        _resolve([(item.future, value) for item, value in zip(group, found, strict=True)])
        self._committed(len(group), ledger.publications != before)

    def _healthy(self) -> Ledger:
        """The ledger, opened anew if its disk failed a while ago. Raises LedgerError."""
        if self.ledger.failed and time.monotonic() - self._failed_at > REOPEN_S:
            self._failed_at = time.monotonic()
            fresh = self._open_again()
            if not fresh.writable:
                raise LedgerError(f"the ledger {fresh.name} is read-only", todo="free some space on its disk")
            self.ledger.close()
            self.ledger, self._failed_at = fresh, 0.0
            log.warning("the ledger can be written again")
        return self.ledger


Outcome = tuple[Any, Any]  # a future, and what becomes of it


def _resolve(outcomes: Sequence[Outcome]) -> None:
    """Tell everyone; an event loop is woken once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Outcome]] = {}
    for future, value in outcomes:
        if isinstance(future, asyncio.Future):
            by_loop.setdefault(future.get_loop(), []).append((future, value))
        else:
            _settle(future, value)
    for loop, own in by_loop.items():
        with suppress(RuntimeError):  # it has ended, and with it all who waited
            loop.call_soon_threadsafe(_settle_all, own)


def _settle_all(outcomes: Sequence[Outcome]) -> None:
    for future, value in outcomes:
        if not future.done():  # its caller went away
            _settle(future, value)


def _settle(future: Any, value: Any) -> None:
    if isinstance(value, BaseException):
        future.set_exception(value)
    else:
        future.set_result(value)
