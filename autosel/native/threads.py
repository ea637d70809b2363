"""The threads of this process's C++ kernels: PyTorch's OpenMP pool where there is one (kernels/cpu/team.h)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autosel import settings

ASK, PLACE, RELEASE, OPENMP, HELPERS, WAKE, WEIGH = range(7)  # commands of kernels/cpu/tensor.h


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    openmp: bool  # kernels run on PyTorch's threads
    place: bool  # workers are kept on cores of their own
    placed: int  # workers that are
    wake: bool  # sleeping workers are woken for every job, and not only where it is worth it


_ENTRIES: list[Callable[..., Any]] = []  # `threads` of each C++ kernel loaded so far: any speaks for the process


def adopt(module: Any) -> None:
    """Take note of a loaded kernel. The first C++ one applies the setting `place_workers`."""
    try:
        _ENTRIES.append(module.threads)
    except AttributeError:  # a CUDA kernel, or a source from elsewhere
        return
    if len(_ENTRIES) == 1 and not settings.get("place_workers"):
        _command(RELEASE)


def state() -> Threads | None:
    """What the loaded kernels run on; None if no C++ kernel is loaded."""
    return _command(ASK)


def use(*, openmp: bool = True, place: bool | None = None, wake: bool = False) -> Threads | None:
    """Choose the threads of all C++ kernels of this process. Returns the new state; None if no such kernel is loaded.

    `openmp=False`: helpers of our own. `place=False`: workers get back the affinity that they had, each in its next
    job; None: as the setting `place_workers` says. `wake=True`: after a rest even a short job runs on all its threads,
    as proofs and races need it.
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
