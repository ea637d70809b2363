"""Check that settings are read once, and that forgotten ones do not come back."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from autosel import settings


def test_settings_are_read_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.home() == home
    monkeypatch.setenv("AUTOSEL_HOME", "/elsewhere")
    assert settings.home() == home
    settings.read.cache_clear()
    assert settings.home() == Path("/elsewhere")


def test_a_thread_that_was_reading_them_does_not_bring_forgotten_ones_back(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.read.cache_clear()
    began, may_end, resolve = threading.Event(), threading.Event(), settings.resolve

    def slow(*given: object) -> object:
        began.set()
        may_end.wait(10)
        return resolve(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(settings, "resolve", slow)
    thread = threading.Thread(target=settings.home)
    thread.start()
    began.wait(10)
    monkeypatch.setenv("AUTOSEL_HOME", str(tmp_path / "other"))
    threading.Timer(0.05, may_end.set).start()
    settings.read.cache_clear()
    thread.join()
    assert settings.home() == tmp_path / "other"
