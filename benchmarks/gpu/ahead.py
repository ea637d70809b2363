"""Work of a stage that measures no times, begun before it is asked for: several pieces side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

MOST = 4  # at once: each has a context on the device, its operands there, and references on the host
WINDOW = 2  # pieces a thread that are begun and not yet asked for: what a kill costs

Piece = TypeVar("Piece")
Result = TypeVar("Result")


class Ahead(Generic[Piece, Result]):
    """Does the pieces in their order, up to some way beyond the last that was asked for. Not ended: the process that
    has it is."""

    def __init__(self, pieces: Sequence[Piece], do: Callable[[Piece], Result], *, threads: int) -> None:
        self.pieces, self.do, self.threads = pieces, do, threads
        self.executor = ThreadPoolExecutor(max_workers=threads)
        self.begun: list[Future[Result]] = []
        self._begin_to(0)

    def of(self, number: int) -> Result:
        """The result of the piece of this number. Raises what it raised."""
        self._begin_to(number)
        return self.begun[number].result()

    def _begin_to(self, number: int) -> None:
        for piece in self.pieces[len(self.begun) : number + 1 + WINDOW * self.threads]:
            self.begun.append(self.executor.submit(self.do, piece))


def side_by_side() -> int:
    """How many pieces: they share cores with what they start and with compilers."""
    from autosel.tuning.builds import at_once

    return max(2, min(MOST, at_once() // 4))
