"""Distinguish faults of the environment from faults of a candidate, and say how to repair them.

A worker process that does not start has not loaded a candidate yet. A process in which PyTorch cannot be imported
cannot run one.
"""

from __future__ import annotations

import sys
from importlib import import_module

from autosel import settings
from autosel.errors import AutoselError, EnvironmentFault, WorkerError

IMPORT = f'{sys.executable} -c "import torch"'


def start_fault(entry: str, error: AutoselError) -> EnvironmentFault:
    """Return the fault of a worker that did not start; `error` describes its end."""
    return EnvironmentFault(f"a worker process ({entry}) does not start", why=_reason(error), todo=_repair(IMPORT))


def control_fault(control: str, error: AutoselError, failed: str = "") -> EnvironmentFault:
    """Return the fault of an environment in which `control` failed with `error` after the candidate `failed` did."""
    what = f"{control} fails in a worker process" + (f", as {failed} did" if failed else "")
    return EnvironmentFault(what, why=_reason(error), todo=_repair(f"{settings.spelling()} doctor"))


def torch_fault() -> EnvironmentFault | None:
    """Return the fault of this process's environment if PyTorch cannot be imported, else None."""
    if "torch" in sys.modules:
        return None
    try:
        import_module("torch")
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        return EnvironmentFault("PyTorch cannot be imported", why=why, todo=_repair(IMPORT))
    return None


def _repair(check: str) -> str:
    return f"repair it, check it with `{check}`, then run the command again"


def _reason(error: AutoselError) -> str:
    """Return the exception that the worker raised; else how it ended, and its last line of output."""
    if isinstance(error, WorkerError) and error.cause.startswith("raised "):
        return error.why
    last = error.why.strip().splitlines()[-1:]
    return ": ".join([error.what, *last])
