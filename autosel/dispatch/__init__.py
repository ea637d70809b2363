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
from typing import Any, overload

from autosel import ops, settings
from autosel.dispatch.board import Board, Uses
from autosel.dispatch.bound import Bound
from autosel.dispatch.selection import Selection
from autosel.errors import UsageError
from autosel.guard import Policy

__all__ = ["Board", "Bound", "Selection", "Use", "Uses", "best", "board", "epoch", "refresh", "use", "uses"]


@overload
def best(op: str) -> Selection: ...


@overload
def best(op: str, like: Sequence[Any] | Mapping[str, Any]) -> Bound: ...


def best(op: str, like: Sequence[Any] | Mapping[str, Any] | None = None) -> Selection | Bound:
    """The op as a function that takes its arguments by name or position, then `out` (default: allocate).

    `like` are arguments, or a mapping by name, of the shapes it will be called with. Every kernel served is right for
    all shapes its op accepts from it; another bucket than `like`'s may merely be slower. For inference: no autograd.
    Raises UnknownName for an op nobody knows, BadArguments for a `like` that no workload describes.
    """
    contract = ops.find(op)
    return board().selection(contract) if like is None else board().bind(contract, like)


def board() -> Board:
    """What serves now, from the snapshot of this process's home (or the one given to `use`)."""
    with _lock:
        if not _stack:
            _stack.append(_own_board())
        return _stack[-1]


def _own_board() -> Board:
    """From the lock file that the settings name, else this home's snapshot. Raises ForeignDecision if it is frozen and
    cannot be kept."""
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
    """Changes whenever something that was served no longer is: owners of captured graphs then capture again."""
    return board().epoch


def uses() -> list[Uses]:
    """Proof of use: what served how many calls in this process, and by which decision, most called first."""
    return sorted(board().uses(), key=lambda u: -u.calls)


def refresh() -> None:
    """Look at the snapshot now, instead of within half a second."""
    board().refresh()


def use(place: Path | str, guard: Policy | None = None) -> Use:
    """Serve from another home or snapshot file from now on, or, in a `with`, until it ends.

    Callables bound before stay with the board that bound them. `guard` says how much is checked, instead of the
    settings.
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


_stack: list[Board] = []  # the last one serves
_lock = threading.Lock()


def _fresh_lock() -> None:
    """A fork copies the lock as it was, held by a thread that the child does not have."""
    global _lock  # noqa: PLW0603  (there is one for the module)
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_fresh_lock)
