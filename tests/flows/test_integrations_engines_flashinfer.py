"""Read the exported FlashInfer dataset and its manifest by the published parsers."""

from __future__ import annotations

from pathlib import Path

import pytest

from autosel import ops
from autosel.cli.main import run
from autosel.integrations.engines import ask, flashinfer
from autosel.integrations.engines import folder as folders
from tests import engines
from tests.flows.test_integrations_flashinfer_bench import decided, small


@pytest.mark.parametrize("engine", ["flashinfer-bench", "flashinfer"])
def test_flashinfers_own_parser_reads_every_solution(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if engines.missing(engine):
        pytest.skip(engines.missing(engine))
    monkeypatch.setenv("PYTHONPATH", engines.paths(engine))
    every = [
        decided(small(ops.find("swiglu")), "torch:swiglu"),
        decided(small(ops.find("rmsnorm")), "torch:rmsnorm", raced=False),
    ]
    flashinfer.export(every, tmp_path)
    made = folders.read(tmp_path)
    assert [row.source for row in made.rows] == ["measured", "default"] and "by hand" in made.rows[1].reason
    heard = ask.ask("flashinfer", tmp_path, made)
    assert heard.here == 2
    (tmp_path / made.rows[0].file).write_text("{}")
    assert run(["doctor", "--engine", "flashinfer", str(tmp_path)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "has been changed or removed" in said and "of 2 rows would be loaded here" in said
