"""Find SGLang's exported files by SGLang's own lookups, with its published wheel; no GPU, no serving."""

from __future__ import annotations

from pathlib import Path

import pytest

from autosel.integrations.engines import ask, sglang
from tests import engines
from tests.flows.test_integrations_engines_vllm import exported, refuse_missed_and_stale

pytestmark = pytest.mark.skipif(bool(engines.missing("sglang")), reason=engines.missing("sglang"))


@pytest.fixture(autouse=True)
def _sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", engines.paths("sglang"))
    monkeypatch.delenv("SGLANG_MOE_CONFIG_DIR", raising=False)


def test_sglangs_own_lookups_find_every_row(tmp_path: Path) -> None:
    made = exported(sglang.export, tmp_path)
    heard = ask.ask("sglang", tmp_path / "all", made)
    assert heard.version == sglang.VERSION
    refuse_missed_and_stale(made.rows, heard.rows)
    assert "SGLANG_MOE_CONFIG_DIR" in heard.setting and "AUTOSEL_ENGINE_FILES" in heard.setting
