"""Test a promoted kernel that becomes wrong: compiled code, a real ledger, real processes, and `explain --history`."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autosel import dispatch, resources, settings
from autosel.cli.main import run as cli
from autosel.dispatch.board import Board, this_device
from autosel.errors import LedgerError
from autosel.guard import Policy
from autosel.guard.rate import CANARY
from autosel.ledger import faults, open_ledger
from autosel.ledger.commands import Release
from autosel.ledger.faults import Cause, Fault
from autosel.ops.contract import Match
from autosel.values import Arm, Decision
from tests.cpu.engine_scene import last_line
from tests.cpu.test_dispatch_board import RMS, WEIGHT, W, X, forget, home, native_arm, promote
from tests.null.test_dispatch import User, arms_of_module

__all__ = ["home"]  # a fixture

ROOT = Path(__file__).resolve().parents[2]
LATER = "2999-01-01T00:00:00.000000+00:00"

# Right unless a row's mean square exceeds 4, which normal inputs never do.
WRONG_FOR_LARGE = (
    "float rstd = 1.0f /",
    "float rstd = (sum((a0 + a1) + (a2 + a3)) > 4.0f * float(d) ? 1.01f : 1.0f) /",
)
WRONG = ("float rstd = 1.0f /", "float rstd = 1.01f /")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a home with artefacts of the present kernel and of two wrong ones, compiled once, and their sources."""
    folder = tmp_path_factory.mktemp("builds")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOSEL_HOME", str(folder))
        settings.read.cache_clear()
        native_arm()
        for name, edit in (("large", WRONG_FOR_LARGE), ("wrong", WRONG)):
            shutil.copytree(resources.kernels() / "cpu", folder / name / "cpu")
            for shared in resources.kernels().glob("*.h"):
                shutil.copy(shared, folder / name)
            source = folder / name / "cpu" / "rmsnorm.cpp"
            text = source.read_text()
            assert edit[0] in text
            source.write_text(text.replace(*edit))
            with pytest.MonkeyPatch.context() as elsewhere:
                elsewhere.setattr(resources, "kernels", lambda name=name: folder / name)
                native_arm()
    settings.read.cache_clear()
    return folder


@pytest.fixture
def edited(built: Path, monkeypatch: pytest.MonkeyPatch) -> User:
    """Return the arm of a wrong kernel, after replacing the present source by its source."""

    def arm(name: str) -> Arm:
        monkeypatch.setattr(resources, "kernels", lambda: built / name)
        forget()
        return native_arm()

    return arm


def is_right(result: torch.Tensor, x: torch.Tensor = X) -> bool:
    inputs = {"x": x, "weight": WEIGHT, "eps": 1e-6, "offset": 0.0}
    return isinstance(RMS.verify(inputs, (result,)), Match)


