"""Control the threads of this process's C++ kernels: PyTorch's OpenMP pool if there is one (kernels/cpu/team.h)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autosel import settings

ASK, PLACE, RELEASE, OPENMP, HELPERS, WAKE, WEIGH = range(7)  # commands of kernels/cpu/tensor.h


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    openmp: bool  # kernels run on PyTorch's threads
    place: bool  # each worker has its own slice of the cores
    placed: int  # number of workers with a slice
    wake: bool  # wake sleeping workers for every job, even if it does not pay


# `threads` of each C++ kernel loaded so far; any of them controls the whole process
_ENTRIES: list[Callable[..., Any]] = []


def adopt(module: Any) -> None:
    """Register a loaded kernel. The first C++ one applies the setting `place_workers`."""
    try:
        _ENTRIES.append(module.threads)
    except AttributeError:  # a CUDA kernel, or a source from outside autosel
        return
    if len(_ENTRIES) == 1 and not settings.get("place_workers"):
        _command(RELEASE)


def state() -> Threads | None:
    """Return the thread state of the loaded kernels, or None if no C++ kernel is loaded."""
    return _command(ASK)


def use(*, openmp: bool = True, place: bool | None = None, wake: bool = False) -> Threads | None:
    """Set the threads of all C++ kernels of this process. Return the new state, or None if no such kernel is loaded.

    `openmp=False`: use autosel's helper threads. `place=False`: workers get their previous affinity back at their next
    job; None: follow the setting `place_workers`. `wake=True`: after a rest even a short job uses all threads, as
    proofs and races need.
    """
    placing = settings.get("place_workers") if place is None else place
    _command(OPENMP if openmp else HELPERS)
    _command(PLACE if placing else RELEASE)
    return _command(WAKE if wake else WEIGH)


def _command(command: int) -> Threads | None:
    import torch

    if not _ENTRIES:
        return None
    found = torch.zeros(4, dtype=torch.int64)
    _ENTRIES[0](found, command)
    openmp, place, placed, wake = found.tolist()
    return Threads(openmp=bool(openmp), place=bool(place), placed=placed, wake=bool(wake))
