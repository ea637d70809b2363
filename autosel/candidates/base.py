"""One way to run an op. `candidates.registry` lists them; only workers and `dispatch` load them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

from autosel.formats import PLAIN
from autosel.values import Accepted, Backend, Fingerprint, Knobs, Layout, Recipe, Rejected, Support, Workload


class Candidate(ABC):
    """Base class of candidates; a subclass or an instance for each way. Stateless. `name` is unique:
    `<backend>:<what>`.
    """

    name: str
    op: str
    backend: Backend
    deterministic: bool = True  # the same inputs give the same bits on every call
    static_shapes: bool = False  # compiled again for each shape: seconds each
    writes_out: bool = True  # False: it allocates its result, which its time includes
    first_call_s: float = 0.0  # time limit of a process's first call, if that call compiles
    effort: Literal["quick", "full"] = "quick"  # raced always, or only with `--effort full`
    formats: frozenset[str] = frozenset({PLAIN})  # formats of weights that it reads
    cache_formats: frozenset[str] = frozenset({PLAIN})  # formats of keys and values
    layout: Layout | None = None  # layout of the weights that it reads; its recipe names it too (candidates/layouts.py)

    @abstractmethod
    def supports(self, w: Workload, fp: Fingerprint) -> Support:
        """Return whether it can run this workload on this device; a rejection's reason is shown to the user.

        `support_of` calls it, never for a format that the candidate does not name.
        """

    def knobs(self, w: Workload, fp: Fingerprint) -> Knobs:
        """Return its settings, in closed form."""
        return Knobs()

    @abstractmethod
    def recipe(self, w: Workload, fp: Fingerprint, knobs: Knobs) -> Recipe:
        """Return how a worker obtains the callable."""


class Checked(Candidate):
    """A candidate that names what it cannot run."""

    def supports(self, w: Workload, fp: Fingerprint) -> Support:
        why = self.why_not(w, fp)
        return Rejected(reason=why) if why else Accepted()

    @abstractmethod
    def why_not(self, w: Workload, fp: Fingerprint) -> str:
        """Return why it cannot run this workload on this device, or ""."""


def support_of(candidate: Candidate, w: Workload, fp: Fingerprint) -> Support:
    """Return whether the candidate can run this workload on this device. Only formats are checked here."""
    for trait, format_, known in (
        ("weights", w.weight_format.name, candidate.formats),
        ("a cache", w.cache_format.name, candidate.cache_formats),
    ):
        if format_ not in known:
            return Rejected(
                reason=f"supports {trait} in {', '.join(sorted(known))}; the workload's format is {format_}"
            )
    return candidate.supports(w, fp)


__all__ = ["Accepted", "Candidate", "Checked", "Rejected", "support_of"]
