"""Test a user's installation: the wheel contains all it needs and no more; wheel and editable install find their
resources."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
SHIPPED = ("kernels", "fingerprints", "db")
LEFT_OUT = ("tests", "benchmarks", "docs", ".ci", ".venv", ".git", "build", "dist")

# Runs inside an installation, in a folder that is not the checkout.
LOOK = """\
import json, sys
import autosel
loaded = sorted({"torch", "sqlalchemy", "numpy", "click", "rich"} & set(sys.modules))
from autosel import resources
from autosel.fingerprint import known
print(json.dumps({
    "file": autosel.__file__,
    "loaded": loaded,
    "root": str(resources.root()),
    "kernel": (resources.kernels() / "cpu" / "rmsnorm.cpp").is_file(),
    "migrations": resources.migrations().is_dir(),
    "devices": known.names(),
    "read_rate": known.load("h200").rates["read_bytes_per_s"].value,
}))
"""


def relevant(folder: Path) -> set[str]:
    """Return the files below a folder that a clone would have."""
    return {
        str(p.relative_to(folder))
        for p in folder.rglob("*")
        if p.is_file() and "__pycache__" not in p.parts and not p.name.endswith(".pyc")
    }


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """Return a copy of the checkout, so that building does not change ours."""
    copy = tmp_path_factory.mktemp("copy") / "autosel"
    ignored = shutil.ignore_patterns(".venv*", ".git", "__pycache__", ".*_cache", ".hypothesis", "build", "dist")
    shutil.copytree(CHECKOUT, copy, ignore=ignored)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=checkout)
    (made,) = folder.iterdir()
    return made


def make_venv(folder: Path) -> Path:
    """Make an empty environment that sees the dependencies, but not the present installation of autosel."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    (site,) = folder.glob("lib/python3.*/site-packages")
    shared = [p for p in sys.path if os.path.basename(p) in ("site-packages", "dist-packages")]
    (site / "dependencies.pth").write_text("\n".join(shared) + "\n")
    return folder


def pip_install(venv: Path, *what: str | Path) -> None:
    pip = (sys.executable, "-m", "pip", "--python", venv / "bin" / "python", "install")
    run(*pip, "--no-deps", "--no-index", "--no-build-isolation", *what, cwd=venv)


def look(venv: Path) -> dict:
    return json.loads(run(venv / "bin" / "python", "-c", LOOK, cwd=venv))


# --- what the wheel holds ---------------------------------------------------------------------------------------------


def test_the_wheel_is_pure_python_with_the_projects_name(wheel):
    assert wheel.name.startswith("autosel_kernels-")
    assert wheel.name.endswith("-py3-none-any.whl")


def test_the_wheel_holds_the_package_and_what_ships_with_it(wheel, checkout):
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in relevant(checkout / "autosel"):
        assert f"autosel/{path}" in names
    for folder in SHIPPED:
        files = relevant(checkout / folder)
        assert files, folder
        assert {f"autosel/_data/{folder}/{path}" for path in files} <= names


def test_the_wheel_holds_nothing_else(wheel, checkout):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"autosel"}
    assert {n.split("/")[2] for n in names if n.startswith("autosel/_data/")} == set(SHIPPED)
    conformance = "autosel/testing/test_"  # the conformance suite, which users run
    assert not [n for n in names if "__pycache__" in n or ("/test_" in n and not n.startswith(conformance))]


def test_no_package_file_in_kernels_that_would_shadow_another_package(wheel, checkout):
    # kernels/__init__.py at a checkout's root would hide Hugging Face's `kernels` from transformers.
    assert not [path for folder in SHIPPED for path in relevant(checkout / folder) if path.endswith("__init__.py")]


def test_the_metadata_has_requirements_and_entry_points(wheel):
    archive = zipfile.ZipFile(wheel)
    (info,) = {n.split("/")[0] for n in archive.namelist() if ".dist-info/" in n}
    metadata = archive.read(f"{info}/METADATA").decode()
    assert "\nName: autosel-kernels\n" in metadata
    assert "\nRequires-Python: >=3.11\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert "\nRequires-Dist: torch>=2.10\n" in metadata
    assert "autosel = autosel.cli.main:main" in archive.read(f"{info}/entry_points.txt").decode()
    assert f"{info}/licenses/LICENSE" in archive.namelist()


def test_the_source_archive_is_enough_to_build_the_wheel(checkout, wheel, tmp_path):
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path, cwd=checkout)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    assert not [name for name in LEFT_OUT if (source / name).exists()]
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "again", cwd=source)
    (again,) = (tmp_path / "again").iterdir()
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


# --- what an installation finds ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    venv = make_venv(tmp_path_factory.mktemp("installed") / "venv")
    pip_install(venv, wheel)
    return venv


@pytest.fixture(scope="module")
def editable(checkout, tmp_path_factory):
    venv = make_venv(tmp_path_factory.mktemp("editable") / "venv")
    pip_install(venv, "--editable", checkout)
    return venv


def test_an_installed_wheel_finds_its_own_resources(installed):
    seen = look(installed)
    assert Path(seen["file"]).is_relative_to(installed)
    assert Path(seen["root"]) == Path(seen["file"]).parent / "_data"
    assert seen["kernel"] and seen["migrations"] and "h200" in seen["devices"]
    assert seen["read_rate"] > 1e12


def test_an_editable_install_reads_the_checkout(editable, checkout):
    seen = look(editable)
    assert Path(seen["file"]) == checkout / "autosel" / "__init__.py"
    assert Path(seen["root"]) == checkout
    assert seen["kernel"] and seen["migrations"] and "h200" in seen["devices"]
    (checkout / "fingerprints" / "mine.json").write_text("{}")
    assert "mine" in look(editable)["devices"], "a change of the checkout must take effect at once"
    (checkout / "fingerprints" / "mine.json").unlink()


def test_an_editable_install_exposes_only_the_package(editable):
    finding = (
        "import importlib.util as u; print([n for n in ('tests', 'benchmarks', 'kernels', 'db') if u.find_spec(n)])"
    )
    assert run(editable / "bin" / "python", "-P", "-c", finding, cwd=editable) == "[]\n"


@pytest.mark.parametrize("kind", ["installed", "editable"])
def test_the_command_is_on_the_path_and_helps_without_torch(kind, request):
    venv = request.getfixturevalue(kind)
    assert "tune" in run(venv / "bin" / "autosel", "--help", cwd=venv)
    helping = (
        "import sys; sys.argv = ['autosel', '--help']\n"
        "from autosel.cli.main import main\n"
        "try: main()\n"
        "finally: print('loaded', sorted({'torch', 'sqlalchemy'} & set(sys.modules)))\n"
    )
    assert "loaded []" in run(venv / "bin" / "python", "-c", helping, cwd=venv)
