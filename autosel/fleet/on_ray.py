"""Run workers on a Ray cluster: one actor per GPU, or one per host for its CPU. Each runs `pipeline.tune` in a child
process.

The child is the daemon's (`daemon.tuner`). It ends with its actor, and its decisions are in the ledger as soon as they
are made. Messages are JSON. A Ray cluster runs any code that its users send: use only a cluster that you trust.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from autosel import devices, extras, settings
from autosel.errors import AutoselError, UsageError
from autosel.fleet.spread import Lost, Spread, SpreadOutcome, error_of
from autosel.ledger import containment
from autosel.ledger.host import here
from autosel.ledger.schema import HEAD
from autosel.ledger.store import Ledger
from autosel.tuning.job import Rejection, Report, Request, TuneListener
from autosel.values import Decision, Fingerprint, from_json
from autosel.version import __version__

log = logging.getLogger(__name__)

ANSWER_S = 30.0  # an actor without a message for so long is lost; starting one takes seconds
START_S = 120.0
CONNECT_S = 5.0
STORE_BYTES = 80 << 20  # Ray's smallest object store, because only small messages travel
LOOPBACK = "127.0.0.1"  # Ray has no password, so a local cluster listens on this machine only


# --- on the worker's side ----------------------------------------------------------------------------------------


class RayActor:
    """Run in the actor: start the child, and keep its messages until they are fetched."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._child: subprocess.Popen[str] | None = None
        self._one = threading.Lock()

    def about(self, device: str) -> str:
        """Return the host's name, the device, and the ledger that the actor would write to."""
        ledger, kind = ledger_name(), devices.named(device).identified().hw_id
        unit = (settings.visible_gpus() or "") if not devices.on_host(device) else ""
        found = {"version": __version__, "schema": HEAD, "ledger": ledger}
        place = {"name": platform.node(), "device": f"{containment.machine()} {device} {unit}".strip(), "kind": kind}
        return json.dumps({**found, **place, "pid": os.getpid()})

    def run(self, task: str) -> int:
        """Tune a part and return the child's exit code."""
        with self._one:
            child = self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", "autosel.daemon.tuner"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
                env=settings.passed_to_children(),
            )
        assert child.stdin is not None and child.stdout is not None
        with child:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(task + "\n")
                child.stdin.flush()
            for line in child.stdout:
                self._lines.append(line)
            return child.wait()

    def news(self, after: int) -> list[str]:
        return self._lines[after:]

    def stop(self) -> None:
        with self._one:
            if self._child is not None and self._child.stdin is not None:
                with contextlib.suppress(OSError, ValueError):
                    self._child.stdin.write("stop\n")
                    self._child.stdin.flush()


def ledger_name() -> str:
    """Return the name of this process's ledger: a file of this host, or a database of a server, without the user."""
    from autosel.ledger.engine import Database

    database = Database(settings.db_url())
    if database.path is not None:
        return f"{here(settings.home()).id}:{database.path}"
    return database.url.set(username=None, password=None).render_as_string()


# --- on ours -----------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class RayWorker:
    """Wrap an actor for `Spread`."""

    actor: Any
    node: str  # Ray's id of the host
    name: str
    kind: str
    device: str
    pid: int
    seen: int = 0
    under_way: Any = None

    def start(self, task: Mapping[str, Any]) -> None:
        self.under_way = self.actor.run.remote(json.dumps(task))

    def news(self) -> list[dict[str, Any]]:
        import ray

        try:
            ended, _ = ray.wait([self.under_way], timeout=0)
            code = ray.get(self.under_way) if ended else None
            lines = ray.get(self.actor.news.remote(self.seen), timeout=ANSWER_S)
        except ray.exceptions.RayError as error:
            with contextlib.suppress(Exception):
                ray.kill(self.actor)
            raise Lost(type(error).__name__) from error
        self.seen += len(lines)
        found = [json.loads(line) for line in lines]
        return found if code is None else [*found, {"event": "ended", "code": code}]

    def stop(self) -> None:
        self.actor.stop.remote()


