"""Find vLLM's exported files by vLLM's own lookups, with its published wheel; no GPU, no serving."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from autosel import models
from autosel.cli.main import run
from autosel.errors import BadConfig, UsageError
from autosel.fingerprint import known
from autosel.integrations.engines import ask, experts, vllm
from autosel.integrations.engines.folder import Manifest
from autosel.integrations.engines.rows import EngineRow, Target
from autosel.testing.serving import pinned
from autosel.values import Decision
from tests import engines

MODEL = models.load("qwen3-8b")
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
asks_vllm = pytest.mark.skipif(bool(engines.missing("vllm")), reason=engines.missing("vllm"))


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", engines.paths("vllm"))
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    monkeypatch.delenv("VLLM_TUNED_CONFIG_FOLDER", raising=False)


def checkpoint(folder: Path, **changed: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changed}))
    return folder


def target(*decisions: Decision, model: str = "", derives: bool = True, tp: int = 1, device: str = "h200") -> Target:
    found = experts.read(model) if model else None
    shape = None if found else MODEL
    return Target(
        fp=known.load(device), decisions=decisions, dtype="bf16", derives=derives, model=shape, experts=found, tp=tp
    )


def spoiled(scratch: Path, folder: Path) -> list[EngineRow]:
    """Return a row whose file has another name in vLLM, and a default that this vLLM does not have."""
    moved, changed = (
        r for r in vllm.export(target(derives=False, tp=16), scratch).rows if r.key == "1" and r.ask["n"] < 4000
    )
    changed = dataclasses.replace(changed, value={**changed.value, "num_warps": 16})
    (folder / moved.file.replace(",device", ", device")).write_text(json.dumps({moved.key: moved.value}))
    (folder / changed.file).write_text(json.dumps({changed.key: changed.value}))
    return [moved, changed]


def exported(export: Callable[[Target, Path], Manifest], scratch: Path) -> Manifest:
    """Export products and experts in bf16 and blocked fp8, derived rows and pinned ones (the engine's defaults).

    All files are in `scratch / "all"`, because starting an engine takes seconds: one process reads all rows.
    """
    asked = [target(tp=2), target(derives=False)]
    for name, extra in (("plain", {}), ("fp8", FP8)):
        model = str(checkpoint(scratch / name, **extra))
        asked += [target(model=model, tp=2), target(model=model, derives=False)]
    rows: list[EngineRow] = []
    for one in asked:
        made = export(one, scratch / "one")
        rows += made.rows
        shutil.copytree(scratch / "one", scratch / "all", dirs_exist_ok=True)
    return dataclasses.replace(made, rows=tuple(rows))


def refuse_missed_and_stale(rows: Sequence[EngineRow], heard: Sequence[ask.Heard]) -> None:
    missed = [r.label for r, said in zip(rows, heard, strict=True) if not said.there]
    stale = [r.label for r, said in zip(rows, heard, strict=True) if not said.same]
    assert not missed and not stale


@asks_vllm
def test_vllms_own_lookups_find_every_row(tmp_path: Path) -> None:
    made, folder = exported(vllm.export, tmp_path), tmp_path / "all"
    odd, count = spoiled(tmp_path / "one", folder), len(made.rows)
    heard = ask.ask("vllm", folder, dataclasses.replace(made, rows=(*made.rows, *odd)))
    assert [(r.there, r.same) for r in heard.rows[count:]] == [(False, True), (True, False)]
    assert heard.version == vllm.VERSION
    refuse_missed_and_stale(made.rows, heard.rows[:count])
    flags = [row.ask["kind"] for row, said in zip(made.rows, heard.rows, strict=False) if said.here]
    assert flags == ["flag"] * 6  # one for each target; other rows are for another device
    assert "VLLM_TUNED_CONFIG_FOLDER" in heard.setting and "AUTOSEL_ENGINE_FILES" in heard.setting


def test_a_python_without_vllm_is_named_with_the_version_that_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    vllm.export(target(), tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(engines.ROOT))
    assert run(["doctor", "--engine", "vllm", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "vllm is not installed in" in said and "vllm 0.33.0" in said and "--python" in said


def test_decided_attention_names_a_backend_only_where_all_agree(tmp_path: Path) -> None:
    from autosel import ops

    def decided(number: int, length: int, backend: str) -> Decision:
        dims = {"B": 1, "Hq": MODEL.Hq, "Hkv": MODEL.Hkv, "S": 1, "D": MODEL.D, "L": length}
        w = ops.find("attn").workload("bf16", dims)
        d = pinned(w, "torch:sdpa")
        return dataclasses.replace(d, id=number, arm=dataclasses.replace(d.arm, backend=backend))

    one = vllm.export(target(decided(3, 512, "FLASHINFER"), decided(4, 2048, "FLASHINFER")), tmp_path / "one").rows[-1]
    assert (one.value, one.source, one.decision) == ("FLASHINFER", "measured", 3)
    assert "attention-backend: FLASHINFER\n" in (tmp_path / "one" / "serve.yaml").read_text()
    two = vllm.export(target(decided(3, 512, "FLASHINFER"), decided(4, 2048, "TORCH")), tmp_path / "two").rows[-1]
    assert (two.value, two.source, two.decision) == (None, "default", None) and "3, 4" in two.reason
    assert "\nattention-backend" not in (tmp_path / "two" / "serve.yaml").read_text()


def test_products_of_a_tensor_parallel_model_have_one_devices_sizes(tmp_path: Path) -> None:
    made = vllm.export(target(tp=4), tmp_path)
    assert {(r.ask["n"], r.ask["k"]) for r in made.rows if r.ask["kind"] == "gemm"} == {
        (1536, 4096),
        (4096, 1024),
        (6144, 4096),
        (4096, 3072),
    }
    with pytest.raises(UsageError, match="does not divide"):
        vllm.export(target(tp=5), tmp_path / "five")
    assert not (tmp_path / "five").exists()


@pytest.mark.parametrize(
    "changed",
    [
        {"num_experts_per_tok": None},
        {"moe_intermediate_size": "768"},
        {"hidden_size": True},
        {"num_experts": -1},
        {"quantization_config": {"quant_method": "awq"}},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
    ],
)
def test_experts_without_sizes_are_refused(changed: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"config\.json"):
        experts.read(str(checkpoint(tmp_path / "m", **changed)))


def test_tiles_of_experts_fit_every_known_device(tmp_path: Path) -> None:
    for extra in ({}, FP8):
        model = checkpoint(tmp_path / f"m{len(extra)}", **extra)
        for name in known.names():
            one = target(model=str(model), device=name)
            size = 1 if extra else 2
            for row in vllm.export(one, tmp_path / name).rows[:-1]:
                v = row.value
                stage = (v["BLOCK_SIZE_M"] + v["BLOCK_SIZE_N"]) * v["BLOCK_SIZE_K"] * size
                assert stage * v["num_stages"] <= one.facts.smem_per_cta and row.source == "derived"
