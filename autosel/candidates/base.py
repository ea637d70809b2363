"""One way to run an op. `candidates.registry` knows them all; workers and `dispatch` load them, nobody else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

from autosel.formats import PLAIN
from autosel.values import Accepted, Backend, Fingerprint, Knobs, Layout, Recipe, Rejected, Support, Workload


class Candidate(ABC):
    """Subclass or instantiate once per way; stateless. `name` is unique: `<backend>:<what>`, lower case."""

    name: str
    op: str
    backend: Backend
    deterministic: bool = True  # the same inputs give the same bits on every call
    static_shapes: bool = False  # compiled anew for each shape it meets: seconds each
    writes_out: bool = True  # False: it allocates its result, and is timed doing so
    first_call_s: float = 0.0  # what the first call in a process may take, where something is compiled at it
    effort: Literal["quick", "full"] = "quick"  # raced always, or only with `--effort full`
    formats: frozenset[str] = frozenset({PLAIN})  # of weights that it reads
    cache_formats: frozenset[str] = frozenset({PLAIN})  # of keys and values
    layout: Layout | None = None  # that it reads weights in; its recipe names it too (candidates/layouts.py)

    @abstractmethod
    def supports(self, w: Workload, fp: Fingerprint) -> Support:
        """May it run this workload on this device? A rejection's reason is shown to the user. Asked by `support_of`,
        never about a format that it does not name."""

    def knobs(self, w: Workload, fp: Fingerprint) -> Knobs:
        """Its settings, in closed form."""
        return Knobs()

    @abstractmethod
    def recipe(self, w: Workload, fp: Fingerprint, knobs: Knobs) -> Recipe:
        """How a worker obtains the callable."""


def support_of(candidate: Candidate, w: Workload, fp: Fingerprint) -> Support:
    """May the candidate run this workload on this device? Its formats are checked here, the rest is its own answer."""
    for trait, format_, known in (
        ("weights", w.weight_format.name, candidate.formats),
        ("a cache", w.cache_format.name, candidate.cache_formats),
    ):
        if format_ not in known:
            return Rejected(reason=f"takes {trait} in {', '.join(sorted(known))}; the workload's format is {format_}")
    return candidate.supports(w, fp)


__all__ = ["Accepted", "Candidate", "Rejected", "support_of"]
