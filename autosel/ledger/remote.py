"""Use the ledger from a process that does not own it: read directly, and let the daemon write.

If the daemon ends, it continues alone, under the kernel's lock: acknowledged writes are on disk in both cases, and a
lease on a device holds for whichever process writes it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from autosel.client import Client, Refused, Unreachable
from autosel.errors import LedgerError
from autosel.ledger import commands
from autosel.ledger.engine import Database
from autosel.ledger.local import Ledger
from autosel.ledger.schema import HEAD
from autosel.ledger.transaction import Command, R

log = logging.getLogger(__name__)
ANSWER_S = 1.0  # a check for a daemon waits no longer
WRITE_S = 60.0  # a commit takes milliseconds; behind many others, and on a slow disk, more


def reach(database: Database, home: Path) -> RemoteLedger | None:
    """Return the ledger through the daemon that owns it, if one answers and uses the same database."""
    ask = Client(home / "run" / "daemon.sock", timeout_s=ANSWER_S)
    if not ask.there:
        return None
    try:
        about = ask.get(commands.ADDRESS)
        same = about["ledger"] == database.name and about["schema"] == HEAD and about["writable"] is True
    except (Unreachable, Refused, KeyError, TypeError) as error:
        log.info("writing without the daemon: %s", error)
        return None
    finally:
        ask.close()
    return RemoteLedger(database, home) if same else None


class RemoteLedger(Ledger):
    """A ledger whose writes go through the daemon. Made by `open_ledger`."""

    def write(self, command: Command[R], *, leases: Mapping[str, int] | None = None) -> R:
        """Return the daemon's result or, if it no longer answers, the result of the command here.

        A command that may have been carried out is repeated, unless it is not repeatable.
        """
        leases = self._leases if leases is None else leases
        line = Client(self.home / "run" / "daemon.sock", timeout_s=WRITE_S)
        try:
            return commands.result_of(command, line.post(commands.ADDRESS, commands.encode(command, leases)))
        except Unreachable as error:
            log.warning("the daemon no longer answers: continuing without it (%s)", error.why)
            if error.sent and not command.repeatable:
                return commands.result_of(command, None)
            return Ledger(self._database, self.home).write(command, leases=leases)
        except Refused as error:
            raise LedgerError(error.what, why=error.why, todo=error.todo) from error
        finally:
            line.close()

    def publish(self, *, patience_s: float = 0.0) -> None:
        """Do nothing: the daemon has published before it acknowledged."""