def tune(request: Request, address: str, ledger: Ledger, listener: TuneListener) -> Report:
    """Run `pipeline.tune` on the workers of the cluster at `address`. `local`, or `local:N` for N workers, starts a
    cluster for this tune only.

    Raises AutoselError if Ray is missing, if no worker may write this ledger, or if nothing was decided.
    """
    if request.device not in devices.KINDS:
        raise UsageError(
            f"--ray and --device {request.device}", why="Ray gives each worker a GPU", todo="--device cuda"
        )
    started, count = time.monotonic(), _count(address)
    with cluster(address) as ray:
        listener.stage("workers", address, 0, 1)
        seats = _Seats(ray, request.device, count)
        workers = seats.take_all()
        told = _Told(request, ledger, listener, total=len(request.workloads) * len({w.kind for w in workers}))
        spread = Spread(request, workers, replace=seats.again, hear=told.hear)
        try:
            found = spread.run()
        except KeyboardInterrupt:
            time.sleep(1.0)  # children end when told to; the others end with their actors
            raise
    if found.failed and not found.decided:
        raise error_of(found.failed[0])
    for part in found.failed:
        log.warning("%d workloads stay undecided: %s", len(part.workloads), error_of(part).what)
    return told.report(found, time.monotonic() - started)


def _count(address: str) -> int:
    """Return the number of workers of a local cluster; 0 means one per device."""
    name, _, number = address.partition(":")
    if name != "local" or not number:
        return 0
    if not number.isdecimal() or not 1 <= int(number) <= 64:
        raise UsageError(f"--ray {address}", why="a number of workers from 1 to 64 is expected", todo="--ray local:2")
    return int(number)


@contextlib.contextmanager
def cluster(address: str) -> Iterator[Any]:
    """Connect to Ray; a local cluster ends with the tune. Raises AutoselError."""
    os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
    if find_spec("ray") is None:
        raise extras.missing("ray", f"--ray {address}")
    _refuse_silence(address)  # before its import, which takes seconds
    try:
        import ray
    except ImportError as error:
        raise AutoselError(
            "Ray cannot be imported", why=str(error), todo="pip check lists missing dependencies"
        ) from error
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    here = {"include_dashboard": False, "object_store_memory": STORE_BYTES, "_node_ip_address": LOOPBACK}
    own: dict[str, Any] = here if address.startswith("local") else {}
    with _stdout_is_ours():
        try:
            ray.init(address="local" if own else address, namespace="autosel", **quiet, **own)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise AutoselError(
                f"no Ray cluster answers at {address}", why=f"{error}"[:200], todo="ray status; or --ray local"
            ) from error
        try:
            yield ray
        finally:
            ray.shutdown()


def _refuse_silence(address: str) -> None:
    """Raise AutoselError if nothing listens at the address, because Ray itself would keep trying for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host in ("", "local") or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise AutoselError(
            f"no Ray cluster answers at {address}", why=str(error), todo="ray status says where it is; or --ray local"
        ) from error


@contextlib.contextmanager
def _stdout_is_ours() -> Iterator[None]:
    """Send Ray's output about its workers to stderr: stdout is reserved for the one document of --json."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


