"""Tune on two real workers of a local Ray cluster: one is killed during the tune; Ctrl-C ends all.

A cluster is some ten processes on two cores: run this file alone (`.ci/run` does), or give it time.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from autosel.ledger import open_ledger
from tests.cpu.daemons import ROOT, cli, environment
from tests.homes import furnish

pytestmark = [
    pytest.mark.fleet,
    # no importorskip: a file without collected tests would be an error when run alone
    pytest.mark.skipif(find_spec("ray") is None, reason="no Ray: install the extra `ray`"),
]
END_S = 400.0  # a tune that takes longer hangs
OPS = [word for op in ("rmsnorm", "rope", "add_rmsnorm", "swiglu") for word in ("--op", op)]
GONE_S = 60.0  # Ray gives its processes ten seconds to end by themselves

STORY = """
import json, os, signal, sys
from autosel.fleet import on_ray
from autosel.ledger import open_ledger
from autosel.models.workloads import Named
from autosel.pipeline import Request
from autosel.values import Workload, to_json

class Quiet:
    def stage(self, *_): pass
    def pair(self, *_): pass
    def decided(self, *_, **__): pass
    def rejected(self, *_): pass

killed, spoke = [], []
hear = on_ray._Told.hear

def hears(told, worker, event):
    hear(told, worker, event)
    spoke.append(worker.name)
    if event["event"] == "stage" and event["name"] == "parity" and not killed:
        killed.append(worker.name)
        os.kill(worker.pid, signal.SIGKILL)

on_ray._Told.hear = hears
ws = [Workload(op="rmsnorm", dims=(("M", 1), ("d", d)), dtype="bf16") for d in (512, 2048)]
named = tuple(Named(workload=w, label=w.op, calls_per_step=1) for w in ws)
with open_ledger() as ledger:
    found = on_ray.tune(Request(workloads=named, seed=1), "local:2", ledger, Quiet())
said = {"killed": killed, "spoke": list(dict.fromkeys(spoke)), "decisions": [d.id for d in found.decisions]}
said |= {"undecided": [n.workload.key for n in found.undecided], "hw_id": found.fingerprint.hw_id}
json.dump(said, sys.stdout)
"""


def test_the_part_of_a_killed_worker_is_tuned_by_the_other(tmp_path: Path) -> None:
    home = furnish(tmp_path / "home")
    done = subprocess.run(
        [sys.executable, "-c", STORY], env=environment(home), cwd=ROOT, capture_output=True, text=True, timeout=END_S
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    (killed,) = said["killed"]
    assert said["spoke"][0] == killed
    assert len(said["spoke"]) == 2
    with open_ledger(home=home, alone=True) as ledger:
        stored = {d.id: d for d in ledger.history()}
    # a workload that is too noisy to decide also counts as finished
    assert {stored[number].workload["d"] for number in said["decisions"]} == {512, 2048}
    assert {stored[number].hw_id for number in said["decisions"]} == {said["hw_id"]}
    assert said["undecided"] == [
        d.workload.key for d in stored.values() if d.verdict and d.verdict.outcome == "undecided"
    ]


# The unchanged command, except that after the first decision it blocks until its input ends.
HOLDS = """
import sys
from autosel.cli.main import main
from autosel.fleet import on_ray

hear = on_ray._Told.hear

def hears(told, worker, event):
    hear(told, worker, event)
    if event["event"] == "decided":
        sys.stdin.read()

on_ray._Told.hear = hears
main()
"""


@contextmanager
def tuning(home: Path, *words: str, held: bool = False) -> Iterator[subprocess.Popen[str]]:
    """Run `tune --ray local:2` in a separate process group, as a terminal does, and kill it if it hangs. `held`: it
    stops after its first decision."""
    start = ["-c", HOLDS] if held else ["-m", "autosel.cli.main"]
    child = subprocess.Popen(
        [sys.executable, "-P", *start, "tune", "--ray", "local:2", *words],
        env=environment(home),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    limit = threading.Timer(END_S, os.killpg, (child.pid, signal.SIGKILL))
    limit.start()
    try:
        yield child
    finally:
        limit.cancel()
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        assert child.stdin is not None and child.stdout is not None
        child.stdin.close()
        child.stdout.close()


def of(home: Path) -> list[psutil.Process]:
    """Return the processes that were started with this home."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("AUTOSEL_HOME") == str(home):
                found.append(process)
        except psutil.Error:  # ended in the meantime, or another user's
            continue
    return found


def runs(process: psutil.Process) -> str:
    """Return its command; "" if it has ended, even if its exit code was not read yet."""
    try:
        return "" if process.status() == psutil.STATUS_ZOMBIE else " ".join(process.cmdline()) or process.name()
    except psutil.NoSuchProcess:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a tune by Ctrl-C: `told` is its output, `there` the commands of its processes before."""

    code: int
    told: str
    there: Sequence[str]

    @property
    def kept(self) -> int:
        """Return the decisions that it reported as kept."""
        found = re.search(r"stopped; (\d+) of \d+ decided and stored", self.told)
        return int(found[1]) if found else 0


def interrupt(home: Path, child: subprocess.Popen[str]) -> Ended:
    """Press Ctrl-C, and wait until all its processes have ended."""
    there = {p.pid: p for p in [*psutil.Process(child.pid).children(recursive=True), *of(home)]}
    names = [name for p in there.values() if (name := runs(p))]
    os.killpg(child.pid, signal.SIGINT)
    assert child.stdout is not None
    told, code = child.stdout.read(), child.wait()
    _, left = psutil.wait_procs(there.values(), timeout=GONE_S)
    assert [p for p in left if runs(p)] == []
    assert of(home) == []
    return Ended(code=code, told=told, there=names)


def test_ctrl_c_ends_every_worker_and_keeps_what_was_acknowledged(tmp_path: Path) -> None:
    home = furnish(tmp_path / "home")
    with tuning(home, "--model", "llama-1b", *OPS, held=True) as child:
        assert child.stdout is not None
        said = []
        for line in child.stdout:
            said.append(line)
            if ": promoted " in line or ": kept " in line:
                break
        else:
            raise AssertionError("it ended before anything was decided: " + "".join(said))
        found = interrupt(home, child)
    assert found.code == 130, "".join(said) + found.told
    assert sum(name.startswith("ray::Seat") for name in found.there) == 2
    assert found.kept >= 1
    with open_ledger(home=home, alone=True) as ledger:
        assert len(ledger.history()) >= found.kept
        ledger.check()


def test_a_missing_cluster_and_an_invalid_number_of_workers_are_reported(tmp_path: Path) -> None:
    for address, word in (("local:many", "from 1 to 64"), ("127.0.0.1:1", "no Ray cluster")):
        said = cli(tmp_path / "home", "tune", "--model", "llama-1b", "--op", "rmsnorm", "--ray", address)
        assert said.returncode in (1, 2)
        assert word in said.stderr
