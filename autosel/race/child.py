"""The race worker's side: requests in, times out. `Worker("autosel.race.child:serve")` starts it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import torch

from autosel.fingerprint.probe import read_rate
from autosel.race.bench import Bench
from autosel.race.contest import Entrant
from autosel.values import Workload, from_json
from autosel.workers.arena import Arenas

PROBE_S = 0.02

_BENCH = Bench()
_FORETOLD = cycle((False, True))  # what is checked: a call that nothing foretold, or the last one timed


def serve(request: dict[str, Any], arenas: Arenas) -> dict[str, Any]:
    """Answer one request: `do` is load, prepare, warm, pair, probe or release."""
    match request["do"]:
        case "load":
            _BENCH.load(from_json(Entrant, request["entrant"]))
        case "prepare":
            torch.set_grad_enabled(False)
            inputs = _resolve(request["inputs"], arenas)
            _BENCH.prepare(from_json(Workload, request["workload"]), inputs, request["arms"], int(request["copies"]))
        case "warm":
            return {"ns": _BENCH.warm(int(request["limit_ns"]))}
        case "pair":
            return _pair(request, arenas)
        case "probe":
            return {"bytes_per_s": read_rate(torch.get_num_threads(), PROBE_S)}
        case "release":
            _BENCH.release()
        case other:
            raise ValueError(f"no request {other!r}")
    return {}


def _resolve(inputs: Mapping[str, Any], arenas: Arenas) -> dict[str, Any]:
    return {n: arenas.tensor(v) if isinstance(v, dict) else v for n, v in inputs.items()}


def _pair(request: dict[str, Any], arenas: Arenas) -> dict[str, Any]:
    resident, calls = _resolve(request["resident"], arenas), int(request["calls"])
    foretold = not request["outputs"] or next(_FORETOLD)
    if not foretold:
        for name, places in request["outputs"].items():
            _BENCH.surprise(name, calls, resident)
            _put(places, name, arenas)
    if resident:
        _BENCH.refresh(resident)
    times, disturbed = _BENCH.pair(request["order"], calls, int(request["samples"]), bool(request["wake"]))
    if foretold:
        for name, places in request["outputs"].items():
            _put(places, name, arenas)
    return {"ns": times, "disturbed": disturbed}


def _put(places: Sequence[Mapping[str, Any]], name: str, arenas: Arenas) -> None:
    """An arm's outputs, to where they are checked."""
    for place, tensor in zip(places, _BENCH.outputs(name), strict=True):
        arenas.tensor(place).copy_(tensor)
