"""The race worker's side: requests in, times out. `Worker("autosel.race.child:serve")` starts it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from random import Random
from typing import Any

import torch

from autosel import devices
from autosel.ops.stored import received
from autosel.race.bench import Bench
from autosel.race.contest import Entrant
from autosel.race.realtime import prefer
from autosel.values import Workload, from_json, to_json
from autosel.workers.arena import Arenas

_BENCHES: dict[str, Bench] = {}  # the process's only one, under ""
_FORETOLD = cycle((False, True))  # the checked call is unexpected, or the last one timed


def serve(request: dict[str, Any], arenas: Arenas) -> dict[str, Any]:
    """Answer one request: `do` is load, prepare, warm, pair, deployed, probe or release."""
    bench = _bench(request)
    match request["do"]:
        case "load":
            bench.load(from_json(Entrant, request["entrant"]))
        case "prepare":
            torch.set_grad_enabled(False)
            inputs = _resolve(request["inputs"], arenas)
            copies, slots = int(request["copies"]), int(request["slots"])
            bench.prepare(from_json(Workload, request["workload"]), inputs, request["arms"], copies, slots)
            return {"prepared": to_json(bench.prepared)}
        case "warm":
            return {"ns": bench.warm(int(request["limit_ns"]))}
        case "pair":
            return _pair(bench, request, arenas)
        case "deployed":
            return {"ns": [bench.deployed(situation, order) for situation, order in request["turns"]]}
        case "probe":
            return {"bytes_per_s": bench.read_bytes_per_s()}
        case "release":
            bench.release()
        case other:
            raise ValueError(f"no request {other!r}")
    return {}


def _bench(request: Mapping[str, Any]) -> Bench:
    """Return the instrument: made for the device of the first request, which names it and the process that asks."""
    if not _BENCHES:
        owner, realtime = int(request.get("owner", 0)), bool(request.get("realtime"))
        if realtime:
            prefer()
        _BENCHES[""] = Bench(request.get("device") or devices.HOST, owner=owner, realtime=realtime)
    return _BENCHES[""]


def _resolve(inputs: Mapping[str, Any], arenas: Arenas) -> dict[str, Any]:
    return {name: received(value, arenas.tensor) for name, value in inputs.items()}


def _pair(bench: Bench, request: dict[str, Any], arenas: Arenas) -> dict[str, Any]:
    resident, calls = _resolve(request["resident"], arenas), int(request["calls"])
    foretold = not request["outputs"] or next(_FORETOLD)
    if not foretold:
        for name, places in request["outputs"].items():
            bench.surprise(name, calls, resident)
            _copy(bench.outputs(name), places, arenas)
    if resident:
        bench.refresh(resident)
    before = bench.again
    look = KeptResults(places=request["kept"], arenas=arenas, rng=Random(request["draw"])) if request["kept"] else None
    times, disturbed = bench.pair(request["order"], calls, int(request["samples"]), bool(request["wake"]), look)
    if foretold:
        for name, places in request["outputs"].items():
            _copy(bench.outputs(name), places, arenas)
    taken = {"ns": times, "disturbed": disturbed, "again": bench.again - before, "watched": bench.watched}
    return taken | {"kept": look.count if look is not None else {}}


@dataclass(slots=True, kw_only=True)
class KeptResults:
    """Copies the results of drawn calls to memory where the parent compares them.

    `places`: by arm and number of a sample, one set for each drawn call; `count`: number of copied calls by arm.
    """

    places: Mapping[str, Sequence[Sequence[Any]]]
    arenas: Arenas
    rng: Random
    count: dict[str, int] = field(default_factory=dict)

    def wants(self, arm: str) -> bool:
        return arm in self.places

    def take(self, arm: str, number: int, results: Sequence[tuple[torch.Tensor, ...]]) -> None:
        places = self.places[arm][number]
        for result, place in zip(results, places, strict=True):
            _copy(result, place, self.arenas)
        self.count[arm] = max(self.count.get(arm, 0), (number + 1) * len(places))


def _copy(results: Sequence[torch.Tensor], places: Sequence[Mapping[str, Any]], arenas: Arenas) -> None:
    """Copy results to the memory where they are checked."""
    for place, tensor in zip(places, results, strict=True):
        arenas.tensor(place).copy_(tensor)
