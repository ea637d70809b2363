"""Press Ctrl-C during tunes on two workers of a local Ray cluster: after the first decision, and at any moment."""

from __future__ import annotations

import os
import random
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
from tests.cpu.daemons import environment
from tests.fleet.test_ray import END_S
from tests.homes import furnish

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="no Ray: install the extra `ray`")

OPS = [word for op in ("rmsnorm", "rope", "add_rmsnorm", "swiglu") for word in ("--op", op)]
GONE_S = 60.0  # Ray gives its processes ten seconds to end by themselves
ROUNDS, LATEST_S = 8, 40.0  # a tune takes about half a minute
EARLIEST_S = 4.0  # earlier, a Python that is still starting ends without a message

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


def test_ctrl_c_at_any_moment_leaves_no_process_and_no_lock_and_keeps_every_decision(tmp_path: Path) -> None:
    home, rng, known = tmp_path / "home", random.Random(1), set[int]()
    for n in range(ROUNDS):
        with tuning(home, "--model", "llama-1b", "--force", *OPS) as child:
            try:
                after_s = rng.uniform(EARLIEST_S, LATEST_S)
                code = child.wait(timeout=after_s)
            except subprocess.TimeoutExpired:
                ended = interrupt(home, child)
                code, kept = ended.code, ended.kept
                sys.stderr.write(f"Ctrl-C {n + 1} after {after_s:.0f} s: {kept} decided and stored\n")
            else:
                kept = 0
            assert code in (0, 5, 130), "decided, too noisy to decide, or stopped"
        with open_ledger(home=home, alone=True) as ledger:
            ledger.check()
            found = {d.id for d in ledger.history()}
        assert known <= found and len(found) >= kept
        known = found
