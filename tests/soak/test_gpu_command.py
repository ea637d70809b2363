"""`./run gpu --device cpu` through every unit of every stage, on a tiny model at one op."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cpu.test_gpu_command import CONFIG, STAGES, command


def test_a_dry_run_goes_through_every_unit_of_every_stage(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    words = ["--device", "cpu", "--out", str(tmp_path / "out"), "--model", str(tmp_path / "model"), "--seq", "128"]
    done = command(tmp_path, *words, "--op", "rmsnorm", "--layers", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    for stage in STAGES:
        record = json.loads((tmp_path / "out" / f"{stage}.json").read_text())
        assert set(record["units"]) == set(record["listed"]), stage
        assert all(found["ok"] for found in record["units"].values()), stage
