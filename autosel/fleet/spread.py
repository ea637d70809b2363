"""Spread a tune over workers: each gets one part of the workloads at a time, and the part of a lost worker goes to
another. This module does not use Ray.

A decision holds for the kind of device that it was measured on, so each kind gets all workloads, and the devices of a
kind share them. Workers of one device take turns, because simultaneous measurements would disturb each other. Decisions
of a lost worker are in the ledger and are not measured again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

from autosel.errors import AutoselError, EnvironmentFault
from autosel.models.workloads import Named
from autosel.tuning.job import Request
from autosel.values import to_json

PARTS_A_DEVICE = 3  # a part costs some starts of Python and torch; losing one costs all its undecided workloads
ATTEMPTS = 3  # attempts for a part
LOOK_S = 0.25
REST_S = 3.0  # pause before a worker retries a busy device: the child of a killed worker releases it within seconds
RESTS = 10


class Lost(Exception):
    """A worker is gone."""


class FleetWorker(Protocol):
    """Tune one part at a time. `kind` is its device's hw_id, `device` the device, `name` a label for people."""

    name: str
    kind: str
    device: str

    def start(self, task: Mapping[str, Any]) -> None: ...

    def news(self) -> list[dict[str, Any]]:
        """Return the messages since the last call; a part ends with `{"event": "ended", "code": ...}`. Raises Lost."""
        ...

    def stop(self) -> None:
        """Ask the worker to end its part."""
        ...


@dataclass(slots=True, kw_only=True)
class FleetPart:
    """Hold workloads for one kind of device. `last` is the worker that had the part before."""

    kind: str
    workloads: tuple[Named, ...]
    attempts: int = 0
    rests: int = 0
    last: str = ""
    trouble: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class SpreadOutcome:
    """Hold the result: `decided` the reports of decisions, `undecided` keys of workloads, `failed` parts with the
    reason."""

    decided: dict[int, dict[str, Any]] = field(default_factory=dict)
    undecided: list[str] = field(default_factory=list)
    failed: list[FleetPart] = field(default_factory=list)
    fingerprint: Mapping[str, Any] = field(default_factory=dict)


