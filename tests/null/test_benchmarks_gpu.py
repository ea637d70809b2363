"""Test what `./run gpu` derives from its stages' results: goals, files to keep, the documentation. Without a device:
records and tables are synthetic."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from autosel.errors import UsageError
from autosel.fingerprint import known
from autosel.knobs.gpu.facts import facts
from autosel.ops import OPS
from benchmarks.gpu import decode, goals, keeping
from benchmarks.gpu.__main__ import parsed
from benchmarks.gpu.kept import RunFolder, StageResult
from benchmarks.gpu.scope import Scope, scope_of

ROOT = Path(__file__).resolve().parents[2]
DEVICE = {"name": "NVIDIA H200", "kind": "cuda", "hw_id": "0" * 64}


def scope(*words: str) -> Scope:
    return scope_of(parsed(["--device", "cuda", *words]))


def record(stage: str, units: Mapping[str, Any], listed: list[str] | None = None) -> StageResult:
    return StageResult(
        stage=stage, key="k", device=DEVICE, scope={}, git_sha="a" * 40, started="2026-01-01T00:00:00+00:00",
        listed=list(units) if listed is None else listed, units=dict(units),
    )  # fmt: skip


def key(op: str, **dims: int) -> str:
    return str(OPS[op].workload("bf16", dims).key)


GEMV = {"M": 1, "N": 4096, "K": 4096}


# --- goals ------------------------------------------------------------------------------------------------------------


def reached(name: str, **records: StageResult) -> tuple[str, ...]:
    return next(row for row in goals.lines(records, {}) if row[0] == name)


def test_a_missed_goal_requires_a_reason() -> None:
    runs = record("decode", {"batch 1": {"ok": True, "certificate": {"tokens_per_sec": 200.0, "speedup": 3.0}}})
    name = "llama-8b bf16, B=1, L=8192"
    assert reached(name, decode=runs)[5] == goals.UNKNOWN
    told = {row[0]: row for row in goals.lines({"decode": runs}, {name: "the launch gaps"})}
    assert told[name][2:4] == ("200 tok/s", "missed") and told[name][5] == "the launch gaps"
    assert told["llama-8b over eager PyTorch, B=1, L=8192"][3] == "reached"


def test_goals_name_existing_units() -> None:
    """Check this, because a renamed decode run would silently disable its goal."""
    named = {*goals.BASE, "llama-1b at 256", "qwen3-1.7b at 256", "gemma3-1b at 256"}
    assert named <= set(decode.runs(scope()))


# --- keeping ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "fingerprints", tmp_path / "checkout" / "fingerprints")
    return tmp_path / "checkout"


def rate(value: float) -> dict[str, Any]:
    return {"value": value, "unit": "B/s", "spread": 0.01, "source": "best of 5 windows"}


def test_results_of_a_device_become_files_of_the_checkout(tmp_path: Path, checkout: Path) -> None:
    kept = RunFolder(tmp_path / "out")
    taken = {"name": "NVIDIA H200", "rates": {"read_bytes_per_s": rate(4.2e12), "unheard_of": rate(1.0)}}
    kept.write(record("fingerprint", {"take": {"ok": True, "fingerprint": taken}}))
    kept.write(record("decode", {"batch 1": {"ok": True, "file": "/home/me/c.jsonl", "certificate": {"speedup": 3.0}}}))
    written = keeping.keep(kept, checkout)
    folder = checkout / "benchmarks" / "results" / "nvidia-h200"
    assert {"fingerprint.json", "decode.json", "certificates.jsonl"} == {p.name for p in folder.iterdir()}
    assert "/home/me" not in (folder / "decode.json").read_text()
    assert "fingerprints/h200.json" in written
    now = known.read(checkout / "fingerprints" / "h200.json")
    assert now.rates["read_bytes_per_s"].value == 4.2e12
    assert now.rates["l2_bytes_per_s"].value == known.load("h200").rates["l2_bytes_per_s"].value  # still estimated
    keeping.keep(kept, checkout)  # repeated, replacing earlier results
    assert known.read(checkout / "fingerprints" / "h200.json").rates == now.rates


def test_a_dry_run_is_not_kept_in_this_checkout(tmp_path: Path) -> None:
    kept = RunFolder(tmp_path)
    with pytest.raises(UsageError, match="nothing to keep"):
        keeping.keep(kept)
    dry = record("parity", {})
    dry.device = {**DEVICE, "kind": "cpu"}
    kept.write(dry)
    with pytest.raises(UsageError, match="a dry run is not kept"):
        keeping.keep(kept)


CELL = {
    "ok": True, "kind": "decode", "kernel": "cuda:gemv", "workload": key("linear", **GEMV), "regret": 0.021, "low": 0.0,
    "high": 0.04, "twin": 0.001, "closed": {"unroll": 4}, "closed_us": 10.21, "best": {"unroll": 2}, "best_us": 10.0,
    "settings": 9, "left_out": 0, "readings": 99, "rounds": 20, "seconds": 8.0,
}  # fmt: skip


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return docs/generate.py for a checkout with results of one device."""
    spec = importlib.util.spec_from_file_location("generate_for_results", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    kept = RunFolder(tmp_path / "benchmarks" / "results" / "nvidia-h200")
    passed, failed = ({"ok": ok, "outcome": word} for ok, word in ((True, "passed"), (False, "failed")))
    rows = {"rmsnorm cuda:rmsnorm bf16": passed, "linear cuda:gemv bf16": passed, "linear cuda:gemv fp32": failed}
    kept.write(record("parity", rows))
    kept.write(record("sanitizer", {"memcheck step cuda:step bf16": {"ok": True, "outcome": "clean", "cases": 1}}))
    kept.write(record("fingerprint", {"take": {"ok": True}}))
    kept.write(record("regret", {"decode cuda:gemv": CELL, "decode cuda:rope": {"ok": True, "left out": "no kernel"}}))
    kept.write_text("gaps.json", json.dumps({"parity: failed or undone units": "fp32 rounds twice"}))
    monkeypatch.setattr(made, "ROOT", tmp_path)
    return made


def test_the_documentation_lists_the_devices_on_which_a_kernel_was_right(pages: Any) -> None:
    """Treat a kernel with one failed build as not right."""
    where = {"cuda:rmsnorm": {"NVIDIA H200"}, "cuda:gemv": set(), "cuda:step": {"NVIDIA H200"}}
    assert pages._parities() == {**where, "cuda:probes": {"NVIDIA H200"}}


def test_a_kernels_header_states_that_it_never_ran_until_there_are_results(
    pages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Treat a kernel that failed on the device as run; without results no kernel has run."""
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels")
    shutil.copytree(ROOT / "tests" / "compile", tmp_path / "tests" / "compile")
    changed = {path.stem for path in pages.rewrite_headers(write=True)}
    assert changed == {"rmsnorm", "gemv", "step", "probes"} and not list(pages.rewrite_headers(write=False))
    text = (tmp_path / "kernels" / "cuda" / "gemv.cu").read_text()
    assert "// status  compiled and emulated; run on silicon: docs/gpu.md\n" in text
    rows = {row.split(" | ")[0]: row for row in pages.ran_on().splitlines()}
    assert "| passed on NVIDIA H200 |" in rows["| `cuda/rmsnorm.cu`"]
    assert "| failed on NVIDIA H200 |" in rows["| `cuda/gemv.cu`"]
    assert "| not yet run on silicon |" in rows["| `triton/rmsnorm.py`"]
    shutil.rmtree(tmp_path / "benchmarks")
    assert {path.stem for path in pages.rewrite_headers(write=True)} == changed
    for path in pages.gpu_sources():
        assert path.read_text() == (ROOT / path.relative_to(tmp_path)).read_text()


def test_only_sources_that_never_ran_on_a_device_state_it() -> None:
    """Check the modules that run kernels, and the README; docs/generate.py --check covers the kernels."""
    ran = any(record["device"]["kind"] == "cuda" for record in map(_record, ROOT.glob("benchmarks/results/*/*.json")))
    modules = [
        path for path in (ROOT / "autosel").rglob("*.py") if re.search(r"not\s+yet run on silicon", path.read_text())
    ]
    claim = "**No GPU kernel has run on a GPU.**" in (ROOT / "README.md").read_text()
    assert (bool(modules), claim) == (not ran, not ran), "correct the status of these modules, and README's first gap"


def _record(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    return found if "units" in found else {"device": {"kind": ""}}


def test_the_page_names_the_targets_of_the_tests() -> None:
    from tests.compile import cutlass_asked, targets, triton_kernels

    assert targets.of_known_devices() == tuple(sorted(triton_kernels.TARGETS))
    for source in cutlass_asked.BY_NAME:
        asked = {facts(known.load(b.device)).cc for b in cutlass_asked.builds() if b.source == source}
        assert asked in (set(), set(targets.of_cutlass(source)))  # none where nothing can be compiled
