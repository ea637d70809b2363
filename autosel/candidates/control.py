"""The control of a failure: a candidate that does nothing, loaded in the same way as the failed candidate.

A failure counts against a candidate only if the baseline and an empty candidate work in a worker of the same kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from autosel.candidates.base import Accepted, Candidate
from autosel.native.compile import empty_source
from autosel.values import Backend, Fingerprint, Knobs, NativeRecipe, PythonRecipe, Recipe, Support, Workload

CONTROL, WORKED = "control", "the baseline and an empty candidate worked afterwards"  # in the evidence of a failure


class Empty(Candidate):
    """Candidate that does nothing. It is built and loaded as `like` is: compiled for the same device, or imported."""

    backend: Backend = "USER"

    def __init__(self, op: str, like: Recipe) -> None:
        self.op, self.loaded_as = op, _recipe(like)
        self.name = f"control:empty.{'py' if like.kind == 'python' else Path(like.source).suffix[1:]}"

    def supports(self, w: Workload, fp: Fingerprint) -> Support:
        return Accepted()

    def recipe(self, w: Workload, fp: Fingerprint, knobs: Knobs) -> Recipe:
        return self.loaded_as


def empties(op: str, failed: Iterable[Recipe]) -> list[Empty]:
    """Return one empty candidate for each way in which the failed ones are built and loaded."""
    return list({empty.name: empty for empty in (Empty(op, like) for like in failed)}.values())


def _recipe(like: Recipe) -> Recipe:
    if isinstance(like, NativeRecipe):
        return NativeRecipe(source=empty_source(like.source), entry="empty")
    return PythonRecipe(target=f"{__name__}:nothing")


def nothing(*_: Any) -> None:
    """Take any arguments and return nothing."""
