"""Run the work of a stage that measures no times ahead of its use, several pieces in parallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

MOST = 4  # threads; each needs a context on the device, device memory for operands, and references on the host
WINDOW = 2  # pieces a thread that are started before they are needed: the work lost when the process is killed

Piece = TypeVar("Piece")
Result = TypeVar("Result")


class Ahead(Generic[Piece, Result]):
    """Run pieces in order in a thread pool, up to a fixed window beyond the last piece that was requested.

    The pool is never shut down: it ends with its process.
    """

    def __init__(self, pieces: Sequence[Piece], do: Callable[[Piece], Result], *, threads: int) -> None:
        self.pieces, self.do, self.threads = pieces, do, threads
        self.executor = ThreadPoolExecutor(max_workers=threads)
        self.begun: list[Future[Result]] = []
        self._begin_to(0)

    def of(self, number: int) -> Result:
        """Return the result of piece `number`, or raise the exception that the piece raised."""
        self._begin_to(number)
        return self.begun[number].result()

    def _begin_to(self, number: int) -> None:
        for piece in self.pieces[len(self.begun) : number + 1 + WINDOW * self.threads]:
            self.begun.append(self.executor.submit(self.do, piece))


def side_by_side() -> int:
    """Return the number of threads; the pieces share cores with their subprocesses and with compilers."""
    from autosel.tuning.builds import at_once

    return max(2, min(MOST, at_once() // 4))
