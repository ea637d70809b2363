"""Write a ledger in this process.

Each command is one transaction, on disk and published when `write` returns: its result is acknowledged and survives
`kill -9` and power loss. If `write` was killed before it returned, the change may or may not be stored; the same
command with the same idempotency key yields the one decision.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from autosel.errors import LedgerError
from autosel.ledger import containment, server, snapshot
from autosel.ledger import schema as t
from autosel.ledger.containment import Strike
from autosel.ledger.engine import BUSY_S, Database, lost
from autosel.ledger.locks import device_lock, publish_lock, whoami
from autosel.ledger.measuring import CloseTrial, OpenTrial, TakeOver
from autosel.ledger.reader import LedgerReader
from autosel.ledger.transaction import Command, R, Transaction
from autosel.values import Arm


class Ledger(LedgerReader):
    """Read and write the ledger of a home. Made by `open_ledger`. Threads may share it."""

    def __init__(self, database: Database, home: Path) -> None:
        super().__init__(database, home)
        self._group = threading.local()  # .publish: whether this thread must publish after `together`
        self._leases: dict[str, int] = {}  # of the devices that this process holds
        self._trials: set[int] = set()  # open ones
        self.publications = 0  # number of publications

    def write(self, command: Command[R], *, leases: Mapping[str, int] | None = None) -> R:
        """Run a command in one transaction, publish, and only then return its result.

        `leases` are those of another process that sent the command. Raises what the command raises, with nothing
        changed; LedgerError.
        """
        leases = self._leases if leases is None else leases
        with self._database.writing() as c:
            transaction = Transaction(c=c, home=self.home, shared=self.shared, known_host=self._host_id, leases=leases)
            made = command.run(transaction)
        if command.publishes:
            self.publish()
        return made

    def together(self, calls: Iterable[Callable[[], Any]]) -> list[Any]:
        """Make several calls in one transaction, then publish once; all are acknowledged when this returns. Return each
        call's result, or the exception with which it changed nothing.

        A call may be made twice: if one raises, all are rolled back and repeated, each with a savepoint, which is
        rarely needed and would cost every group. Raises LedgerError if the transaction as a whole failed, and then
        nothing is changed.
        """
        group = list(calls)
        try:
            found, changed = self._grouped(group, apart=False)
        except Exception as error:
            if lost(error):
                raise
            found, changed = self._grouped(group, apart=True)
        if changed:  # already committed: if this fails, nothing must be repeated
            self.publish()
        return found

    def _grouped(self, calls: Sequence[Callable[[], Any]], *, apart: bool) -> tuple[list[Any], bool]:
        """Return the results of the calls, and whether the snapshot must be published."""
        self._group.publish = False
        try:
            with self._database.together():
                found = [self._apart(call) if apart else call() for call in calls]
            return found, bool(self._group.publish)
        finally:
            del self._group.publish

    def _apart(self, call: Callable[[], Any]) -> Any:
        """Return a call's result, or the exception that it raised, with its writes undone."""
        try:
            with self._database.part():
                return call()
        except Exception as error:
            if lost(error):
                raise
            return error

    def publish(self, *, patience_s: float = BUSY_S) -> None:
        """Replace the snapshot by the current decisions. Raises LedgerError if they are stored but not yet visible to
        `best()`."""
        if hasattr(self._group, "publish"):
            self._group.publish = True
            return
        path = self.home / snapshot.FILE
        self.publications += 1
        with publish_lock(self.home, patience_s):  # read under the lock, so that the last publication is the latest
            snapshot.sweep(path)
            snapshot.publish(path, self.export())

    def keep_line(self) -> None:
        """Keep the connection to the database open between writes. For one thread that writes often, in a process that
        does not fork, and that calls `move_log` now and then."""
        self._database.keep_line()

    def move_log(self) -> None:
        self._database.move_log()

    # --- measuring --------------------------------------------------------------------------------------------------

    @contextmanager
    def lock(self, hw_id: str, unit: str = "") -> Iterator[list[Strike]]:
        """Lock the device for measuring; LedgerError at once, naming the holder, if it is taken. `unit` selects one of
        several equal devices of this machine.

        Yield the arms whose trial was interrupted by a predecessor's death; those with too many strikes are quarantined
        already. If the lock is lost, and another process takes the device, later measurements can no longer be stored.
        """
        with device_lock(self.home, hw_id, unit), self._device_of_all(hw_id, unit):
            if not self.writable:
                yield []
                return
            lease, strikes = self.write(TakeOver(hw_id=hw_id, holder=whoami(), unit=unit))
            self._leases[hw_id] = lease
            try:
                yield [*strikes]
            finally:
                with suppress(LedgerError):
                    self._stop_trials()
                self._leases.pop(hw_id, None)

    def _device_of_all(self, hw_id: str, unit: str) -> AbstractContextManager[None]:
        """Lock the device at the server, because other homes and containers of this machine share it."""
        if not self.shared:
            return nullcontext()
        name = " ".join(["autosel device", hw_id, containment.machine(), *([unit] if unit else [])])
        return server.session_lock(self._database.engine, name, "this device")

    @contextmanager
    def trial(self, hw_id: str, op: str, arm: Arm) -> Iterator[int]:
        """Journal that an arm is about to run; closed on leaving, also by an exception or Ctrl-C."""
        trial_id = self.write(OpenTrial(hw_id=hw_id, op=op, arm=arm))
        self._trials.add(trial_id)
        outcome = containment.FINISHED
        try:
            yield trial_id
        except BaseException as error:
            outcome = type(error).__name__
            raise
        finally:
            self._close_trial(trial_id, outcome)

    def _close_trial(self, trial_id: int, outcome: str) -> None:
        with suppress(KeyError):
            self._trials.remove(trial_id)  # KeyError: another thread has closed it
            try:
                self.write(CloseTrial(trial_id=trial_id, outcome=outcome))
            except LedgerError:
                self._trials.add(trial_id)
                raise

    def _stop_trials(self) -> None:
        """Close open trials of threads that Ctrl-C did not wait for: they do not count as strikes."""
        for trial_id in sorted(self._trials):
            self._close_trial(trial_id, "stopped")

    # --- administration ---------------------------------------------------------------------------------------------

    def grant(self, role: str, login: str, *, only_say: bool = False) -> list[str]:
        """Let a role of the server read, record or administer; return the statements. Raises LedgerError."""
        if not self.shared:
            raise LedgerError(
                "a ledger in a file has no roles",
                why=f"who may read or write {self.name} depends on its permissions",
                todo="AUTOSEL_DB=postgresql+psycopg://user@host/database shares one",
            )
        with self._database.reading() as c:
            database, schema = c.exec_driver_sql("SELECT current_database(), current_schema()").one()
        made = server.grants(role, login, database, schema, t.HISTORY)
        if not only_say:
            with self._database.writing() as c:
                for line in made:
                    c.exec_driver_sql(line)
        return made
