"""Test the downloads of tests/engines.py: the wanted version, and no older one."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests import engines


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Serve a package index of one engine; return its requests."""
    asked: list[str] = []

    def pip(verb: str, *words: str) -> None:
        lines = Path(words[words.index("-r") + 1]).read_text()
        asked.append(lines.strip())
        if verb == "install":
            Path(words[words.index("--target") + 1]).mkdir()
            return
        name, _, version = lines.split()[0].partition("==")
        folder = Path(words[words.index("--dest") + 1])
        with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", f"__version__ = '{version}'\n")
            wheel.writestr(f"{name}/kernels.so", "not Python")
            wheel.writestr(f"{name}-{version}.dist-info/METADATA", f"Version: {version}\n")

    monkeypatch.setattr(engines, "ENGINES", tmp_path / "engines")
    monkeypatch.setattr(engines, "FETCHED", tmp_path / "engines" / "dependencies" / engines.DEPENDENCIES.name)
    monkeypatch.setattr(engines, "WHEELS", {"engine": "engine==1.0 --hash=sha256:0"})
    monkeypatch.setattr(engines, "_pip", pip)
    return asked


def test_an_engine_is_fetched_once_and_again_when_another_version_is_wanted(
    index: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "engine" in engines.missing("engine")
    engines.fetch()
    engines.fetch()
    assert index.count("engine==1.0 --hash=sha256:0") == 1
    assert engines.missing("engine") == ""
    monkeypatch.setattr(engines, "WHEELS", {"engine": "engine==1.1 --hash=sha256:1"})
    assert "engine" in engines.missing("engine")
    engines.fetch()
    assert engines.missing("engine") == ""
    assert (tmp_path / "engines" / "engine" / "engine" / "__init__.py").read_text() == "__version__ = '1.1'\n"
    assert not list((tmp_path / "engines" / "engine").glob("*-1.0.dist-info"))


def test_only_the_used_files_of_an_engine_are_kept(index: list[str], tmp_path: Path) -> None:
    engines.fetch()
    assert not (tmp_path / "engines" / "engine" / "engine" / "kernels.so").exists()
