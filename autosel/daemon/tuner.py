"""Run a tune, or an examination that needs a tensor library, in a child process. `jobs` starts it, or a worker of a
fleet.

    stdin   one JSON line with the task, then `pause`, `resume`, `stop`; its end stops the child too
    stdout  one JSON line per event

Decisions are recorded through the daemon, as in any other process: acknowledged ones survive the child.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, TextIO

from autosel.errors import AutoselError, BuildError, UsageError
from autosel.ledger.faults import plain
from autosel.race.judge import CLONE, duels
from autosel.values import WHOLE_STEP, Accepted, Decision, Fingerprint, Workload, from_json, to_json
from autosel.workers.environment import torch_fault

if TYPE_CHECKING:  # modules that import torch are imported late, so that a failure is reported like any other error
    from autosel.fingerprint import Drift
    from autosel.ledger.store import Ledger
    from autosel.race.run import Tick
    from autosel.tuning.job import Rejection

log = logging.getLogger(__name__)

SAY_EVERY_S = 0.25
STOP_S = 5.0  # time from the request to stop until the process is gone, in any state


def main() -> int:
    gc.set_threshold(100_000)  # as in cli.main
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background parent may have made the child ignore it
    voice = Voice(_own_stdout())
    task = json.loads(sys.stdin.readline())
    orders = Orders()
    threading.Thread(target=orders.listen, args=(sys.stdin,), name="autosel-control", daemon=True).start()
    try:
        DUTIES[task["do"]](task, voice, orders)
    except KeyboardInterrupt:
        voice.say("stopped")
        os._exit(130)  # at once: a thread may be waiting for a proof; workers end with this process
    except Exception as error:
        told = error if isinstance(error, AutoselError) else torch_fault()
        if told is None:
            raise
        voice.say("error", kind=type(told).__name__, what=told.what, why=told.why, todo=told.todo)
        return 1
    return 0


def _own_stdout() -> TextIO:
    """Return the line to the daemon; libraries print to stderr from now on."""
    kept = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(kept, "w", encoding="utf-8")


class Voice:
    def __init__(self, out: TextIO) -> None:
        self._out, self._one = out, threading.Lock()

    def say(self, event: str, **values: Any) -> None:
        with self._one:
            self._out.write(json.dumps({"event": event, **plain(to_json(values))}) + "\n")
            self._out.flush()


class Orders:
    """Follow the daemon's orders to the running task."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()

    def listen(self, lines: TextIO) -> None:
        for line in lines:
            if line.strip() == "pause":
                self.open.clear()
            elif line.strip() == "resume":
                self.open.set()
            else:
                break
        self.open.set()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(STOP_S)
        os._exit(130)


