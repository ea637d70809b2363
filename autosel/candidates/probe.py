"""Test once per version, in a child process with a time limit, that a way to run an op works here, before it races.

An installed package may compile for minutes, print, crash, or have been built for another torch; a kernel behind one of
PyTorch's switches may hang or end its process. A worker runs it, as it runs candidates. The result is kept in the home,
unless the cause was external (no memory, a busy device, an environment in which no worker can import PyTorch).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from autosel import devices, files, settings
from autosel.errors import EnvironmentFault, WorkerError
from autosel.values import digest
from autosel.workers import RaisedError, Worker

PROBE_S = 120.0
MOST_BYTES = 64 << 10
_KNOWN: dict[str, str] = {}


def fault(target: str, *arguments: Any, about: Sequence[str] = (), deadline_s: float = PROBE_S) -> str:
    """Return why `target` ("module:function") with these arguments fails in a child process, or "".

    `about` lists what else the result depends on besides torch and Python (a version, a device).
    """
    asked: dict[str, Any] = {"of": [target, *map(str, arguments), *about], "torch": _torch(), "python": sys.version}
    asked["controlled"] = True  # earlier versions also kept results of environments without PyTorch
    name = digest(asked)[:24]
    path = settings.home() / "cache" / "libraries" / f"{name}.json"
    if str(path) not in _KNOWN:
        kept, why = _kept(path)
        if not kept:
            why, lasting = _tried(target, arguments, deadline_s)
            if not lasting:
                return why
            _keep(path, why)
        _KNOWN[str(path)] = why
    return _KNOWN[str(path)]


@cache
def _torch() -> str:
    return metadata.version("torch")


def serve(request: dict[str, Any], _: Any) -> dict[str, Any]:
    """Run the target in the worker."""
    module, _, name = request["target"].partition(":")
    getattr(import_module(module), name)(*request["arguments"])
    return {}


def device(kind: str, cc: str) -> str:
    """Return PyTorch's first device of this compute capability, or its CPU. Raises RuntimeError if there is none."""
    import torch

    if devices.on_host(kind):
        return kind
    for i in range(torch.cuda.device_count()):
        if "{}.{}".format(*torch.cuda.get_device_capability(i)) == cc:
            return f"cuda:{i}"
    raise RuntimeError(f"PyTorch sees no GPU of compute capability {cc}")


def _tried(target: str, arguments: Sequence[Any], deadline_s: float) -> tuple[str, bool]:
    """Return the reason of a failure or "", and whether another try would give the same result."""
    try:
        worker = Worker(f"{__name__}:serve")
        try:
            worker.request({"target": target, "arguments": list(arguments)}, deadline_s)
        finally:
            worker.close()
    except EnvironmentFault as error:
        return " ".join(f"{error.what}: {error.why}".split())[:200], False
    except RaisedError as error:
        return " ".join(f"{error.kind}: {error.message}".split())[:200], not error.retryable and _torch_works()
    except WorkerError as error:
        late = error.cause == "timeout in request"
        why = f"the probe took longer than {deadline_s:.0f} s" if late else f"the probe's process ended: {error.cause}"
        return why, not error.retryable and _torch_works()
    return "", True


def _torch_works() -> bool:
    """Return True if a worker that only imports PyTorch starts: the control of a failure."""
    try:
        with Worker(f"{__name__}:serve", threads=1) as worker:  # setting a number of threads imports PyTorch
            worker.wait_ready()
    except EnvironmentFault:
        return False
    return True


def _kept(path: Path) -> tuple[bool, str]:
    try:
        return True, str(json.loads(files.read(path, MOST_BYTES))["why"])
    except (OSError, ValueError, KeyError):
        return False, ""


def _keep(path: Path, why: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text(json.dumps({"why": why}))
    except OSError:  # a read-only home: the next process probes again
        return
