"""Test a home that commit 462cf5c wrote: the present code opens it, lists it, serves it or states the reason, and
imports its files.

Ops on fp8 operands were separate ops then; their rows move to the keys of linear and attn. All others stay.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from autosel import ops
from autosel.candidates import registry
from autosel.devices import this_device
from autosel.dispatch.resolve import Resolution, index, resolve
from autosel.guard import Held
from autosel.ledger import open_ledger, snapshot
from autosel.ledger.former import modern
from autosel.ledger.key import current_mode
from autosel.ledger.schema import HEAD
from autosel.ops.compare import compare
from autosel.ops.contract import Match
from autosel.values import SERVING, WHOLE_STEP, Decision, Workload
from tests import earlier
from tests.verbs import verb

FP8 = {"gemv_fp8": ("linear", ".weight=fp8_e4m3-row"), "attn_decode_fp8": ("attn", ".cache=fp8_e4m3-head")}
BASELINES = {"torch:gemv_fp8": "torch:linear", "torch:attn_decode_fp8": "torch:sdpa"}
OPS = ("linear", "attn", "rmsnorm", "swiglu", WHOLE_STEP)
ROOT = Path(__file__).resolve().parents[2]
SAME = ("decision_id", "state", "candidate", "backend", "reason", "created_at", "hw_id")
OF_ITS_RACE = ("outcome", "speedup", "time_us")
BY_HAND = (44, 46, 47)  # demoted or promoted by hand: that version still showed the race of the previous decision


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return earlier.copied(tmp_path / "home")


@pytest.fixture
def _there() -> Iterator[None]:
    with earlier.there():
        yield


def rows_then() -> tuple[Mapping[str, Any], ...]:
    """Return the rows of the stored snapshot as written in the file."""
    return tuple(json.loads((earlier.FOLDER / "home" / "decisions.json").read_text())["rows"])


def moved(text: str) -> str:
    """Return the present key or bucket of a row, which only changed for fp8 operands."""
    op = next((name for name in FP8 if f"{name}/" in text), "")
    return text.replace(f"{op}/", f"{FP8[op][0]}/").replace("/bf16", f"/bf16{FP8[op][1]}") if op else text


def names_of(op: str) -> list[str]:
    """Return the former names of an op's rows."""
    return [op, *(former for former, (name, _) in FP8.items() if name == op)]


def today(told: Any) -> Any:
    """Return the output about a race with today's names of baselines and workloads."""
    if isinstance(told, dict):
        return {BASELINES.get(name, name): today(item) for name, item in told.items()}
    if isinstance(told, list):
        return [today(item) for item in told]
    return moved(BASELINES.get(told, told)) if isinstance(told, str) and " " not in told else told


# --- listing --------------------------------------------------------------------------------------------------------


def test_the_stored_home_opens_completely_in_the_present_schema(home: Path) -> None:
    then = earlier.said("db-info")
    now = verb("db", "info", "--json", home=home)
    assert (now["decisions"], now["serving"]) == (then["decisions"], then["serving"]) == (47, 32)
    assert verb("db", "upgrade", "--json", home=home)["schema"] == HEAD
    assert "is intact" in verb("db", "check", home=home)


def test_the_original_home_is_not_changed(home: Path) -> None:
    before = {path: path.read_bytes() for path in earlier.FOLDER.rglob("*") if path.is_file()}
    verb("db", "upgrade", home=home)
    assert before == {path: path.read_bytes() for path in before}


def test_history_is_unchanged(home: Path) -> None:
    then, now = earlier.said("history"), verb("explain", "--history", "--json", "-n", "100", home=home)
    then_today = [{**row, "candidate": BASELINES.get(row["candidate"], row["candidate"])} for row in then]
    assert [{name: row[name] for name in SAME} for row in now] == [
        {name: row[name] for name in SAME} for row in then_today
    ]
    for was, row in zip(then, now, strict=True):
        if row["decision_id"] not in BY_HAND:
            assert [row[name] for name in OF_ITS_RACE] == [was[name] for name in OF_ITS_RACE]
        assert row["op"] == FP8.get(was["op"], (was["op"],))[0]
        assert (row["workload"], row["bucket"]) == (moved(was["workload"]), moved(was["bucket"]))
    assert {row["state"] for row in now} == {"promoted", "kept", "pinned", "demoted"}


