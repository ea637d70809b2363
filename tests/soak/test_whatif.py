"""Rehearse an upgrade with a short budget; the other interpreter is this one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from autosel import ops
from autosel.cli.main import run
from autosel.dispatch import recorded
from autosel.dispatch.board import this_device
from autosel.ledger import open_ledger
from autosel.ledger.key import current_mode

pytestmark = pytest.mark.usefixtures("home")


def test_a_rehearsal_leaves_this_home_as_it_was(home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rehearse with a budget that ends before a race."""
    w = ops.find("rmsnorm").workload("fp32", {"M": 1, "d": 64})
    file = tmp_path / "r.json"
    recorded.save(file, recorded.Recorded(device=this_device().hw_id, mode=current_mode(), calls={w: 7}))
    code = run(["whatif", "--python", sys.executable, "--recorded", str(file), "--budget", "1s", "--json"])
    out = capfd.readouterr().out
    assert code == 0, out
    found = json.loads(out)
    assert found["environment"]["mode"] == current_mode()
    (change,) = found["changes"]
    assert (change["bucket"], change["calls"], change["here"]) == (w.bucket, 7, "(undecided)")
    assert open_ledger().history() == []
