"""Tunes on two real workers of a Ray cluster made here: one is killed in the middle of it; Ctrl-C ends them all.

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
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from autosel.ledger import open_ledger
from tests.cpu.daemons import ROOT, cli, environment

pytestmark = [
    pytest.mark.fleet,
    # no importorskip: a file of which nothing is collected would be an error of its own run
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


def test_what_a_killed_worker_had_is_tuned_by_the_other(tmp_path: Path) -> None:
    home = tmp_path / "home"
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
    # a machine too noisy to decide says so, with a decision of its own: each workload has come to its end
    assert {stored[number].workload["d"] for number in said["decisions"]} == {512, 2048}
    assert {stored[number].hw_id for number in said["decisions"]} == {said["hw_id"]}
    assert said["undecided"] == [
        d.workload.key for d in stored.values() if d.verdict and d.verdict.outcome == "undecided"
    ]


@contextmanager
def tuning(home: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """`tune --ray local:2` in a process group of its own, as a terminal starts it; what hangs is killed."""
    command = [sys.executable, "-P", "-m", "autosel.cli.main", "tune", "--ray", "local:2", *words]
    child = subprocess.Popen(
        command, env=environment(home), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    limit = threading.Timer(END_S, os.killpg, (child.pid, signal.SIGKILL))
    limit.start()
    try:
        yield child
    finally:
        limit.cancel()
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def of(home: Path) -> list[psutil.Process]:
    """Processes that were started with this home."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("AUTOSEL_HOME") == str(home):
                found.append(process)
        except psutil.Error:  # gone meanwhile, or another user's
            continue
    return found


def interrupt(home: Path, child: subprocess.Popen[str]) -> tuple[int, int, Sequence[str]]:
    """Ctrl-C. How many decisions are said to be kept, of how many; and the processes there were, none of which is left
    when this returns."""
    there = {p.pid: p for p in [*psutil.Process(child.pid).children(recursive=True), *of(home)]}
    names = [" ".join(p.cmdline()) for p in there.values() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    os.killpg(child.pid, signal.SIGINT)
    assert child.stdout is not None
    rest = child.stdout.read()
    assert child.wait() == 130, rest
    _, left = psutil.wait_procs(there.values(), timeout=GONE_S)
    assert left == []
    assert of(home) == []
    told = re.search(r"stopped; (\d+) of (\d+) decided and kept", rest)
    assert told is not None, rest
    return int(told[1]), int(told[2]), names


def test_ctrl_c_ends_every_worker_and_keeps_what_was_acknowledged(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with tuning(home, "--model", "llama-1b", *OPS) as child:
        assert child.stdout is not None
        said = next((line for line in child.stdout if re.search(r": (promoted|kept|undecided) ", line)), "")
        assert said, "it ended before anything was decided"
        kept, asked, names = interrupt(home, child)
    assert sum(name.startswith("ray::Seat") for name in names) == 2
    assert 1 <= kept <= asked
    with open_ledger(home=home, alone=True) as ledger:
        assert len(ledger.history()) >= kept
        ledger.check()


def test_a_cluster_that_is_not_there_and_a_number_that_is_none_are_said_to_be(tmp_path: Path) -> None:
    for address, word in (("local:many", "from 1 to 64"), ("127.0.0.1:1", "no Ray cluster")):
        said = cli(tmp_path / "home", "tune", "--model", "llama-1b", "--op", "rmsnorm", "--ray", address)
        assert said.returncode in (1, 2)
        assert word in said.stderr
