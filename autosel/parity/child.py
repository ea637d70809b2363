"""The parity worker's side: load a candidate, call it on shared memory, tell what it returned. It judges nothing.

`Worker("autosel.parity.child:serve")` starts it. The parent generates inputs, owns the guards around them and compares;
what this process says is only believed about the form of a result (type, shape, dtype), which it also has to hold true
for the copy into shared memory to succeed.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import math
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from autosel.candidates.load import load, reader_of
from autosel.native import threads
from autosel.ops import OPS
from autosel.ops.precision import matmul_precision
from autosel.ops.stored import received
from autosel.parity.mirror import Mirror
from autosel.values import NativeRecipe, PythonRecipe, from_json
from autosel.workers.arena import Arenas

CLOCKS = ("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time_ns", "thread_time_ns", "time")

_FUNCTIONS: dict[str, Callable[..., Any]] = {}
_HELD: dict[str, list[Any]] = {}
_MIRRORS: dict[str, Mirror] = {}  # the one of this process, under ""; none where candidates run on shared memory itself


def serve(request: dict[str, Any], arenas: Arenas) -> dict[str, Any]:
    """Answer one request; `do` names a function below."""
    handlers: dict[str, Callable[[dict[str, Any], Arenas], dict[str, Any]]] = {
        "load": _load,
        "call": _call,
        "loop": _loop,
        "dump": _dump,
        "state": _state,
    }
    return handlers[request["do"]](request, arenas)


def _load(request: dict[str, Any], _: Arenas) -> dict[str, Any]:
    """Load a candidate. The first request names the device: any but `cpu` gets a mirror of the operands."""
    if request["device"] != "cpu" and not _MIRRORS:
        _MIRRORS[""] = Mirror(request["device"])
    kind = NativeRecipe if request["recipe"]["kind"] == "native" else PythonRecipe
    recipe = from_json(kind, request["recipe"])
    _FUNCTIONS[request["name"]] = load(OPS[request["op"]], recipe, request["digest"], request["knobs"])
    # Helpers spin for less long than OpenMP's threads: checks are thousands of tiny calls with pauses between.
    threads.use(openmp=False, wake=True)
    return {}


def _call(request: dict[str, Any], arenas: Arenas) -> dict[str, Any]:
    """One call. Results go to `into` where their form allows; `hold` keeps the result objects for a later dump."""
    arguments, outputs = _there(request["arguments"], arenas), _there(request["outputs"], arenas)
    function = _prepared(request["name"], arguments)
    started = time.perf_counter_ns()
    returned = function(*arguments, *outputs)
    _back(request, arenas)
    elapsed_ns = time.perf_counter_ns() - started
    results = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    if request.get("hold"):
        _HELD[request["hold"]] = results
    _copy(results, request["into"], arenas)
    return {"results": [_form(r, arguments + outputs) for r in results], "ns": elapsed_ns}


def _loop(request: dict[str, Any], arenas: Arenas) -> dict[str, Any]:
    """Many calls on the same operands; `into` holds each output of the first of them, as many as it has room for."""
    arguments, outputs = _there(request["arguments"], arenas), _there(request["outputs"], arenas)
    function = _prepared(request["name"], arguments)
    kept = [arenas.tensor(place) for place in request["into"]]
    for call in range(request["times"]):
        for output in outputs if call < len(kept[0]) else ():
            if output is not None:
                output.fill_(math.nan if output.is_floating_point() else -1)
        returned = function(*arguments, *outputs)
        if call < len(kept[0]):
            results = returned if isinstance(returned, (tuple, list)) else [returned]
            for place, result in zip(kept, results, strict=True):
                place[call].copy_(result)
    _back(request, arenas)
    gc.collect()
    return {}


def _prepared(name: str, arguments: Sequence[Any]) -> Callable[..., Any]:
    """Return the candidate, after it has prepared the weights of its next call, whether that pays or not."""
    function = _FUNCTIONS[name]
    reader = reader_of(function)
    if reader is not None:
        reader.prepare(arguments)
    return function


def _dump(request: dict[str, Any], arenas: Arenas) -> dict[str, Any]:
    """Copy held results once more, and let go of them."""
    _copy(_HELD.pop(request["hold"]), request["into"], arenas)
    return {}


def _there(values: Sequence[Any], arenas: Arenas) -> list[Any]:
    """The operands where the candidate runs."""
    if _MIRRORS:
        return _MIRRORS[""].push(values, arenas)
    return [received(v, arenas.tensor) for v in values]


def _back(request: Mapping[str, Any], arenas: Arenas) -> None:
    """Wait for what was enqueued; what it wrote, where the parent looks for it."""
    if _MIRRORS:
        _MIRRORS[""].pull([*request["arguments"], *request["outputs"]], arenas)


def _copy(results: Sequence[Any], places: Sequence[Mapping[str, Any] | None], arenas: Arenas) -> None:
    for result, place in zip(results, places, strict=False):
        if place is None or not isinstance(result, torch.Tensor):
            continue
        target = arenas.tensor(place)
        if target.shape == result.shape and target.dtype == result.dtype:
            target.copy_(result)


def _form(result: Any, passed: Sequence[Any]) -> dict[str, Any]:
    """What a result is; `is_argument` is the position of the passed tensor whose memory it shares from the start."""
    kind = f"{type(result).__module__}.{type(result).__qualname__}"
    if not isinstance(result, torch.Tensor):
        return {"type": kind}
    pointer = result.data_ptr() if result.numel() else -1
    same = [i for i, t in enumerate(passed) if isinstance(t, torch.Tensor) and t.numel() and t.data_ptr() == pointer]
    return {
        "type": kind,
        "dtype": str(result.dtype).removeprefix("torch."),
        "shape": list(result.shape),
        "strides": list(result.stride()),
        "device": result.device.type,
        "is_argument": same[0] if same else None,
    }


# --- what a candidate must leave as it was ---------------------------------------------------------------------------


def _state(_: dict[str, Any], __: Arenas) -> dict[str, Any]:
    """Process-wide state that an op has no business changing, as comparable text."""
    state = {
        "torch threads": torch.get_num_threads(),
        "torch interop threads": torch.get_num_interop_threads(),
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32 matmul precision": matmul_precision(),
        "oneDNN": torch.backends.mkldnn.enabled,
        "torch random state": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:16],
        "python random state": hashlib.sha256(repr(random.getstate()).encode()).hexdigest()[:16],
        "rounding mode": ctypes.CDLL(None).fegetround(),
        "subnormals": _subnormals(),
        "working folder": Path.cwd(),
        "clocks": [_named(getattr(time, clock)) for clock in CLOCKS],
        "affinity": str(sorted(os.sched_getaffinity(0))),
    }
    return {name: str(value) for name, value in state.items()}


def _named(function: Callable[..., Any]) -> str:
    """A clock of Python's own is a builtin of its own name; what replaced one is not."""
    return f"{type(function).__name__} {getattr(function, '__name__', '')}"


def _subnormals() -> str:
    """Are subnormal numbers kept by this thread's arithmetic (FTZ and DAZ off)?"""
    tiny = 2.0**-1060
    return "kept" if tiny * 0.5 > 0.0 and tiny * 2.0**40 > 0.0 else "flushed"


__all__ = ["serve"]
