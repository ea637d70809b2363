"""Candidates from installed packages: the entry-point group `autosel.candidates`.

    [project.entry-points."autosel.candidates"]
    fastnorm = "fastnorm.autosel_candidates"

Listing reads metadata only. The module is imported only if the user allows it (AUTOSEL_ALLOW=fastnorm). It registers
candidates with the decorator, or its value is one or several Candidates. A module that fails is reported; others still
load.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

from autosel import settings
from autosel.candidates.base import Candidate
from autosel.candidates.user import all_registered, register
from autosel.errors import AutoselError

GROUP = "autosel.candidates"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """One entry point. `problem` says why an allowed one gave no candidates."""

    name: str
    value: str
    distribution: str
    version: str
    allowed: bool
    candidates: tuple[str, ...] = ()
    problem: str = ""


@cache
def load_allowed() -> tuple[Plugin, ...]:
    """Import the allowed ones, once per process, and return what each gave."""
    allowed = {part.strip() for part in str(settings.get("allow")).split(",") if part.strip()}
    points = sorted(entry_points(group=GROUP), key=lambda p: (p.name, p.value))
    return tuple(_load(point, allowed) for point in points)


def _load(point: EntryPoint, allowed: Collection[str]) -> Plugin:
    distribution = point.dist.name if point.dist is not None else ""
    version = point.dist.version if point.dist is not None else ""
    # `name`, or `distribution:name` if two have the same name.
    may = point.name in allowed or f"{distribution}:{point.name}" in allowed
    plugin = Plugin(name=point.name, value=point.value, distribution=distribution, version=version, allowed=may)
    if not may:
        return plugin
    before = {id(c) for c in all_registered()}
    try:
        for found in _candidates(point.load()):
            register(found)
    except AutoselError as error:
        return replace(plugin, problem=str(error))
    except (Exception, SystemExit) as error:  # a plug-in's module may raise anything
        return replace(plugin, problem=f"{type(error).__name__}: {error}")
    names = tuple(c.name for c in all_registered() if id(c) not in before)
    return replace(plugin, candidates=names, problem="" if names else "it registered no candidate")


def _candidates(value: Any) -> Iterable[Candidate]:
    """Return the candidates of an entry point's value; none for a module or function, whose import registered them."""
    if isinstance(value, Candidate):
        return (value,)
    if isinstance(value, ModuleType) or callable(value):
        return ()
    found = tuple(value)
    for item in found:
        if not isinstance(item, Candidate):
            raise TypeError(f"{item!r:.60} is not a Candidate")
    return found
