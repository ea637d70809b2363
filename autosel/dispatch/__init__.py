"""`best(op)`: the proven kernel for these tensors on this device, or the baseline and the reason why.

    attn = autosel.best("attn")                   # picks by shape at each call: a tuple key, a dict lookup, the call
    step = autosel.best("attn", like=(q, k, v))   # picks once; a demotion still reaches it

Reads the serving snapshot and nothing else: no database, no compiler, no search. Works in a read-only container.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from autosel import ops, settings
from autosel.dispatch.board import Board, Uses
from autosel.dispatch.bound import Bound
from autosel.dispatch.handover import measuring
from autosel.dispatch.selection import Selection
from autosel.dispatch.served import Coverage
from autosel.errors import UsageError
from autosel.guard import Policy

if TYPE_CHECKING:
    from autosel.dispatch.agreement import Agreement

__all__ = [
    "Board", "Bound", "Coverage", "Selection", "Use", "Uses", "agree", "best", "board", "coverage", "epoch",
    "measuring", "refresh", "use", "uses",
]  # fmt: skip


@overload
def best(op: str) -> Selection: ...


@overload
def best(op: str, like: Sequence[Any] | Mapping[str, Any]) -> Bound: ...


def best(op: str, like: Sequence[Any] | Mapping[str, Any] | None = None) -> Selection | Bound:
    """Return the op as a function that takes its arguments by name or position, then `out` (default: allocate).

    `like` gives the shapes of later calls, as arguments or as a mapping by name. Every served kernel is correct for all
    shapes that its op accepts; for another bucket than `like`'s it may only be slower. For inference: no autograd.
    Raises UnknownName for an unknown op, BadArguments if `like` matches no workload.
    """
    contract = ops.find(op)
    return board().selection(contract) if like is None else board().bind(contract, like)


def board() -> Board:
    """Return the board that serves now, from the snapshot of this process's home (or the one given to `use`)."""
    with _lock:
        if not _stack:
            _stack.append(_own_board())
        return _stack[-1]


def _own_board() -> Board:
    """Read the lock file that the settings name, else this home's snapshot. Raises ForeignDecision if it is frozen and
    does not fit this device."""
    path = settings.get("lock")
    made = Board(path or settings.home())
    if settings.get("frozen"):
        if path is None:
            raise UsageError(
                "AUTOSEL_FROZEN without AUTOSEL_LOCK", todo="name the lock file: AUTOSEL_LOCK=autosel.lock"
            )
        made.refuse_unkept()
    return made


def epoch() -> int:
    """Return a number that changes whenever a served decision no longer holds; owners of captured graphs then capture
    again."""
    return board().epoch


def uses() -> list[Uses]:
    """Return the calls of this process by candidate and decision, most called first (proof of use)."""
    return sorted(board().uses(), key=lambda u: -u.calls)


def coverage() -> Coverage:
    """Return the share of this process's time in ops that decisions serve, and why the other calls miss."""
    return board().coverage()


def agree(group: Any = None) -> Agreement:
    """Check that all ranks of a torch.distributed job serve the same decisions, and keep serving them until the end.

    Call it on every rank before the first call. Raises Disagreement on every rank, naming what differs, or UsageError
    without a process group.
    """
    from autosel.dispatch import agreement

    return agreement.agree(board(), group)


def refresh() -> None:
    """Check the snapshot now, instead of within half a second."""
    board().refresh()


def use(place: Path | str, guard: Policy | None = None) -> Use:
    """Serve from another home or snapshot file from now on, or until the end of a `with` block.

    Callables bound earlier stay with their board. `guard` sets the rate of checks, instead of the settings.
    """
    return Use(Board(Path(place), guard))


class Use:
    def __init__(self, board: Board) -> None:
        self.board = board
        with _lock:
            _stack.append(board)

    def __enter__(self) -> Board:
        return self.board

    def __exit__(self, *exception: object) -> None:
        with _lock:
            _stack.remove(self.board)
        self.board.close()


_stack: list[Board] = []  # the last one keeps serving
_lock = threading.Lock()


def _fresh_lock() -> None:
    """Replace the lock after a fork: it may be held by a thread that the child does not have."""
    global _lock  # noqa: PLW0603  (there is one for the module)
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_fresh_lock)