def parts(workloads: Sequence[Named], workers: Sequence[FleetWorker]) -> list[FleetPart]:
    """Split workloads into parts. Workloads of one op stay together if possible, because they share builds."""
    found = []
    in_order = sorted(workloads, key=lambda n: n.workload.op)
    for kind in dict.fromkeys(w.kind for w in workers):
        devices = len({w.device for w in workers if w.kind == kind})
        count = min(len(in_order), devices * PARTS_A_DEVICE if devices > 1 else 1)
        cuts = [len(in_order) * n // count for n in range(count + 1)]
        found += [FleetPart(kind=kind, workloads=tuple(in_order[a:b])) for a, b in pairwise(cuts) if b > a]
    return found


class Spread:
    """Assign parts to workers. `replace` finds a substitute for a lost worker, or None; `hear` gets every message and
    its sender."""

    def __init__(
        self,
        request: Request,
        workers: Sequence[FleetWorker],
        *,
        replace: Callable[[FleetWorker], FleetWorker | None] = lambda _: None,
        hear: Callable[[FleetWorker, dict[str, Any]], None] = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
        rest: Callable[[float], None] = time.sleep,
    ) -> None:
        self.request, self._replace, self._hear = request, replace, hear
        self._clock, self._rest = clock, rest
        self._idle: list[FleetWorker] = list(workers)  # in order of waiting time
        self._resting: list[tuple[float, FleetWorker]] = []
        self._running: list[tuple[FleetWorker, FleetPart]] = []
        self._waiting = parts(request.workloads, workers)
        self._over_at = clock() + request.budget_s if request.budget_s else float("inf")
        self._done: set[tuple[str, str]] = set()  # (kind, workload) of each decision
        self.outcome = SpreadOutcome()

    def run(self) -> SpreadOutcome:
        """Run until every part has ended. KeyboardInterrupt ends running parts, keeps decisions and is re-raised."""
        try:
            while self._running or self._waiting:
                self._hand_out()
                for worker, part in list(self._running):
                    self._listen(worker, part)
                if self._clock() >= self._over_at:
                    self._give_up(self._waiting, {})
                elif not self._workers() and self._waiting:
                    self._give_up(self._waiting, {"what": "no worker is left"})
                if self._running or self._waiting:
                    self._rest(LOOK_S)
        except KeyboardInterrupt:
            self.stop()
            raise
        return self.outcome

    def stop(self) -> None:
        for worker, _ in self._running:
            worker.stop()

    def _workers(self) -> list[FleetWorker]:
        return [*self._idle, *(w for _, w in self._resting), *(w for w, _ in self._running)]

    def _hand_out(self) -> None:
        rested = [w for at_s, w in self._resting if at_s <= self._clock()]
        self._resting = [(at_s, w) for at_s, w in self._resting if at_s > self._clock()]
        self._idle += rested
        for worker in list(self._idle):
            part = self._part_for(worker)
            if part is not None:
                self._waiting.remove(part)
                self._idle.remove(worker)
                self._running.append((worker, part))
                part.last = worker.name
                worker.start(self._task(part))

    def _part_for(self, worker: FleetWorker) -> FleetPart | None:
        """Return the next part for a worker with a free device; a part that it had before only if no other worker can
        take it."""
        if any(other.device == worker.device for other, _ in self._running):
            return None
        others = any(w.kind == worker.kind for w in self._workers() if w is not worker)
        mine = [p for p in self._waiting if p.kind == worker.kind]
        return next((p for p in mine if p.last != worker.name or not others), None)

    def _task(self, part: FleetPart) -> dict[str, Any]:
        asked = self.request
        left = max(1.0, self._over_at - self._clock()) if asked.budget_s else 0.0
        return {
            "do": "tune",
            "workloads": [to_json(n.workload) for n in part.workloads],
            "effort": asked.effort,
            "device": asked.device,
            "budget_s": left,
            "seed": asked.seed,
            "force": asked.force and part.attempts == 0,  # keep the lost worker's new measurements
        }

    def _listen(self, worker: FleetWorker, part: FleetPart) -> None:
        try:
            said = worker.news()
        except Lost as error:
            self._running.remove((worker, part))
            self._hear(worker, {"event": "lost", "why": str(error)})
            another = self._replace(worker)
            if another is not None:
                self._idle.append(another)
            self._again(part, {"what": f"{worker.name} was lost", "why": str(error)})
            return
        for event in said:
            self._take(worker, part, event)

    def _take(self, worker: FleetWorker, part: FleetPart, event: dict[str, Any]) -> None:
        if event["event"] == "decided":
            if event["id"] in self.outcome.decided:
                return  # of a part that started earlier
            self.outcome.decided[event["id"]] = event
            self._done.add((part.kind, event["workload"]))
        elif event["event"] == "error":
            part.trouble = {n: str(event.get(n) or "") for n in ("kind", "what", "why", "todo")}
        elif event["event"] == "done":
            self.outcome.undecided += event["undecided"]
            self.outcome.fingerprint = self.outcome.fingerprint or event["fingerprint"]
        elif event["event"] == "ended":
            self._ended(worker, part, event["code"])
        self._hear(worker, event)

    def _ended(self, worker: FleetWorker, part: FleetPart, code: int) -> None:
        self._running.remove((worker, part))
        trouble, part.trouble = part.trouble, {}
        if code and trouble.get("kind") == "InUseError" and part.rests < RESTS:
            part.rests += 1
            self._resting.append((self._clock() + REST_S, worker))
            part.last = ""
            self._waiting.insert(0, part)
            return
        self._idle.append(worker)
        if code:
            self._again(part, trouble or {"what": f"the tune on {worker.name} ended with {code}"})

    def _again(self, part: FleetPart, trouble: dict[str, str]) -> None:
        part.attempts += 1
        alone = not any(w.kind == part.kind and w.name != part.last for w in self._workers())
        if part.attempts >= ATTEMPTS or (alone and trouble.get("kind")):  # the same part would be refused again
            self._give_up([part], trouble)
        else:
            self._waiting.insert(0, part)

    def _give_up(self, given: Sequence[FleetPart], trouble: dict[str, str]) -> None:
        """Give up a part. `trouble` is empty if its time ended, which is not a failure."""
        for part in list(given):
            if part in self._waiting:
                self._waiting.remove(part)
            left = [n.workload.key for n in part.workloads if (part.kind, n.workload.key) not in self._done]
            self.outcome.undecided += left
            if trouble and left:
                part.trouble = trouble
                self.outcome.failed.append(part)


def error_of(part: FleetPart) -> AutoselError:
    t = part.trouble
    made = AutoselError(t.get("what", ""), why=t.get("why", ""), todo=t.get("todo", ""))
    if t.get("kind") == EnvironmentFault.__name__:
        made.exit_code = EnvironmentFault.exit_code
    return made
