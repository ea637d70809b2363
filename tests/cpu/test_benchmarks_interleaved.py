"""Test the plain read that the figures of gemv and attention are compared with."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from autosel import fingerprint
from autosel.native.compile import find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")


def test_a_plain_read_of_operands_returns_its_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    read = importlib.import_module("interleaved").reader(["w", "v"], fingerprint.take("cpu"))
    sys.modules.pop("interleaved")
    w, v = torch.ones(1 << 20), torch.ones(1 << 18)
    seconds = read({"w": w, "v": v, "x": torch.ones(1)})
    assert (w.nbytes + v.nbytes) / 1e13 < seconds < 10
