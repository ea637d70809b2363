"""Test the common parts of all exports to engines: manifest, writes, refusals."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from autosel import settings
from autosel.cli.main import run
from autosel.errors import AutoselError, BadConfig
from autosel.fingerprint import known
from autosel.integrations import sglang_plugin, vllm_plugin
from autosel.integrations.engines import ask
from autosel.integrations.engines import folder as folders
from autosel.integrations.engines.rows import EngineRow

ROW = EngineRow(
    file="a.json", key="M=1", label="qkv M1", value={"x": 1}, source="derived", reason="formula", ask={"m": 1}
)


def put(folder: Path, *names: str, engine: str = "vllm") -> folders.Manifest:
    return folders.write(
        folder,
        engine=engine,
        engine_version="1.2.3",
        fp=known.load("h200"),
        model="llama-8b",
        dtype="bf16",
        rows=[ROW],
        files={name: f"{name}\n" for name in names},
    )


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = put(tmp_path, "a.json", "sub/b.json")
    assert folders.read(tmp_path) == made and made.device == "NVIDIA H200"
    assert folders.changed(tmp_path, made) == ()
    (tmp_path / "a.json").write_text("mine\n")
    (tmp_path / "sub/b.json").unlink()
    assert folders.changed(tmp_path, made) == ("a.json", "sub/b.json")


def test_a_new_export_removes_only_files_of_the_last_one(tmp_path: Path) -> None:
    put(tmp_path, "a.json", "old.json", "edited.json")
    (tmp_path / "mine.json").write_text("{}")
    (tmp_path / "edited.json").write_text("by hand")
    put(tmp_path, "a.json")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "autosel.json", "edited.json", "mine.json"]


def contents(folder: Path) -> dict[str, str]:
    return {p.relative_to(folder).as_posix(): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_file_that_cannot_be_moved_leaves_all_others_unchanged(tmp_path: Path) -> None:
    """Move back the files that were already moved, and remove the folders made for them."""
    put(tmp_path, "a.json", "sub/b.json")
    (tmp_path / "a.json").write_text("edited")
    (tmp_path / "blocked").write_text("a file where a folder is needed")
    (tmp_path / "taken.json").mkdir()
    before, folders_before = contents(tmp_path), sorted(p for p in tmp_path.rglob("*") if p.is_dir())
    for bad in ("blocked/c.json", "taken.json"):
        with pytest.raises(BadConfig, match=f"cannot write .*{bad}"):
            put(tmp_path, "a.json", "new/d.json", bad, "sub/b.json")
        assert contents(tmp_path) == before
        assert sorted(p for p in tmp_path.rglob("*") if p.is_dir()) == folders_before


def test_a_full_disk_leaves_every_file_unchanged(tmp_path: Path) -> None:
    """Write in a process whose files may have 2 KiB, where writing more fails as on a full disk."""
    put(tmp_path, "a.json")
    before = contents(tmp_path)
    script = f"""
import resource, signal
from pathlib import Path
from autosel.errors import BadConfig
from autosel.integrations.engines import folder as folders
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))
try:
    folders.put(Path({str(tmp_path)!r}), {{"a.json": "new", "b.json": "x" * 4096}})
except BadConfig as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "cannot write" in done.stdout and "b.json" in done.stdout
    assert contents(tmp_path) == before


def test_another_engines_export_is_not_overwritten(tmp_path: Path) -> None:
    put(tmp_path, "a.json", engine="sglang")
    with pytest.raises(BadConfig, match="an export to sglang"):
        put(tmp_path, "a.json")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": 2}', '{"schema": 1, "engine": 5}', "{" * 2000, '{"schema": 1}', "\x00\xff"]
)
def test_an_invalid_manifest_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    (tmp_path / folders.MANIFEST).write_bytes(text.encode())
    with pytest.raises(BadConfig, match=r"autosel\.json is not the manifest"):
        folders.read(tmp_path)


def test_a_manifest_that_names_a_file_elsewhere_is_refused(tmp_path: Path) -> None:
    put(tmp_path, "a.json")
    data = json.loads((tmp_path / folders.MANIFEST).read_text())
    for name in ("../a.json", "/etc/passwd"):
        (tmp_path / folders.MANIFEST).write_text(json.dumps({**data, "digests": {name: "0"}}))
        with pytest.raises(BadConfig, match="leads elsewhere"):
            folders.read(tmp_path)


def test_a_missing_engine_is_named_with_the_required_version(tmp_path: Path) -> None:
    made = put(tmp_path, "a.json")
    with pytest.raises(ask.NotInstalled) as error:
        ask._reply("vllm", "/srv/bin/python", made, '{"absent": "No module named vllm"}\n', "")
    assert "vllm is not installed in /srv/bin/python" in str(error.value) and "1.2.3" in str(error.value)


@pytest.mark.parametrize("out", ["", "hello\n", '{"version": "1"}\n', '{"version":"1","device":"d","rows":[]}\n'])
def test_an_engine_that_does_not_answer_in_full_is_an_error(tmp_path: Path, out: str) -> None:
    made = put(tmp_path, "a.json")
    with pytest.raises(AutoselError):
        ask._reply("vllm", "python", made, out, "ImportError: libcuda.so\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["export", "--to", "vllm"], "--to needs a folder"),
        (["export", "--to", "vlm", "x"], "unknown engine"),
        (["export", "--model", "llama-8b", "x"], "need --to ENGINE"),
        (["export", "--to", "inductor", "--fingerprint", "h2000", "x"], "unknown device"),
        (["export", "--to", "inductor", "x"], "this ledger has no decisions of a GPU"),
        (["doctor", "x"], "belong to --engine"),
        (["doctor", "--engine", "vllm"], "needs the folder"),
        (["doctor", "--engine", "vllm", "."], "no export of autosel"),
    ],
)
def test_bad_words_are_refused_with_the_next_step(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(words) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("engine", "plugin"), [("vLLM", vllm_plugin), ("SGLang", sglang_plugin)])
def test_an_engine_with_another_interface_is_not_changed_and_both_versions_are_named(
    engine: str, plugin: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Test a package of that name without the functions that the plug-in uses."""
    monkeypatch.setitem(sys.modules, engine.lower(), types.ModuleType(engine.lower()))
    monkeypatch.setattr("autosel.integrations.plugged.version", lambda name: f"9.9 of {name}")
    plugin.register()
    (said,) = caplog.messages
    assert f"9.9 of {engine.lower()}" in said and f"install a {engine} near {plugin.WRITTEN_FOR}" in said
    monkeypatch.setenv("AUTOSEL_DISABLE", "1")
    settings.read.cache_clear()
    plugin.register()
    settings.read.cache_clear()
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("engine", "plugin", "begins"), [("vLLM", vllm_plugin, "_parts"), ("SGLang", sglang_plugin, "_hooks")]
)
def test_an_engine_starts_despite_errors_of_a_plug_in(
    engine: str, plugin: Any, begins: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM calls its plug-ins without catching exceptions."""
    monkeypatch.setattr(plugin, begins, lambda: (_ for _ in ()).throw(RuntimeError("operator registered twice")))
    plugin.register()
    assert caplog.messages == [f"autosel does not change {engine}: RuntimeError: operator registered twice"]
