"""Run the long form of tests/fleet/test_ray.py: Ctrl-C at any moment of successive tunes on two workers."""

from __future__ import annotations

import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from autosel.ledger import open_ledger
from tests.fleet.test_ray import OPS, interrupt, tuning

ROUNDS, LATEST_S = 8, 40.0  # a tune takes about half a minute
EARLIEST_S = 4.0  # earlier, a Python that is still starting ends without a message


@pytest.mark.skipif(find_spec("ray") is None, reason="no Ray: install the extra `ray`")
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
