"""Test the path from the ledger to the served kernel: compiled code, a real database, the real snapshot."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from autosel import dispatch, ops, resources, settings
from autosel.candidates import arms, registry, validity
from autosel.dispatch import signature
from autosel.dispatch.board import this_device
from autosel.ledger import Ledger, open_ledger
from autosel.ledger.commands import Demote, Record
from autosel.ledger.key import current_mode
from autosel.native.compile import compile_source
from autosel.values import Arm, Decision, Knobs, NativeRecipe, Passed, Workload

ROOT = Path(__file__).resolve().parents[2]
RMS = ops.find("rmsnorm")
X, WEIGHT = torch.randn(3, 256), torch.randn(256)
W = RMS.workload("fp32", {"M": 3, "d": 256})


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of artefacts, compiled once."""
    return tmp_path_factory.mktemp("built")


@pytest.fixture
def home(tmp_path: Path, built: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a separate home with kernels, which all settings use."""
    monkeypatch.delenv("AUTOSEL_DB", raising=False)
    for folder in (built, tmp_path / "home"):
        monkeypatch.setenv("AUTOSEL_HOME", str(folder))
        settings.read.cache_clear()
        if folder is built:
            native_arm()
    shutil.copytree(built / "native", tmp_path / "home" / "native")
    (tmp_path / "home").chmod(0o700)
    forget()
    yield tmp_path / "home"
    monkeypatch.undo()
    settings.read.cache_clear()
    forget()


def forget() -> None:
    """Clear the state that a new process would not have."""
    validity.forget()


def native_arm(w: Workload = W) -> Arm:
    candidate, device = registry.find("rmsnorm", "cpp:rmsnorm"), this_device()
    knobs = candidate.knobs(w, device)
    recipe = candidate.recipe(w, device, knobs)
    assert isinstance(recipe, NativeRecipe)
    return arms.arm(candidate, w, device, compile_source(recipe.source, recipe.flags).digest, knobs)


def promote(ledger: Ledger, arm: Arm, w: Workload = W, **changes: Any) -> Decision:
    passed = Passed(cases=1, worst=0.1, worst_case="random")
    values: dict[str, Any] = {
        "verdict": None,
        "race": None,
        "parities": [(arm, passed)],
        "arm": arm,
        "baseline": arms.arm(registry.baseline(w.op), w, this_device(), "", Knobs()),
        "mode": current_mode(),
        "state": "promoted",
        "reason": "for the test",
        "idempotency_key": w.key,
    }
    return ledger.write(Record(fp=changes.pop("fp", this_device()), workload=w, **values | changes))


def close(result: torch.Tensor) -> bool:
    inputs = {"x": X, "weight": WEIGHT, "eps": 1e-6, "offset": 0.0}
    return isinstance(RMS.verify(inputs, (result,)), ops.contract.Match)


def test_promoted_kernels_run_natively_and_demoted_ones_do_not(home: Path) -> None:
    ledger = open_ledger()
    made = promote(ledger, native_arm())
    with dispatch.use(home):
        best, bound = dispatch.best("rmsnorm"), dispatch.best("rmsnorm", like=(X, WEIGHT))
        assert bound.candidate == "cpp:rmsnorm"
        assert bound.decision == made
        out = torch.empty_like(X)
        assert close(bound(X, WEIGHT, out=out))
        assert close(out)
        for _ in range(2):  # allocates: describes the result in the first call, looks it up later
            result = best(X, WEIGHT)
            assert result.shape == X.shape
            assert close(result)
        assert close(bound(X.repeat(1, 2)[:, :256], WEIGHT)), "rows may be strided"
        ledger.write(Demote(decision_id=made.id, reason="fault"))
        dispatch.refresh()
        assert bound.candidate == "torch:rmsnorm"
        assert close(bound(X, WEIGHT))
        assert "demoted: fault" in best.explain() or best.explain() == "rmsnorm: not called yet"


def test_a_missing_or_damaged_artefact_is_the_baseline_with_the_reason(home: Path) -> None:
    arm = native_arm()
    promote(open_ledger(), arm)
    kernel = home / "native" / arm.build / "kernel.so"
    content = kernel.read_bytes()
    for damaged in (content[:-1] + b"x", b""):
        kernel.write_bytes(damaged)
        forget()
        with dispatch.use(home):
            bound = dispatch.best("rmsnorm", like=(X, WEIGHT))
            assert close(bound(X, WEIGHT))
            assert "missing or damaged; run tune again" in bound.reason
    kernel.unlink()
    forget()
    with dispatch.use(home):
        assert "missing or damaged" in dispatch.best("rmsnorm", like=(X, WEIGHT)).reason


def test_editing_a_kernel_voids_its_own_decisions_and_no_others(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    promote(open_ledger(), native_arm())
    edited = home / "kernels"
    shutil.copytree(resources.kernels() / "cpu", edited / "cpu")
    for shared in resources.kernels().glob("*.h"):
        shutil.copy(shared, edited)
    monkeypatch.setattr(resources, "kernels", lambda: edited)
    (edited / "cpu" / "gemv.cpp").write_text("// another kernel\n")
    with dispatch.use(home):
        assert dispatch.best("rmsnorm", like=(X, WEIGHT)).candidate == "cpp:rmsnorm"
    source = edited / "cpu" / "rmsnorm.cpp"
    source.write_text(source.read_text() + "\n// edited\n")
    forget()
    with dispatch.use(home):
        assert "source has been edited" in dispatch.best("rmsnorm", like=(X, WEIGHT)).reason


def test_tensors_of_another_device_get_the_baseline(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use PyTorch's meta device as the other device: the C++ kernel must not get pointers that it cannot read."""
    promote(open_ledger(), native_arm())
    away = (X.to("meta"), WEIGHT.to("meta"))
    monkeypatch.setattr(signature, "several_devices", lambda: True)
    signature.signature.cache_clear()
    try:
        with dispatch.use(home):
            assert dispatch.best("rmsnorm", like=(X, WEIGHT)).candidate == "cpp:rmsnorm"
            bound = dispatch.best("rmsnorm", like=away)
            assert bound.candidate == "torch:rmsnorm"
            assert "on meta" in bound.reason
            picked = dispatch.best("rmsnorm")
            assert picked(X, WEIGHT).device.type == "cpu"
            assert picked(*away).device.type == "meta"
            assert {r.candidate for r, _ in picked.uses()} == {"cpp:rmsnorm", "torch:rmsnorm"}
    finally:
        signature.signature.cache_clear()
