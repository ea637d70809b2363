"""The threads that C++ kernels of this process run on: PyTorch's OpenMP pool where there is one (kernels/cpu/team.h)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autosel.native import load

ASK, PLACE, RELEASE, OPENMP, HELPERS, WAKE, WEIGH = range(7)  # commands of kernels/cpu/tensor.h


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    openmp: bool  # kernels run on PyTorch's threads
    place: bool  # workers are kept on cores of their own
    placed: int  # workers that are
    wake: bool  # sleeping workers are woken for every job, and not only where it is worth it


def state() -> Threads | None:
    """What the loaded kernels run on; None if no C++ kernel is loaded."""
    return _command(ASK)


def use(*, openmp: bool = True, place: bool = True, wake: bool = False) -> Threads | None:
    """Choose the threads of all C++ kernels of this process. Returns the new state; None if no such kernel is loaded.

    `openmp=False`: helpers of our own. `place=False`: workers get back the affinity that they had; each changes it in its
    next job. `wake=True`: after a rest even a short job runs on all its threads, as proofs and races need it.
    """
    _command(OPENMP if openmp else HELPERS)
    _command(PLACE if place else RELEASE)
    return _command(WAKE if wake else WEIGH)


def _command(command: int) -> Threads | None:
    import torch

    kernel = next((found for found in map(_entry, load.loaded()) if found is not None), None)
    if kernel is None:
        return None
    found = torch.zeros(4, dtype=torch.int64)
    kernel(found, command)
    openmp, place, placed, wake = found.tolist()
    return Threads(openmp=bool(openmp), place=bool(place), placed=placed, wake=bool(wake))


def _entry(module: Any) -> Callable[..., Any] | None:
    try:
        entry: Callable[..., Any] = module.threads
    except AttributeError:  # a CUDA kernel
        return None
    return entry