def test_each_decision_is_explained_by_its_number(home: Path) -> None:
    for row in earlier.said("history"):
        (found,) = verb("explain", "--id", str(row["decision_id"]), "--json", home=home)
        assert found["candidate"] == BASELINES.get(row["candidate"], row["candidate"])
        assert found["parities"] or row["candidate"].startswith(("torch:", "ops:")), row["decision_id"]
        told = verb("explain", "--id", str(row["decision_id"]), home=home)
        assert f"decision {row['decision_id']}" in told


def test_old_failures_and_quarantines_are_still_shown(home: Path) -> None:
    with open_ledger(home=home) as ledger:
        (held,) = ledger.quarantined(earlier.device().hw_id).values()
    assert (held.arm.candidate, held.op, held.cause) == ("user:crashes", "swiglu", "crash")
    (swiglu,) = verb("explain", "--id", "29", "--json", home=home)
    assert [q["candidate"] for q in swiglu["quarantined"]] == ["user:crashes"]


@pytest.mark.usefixtures("_there")
@pytest.mark.parametrize("op", OPS)
def test_best_lists_each_decision_or_why_the_baseline_serves(home: Path, op: str) -> None:
    then = [row for name in names_of(op) for row in earlier.said(f"best-{name}")["all"]]
    now = verb("best", op, "--json", home=home)["all"]
    assert {row["decision_id"] for row in now} == {row["decision_id"] for row in then}
    for was, row in ((a, b) for a in then for b in now if a["decision_id"] == b["decision_id"]):
        assert row["workload"] == moved(was["workload"])
        assert row["candidate"] == BASELINES.get(was["candidate"], was["candidate"]) or (
            row["state"] == "baseline" and "is stale" in row["reason"]
        )


@pytest.mark.usefixtures("_there")
@pytest.mark.parametrize("op", OPS)
def test_explain_shows_the_same_evidence(home: Path, op: str) -> None:
    then = [found for name in names_of(op) for found in earlier.said(f"explain-{name}")]
    now = verb("explain", op, "--json", home=home)
    assert {e["decision_id"] for e in now} == {e["decision_id"] for e in then}
    for was, found in ((a, b) for a in then for b in now if a["decision_id"] == b["decision_id"]):
        assert found["race"] == today(was["race"])
        assert found["verdict"] == (None if found["decision_id"] in BY_HAND else today(was["verdict"]))


# --- serving --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_there")
def test_no_key_changes_but_those_of_fp8_operands(home: Path) -> None:
    verb("db", "upgrade", home=home)
    found = snapshot.read(home / snapshot.FILE)
    assert found is not None
    now = {int(row.document["id"]): row.key for row in found.rows}
    then = {int(row["decision"]["id"]): (row["key"], row["decision"]["op"]) for row in rows_then()}
    assert now.keys() == then.keys()
    assert all(now[number] == moved(key) for number, (key, _) in then.items())
    assert {op for number, (key, op) in then.items() if now[number] != key} == FP8.keys()


def resolutions(home: Path) -> Iterator[tuple[Decision, Resolution]]:
    """Resolve each row of the snapshot, on the device and under the mode that it was decided for."""
    found = snapshot.read(home / snapshot.FILE)
    assert found is not None
    serving = index(found.rows, this_device(), Held())
    for decision in (row.decision for row in found.rows):
        if decision.op != WHOLE_STEP:
            assert decision.mode == current_mode() and decision.hw_id == this_device().hw_id
            yield decision, resolve(ops.find(decision.op), decision.workload, serving)


def is_right(found: Resolution) -> bool:
    """Call the serving kernel on drawn inputs; return True if each element is within the op's bound."""
    op, w = ops.find(found.workload.op), found.workload
    inputs = op.inputs(w, 7)
    filled = {a.name for a in op.args if a.role == "inout"}
    outputs = [None for spec in op.outputs(w) if spec.name not in filled]
    made = found.run(*(inputs[a.name] for a in op.args), *outputs)
    reference = op.reference(inputs)
    got = made if isinstance(made, tuple) else (made,)
    return isinstance(compare(got, reference, op.bound(inputs, reference)), Match)


