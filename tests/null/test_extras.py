"""Test that a missing package is always reported with its extra and the command that installs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from autosel import extras, resources
from autosel.candidates.triton.base import NO_TRITON
from autosel.devices.cuda import nvml
from autosel.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
# Packages of the extras are installed for tests; here they are hidden.
WITHOUT = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] == sys.argv[1] else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
from autosel.cli.main import main
main(sys.argv[2:])
"""


@pytest.mark.parametrize(
    ("package", "extra", "words"),
    [
        ("uvicorn", "daemon", "serve"),
        ("starlette", "daemon", "serve --systemd-unit"),
        ("matplotlib", "plots", "run --report page"),
        ("cryptography", "sign", "export --sign bundle.json"),
        ("ray", "ray", "tune --ray local:1"),
        ("psycopg", "fleet", "explain --history"),
    ],
)
def test_a_verb_names_its_missing_package_the_extra_and_the_command_to_install_it(
    package: str, extra: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AUTOSEL_SPELLING", raising=False)
    own = {n: v for n, v in os.environ.items() if not n.startswith("AUTOSEL_")}
    if extra == "fleet":
        own["AUTOSEL_DB"] = "postgresql://nobody@localhost/ledger"
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, package, *words.split()],
        cwd=tmp_path,
        env={**own, "PYTHONPATH": str(ROOT), "AUTOSEL_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
    )
    assert done.returncode in (1, 2), done.stderr
    assert f"the extra {extra}" in done.stderr.splitlines()[0]
    if package != "ray":  # searched for but not imported, because importing takes seconds
        assert f"the package {package}" in done.stderr.splitlines()[0]
    assert f"install it:  {extras.command(extra)}" in done.stderr
    assert any(package in line for line in DECLARED[extra])


def test_a_prompt_as_text_names_its_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autosel.decode import prompt

    (tmp_path / prompt.TOKENIZER).touch()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match="a text prompt needs the package tokenizers, of the extra hf") as caught:
        prompt._tokenize("four words of prompt", tmp_path)
    assert caught.value.todo == f"install it:  {extras.command('hf')}"


def test_the_packages_for_a_gpu_are_named_for_both_cudas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(UsageError, match="needs cupy") as caught:
        nvml.counted()
    for said in (caught.value.todo, NO_TRITON):
        assert extras.command("cuda13") in said
        assert "cuda12" in said


@pytest.mark.parametrize("started", ["", "./run", "../checkout/run"])
def test_in_the_environment_of_a_checkout_run_installs_it_else_pip(
    started: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOSEL_SPELLING", started)
    monkeypatch.setattr(resources, "root", lambda: tmp_path)
    assert extras.command("plots") == "pip install 'autosel-kernels[plots]'"  # from a wheel
    (tmp_path / "run").touch()
    assert (
        extras.command("plots") == "pip install 'autosel-kernels[plots]'"
    )  # a checkout, in an environment of its user
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    assert extras.command("plots") == f"{started or tmp_path / 'run'} setup plots"


def test_every_extra_that_is_named_exists() -> None:
    called = re.compile(r"""extras\.(?:missing|command)\(["']([\w-]+)["']""")
    named = {name for path in (ROOT / "autosel").rglob("*.py") for name in called.findall(path.read_text())}
    assert {"daemon", "plots", "sign", "hf", "ray", "fleet"} <= named <= set(DECLARED)
