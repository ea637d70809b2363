"""The worker's side of parity: load a candidate, call it on shared memory, report the form of its results.

`Worker("autosel.parity.child:serve")` starts it. The parent generates inputs, fills the guards around them and compares
results. It trusts this process only for the form of a result (type, shape, dtype), because a wrong form makes the copy
into shared memory fail.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autosel import devices
from autosel.candidates.load import load, reader_of
from autosel.native import threads
from autosel.ops import OPS
from autosel.ops.stored import received
from autosel.parity import ways
from autosel.parity.mirror import Mirror
from autosel.parity.state import State
from autosel.values import NativeRecipe, PythonRecipe, from_json
from autosel.workers.arena import Arenas

_FUNCTIONS: dict[str, Callable[..., Any]] = {}
_HELD: dict[str, list[Any]] = {}
_STATES: dict[str, State] = {}  # at most one, under ""
_MIRRORS: dict[str, Mirror] = {}  # at most one, under ""; empty if candidates run on shared memory


def serve(request: dict[str, Any], arenas: Arenas) -> dict[str, Any]:
    """Answer one request; `do` names a function below."""
    handlers: dict[str, Callable[[dict[str, Any], Arenas], dict[str, Any]]] = {
        "load": _load,
        "call": _call,
        "at_once": _at_once,
        "threads": _threads,
        "loop": _loop,
        "overwrite": _overwrite,
        "dump": _dump,
        "state": _state,
    }
    return handlers[request["do"]](request, arenas)


def _load(request: dict[str, Any], _: Arenas) -> dict[str, Any]:
    """Load a candidate. The first request sets the device; one with its own memory gets a mirror of the operands."""
    if not _MIRRORS and not devices.named(request["device"]).shared:
        _MIRRORS[""] = Mirror(request["device"])
    if not _FUNCTIONS:
        ways.fill_new_memory()
    kind = NativeRecipe if request["recipe"]["kind"] == "native" else PythonRecipe
    recipe = from_json(kind, request["recipe"])
    _FUNCTIONS[request["name"]] = load(OPS[request["op"]], recipe, request["digest"], request["knobs"])
    # Use autosel's threads: OpenMP's spin for longer in the pauses between thousands of tiny calls.
    threads.use(openmp=False, wake=True)
    return {}


def _call(request: dict[str, Any], arenas: Arenas) -> dict[str, Any]:
    """Call once. Copy results to `into` if their form allows; with `hold`, keep the result objects for a later dump."""
    way = request.get("way", ways.HERE)
    operands = _operands(request, arenas, apart=way != ways.ONE_STORAGE)
    function = _FUNCTIONS[request["name"]]
    if way != ways.UNPREPARED:
        function = _prepared(request["name"], operands[: len(request["arguments"])])
    started = time.perf_counter_ns()
    returned = ways.called(way, lambda: function(*operands))
    _back(request, arenas)
    elapsed_ns = time.perf_counter_ns() - started
    results = ways.listed(returned)
    if request.get("hold"):
        _HELD[request["hold"]] = results
    return {"results": _taken(results, operands, request, arenas), "ns": elapsed_ns}


def _at_once(request: dict[str, Any], arenas: Arenas) -> dict[str, Any]:
    """Run two queues of calls, each in a separate thread, at the same time."""
    queues = [
        [ways.Operands(arguments=_there(c["arguments"], arenas), outputs=_there(c["outputs"], arenas)) for c in queue]
        for queue in request["queues"]
    ]
    function = _FUNCTIONS[request["name"]]
    for operands in (one for queue in queues for one in queue):
        _prepared(request["name"], operands.arguments)
    made = ways.at_once(function, queues, request["passes"])
    found = []
    for calls, results in zip(request["queues"], made, strict=True):
        for call in calls:
            _back(call, arenas)
        found.append([_taken(m.results, m.operands, c, arenas) for m, c in zip(results, calls, strict=True)])
    return {"results": found}


def _threads(request: dict[str, Any], _: Arenas) -> dict[str, Any]:
    ways.use_threads(request["count"], served=request["served"])
    ways.other_work()
    return {}


def _operands(request: Mapping[str, Any], arenas: Arenas, *, apart: bool = True) -> list[Any]:
    """Return arguments and outputs. `apart`: with separate storage, otherwise as views of one storage."""
    values = [*request["arguments"], *request["outputs"]]
    if apart or _MIRRORS:
        return [*_there(request["arguments"], arenas), *_there(request["outputs"], arenas)]
    return [received(v, lambda ref: ways.in_one_storage(ref, arenas)) for v in values]


def _taken(
    results: Sequence[Any], operands: Sequence[Any], request: Mapping[str, Any], arenas: Arenas
) -> list[dict[str, Any]]:
    """Copy a call's results to the parent's memory; return their forms."""
    _copy(results, request["into"], arenas)
    return [_form(r, operands) for r in results]


def _loop(request: dict[str, Any], arenas: Arenas) -> dict[str, Any]:
    """Call many times on the same operands. Copy the outputs of the first calls to `into`, as many as fit."""
    arguments, outputs = _there(request["arguments"], arenas), _there(request["outputs"], arenas)
    function = _prepared(request["name"], arguments)
    kept = [arenas.tensor(place) for place in request["into"]]
    for call in range(request["times"]):
        for output in outputs if call < len(kept[0]) else ():
            if output is not None:
                output.fill_(math.nan if output.is_floating_point() else -1)
        returned = function(*arguments, *outputs)
        if call < len(kept[0]):
            for place, result in zip(kept, ways.listed(returned), strict=True):
                place[call].copy_(result)
    _back(request, arenas)
    gc.collect()
    return {}


def _prepared(name: str, arguments: Sequence[Any]) -> Callable[..., Any]:
    """Prepare the weights of the candidate's next call, even if that does not pay; return the candidate."""
    function = _FUNCTIONS[name]
    reader = reader_of(function)
    if reader is not None:
        reader.prepare(arguments)
    return function


def _dump(request: dict[str, Any], arenas: Arenas) -> dict[str, Any]:
    """Copy held results again, and release them."""
    _copy(_HELD.pop(request["hold"]), request["into"], arenas)
    return {}


def _overwrite(request: dict[str, Any], arenas: Arenas) -> dict[str, Any]:
    """Fill each held result with its number, as a caller that owns it may; copy them, and release them."""
    for number, result in enumerate(_HELD[request["hold"]], 1):
        if isinstance(result, torch.Tensor):
            result.fill_(number)
    return _dump(request, arenas)


def _there(values: Sequence[Any], arenas: Arenas) -> list[Any]:
    """Return the operands on the candidate's device."""
    if _MIRRORS:
        return _MIRRORS[""].push(values, arenas)
    return [received(v, arenas.tensor) for v in values]


def _back(request: Mapping[str, Any], arenas: Arenas) -> None:
    """Wait for enqueued work; copy its results to the parent's memory."""
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
    """Return the form of a result. `is_argument`: position of the passed tensor that starts at the same address."""
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


def _state(_: dict[str, Any], __: Arenas) -> dict[str, Any]:
    """Return the process-wide state. The first request comes before a candidate is loaded."""
    if not _STATES:
        _STATES[""] = State()
    return dict(_STATES[""].now())
