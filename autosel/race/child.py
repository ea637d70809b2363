"""The race worker's side: requests in, times out. `Worker("autosel.race.child:serve")` starts it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import torch

from autosel.ops.stored import received
from autosel.race.bench import Bench
from autosel.race.contest import Entrant
from autosel.values import Workload, from_json, to_json
from autosel.workers.arena import Arenas

_BENCHES: dict[str, Bench] = {}  # the one of this process, under ""
_FORETOLD = cycle((False, True))  # what is checked: a call that nothing foretold, or the last one timed


def serve(request: dict[str, Any], arenas: Arenas) -> dict[str, Any]:
    """Answer one request: `do` is load, prepare, warm, pair, probe or release."""
    bench = _bench(request)
    match request["do"]:
        case "load":
            bench.load(from_json(Entrant, request["entrant"]))
        case "prepare":
            torch.set_grad_enabled(False)
            inputs = _resolve(request["inputs"], arenas)
            bench.prepare(from_json(Workload, request["workload"]), inputs, request["arms"], int(request["copies"]))
            return {"prepared": to_json(bench.prepared)}
        case "warm":
            return {"ns": bench.warm(int(request["limit_ns"]))}
        case "pair":
            return _pair(bench, request, arenas)
        case "probe":
            return {"bytes_per_s": bench.read_bytes_per_s()}
        case "release":
            bench.release()
        case other:
            raise ValueError(f"no request {other!r}")
    return {}


def _bench(request: Mapping[str, Any]) -> Bench:
    """The instrument: made for the device of the first request, which names it and the process that asks."""
    if not _BENCHES:
        owner, realtime = int(request.get("owner", 0)), bool(request.get("realtime"))
        _BENCHES[""] = Bench(request.get("device") or "cpu", owner=owner, realtime=realtime)
    return _BENCHES[""]


def _resolve(inputs: Mapping[str, Any], arenas: Arenas) -> dict[str, Any]:
    return {name: received(value, arenas.tensor) for name, value in inputs.items()}


def _pair(bench: Bench, request: dict[str, Any], arenas: Arenas) -> dict[str, Any]:
    resident, calls = _resolve(request["resident"], arenas), int(request["calls"])
    foretold = not request["outputs"] or next(_FORETOLD)
    if not foretold:
        for name, places in request["outputs"].items():
            bench.surprise(name, calls, resident)
            _put(bench, places, name, arenas)
    if resident:
        bench.refresh(resident)
    before = bench.again
    times, disturbed = bench.pair(request["order"], calls, int(request["samples"]), bool(request["wake"]))
    if foretold:
        for name, places in request["outputs"].items():
            _put(bench, places, name, arenas)
    return {"ns": times, "disturbed": disturbed, "again": bench.again - before, "watched": bench.watched}


def _put(bench: Bench, places: Sequence[Mapping[str, Any]], name: str, arenas: Arenas) -> None:
    """An arm's outputs, to where they are checked."""
    for place, tensor in zip(places, bench.outputs(name), strict=True):
        arenas.tensor(place).copy_(tensor)
