"""The race worker's side: requests in, times out. `Worker("autosel.race.child:serve")` starts it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autosel.fingerprint.probe import read_rate
from autosel.race.bench import Bench, configure
from autosel.values import NativeRecipe, PythonRecipe, Workload, from_json
from autosel.workers.arena import Arenas

PROBE_S = 0.02

_BENCH = Bench()
_THREADS = 1


def serve(request: dict[str, Any], arenas: Arenas) -> dict[str, Any]:
    """Answer one request; `do` names a function below."""
    handlers: dict[str, Callable[[dict[str, Any], Arenas], dict[str, Any]]] = {
        "configure": _configure,
        "load": _load,
        "prepare": _prepare,
        "warm": _warm,
        "pair": _pair,
        "probe": _probe,
        "release": _release,
    }
    return handlers[request["do"]](request, arenas)


def _configure(request: dict[str, Any], arenas: Arenas) -> dict[str, Any]:
    global _THREADS
    _THREADS = int(request["threads"])
    configure(_THREADS)
    return {}


def _load(request: dict[str, Any], arenas: Arenas) -> dict[str, Any]:
    recipe = from_json(NativeRecipe if request["recipe"]["kind"] == "native" else PythonRecipe, request["recipe"])
    _BENCH.load(
        request["name"], request["op"], recipe, request["digest"], request["knobs"], bool(request["writes_out"])
    )
    return {}


def _prepare(request: dict[str, Any], arenas: Arenas) -> dict[str, Any]:
    w = from_json(Workload, request["workload"])
    inputs = _resolve(request["inputs"], arenas)
    _BENCH.prepare(w, inputs, request["arms"], int(request["copies"]), request["clone"])
    return {}


def _resolve(inputs: Mapping[str, Any], arenas: Arenas) -> dict[str, Any]:
    return {n: arenas.tensor(v) if isinstance(v, dict) else v for n, v in inputs.items()}


def _warm(request: dict[str, Any], arenas: Arenas) -> dict[str, Any]:
    return {"ns": _BENCH.warm(int(request["limit_ns"]))}


def _pair(request: dict[str, Any], arenas: Arenas) -> dict[str, Any]:
    if request["resident"]:
        _BENCH.refresh(_resolve(request["resident"], arenas))
    times, disturbed = _BENCH.pair(request["order"], int(request["calls"]), int(request["samples"]))
    for name, places in request["outputs"].items():
        for place, tensor in zip(places, _BENCH.outputs(name), strict=True):
            arenas.tensor(place).copy_(tensor)
    return {"ns": times, "disturbed": disturbed}


def _probe(request: dict[str, Any], arenas: Arenas) -> dict[str, Any]:
    return {"bytes_per_s": read_rate(_THREADS, PROBE_S)}


def _release(request: dict[str, Any], arenas: Arenas) -> dict[str, Any]:
    _BENCH.release()
    return {}
