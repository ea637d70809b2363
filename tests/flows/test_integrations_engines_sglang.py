"""Find SGLang's exported files by SGLang's own lookups, with its published wheel; no GPU, no serving."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from autosel.integrations.engines import ask, sglang
from tests import engines
from tests.flows.test_integrations_engines_vllm import FP8, checkpoint, target

pytestmark = pytest.mark.skipif(bool(engines.missing("sglang")), reason=engines.missing("sglang"))


@pytest.fixture(autouse=True)
def _sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", engines.paths("sglang"))
    monkeypatch.delenv("SGLANG_MOE_CONFIG_DIR", raising=False)


def test_sglangs_own_lookups_find_every_row(tmp_path: Path) -> None:
    """Test products and experts in bf16 and blocked fp8, derived rows and pinned ones (the engine's defaults)."""
    asked = [target(tp=2), target(derives=False)]
    for name, extra in (("plain", {}), ("fp8", FP8)):
        model = str(checkpoint(tmp_path / name, **extra))
        asked += [target(model=model, tp=2), target(model=model, derives=False)]
    rows, folder = [], tmp_path / "all"
    for one in asked:
        made = sglang.export(one, tmp_path / "one")
        rows += made.rows
        for file in made.digests:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes((tmp_path / "one" / file).read_bytes())
    heard = ask.ask("sglang", folder, dataclasses.replace(made, rows=tuple(rows)))
    assert heard.version == sglang.VERSION
    missed = [r.label for r, said in zip(rows, heard.rows, strict=True) if not said.there]
    stale = [r.label for r, said in zip(rows, heard.rows, strict=True) if not said.same]
    assert not missed and not stale
    assert "SGLANG_MOE_CONFIG_DIR" in heard.setting and "AUTOSEL_ENGINE_FILES" in heard.setting
