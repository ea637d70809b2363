"""Tests build kernels and measure rates in a home of their own, kept between runs; never in the user's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("AUTOSEL_HOME", str(Path(__file__).resolve().parents[1] / ".autosel" / "tests"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home with nothing in it yet, and an environment in which nothing else of autosel's is set."""
    from autosel import settings

    for name in [n for n in os.environ if n.startswith("AUTOSEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AUTOSEL_HOME", str(tmp_path / "home"))
    settings.read.cache_clear()
    yield tmp_path / "home"
    monkeypatch.undo()
    settings.read.cache_clear()
