"""Does a decision still hold: are its two arms the things that were measured? And what is an arm as it is now?"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from autosel.candidates import arms
from autosel.errors import AutoselError, BuildError
from autosel.native.compile import find_artefact, sources_digest
from autosel.values import Arm, Decision, NativeRecipe, PythonRecipe


def staleness(decision: Decision) -> str:
    """Why a decision no longer holds: one of its two arms is not the thing that was measured. Empty if both are.

    Of one that was proven again after a change (`decision.stale`), the build that was: its source is another already.
    """
    for arm in (decision.baseline, decision.arm):
        why = _stale(arm, any_source=bool(decision.stale))
        if why:
            return f"decision {decision.id} is stale: {why}"
    return ""


def _stale(arm: Arm, *, any_source: bool) -> str:
    recipe = arm.recipe
    if isinstance(recipe, NativeRecipe):
        if not re.fullmatch("[0-9a-f]{64}", arm.build):  # a path would lead out of the folder of artefacts
            return f"{arm.candidate}'s build is not named by a digest"
        if arms.digest_of(arm.build, arm.knobs) != arm.digest:
            return f"{arm.candidate}'s build and knobs are not those of its digest"
        return _edited(arm.build, "" if any_source else recipe.source, arm.candidate)
    try:
        now = _python_digest(recipe)
    except (AutoselError, OSError, AssertionError) as error:
        return (str(error) or type(error).__name__).splitlines()[0]
    if arms.digest_of(now, arm.knobs) != arm.digest:
        return f"{arm.candidate}'s code or its libraries (torch {_torch()}) are not those that were measured"
    return ""


@lru_cache(maxsize=1024)
def _edited(build: str, source: str, candidate: str) -> str:
    """Once a process: a serving process keeps what it loaded, whatever becomes of the files. No `source`: any."""
    artefact = find_artefact(build)
    if artefact is None:
        return f"the compiled {candidate} ({build[:12]}) is missing or damaged; run tune again"
    if not source:
        return ""
    try:
        current = sources_digest(source)
    except AutoselError as error:
        return error.what
    return "" if artefact.sources == current else f"{candidate}'s source was edited since"


@lru_cache(maxsize=1024)
def _python_digest(recipe: PythonRecipe) -> str:
    return arms.python_digest(recipe)


def _torch() -> str:
    import torch

    return str(torch.__version__)


def forget() -> None:
    """Look at files and libraries anew: for a process that outlives their change."""
    _edited.cache_clear()
    _python_digest.cache_clear()


def as_now(arm: Arm) -> Arm:
    """What would be loaded by this arm's recipe now: a build by its digest, as it was raced, whatever became of its
    source; Python with the code and libraries that are there. Raises BuildError where nothing would."""
    if isinstance(arm.recipe, PythonRecipe):
        try:
            return replace(arm, digest=arms.digest_of(_python_digest(arm.recipe), arm.knobs))
        except (OSError, AssertionError) as error:
            raise BuildError(f"{arm.candidate} cannot be read any more: {error}") from error
    if not re.fullmatch("[0-9a-f]{64}", arm.build) or find_artefact(arm.build) is None:
        raise BuildError(f"the compiled {arm.candidate} ({arm.build[:12]}) is missing or damaged")
    return arm