class _Seats:
    """Manage the actors of the cluster, each bound to its host."""

    def __init__(self, ray: Any, device: str, count: int) -> None:
        self.ray, self.device, self.count = ray, device, count
        self._made = 0
        self._refused: list[str] = []

    def take_all(self) -> list[RayWorker]:
        """Start a worker on every seat. Raises AutoselError with the reasons if none can be used."""
        asked = [node for node in self.ray.nodes() if node["Alive"] for _ in range(self._on(node))]
        made = [(self._actor(node["NodeID"]), node["NodeID"]) for node in asked]
        found = [w for actor, node in made if (w := self._worker(actor, node)) is not None]
        if not found:
            what = "no worker can take a part of this tune"
            raise AutoselError(
                what, why="; ".join(dict.fromkeys(self._refused)) or f"no {self.device} is in the cluster"
            )
        for reason in dict.fromkeys(self._refused):
            log.warning("%s", reason)
        return found

    def _on(self, node: Mapping[str, Any]) -> int:
        if devices.accelerated(self.device):
            return int(node["Resources"].get("GPU", 0))
        return self.count or 1

    def _actor(self, node: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        own = {"num_gpus": 1} if devices.accelerated(self.device) else {}
        place = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        kind = self.ray.remote(num_cpus=0, max_restarts=0, max_concurrency=4, scheduling_strategy=place, **own)(
            RayActor
        )
        return kind.remote()

    def _worker(self, actor: Any, node: str) -> RayWorker | None:
        """Start a worker. Return None if the actor does not start, or uses another autosel or ledger."""
        try:
            about = json.loads(self.ray.get(actor.about.remote(self.device), timeout=START_S))
        except Exception as error:  # a missing dependency on its host can raise any exception
            self._refused.append(f"a worker did not start: {error}"[:300])
            return None
        ours = (__version__, HEAD, ledger_name())
        if (about["version"], about["schema"], about["ledger"]) != ours:
            self._refused.append(
                f"{about['name']} has another autosel, or writes to another ledger ({about['ledger']})"
            )
            self.ray.kill(actor)
            return None
        self._made += 1
        name = f"{about['name']} #{self._made}"
        place = {"kind": about["kind"], "device": about["device"], "pid": about["pid"]}
        return RayWorker(actor=actor, node=node, name=name, **place)

    def again(self, lost: Any) -> RayWorker | None:
        """Replace a lost worker on its host, if the host still exists."""
        if not any(node["Alive"] and node["NodeID"] == lost.node for node in self.ray.nodes()):
            return None
        return self._worker(self._actor(lost.node), lost.node)


@dataclass(slots=True)
class _Told:
    """Pass the workers' messages to the listener, and collect the report."""

    request: Request
    ledger: Ledger
    listener: TuneListener
    total: int
    said: list[tuple[Decision, bool]] = field(default_factory=list)  # (report line, was it settled before)
    rejected: list[Rejection] = field(default_factory=list)

    def hear(self, worker: Any, event: dict[str, Any]) -> None:
        if event["event"] == "stage":
            detail = " ".join(str(event[n]) for n in ("name", "detail") if event[n])
            self.listener.stage("tuning", f"{worker.name}: {detail}", len(self.said), self.total)
        elif event["event"] == "decided":
            made = self.ledger.decision(event["id"])
            self.said.append((made, event["before"]))
            self.listener.decided(made, settled_before=event["before"])
        elif event["event"] == "rejected":
            self._reject(event)
        elif event["event"] == "lost":
            log.warning("%s was lost (%s): another takes its part", worker.name, event["why"])

    def _reject(self, event: Mapping[str, Any]) -> None:
        known = {n.workload.key: n.workload for n in self.request.workloads}
        if event["workload"] in known:
            told = {n: event[n] for n in ("candidate", "stage", "reason", "quarantine")}
            made = Rejection(workload=known[event["workload"]], **told)
            if made not in self.rejected:
                self.rejected.append(made)
                self.listener.rejected(made)

    def report(self, outcome: SpreadOutcome, seconds: float) -> Report:
        named = {n.workload.key: n for n in self.request.workloads}
        return Report(
            fingerprint=self._fingerprint(outcome),
            decisions=tuple(d for d, _ in self.said),
            measured=sum(not settled for _, settled in self.said),
            rejected=tuple(self.rejected),
            undecided=tuple(named[key] for key in dict.fromkeys(outcome.undecided) if key in named),
            seconds=seconds,
            labels={key: n.label for key, n in named.items()},
        )

    def _fingerprint(self, outcome: SpreadOutcome) -> Fingerprint:
        """Return the fingerprint of the first worker that finished, else of the first decision. Raises AutoselError."""
        if outcome.fingerprint:
            found: Fingerprint = from_json(Fingerprint, outcome.fingerprint)
            return found
        measured = (self.ledger.evidence(d.id).fingerprint for d, _ in self.said)
        first = next((fp for fp in measured if fp is not None), None)
        if first is None:
            raise AutoselError("no worker came to an end within its time", todo="give it a longer --budget")
        return first