@pytest.mark.usefixtures("_there")
def test_each_decision_serves_or_the_baseline_does_with_the_reason(home: Path) -> None:
    verb("db", "upgrade", home=home)
    states = set()
    for decision, found in resolutions(home):
        states.add(decision.state)
        if found.served:
            assert found.candidate == decision.arm.candidate and decision.state in SERVING
            assert found.candidate == registry.baseline(decision.op).name, "the stored home has no builds"
        else:
            assert found.candidate == registry.baseline(decision.op).name
            assert "is stale" in found.reason or found.reason == decision.told
        if decision.op != "sample":  # whose reference is a choice, not a value
            assert is_right(found), decision.workload.key
    assert states == {"promoted", "kept", "pinned", "demoted"}


def test_arms_for_fp8_operands_do_not_serve_until_raced_against_the_present_baseline(
    home: Path, tmp_path: Path
) -> None:
    """Check in a process that may import the user's plug-in: these arms won against another baseline."""
    verb("db", "upgrade", home=home)
    told = in_a_process(home)
    mine = {number: one for number, one in told.items() if one["arm"].startswith("user:")}
    assert len(mine) == 4
    for one in mine.values():
        assert one["served"] == one["baseline"]
        assert "have changed since they were measured" in one["reason"]
        assert one["right"]


def in_a_process(home: Path) -> dict[str, Any]:
    paths = os.pathsep.join([str(earlier.FOLDER / "plugins"), str(ROOT)])
    environment = {**os.environ, "AUTOSEL_HOME": str(home), "AUTOSEL_ALLOW": "stored", "PYTHONPATH": paths}
    line = [sys.executable, "-P", "-m", __name__, str(home)]
    done = subprocess.run(line, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    made: dict[str, Any] = json.loads(done.stdout)
    return made


def tell(home: Path) -> dict[int, dict[str, Any]]:
    import torch

    told = {}
    with earlier.there():
        for decision, found in resolutions(home):
            told[decision.id] = {
                "arm": decision.arm.candidate,
                "baseline": decision.baseline.candidate,
                "served": found.candidate,
                "reason": found.reason,
                "right": decision.op == "sample" or is_right(found),
                "torch": torch.__version__,
            }
    return told


# --- exported files -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_there")
def test_its_lock_pins_each_decision_or_names_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "autosel.lock"
    shutil.copyfile(earlier.LOCK, path)
    path.chmod(0o644)
    told = verb("export", "--lock", str(path), "--check", "--json", home=tmp_path / "home", codes=(0, 1))
    then = earlier.said("lock")
    assert told["pinned"] == then["pinned"] == 31
    assert all(one["reason"] for one in told["unkept"]) and len(told["unkept"]) <= 31


@pytest.mark.usefixtures("_there")
def test_its_signed_bundle_can_be_imported(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    signer = json.loads(earlier.BUNDLE.read_text())["signer"]
    line = ("import", str(earlier.BUNDLE), "--no-check", "--json")
    taken = verb(*line, "--key", signer, home=tmp_path / "home")
    assert {one["reason"].partition(":")[0] for one in taken["kept"]} == {"it would import stored_kernels"}
    assert len(taken["kept"]) == 4 and not taken["refused"]
    with open_ledger(home=tmp_path / "home") as ledger:
        assert len(ledger.history()) == 32
    refused = verb(*line, "--key", "ab" * 32, home=tmp_path / "other", codes=(1, 2))
    assert refused["error"]


@pytest.mark.usefixtures("_there")
def test_its_export_can_be_imported_and_serves_only_after_a_proof(tmp_path: Path) -> None:
    home, export = tmp_path / "home", earlier.FOLDER / "home" / "decisions.json"
    verb("import", str(export), "--no-check", "--json", home=home)
    for row in rows_then():
        w: Workload = snapshot.Row(key=moved(row["key"]), epoch=1, document=modern(row["decision"])).decision.workload
        if w.op != WHOLE_STEP:
            found = snapshot.read(home / snapshot.FILE)
            serving = index(found.rows if found else (), this_device(), Held())
            assert resolve(ops.find(w.op), w, serving).candidate == registry.baseline(w.op).name


if __name__ == "__main__":
    sys.stdout.write(json.dumps(tell(Path(sys.argv[1]))))