def history(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert cli(["explain", "--history", "rmsnorm", "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


# --- the three faults that the guard must find --------------------------------------------------------------------

SERVE = """
import json, sys, torch
torch.set_num_threads({threads})
import autosel
torch.manual_seed(1)
x, weight = torch.randn(3, 256), torch.randn(256)
bound = autosel.best("rmsnorm", like=(x, weight))
before = bound.candidate
result = bound(x, weight)
right = torch.allclose(result, torch.nn.functional.rms_norm(x, (256,), weight, 1e-6), rtol=1e-5, atol=1e-6)
print(json.dumps([before, bound.candidate, bound.reason, right, autosel.epoch()]))
"""


def serve(home: Path) -> list[Any]:
    """Bind in a fresh process and return its result and log."""
    code = SERVE.format(threads=torch.get_num_threads())
    found: list[Any] = last_line(code, {"AUTOSEL_HOME": str(home), "PYTHONPATH": str(ROOT)})
    return found


def test_a_binary_replaced_by_a_wrong_one_does_not_serve(
    home: Path, edited: User, capsys: pytest.CaptureFixture[str]
) -> None:
    arm = native_arm()
    with open_ledger() as ledger:
        made = promote(ledger, arm)
    wrong = home / "native" / edited("wrong").build
    place = home / "native" / arm.build
    shutil.copy(wrong / "kernel.so", place / "kernel.so")
    before, now, reason, right, _ = serve(home)
    assert (before, now, right) == ("torch:rmsnorm", "torch:rmsnorm", True)
    assert "missing or damaged" in reason, "the bytes differ from the compiled ones"

    receipt = json.loads((place / "receipt.json").read_text())
    receipt["kernel_sha256"] = json.loads((wrong / "receipt.json").read_text())["kernel_sha256"]
    (place / "receipt.json").write_text(json.dumps(receipt))  # the receipt too, as a bad build would
    before, now, reason, right, epoch = serve(home)
    assert (before, now, right, epoch) == ("cpp:rmsnorm", "torch:rmsnorm", True, 1)
    assert "wrong in 3 of 3 replays: the kernel" in reason
    assert serve(home)[:2] == ["torch:rmsnorm"] * 2, "after a restart, before a ledger was opened"

    latest, first = history(capsys)
    assert (latest["state"], latest["candidate"]) == ("quarantined", "torch:rmsnorm")
    assert "wrong in service: elements" in latest["reason"]
    assert first["decision_id"] == made.id
    assert not list((home / "faults").iterdir()), "taken in"
    assert serve(home)[:2] == ["torch:rmsnorm"] * 2, "after a restart, after a ledger was opened"


def test_a_compiled_kernel_wrong_for_some_inputs_is_demoted_when_they_come(
    home: Path, edited: User, capsys: pytest.CaptureFixture[str]
) -> None:
    arm = edited("large")
    small = W.at(M=1)
    with open_ledger() as ledger:
        promote(ledger, arm)
        promote(ledger, native_arm(small), small)
    board = Board(home, Policy(shadow_rate=1.0, max_share=math.inf, first_ns=math.inf))
    bound, other = board.bind(RMS, (X, WEIGHT)), board.bind(RMS, (X[:1], WEIGHT))
    for _ in range(CANARY + 10):
        assert is_right(bound(X, WEIGHT))
    assert bound.candidate == other.candidate == "cpp:rmsnorm"
    x = X.clone()
    x[1] *= 3
    assert is_right(bound(x, WEIGHT), x), "the checked call must return the baseline's result"
    assert bound.candidate == other.candidate == "torch:rmsnorm"
    assert board.epoch == 1
    board.close()
    found = history(capsys)
    assert [d["state"] for d in found] == ["quarantined", "quarantined", "promoted", "promoted"]
    assert all("element [1," in d["reason"] for d in found[:2])
    with open_ledger() as ledger:
        (held,) = ledger.quarantined(this_device().hw_id).values()
        assert held.cause == "kernel"
        assert held.evidence["candidate_wrong"] == 3
        assert held.evidence["index"][0] == 1
        with pytest.raises(LedgerError, match="in quarantine"):
            promote(ledger, arm, idempotency_key="again")
        ledger.write(Release(quarantine_id=held.id, reason="looked at"))
        made = promote(ledger, arm, idempotency_key="once more")
    with dispatch.use(home):
        assert dispatch.best("rmsnorm", like=(X, WEIGHT)).decision == made, "a promotion by hand must serve"


def test_a_users_kernel_that_becomes_wrong_later_is_demoted_and_history_has_the_reason(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arm = arms_of_module(tmp_path / "turns_wrong.py", """
import torch
count = 0
def kernel(x, weight, eps, offset):
    global count
    count += 1
    y = torch.nn.functional.rms_norm(x, x.shape[-1:], weight + offset, eps)
    return y * 1.01 if count > 60 else y
""")("kernel")  # fmt: skip
    with open_ledger() as ledger:
        made = promote(ledger, arm)
    board = Board(home, Policy(shadow_rate=0.5, max_share=math.inf, first_ns=math.inf))
    bound = board.bind(RMS, (X, WEIGHT))
    results = []
    while board.epoch == 0:  # past 200 calls the chance is 2^-140
        results.append(is_right(bound(X, WEIGHT)))
    assert len(results) < 200
    assert results[-1], "the checked call must return a right result"
    assert is_right(bound(X, WEIGHT))
    board.close()
    latest, first = history(capsys)
    assert first["decision_id"] == made.id
    assert latest["state"] == "quarantined"
    assert "wrong in 3 of 3 replays" in latest["reason"]


def test_a_kernel_that_raises_in_service_is_demoted(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arm = arms_of_module(tmp_path / "raises_later.py", """
import torch
count = 0
def kernel(x, weight, eps, offset):
    global count
    count += 1
    if count > 40:
        raise RuntimeError("lost the device")
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight + offset, eps)
""")("kernel")  # fmt: skip
    with open_ledger() as ledger:
        promote(ledger, arm)
    board = Board(home, Policy(shadow_rate=0.0, first_ns=math.inf))
    best = board.selection(RMS)
    assert all(is_right(best(X, WEIGHT)) for _ in range(45))
    board.close()
    latest, _ = history(capsys)
    assert latest["reason"] == "raised in service: RuntimeError: lost the device"


# --- from the journal into the ledger -----------------------------------------------------------------------------


def fault(cause: Cause, made: Decision, **changes: Any) -> Fault:
    values: dict[str, Any] = {"reason": f"{cause} in the test", "workload": W.key, "evidence": {}, "seen_at": LATER}
    return Fault(cause=cause, decision=made, **(values | changes))


@pytest.mark.parametrize("cause", ["slow", "device"])
def test_a_slow_arm_is_demoted_where_it_was_slow_and_not_quarantined(home: Path, cause: Cause) -> None:
    arm, small = native_arm(), W.at(M=1)
    with open_ledger() as ledger:
        made = promote(ledger, arm)
        promote(ledger, native_arm(small), small)
    faults.write(home, fault(cause, made))
    with open_ledger() as ledger:
        states = {s.decision.workload["M"]: s.decision.state for s in ledger.serving()}
        assert states == {3: "demoted", 1: "promoted"}
        assert ledger.history()[0].reason == f"{cause} in the test"
        assert not ledger.quarantined(this_device().hw_id)


def test_a_slow_arm_that_was_raced_again_since_stays(home: Path) -> None:
    with open_ledger() as ledger:
        made = promote(ledger, native_arm())
    faults.write(home, fault("slow", made, seen_at="2001-01-01T00:00:00.000000+00:00"))
    with open_ledger() as ledger:
        assert [s.decision.state for s in ledger.serving()] == ["promoted"]
    assert not list((home / "faults").iterdir())


def test_a_fault_file_read_twice_is_one_quarantine(home: Path) -> None:
    with open_ledger() as ledger:
        made = promote(ledger, native_arm())
    for _ in range(2):  # as if the process had died before it removed the file
        faults.write(home, fault("race", made))
        with open_ledger() as ledger:
            assert len(ledger.quarantined(this_device().hw_id)) == 1
            assert [d.state for d in ledger.history()] == ["quarantined", "promoted"]


def test_a_fault_of_an_older_build_leaves_the_new_one_alone(home: Path, edited: User) -> None:
    with open_ledger() as ledger:
        old = promote(ledger, native_arm())
        promote(ledger, edited("large"), idempotency_key="another build")
    faults.write(home, fault("kernel", old))
    with open_ledger() as ledger:
        assert [s.decision.state for s in ledger.serving()] == ["promoted"]
        assert old.arm.build in ledger.quarantined(this_device().hw_id)


def test_an_invalid_fault_file_is_put_aside_and_the_ledger_opens(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_ledger() as ledger:
        made = promote(ledger, native_arm())
    good = faults.write(home, fault("kernel", made))
    (home / "faults" / "a.json").write_text('{"cause": "kernel"}')
    (home / "faults" / "b.json").write_bytes(good.read_bytes())
    (home / "faults" / "b.json").chmod(0o666)
    with open_ledger() as ledger:
        assert [s.decision.state for s in ledger.serving()] == ["quarantined"]
    assert {p.name for p in (home / "faults").iterdir()} == {"a.refused", "b.refused"}
    assert "put aside" in caplog.text


def test_a_fault_of_a_decision_unknown_to_the_ledger_quarantines_its_build(home: Path) -> None:
    with open_ledger() as ledger:
        made = promote(ledger, native_arm())
    foreign = replace(made, id=987, bucket="rmsnorm/M9.d256/fp32")
    faults.write(home, fault("kernel", foreign))
    with open_ledger() as ledger:
        assert [s.decision.state for s in ledger.serving()] == ["quarantined"], (
            "the build must be quarantined for every bucket"
        )
