"""Tune on two real workers of a local Ray cluster, of which one is killed; tests/soak/test_ray.py presses Ctrl-C.

A cluster is some ten processes on two cores: run this file in a session of its own (`.ci/run` does), or give it time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

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


def test_a_missing_cluster_and_an_invalid_number_of_workers_are_reported(tmp_path: Path) -> None:
    for address, word in (("local:many", "from 1 to 64"), ("127.0.0.1:1", "no Ray cluster")):
        said = cli(tmp_path / "home", "tune", "--model", "llama-1b", "--op", "rmsnorm", "--ray", address)
        assert said.returncode in (1, 2)
        assert word in said.stderr
