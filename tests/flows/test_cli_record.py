"""Check that the workloads of a running program, with all its processes, are recorded and tuned."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autosel import devices, dispatch, ops
from autosel.cli import record as record_verb
from autosel.cli import tune as tune_verb
from autosel.cli.main import run
from autosel.dispatch import recorded
from autosel.dispatch.board import this_device
from autosel.errors import BadConfig
from autosel.fingerprint import known
from autosel.values import Workload

ROOT = Path(__file__).resolve().parents[2]
RMS, ATTN = ops.find("rmsnorm"), ops.find("attn")
ONE = RMS.workload("fp32", {"M": 1, "d": 32})
PROGRAM = """
import os, sys
import torch, autosel
norm, attn = autosel.best("rmsnorm"), autosel.best("attn")
if os.fork() == 0:  # a worker of the program
    for _ in range(3):
        norm(torch.randn(2, 32), torch.randn(32))
    autosel.dispatch.recorded.note(autosel.dispatch.board().asked_where)
    os._exit(0)
os.wait()
bound = autosel.best("rmsnorm", like=(torch.randn(1, 32), torch.randn(32)))
for _ in range(5):
    bound(torch.randn(1, 32), torch.randn(32))
q, k = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 40, 16)
for length in (17, 18, 40):  # two buckets of length
    attn(q, k, k, torch.tensor([length - 1], dtype=torch.int32), length)