class Reporter:
    """Report progress to the daemon. A pause starts between two pairs of a race or two proofs."""

    def __init__(self, voice: Voice, orders: Orders) -> None:
        self.voice, self.orders = voice, orders
        self._said: dict[str, float] = {}

    def stage(self, name: str, detail: str, done: int, total: int) -> None:
        self.orders.open.wait()
        now = time.monotonic()
        if now - self._said.get(name, 0.0) < SAY_EVERY_S and done < total:
            return
        self._said[name] = now
        self.voice.say("stage", name=name, detail=detail, done=done, total=total)

    def pair(self, tick: Tick) -> None:
        """Report how far ahead of the baseline each arm is in the running session: the median of its pairs, and their
        middle 80 %. The decision depends instead on the judge's count of pairs over three sessions."""
        now, key = time.monotonic(), tick.contest.workload.key
        if now - self._said.get(key, 0.0) < SAY_EVERY_S or not tick.pairs:
            return
        self._said[key] = now
        s = tick.session
        for arm in s.arms[1:]:
            ahead = sorted(theirs / own for own, theirs in duels(s, arm, s.arms[0]))
            if ahead and arm != CLONE:
                low, high = ahead[len(ahead) // 10], ahead[-1 - len(ahead) // 10]
                told = {"workload": key, "candidate": arm, "pairs": len(ahead), "stage": tick.stage}
                self.voice.say("pairs", median=ahead[len(ahead) // 2], lo=low, hi=high, **told)

    def decided(self, decision: Decision, settled_before: bool) -> None:
        outcome = decision.verdict.outcome if decision.verdict else ""
        key, bucket = decision.workload.key, decision.bucket
        self.voice.say("decided", id=decision.id, workload=key, bucket=bucket, outcome=outcome, before=settled_before)

    def rejected(self, rejection: Rejection) -> None:
        told = {"workload": rejection.workload.key, "candidate": rejection.candidate}
        why = {"stage": rejection.stage, "reason": rejection.reason, "quarantine": rejection.quarantine}
        self.voice.say("rejected", **why, **told)


def tune(task: dict[str, Any], voice: Voice, orders: Orders) -> None:
    from autosel import ops
    from autosel.ledger.store import open_ledger
    from autosel.models.workloads import Named
    from autosel.pipeline import Request
    from autosel.pipeline import tune_at as work

    workloads = [from_json(Workload, w) for w in task["workloads"]]
    for w in workloads:
        ops.find(w.op)
    named = tuple(Named(workload=w, label=w.op, calls_per_step=0) for w in workloads)
    asked = {n: task[n] for n in ("effort", "force", "seed", "device", "budget_s") if n in task}
    request = Request(workloads=named, **asked)
    with open_ledger() as ledger:
        found = work(request, (int(task.get("threads", 0)),), ledger, Reporter(voice, orders))
    undecided = [n.workload.key for n in found.undecided]
    voice.say("done", undecided=undecided, seconds=found.seconds, fingerprint=found.fingerprint)


def prove(task: dict[str, Any], voice: Voice, orders: Orders) -> None:
    """Prove decisions: of other hosts, so that they may serve here (adopt); stale winners again, so that they may serve
    until they are raced (renew); or the rows of ops' arrays for which a tune had no time (complete)."""
    from autosel import fingerprint
    from autosel.ledger.store import open_ledger
    from autosel.tuning import adopt, complete, renew

    duty, device = task["do"], task["device"]
    fp, reporter = fingerprint.take(device), Reporter(voice, orders)
    with open_ledger() as ledger:
        if duty == "adopt":
            for a in adopt.adopt(ledger, fp, reporter, device=device):
                voice.say("adopted", id=a.decision.id, workload=a.decision.workload.key, reason=a.reason)
        elif duty == "complete":
            for c in complete.complete(ledger, fp, reporter, device=device):
                key = c.decision.workload.key
                voice.say("completed", id=c.decision.id, workload=key, rows=c.rows, reason=c.reason)
        else:
            with ledger.lock(fp.hw_id, fingerprint.unit(device)):
                for r in renew.renew(ledger, fp, reporter, device=device):
                    voice.say("renewed", id=r.stale.id, workload=r.stale.workload.key, reason=r.reason)


def examine(task: dict[str, Any], voice: Voice, orders: Orders) -> None:
    """Examine each device, its software and its decisions. With `rates`, also check the device's rates; if they have
    moved, measure them again, and report decisions whose knobs differ now.

    On a device with other users, rates depend on these users, so a change has no consequences.
    """
    from autosel import fingerprint
    from autosel.ledger.store import open_ledger

    with open_ledger() as ledger:
        for device in fingerprint.present():
            try:
                voice.say("facts", **_facts(ledger, device, rates=bool(task.get("rates"))))
            except UsageError as error:  # a GPU without the packages that measure it, or with an ambiguous identity
                log.warning("%s is skipped: %s", device, error.what)


def _facts(ledger: Ledger, device: str, *, rates: bool) -> dict[str, Any]:
    from autosel import fingerprint, ops
    from autosel.candidates.validity import staleness
    from autosel.ledger.key import at_threads, current_mode, threads_of
    from autosel.tuning.renew import outdated

    fp, mode = fingerprint.take(device), current_mode()
    drift = _drift(fp, device) if rates else None
    drifted = drift is not None and drift.moved and not drift.shared
    if drifted:
        fp = fingerprint.take(device, refresh=True)

    def at(fp: Fingerprint, d: Decision) -> Fingerprint:
        return fingerprint.at(fp, threads_of(d.mode))

    stale: dict[str, str] = {}
    lost: list[int] = []  # winners among these that may serve after a new proof
    other: dict[str, str] = {}
    moved: dict[str, int] = {}
    for served in ledger.serving():
        d = served.decision
        if d.hw_id != fp.hw_id or d.mode != at_threads(mode, threads_of(d.mode)):
            continue
        why = staleness(d)
        if why:
            stale[str(d.id)] = why
            if outdated([d], fp.hw_id, mode):
                lost.append(d.id)
        elif d.stale:
            other[str(d.id)] = f"proven again, not yet raced: {d.stale}"
        elif drift is not None and drifted and d.op != WHOLE_STEP and has_other_knobs(d, at(fp, d)):
            other[str(d.id)] = f"the device drifted ({drift.reason}): {d.arm.candidate} has other knobs now"
        if d.op != WHOLE_STEP:
            moved[str(d.id)] = ops.find(d.op).bytes_moved(d.workload)
    who = {"device": device, "unit": fingerprint.unit(device), "hw_id": fp.hw_id, "env_id": fp.env_id, "mode": mode}
    return {**who, "fingerprint": fp, "stale": stale, "lost": lost, "other_knobs": other, "moved": moved}


def _drift(fp: Fingerprint, device: str) -> Drift | None:
    """Return None if the rates cannot be checked here: no compiler for a CPU's probes, no cupy for a GPU's, no memory
    left."""
    from autosel import fingerprint

    try:
        return fingerprint.drifted(fp, device)
    except (BuildError, UsageError) as error:
        log.info("%s: its rates are not checked: %s", device, error)
        return None


def has_other_knobs(d: Decision, fp: Fingerprint) -> bool:
    """Return True if the decision's candidate would use other knobs with these rates. It is then raced again; until
    then the proven kernel serves."""
    from autosel.candidates import registry
    from autosel.candidates.base import support_of
    from autosel.tuning.shortlist import way_of

    candidate = registry.find(d.op, d.arm.candidate)
    support = support_of(candidate, d.workload, fp)
    return not isinstance(support, Accepted) or way_of(candidate, d.workload, fp).arm.knobs != d.arm.knobs


DUTIES = {"tune": tune, "examine": examine, "adopt": prove, "renew": prove, "complete": prove}

if __name__ == "__main__":
    sys.exit(main())
