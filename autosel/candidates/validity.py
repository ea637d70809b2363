"""Validity of decisions: are the two arms still those that were measured? Also an arm's current version."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from autosel.candidates import arms
from autosel.errors import AutoselError, BuildError
from autosel.native.compile import find_artefact, sources_digest
from autosel.values import Arm, Decision, NativeRecipe, PythonRecipe


def staleness(decision: Decision) -> str:
    """Return the change of an arm that makes a decision invalid; "" if both arms are unchanged.

    For a decision that was proven again after a change (`decision.stale`), only the build counts: its source has
    changed.
    """
    for arm in (decision.baseline, decision.arm):
        why = _stale(arm, any_source=bool(decision.stale))
        if why:
            return f"decision {decision.id} is stale: {why}"
    return ""


def _stale(arm: Arm, *, any_source: bool) -> str:
    recipe = arm.recipe
    if isinstance(recipe, NativeRecipe):
        if not re.fullmatch("[0-9a-f]{64}", arm.build):  # a path would leave the folder of artefacts
            return f"{arm.candidate}'s build is not named by a digest"
        if arms.digest_of(arm.build, arm.knobs) != arm.digest:
            return f"{arm.candidate}'s build and knobs do not match its digest"
        return _edited(arm.build, "" if any_source else recipe.source, arm.candidate)
    try:
        now = _python_digest(recipe)
    except (AutoselError, OSError, AssertionError) as error:
        return (str(error) or type(error).__name__).splitlines()[0]
    if arms.digest_of(now, arm.knobs) != arm.digest:
        import torch

        changed = f"{arm.candidate}'s code or its libraries (torch {torch.__version__})"
        return f"{changed} have changed since they were measured"
    return ""


@lru_cache(maxsize=1024)
def _edited(build: str, source: str, candidate: str) -> str:
    """Check a build once per process: a serving process keeps its loaded build. Without `source`, accept any source."""
    artefact = find_artefact(build)
    if artefact is None:
        return f"the compiled {candidate} ({build[:12]}) is missing or damaged; run tune again"
    if not source:
        return ""
    try:
        current = sources_digest(source)
    except AutoselError as error:
        return error.what
    return "" if artefact.sources == current else f"{candidate}'s source has been edited"


@lru_cache(maxsize=1024)
def _python_digest(recipe: PythonRecipe) -> str:
    return arms.python_digest(recipe)


def forget() -> None:
    """Forget files and libraries, for a process that outlives a change of them."""
    _edited.cache_clear()
    _python_digest.cache_clear()


def as_now(arm: Arm) -> Arm:
    """Return the arm as its recipe would be loaded now.

    A native arm keeps its build, even if its source has changed; a Python arm gets its current code and libraries.
    Raises BuildError if the arm cannot be loaded.
    """
    if isinstance(arm.recipe, PythonRecipe):
        try:
            return replace(arm, digest=arms.digest_of(_python_digest(arm.recipe), arm.knobs))
        except (OSError, AssertionError) as error:
            raise BuildError(f"{arm.candidate} can no longer be read: {error}") from error
    if not re.fullmatch("[0-9a-f]{64}", arm.build) or find_artefact(arm.build) is None:
        raise BuildError(
            f"the compiled {arm.candidate} ({arm.build[:12]}) is missing or damaged", todo="run tune again"
        )
    return arm
