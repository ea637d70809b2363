"""Test Inductor with real compilations."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import setuptools  # noqa: F401  (here, because two threads of inductor's that import it at once can fail)

from autosel import fingerprint, settings
from autosel.candidates import inductor, registry
from autosel.candidates.load import load
from autosel.ops import OPS
from autosel.ops.contract import Match


def test_inductors_artefacts_are_in_the_home_unless_the_user_sets_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "home", lambda: tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    inductor._keep_artefacts()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/elsewhere"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    inductor._keep_artefacts()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")


def test_inductor_compiles_each_shape_and_outlives_dynamos_limit() -> None:
    import torch._dynamo.config

    op = OPS["add_rmsnorm"]
    way = registry.find("add_rmsnorm", "inductor:add_rmsnorm")
    fp = fingerprint.take("cpu")
    first = op.workload("fp32", {"M": 1, "d": 64})
    call = load(op, way.recipe(first, fp, way.knobs(first, fp)), "", {})
    with torch._dynamo.config.patch(recompile_limit=1):
        for d in (64, 96):
            w = op.workload("fp32", {"M": 1, "d": d})
            inputs, outs = op.inputs(w, 3), op.allocate(w, fill=float("nan"))
            got = call(*op.arguments(inputs), *outs)
            assert isinstance(op.verify(inputs, got), Match)
            assert got[0] is outs[0]
            assert got[1] is outs[1]
