"""Test autosel.lock: decisions pinned by digest, served from the file, and refused if they cannot be served."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autosel import devices, dispatch, settings
from autosel.cli.main import run
from autosel.dispatch.board import Board
from autosel.errors import ForeignDecision, UsageError
from autosel.fingerprint import known
from autosel.ledger import open_ledger, snapshot
from autosel.ledger.commands import Demote
from tests.cpu.test_dispatch_board import ROOT, WEIGHT, W, X, built, forget, home, native_arm, promote

__all__ = ["built", "home"]  # fixtures


@pytest.fixture
def lock(home: Path, tmp_path: Path) -> Path:
    """Write the lock of a home in which one C++ kernel serves."""
    promote(open_ledger(), native_arm())
    path = tmp_path / "autosel.lock"
    assert run(["export", "--lock", str(path)]) == 0
    return path


def remove_builds(home: Path) -> None:
    for artefact in (home / "native").rglob("kernel.so"):
        artefact.unlink()
    forget()


def setting(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name, value in values.items():
        monkeypatch.setenv(f"AUTOSEL_{name.upper()}", value)
    settings.read.cache_clear()


def test_the_lock_serves_its_pins_regardless_of_later_decisions(lock: Path, home: Path) -> None:
    ledger = open_ledger()
    (served,) = ledger.serving()
    ledger.write(Demote(decision_id=served.decision.id, reason="another opinion"))
    with dispatch.use(home):
        assert dispatch.best("rmsnorm", like=(X, WEIGHT)).candidate == "torch:rmsnorm"
    with dispatch.use(lock):
        bound = dispatch.best("rmsnorm", like=(X, WEIGHT))
        assert bound.candidate == "cpp:rmsnorm"
        other = dispatch.best("rmsnorm", like=(torch.randn(9, 256), WEIGHT))
        assert other.candidate == "torch:rmsnorm" and "no decision" in other.reason


def test_check_names_missing_builds_and_build_compiles_them(
    lock: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["export", "--lock", str(lock), "--check"]) == 0
    assert "all 1 decisions" in capsys.readouterr().out
    remove_builds(home)
    assert run(["export", "--lock", str(lock), "--check"]) == 1
    told = capsys.readouterr().err
    assert "missing or damaged" in told and "export --lock --build" in told
    assert run(["export", "--lock", str(lock), "--check", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["kept"] is False and len(found["unkept"]) == 1
    forget()
    assert run(["export", "--lock", str(lock), "--build", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"file": str(lock), "pinned": 1, "built": 1, "kept": True, "unkept": []}


def test_frozen_refuses_to_start_if_the_lock_cannot_be_kept(
    lock: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_stack", [])
    setting(monkeypatch, lock=str(lock), frozen="1")
    assert dispatch.best("rmsnorm", like=(X, WEIGHT)).candidate == "cpp:rmsnorm"
    dispatch._stack.pop().close()
    remove_builds(home)
    with pytest.raises(ForeignDecision, match="1 of 1 decisions"):
        dispatch.best("rmsnorm", like=(X, WEIGHT))
    setting(monkeypatch, frozen="0")
    bound = dispatch.best("rmsnorm", like=(X, WEIGHT))
    assert bound.candidate == "torch:rmsnorm" and "missing" in bound.reason
    dispatch._stack.pop().close()


def test_frozen_needs_a_lock_that_pins_something_for_this_device(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_stack", [])
    setting(monkeypatch, frozen="1")
    with pytest.raises(UsageError, match="without AUTOSEL_LOCK"):
        dispatch.board()
    setting(monkeypatch, lock=str(tmp_path / "nowhere.lock"))
    with pytest.raises(ForeignDecision, match=r"there is no .*nowhere\.lock"):
        dispatch.board()
    empty = tmp_path / "autosel.lock"
    snapshot.write(empty, snapshot.document(0, []))
    setting(monkeypatch, lock=str(empty))
    with pytest.raises(ForeignDecision, match="pins nothing for this device"):
        dispatch.board()


def test_pins_for_other_devices_are_kept(lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(lock.read_text())
    theirs: dict[str, Any] = json.loads(json.dumps(document["rows"][0]))
    theirs["decision"]["hw_id"] = "f" * 64
    theirs["key"] = "f" * 64 + theirs["key"][64:]
    lock.write_text(json.dumps(snapshot.document(1, [*document["rows"], theirs])))
    capsys.readouterr()
    assert run(["export", "--lock", str(lock), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"file": str(lock), "pinned": 1, "of_other_devices": 1}
    mine = document["rows"][0]["key"][:64]
    assert {r.key[:64] for r in snapshot.parse(lock.read_bytes(), "it").rows} == {"f" * 64, mine}


def test_an_edited_lock_is_ignored(lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock.write_text(lock.read_text().replace('"promoted"', '"pinned"', 1))
    assert run(["export", "--lock", str(lock), "--check"]) == 2
    assert "damaged or edited" in capsys.readouterr().err


def test_locking_a_decision_that_cannot_serve_is_reported(
    lock: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert run(["export", "--lock", str(lock)]) == 0
    assert "would not serve" not in capsys.readouterr().err
    remove_builds(home)
    assert run(["export", "--lock", str(lock)]) == 0
    assert "1 of them would not serve here as pinned" in capsys.readouterr().err


@pytest.mark.parametrize(("content", "told"), [("not JSON", "Expecting value"), ("{}", "not a snapshot")])
def test_a_frozen_program_names_what_is_wrong_with_its_lock(tmp_path: Path, content: str, told: str) -> None:
    (tmp_path / "autosel.lock").write_text(content)
    with pytest.raises(ForeignDecision, match="is not a lock file that can serve") as error:
        Board(tmp_path / "autosel.lock").refuse_unkept()
    assert told in str(error.value)


def test_a_command_runs_under_the_lock_or_not_at_all(lock: Path, home: Path) -> None:
    code = (
        f"import torch; torch.set_num_threads({torch.get_num_threads()}); import autosel; "
        "print(autosel.best('rmsnorm', like=(torch.randn(3, 256), torch.randn(256))).candidate)"
    )
    command = [sys.executable, "-P", "-m", "autosel.cli.main", "export", "--lock", str(lock), "--frozen", "--"]
    environment = {**os.environ, "AUTOSEL_HOME": str(home), "PYTHONPATH": str(ROOT)}

    def started() -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, sys.executable, "-c", code], capture_output=True, text=True, env=environment)

    assert started().stdout.strip() == "cpp:rmsnorm"
    remove_builds(home)
    refused = started()
    assert refused.returncode == 1 and "cannot be served here" in refused.stderr


def test_mode_off_serves_the_baseline_and_replay_reports_no_misses(
    lock: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting(monkeypatch, mode="replay")
    board = Board(home)
    missed: list[Any] = []
    monkeypatch.setattr(board._handover, "missed", lambda w, hw_id: missed.append(w))
    from autosel import ops

    rms = ops.find("rmsnorm")
    assert board.bind(rms, (X, WEIGHT)).candidate == "cpp:rmsnorm"
    board.bind(rms, (torch.randn(9, 256), WEIGHT))
    assert missed == []
    setting(monkeypatch, mode="tune")
    board.bind(rms, (torch.randn(9, 256), WEIGHT))
    assert len(missed) == 1
    setting(monkeypatch, mode="off")
    assert board.bind(rms, (X, WEIGHT)).reason == "AUTOSEL_MODE is off"
    board.close()


def test_a_lock_without_decisions_is_an_error(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert W.op == "rmsnorm"
    assert run(["export", "--lock", str(tmp_path / "autosel.lock")]) == 1
    assert "nothing serves on this device yet" in capsys.readouterr().err
    assert not (tmp_path / "autosel.lock").exists()


def test_a_lock_pins_decisions_of_every_device_of_the_machine(
    lock: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = known.load("h200")
    promote(open_ledger(), native_arm(), fp=gpu, idempotency_key="gpu")
    assert run(["export", "--lock", str(lock)]) == 0
    assert len(snapshot.read(lock).rows) == 1, "decisions of a missing GPU must not be pinned"
    monkeypatch.setattr(devices, "places_here", lambda: ("cpu", "cuda:0", "cuda:1"))
    here = devices.device_at
    monkeypatch.setattr(devices, "device_at", lambda place: (gpu, "") if place != "cpu" else here(place))
    assert run(["export", "--lock", str(lock)]) == 0
    assert {row.document["hw_id"] for row in snapshot.read(lock).rows} == {gpu.hw_id, devices.this_device().hw_id}
    assert run(["export", "--lock", str(lock), "--check"]) == 0


def test_a_frozen_program_queries_a_gpu_at_its_first_tensor_so_that_it_can_fork_before(
    lock: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delay the query, because a child forked after CUDA was queried for its devices cannot use it."""
    gpu, asked = known.load("h200"), []
    promote(open_ledger(), native_arm(), fp=gpu, idempotency_key="gpu")
    here = devices.device_at

    def device_at(place: str) -> Any:
        asked.append(place)
        return (gpu, "") if place.startswith("cuda") else here(place)

    monkeypatch.setattr(devices, "places_here", lambda: ("cpu", "cuda:0"))
    monkeypatch.setattr(devices, "device_at", device_at)
    assert run(["export", "--lock", str(lock)]) == 0
    for name in ("device_at", "places_here"):
        monkeypatch.setattr(sys.modules[Board.__module__], name, getattr(devices, name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("which initialises CUDA"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    asked.clear()
    kept = Board(lock)
    kept.refuse_unkept()
    assert set(asked) == {"cpu"}
    assert kept.resolution(dispatch.ops.find("rmsnorm"), W, "cuda:0").decision is not None
    kept.close()
    remove_builds(home)
    rows = [r for r in json.loads(lock.read_text())["rows"] if r["decision"]["hw_id"] == gpu.hw_id]
    lock.write_text(json.dumps(snapshot.document(1, rows)))
    broken = Board(lock)
    broken.refuse_unkept()
    for _ in range(2):
        with pytest.raises(ForeignDecision, match="1 of 1 decisions"):
            broken.resolution(dispatch.ops.find("rmsnorm"), W, "cuda:0")
    broken.close()