print("out")
sys.exit(7)
"""


@pytest.fixture(autouse=True)
def importable(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def recording(**changes: Any) -> recorded.Recorded:
    values = {"device": "d", "mode": "eager.t2.highest", "calls": {ONE: 3}} | changes
    return recorded.Recorded(**values)


def test_calls_of_all_processes_are_added_up_and_the_exit_code_is_the_programs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "traffic.json"
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "traffic.json.99999").write_text("left by a killed recording")
    assert run(["record", "-o", str(file), "--", sys.executable, str(tmp_path / "program.py")]) == 7
    out, err = capfd.readouterr()
    assert out == "out\n", "stdout must be the program's"
    assert f"tune --recorded {file}" in err
    found = recorded.read(file)
    assert found.device == this_device().hw_id
    by_bucket = {w.bucket: n for w, n in found.calls.items()}
    assert by_bucket == {
        "rmsnorm/M2.d32/fp32": 3,
        "rmsnorm/M1.d32/fp32": 5,
        "attn/B1.Hq2.Hkv2.S1.D16.L17-32/fp32.ragged=True": 2,
        "attn/B1.Hq2.Hkv2.S1.D16.L33-64/fp32.ragged=True": 1,
    }
    assert not list(tmp_path.glob("traffic.json.*"))


def test_a_program_that_calls_no_op_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["record", "-o", str(tmp_path / "r.json"), "--", sys.executable, "-c", "print(1)"]) == 2
    err = capfd.readouterr().err
    assert "nothing was recorded" in err and "autosel.patch(model)" in err
    assert run(["record", "-o", str(tmp_path / "r.json"), "--", "/no/such/program"]) == 2
    assert "cannot run" in capfd.readouterr().err


@pytest.mark.parametrize(("last", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)])
def test_a_program_that_fails_before_it_calls_an_op_keeps_its_exit_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], last: str, code: int
) -> None:
    words = ["record", "-o", str(tmp_path / "r.json"), "--", sys.executable, "-c", f"import os, sys; {last}"]
    assert run(words) == code
    assert f"exited with {code} before it called an op" in " ".join(capfd.readouterr().err.split())


def test_one_workload_is_singular() -> None:
    assert record_verb._summary(Path("r.json"), {ONE: 1}) == "1 workload, 1 call, in r.json"
    assert "2 workloads, 1,002 calls" in record_verb._summary(Path("r.json"), {ONE: 2, ONE.at(d=64): 1000})


def test_workloads_are_tuned_in_the_order_of_calls_and_bytes(tmp_path: Path) -> None:
    big = ops.find("linear").workload("fp32", {"M": 1, "N": 512, "K": 512})
    file = tmp_path / "r.json"
    recorded.save(file, recording(calls={ONE: 100, big: 5}))
    named = record_verb.named_workloads(file)
    assert [(n.workload, n.calls_per_step) for n in named] == [(big, 5), (ONE, 100)]


def test_workloads_of_one_bucket_are_tuned_once_with_the_calls_of_all(tmp_path: Path) -> None:
    nine, ten = (RMS.workload("fp32", {"M": m, "d": 32}) for m in (9, 10))
    recorded.save(tmp_path / "r.json", recording(calls={nine: 3, ten: 4}))
    (named,) = record_verb.named_workloads(tmp_path / "r.json")
    assert (named.workload, named.calls_per_step) == (ten, 7)


def test_the_gain_of_tuning_is_weighted_by_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"a": (10.0, 5.0), "b": (1.0, 1.0), "c": (None, None)}
    rows = {bucket: {"baseline_us": base, "time_us": own} for bucket, (base, own) in times.items()}
    monkeypatch.setattr(tune_verb, "decision_json", lambda d: rows[d.bucket])
    decided: Any = [SimpleNamespace(bucket=bucket) for bucket in rows]
    told = tune_verb.weighted_line(decided, {"a": 10, "b": 100, "c": 90})
    assert "110 of 200 recorded calls (55%)" in told and f"{200 / 150:.2f}x" in told
    assert tune_verb.weighted_line(decided[2:], {"c": 1}) == "weighted: nothing was timed"


def test_merging_keeps_the_mode_of_most_calls_and_refuses_two_devices() -> None:
    loader = recording(mode="eager.t1.highest", calls={ONE: 1})
    merged = recorded.merge([recording(), loader, recording(calls={ONE: 4})])
    assert merged == recording(calls={ONE: 7})
    with pytest.raises(BadConfig, match="several devices"):
        recorded.merge([recording(), recording(device="other")])


def test_a_workload_that_no_op_has_is_refused_in_a_recording(tmp_path: Path) -> None:
    odd = [
        Workload(op="nothing", dims=(("M", 1),), dtype="fp32"),
        Workload(op="rmsnorm", dims=(("d", 32), ("M", 1)), dtype="fp32"),
        Workload(op="rmsnorm", dims=(("M", 0), ("d", 32)), dtype="fp32"),
        Workload(op="rmsnorm", dims=(("M", 1), ("d", 32)), dtype="fp32", traits=(("odd", 1),)),
        Workload(op="rmsnorm", dims=(("M", 1), ("d", 32)), dtype="fp32", traits=(("offset", 0.0),)),
    ]
    for w in odd:
        recorded.save(tmp_path / "r.json", recording(calls={w: 1}))
        with pytest.raises(BadConfig, match=r"no op has|is not how"):
            record_verb.named_workloads(tmp_path / "r.json")


def test_an_invalid_recording_is_refused(tmp_path: Path) -> None:
    good = recorded.document(recording())
    row = good["workloads"][0]
    bad: list[Any] = [
        [],
        {**good, "format": "other"},
        {**good, "version": 2},
        {**good, "workloads": {}},
        {**good, "workloads": [{**row, "calls": 0}]},
        {**good, "workloads": [{**row, "calls": "3"}]},
        {**good, "workloads": [{"workload": row["workload"]}]},
        {**good, "device": None},
    ]
    for document in bad:
        (tmp_path / "r.json").write_text(json.dumps(document))
        with pytest.raises(BadConfig, match="not a recording"):
            recorded.read(tmp_path / "r.json")
    with pytest.raises(BadConfig, match="cannot read"):
        recorded.read(tmp_path / "absent.json")


def test_tune_takes_a_recording_or_a_model_not_both(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recorded.save(tmp_path / "r.json", recording())
    assert run(["tune", "--recorded", str(tmp_path / "r.json"), "--seq", "128"]) == 2
    assert "--recorded and --seq" in capfd.readouterr().err


def test_recorded_calls_are_counted_across_a_change_of_the_snapshot(tmp_path: Path) -> None:
    with dispatch.use(tmp_path) as board:
        norm = dispatch.best("rmsnorm")
        norm(torch.randn(1, 32), torch.randn(32))
        board._fold(board._selected["rmsnorm"][1])
        norm(torch.randn(1, 32), torch.randn(32))
        assert board.asked() == {ONE: 2}


def test_calls_on_another_device_are_a_separate_recording(tmp_path: Path) -> None:
    parts = [recording(device="gpu", calls={ONE: 9}), recording(device="cpu"), recording(device="cpu")]
    most, other = recorded.by_device(parts)
    assert (most.device, most.calls) == ("gpu", {ONE: 9})
    assert (other.device, other.calls) == ("cpu", {ONE: 6})
    with pytest.raises(BadConfig, match="nothing was recorded"):
        recorded.by_device([])
    paths = [recorded.part(tmp_path / "r.json", 7, number) for number in range(3)]
    assert len({p.name for p in paths}) == 3 and all(p.suffix[1:].isdigit() for p in paths)
    assert record_verb._beside(Path("a/traffic.json"), "0123456789") == Path("a/traffic-01234567.json")


def test_a_recording_is_tuned_on_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = known.load("h200")
    monkeypatch.setattr(devices, "places_here", lambda: ("cpu", "cuda:0"))
    here = devices.device_at
    monkeypatch.setattr(devices, "device_at", lambda place: (gpu, "") if place == "cuda:0" else here(place))
    for device, place in ((gpu.hw_id, "cuda:0"), (this_device().hw_id, "cpu"), ("elsewhere", "")):
        recorded.save(tmp_path / "r.json", recording(device=device))
        assert record_verb.place_of(tmp_path / "r.json") == place


def test_a_recording_of_a_missing_device_is_not_silently_tuned_for_another(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(tune_verb, "report_on", lambda request, *_, **__: asked.append(request.device))
    file = tmp_path / "r.json"
    recorded.save(file, recording(device=devices._nobody("cuda:0").hw_id))
    assert run(["tune", "--recorded", str(file)]) == 2
    assert "does not name its device" in capfd.readouterr().err and not asked
    assert run(["tune", "--recorded", str(file), "--device", "cpu"]) == 0
    recorded.save(file, recording(device="elsewhere"))
    assert run(["tune", "--recorded", str(file)]) == 0
    assert "recorded on a device that is not here, tuned on cpu" in capfd.readouterr().err
    assert asked == ["cpu", "cpu"]
