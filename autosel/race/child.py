"""The race worker's side: requests in, times out. `Worker("autosel.race.child:serve")` starts it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autosel.fingerprint.probe import read_rate
from autosel.race.bench import Bench
from autosel.race.contest import Entrant
from autosel.values import Workload, from_json
from autosel.workers.arena import Arenas

PROBE_S = 0.02

_BENCH = Bench()


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
    if request["resident"]:
        _BENCH.refresh(_resolve(request["resident"], arenas))
    calls, samples = int(request["calls"]), int(request["samples"])
    times, disturbed = _BENCH.pair(request["order"], calls, samples, bool(request["wake"]))
    for name, places in request["outputs"].items():
        for place, tensor in zip(places, _BENCH.outputs(name), strict=True):
            arenas.tensor(place).copy_(tensor)
    return {"ns": times, "disturbed": disturbed}
