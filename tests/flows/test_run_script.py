"""Test `./run`: real environments made from tiny projects, without network, and its decisions."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
SCRIPT = CHECKOUT / "run"

# A project small enough to set up in seconds: no dependencies, a separate build backend, and a command line that only
# prints its arguments.
PYPROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "autosel-kernels"
version = "0"
dependencies = []
"""
BACKEND = """\
import os, zipfile
def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "autosel_kernels-0-py3-none-any.whl"
    info = "autosel_kernels-0.dist-info/"
    files = {
        "autosel_here.pth": os.getcwd() + "\\n",
        info + "METADATA": "Metadata-Version: 2.1\\nName: autosel-kernels\\nVersion: 0\\nProvides-Extra: test\\n",
        info + "WHEEL": "Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    }
    files[info + "RECORD"] = "".join(f"{n},,\\n" for n in (*files, info + "RECORD"))
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
    return name
build_wheel = build_editable
"""
ECHO = """\
import json, os, sys
print(json.dumps({"arguments": sys.argv[1:], "spelling": os.environ["AUTOSEL_SPELLING"], "python": sys.executable}))
"""


def make_checkout(folder: Path) -> Path:
    (folder / "autosel" / "cli").mkdir(parents=True)
    for name, text in (
        ("pyproject.toml", PYPROJECT),
        ("backend.py", BACKEND),
        ("hatch_build.py", ""),
        ("autosel/__init__.py", ""),
        ("autosel/cli/__init__.py", ""),
        ("autosel/cli/main.py", ECHO),
    ):
        (folder / name).write_text(text)
    shutil.copy(SCRIPT, folder / "run")
    return folder


def offline(**more: str) -> dict[str, str]:
    """Provide an environment in which pip cannot use a network, for any configuration of the machine."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    return {**kept, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", **more}


def start(checkout: Path, *arguments: str, python: tuple[str, ...] = (sys.executable,), folder="", **more: str):
    """Start ./run in its own folder or another one, with more variables in its environment."""
    command, pipe = [*python, str(checkout / "run"), *arguments], subprocess.PIPE
    return subprocess.Popen(command, cwd=folder or checkout, env=offline(**more), stdout=pipe, stderr=pipe, text=True)


def run(checkout: Path, *arguments: str, code: int = 0, **more) -> subprocess.CompletedProcess[str]:
    """Run it as `start` does, and check its exit code."""
    process = start(checkout, *arguments, **more)
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, err
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture(scope="module")
def script():
    """Load `run` as a module, for decisions that cannot be tested without a network."""
    loader = importlib.machinery.SourceFileLoader("autosel_run", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("autosel_run", loader))
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    loader.exec_module(module)
    sys.dont_write_bytecode = writes
    return module


# --- one environment, made by two processes at the same time ---------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Let two ./run set up a checkout at the same moment; return the checkout and their output."""
    checkout = make_checkout(tmp_path_factory.mktemp("checkout"))
    pair = [start(checkout, "--reuse-torch", "best", "attn", "--json") for _ in range(2)]
    said = [(*p.communicate(timeout=300), p.returncode) for p in pair]
    return checkout, said


@pytest.fixture
def checkout(made):
    return made[0]


def stamp_of(checkout: Path) -> dict:
    return json.loads((checkout / ".venv" / "autosel-setup.json").read_text())


def test_two_at_once_both_work_and_one_waits(made):
    checkout, said = made
    assert [code for _, _, code in said] == [0, 0], said
    assert sum("making .venv" in err for _, err, _ in said) == 1
    assert sum("waiting for it" in err for _, err, _ in said) == 1
    assert not (checkout / ".venv" / "autosel-installing").exists()


def test_the_verb_gets_its_arguments_and_the_callers_spelling(made):
    checkout, said = made
    handed = json.loads(said[0][0])
    assert handed["arguments"] == ["best", "attn", "--json"]
    assert handed["spelling"] == "./run"
    assert Path(handed["python"]) == checkout / ".venv" / "bin" / "python"


def in_venv(checkout: Path, *words: str) -> str:
    """Return the output of .venv's Python."""
    command = [str(checkout / ".venv" / "bin" / "python"), "-P", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=offline()).stdout


def imported(checkout: Path, *modules: str) -> list[str]:
    """Return the files from which .venv's Python would import these modules, "" for a missing one."""
    finding = (
        "import sys; from importlib.util import find_spec; "
        "[print(getattr(find_spec(name), 'origin', '')) for name in sys.argv[1:]]"
    )
    return in_venv(checkout, "-c", finding, *modules).splitlines()


def test_a_torch_of_the_active_environment_is_reused_if_requested(checkout):
    import torch

    stamp = stamp_of(checkout)
    assert stamp["options"]["reuse_torch"]
    assert stamp["torch"] == torch.__version__
    assert not list(checkout.glob(".venv/lib/*/site-packages/torch"))
    (found,) = imported(checkout, "torch")
    assert Path(found).resolve() == Path(torch.__file__).resolve()
    assert in_venv(checkout, "-c", "import torch; print(torch.arange(4).sum().item())") == "6\n"


def test_only_torch_and_its_dependencies_come_from_the_active_environment(checkout):
    ours = ("sympy", "jinja2", "markupsafe", "networkx", "filelock")
    assert all(Path(found).is_relative_to(checkout / ".venv") for found in imported(checkout, *ours))
    others = ("pytest", "numpy", "sqlalchemy", "h11", "tvm_ffi", "rich")
    assert all(importlib.util.find_spec(name) for name in others), (
        "the packages are not installed in the active environment"
    )
    assert imported(checkout, *others) == [""] * len(others)


def test_site_returns_the_folder_of_the_reused_torch(checkout):
    asking = "import json, site; print(json.dumps(site.getsitepackages()))"
    first, *others = json.loads(in_venv(checkout, "-c", asking))
    assert Path(first).is_relative_to(checkout / ".venv" / "lib")  # .venv's own packages come first
    assert set(others) == {str(checkout / ".venv" / "autosel-reused")}


def test_a_second_start_only_runs_the_command(checkout):
    before = {p.name: p.stat().st_mtime_ns for p in (checkout / ".venv").iterdir()}
    again = run(checkout, "doctor", "-v")
    assert json.loads(again.stdout)["arguments"] == ["doctor", "-v"]
    assert again.stderr == ""
    assert {p.name: p.stat().st_mtime_ns for p in (checkout / ".venv").iterdir()} == before


def test_without_a_verb_it_tunes_and_shows_the_environment(checkout):
    started = run(checkout)
    assert json.loads(started.stdout)["arguments"] == ["tune"]
    assert started.stderr.startswith("environment   python 3.")
    assert all(len(line) <= 80 for line in started.stderr.splitlines())


def test_wheel_prints_a_line_that_installs_the_wheel(checkout, tmp_path):
    told = run(checkout, "wheel")
    pip, command, *words = shlex.split(told.stdout)
    assert (pip, command, Path(words[0]).parent) == ("pip", "install", checkout / "dist")
    in_venv(checkout, "-m", "pip", command, "--target", str(tmp_path), *words)
    assert (tmp_path / "autosel_kernels-0.dist-info").is_dir()


def test_without_a_compiler_it_warns_and_continues(checkout):
    started = run(checkout, PATH="/nowhere", CXX="", AUTOSEL_CXX="")
    assert "warning: no C++ compiler found" in started.stderr


def test_from_elsewhere_the_spelling_is_the_callers_path(checkout, tmp_path):
    told = run(checkout, "status", folder=tmp_path)
    assert json.loads(told.stdout)["spelling"] == str(checkout / "run")


def test_a_module_in_the_callers_folder_does_not_replace_ours(checkout, tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    run(checkout, "status", folder=tmp_path)


def test_another_pyproject_is_installed_again_into_the_same_environment(checkout):
    (checkout / "pyproject.toml").write_text(PYPROJECT + "# changed\n")
    before, marker = stamp_of(checkout), checkout / ".venv" / "kept"
    marker.write_text("")
    run(checkout, "status")
    assert stamp_of(checkout)["inputs"] != before["inputs"]
    assert marker.exists()


def test_a_reused_torch_stays_when_another_environment_is_active(checkout):
    (checkout / "hatch_build.py").write_text("# changed\n")
    run(checkout, "status", python=BARE)
    assert stamp_of(checkout)["options"]["reuse_torch"] and all(imported(checkout, "torch", "sympy"))


def test_after_a_kill_the_next_start_waits_for_the_orphaned_pip_and_makes_the_environment_again(checkout, tmp_path):
    gate = tmp_path / "gate"  # pip's build reads it to the end
    os.mkfifo(gate)
    held = f"    if os.path.exists({str(gate)!r}): open({str(gate)!r}).read()\n"
    (checkout / "backend.py").write_text(BACKEND.replace("    name =", held + "    name =", 1))
    (checkout / "pyproject.toml").write_text(PYPROJECT + "# to be installed again\n")
    debris = checkout / ".venv" / "debris"
    debris.write_text("")
    killed = start(checkout, "status")
    with gate.open("w"):  # opens once the build reads at the other end: pip is at work, and stays so
        gate.unlink()
        killed.kill()
        killed.wait()
        assert (checkout / ".venv" / "autosel-installing").exists()
        second = start(checkout, "status")
        first_words = second.stderr.readline()
    out, err = second.communicate(timeout=300)
    for pipe in (killed.stdout, killed.stderr):
        pipe.close()
    assert "waiting for it" in first_words
    assert second.returncode == 0, err
    assert "making .venv again" in err
    assert json.loads(out)["arguments"] == ["status"]
    assert not debris.exists()
    assert not (checkout / ".venv" / "autosel-installing").exists()


def test_an_environment_behind_a_link_is_never_deleted(tmp_path):
    checkout, elsewhere = make_checkout(tmp_path), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("")
    (checkout / ".venv").symlink_to(elsewhere)
    refused = run(checkout, "status", code=1)
    assert f"error: .venv is a link to {elsewhere}" in refused.stderr and "remove the link" in refused.stderr
    assert (elsewhere / "kept").exists() and (checkout / ".venv").is_symlink()


def test_it_runs_from_the_checkout_if_pip_cannot_build_and_nothing_is_missing(checkout):
    (checkout / "pyproject.toml").write_text(PYPROJECT.replace("requires = []", 'requires = ["autosel-none"]'))
    again = run(checkout, "status")
    assert "running from the checkout" in again.stderr
    assert json.loads(again.stdout)["arguments"] == ["status"]


def test_a_dependency_that_cannot_be_installed_is_an_error_with_pips_message_and_no_stamp(checkout):
    # This test breaks the shared checkout, so it must be the last one that uses it.
    (checkout / "pyproject.toml").write_text(PYPROJECT.replace("dependencies = []", 'dependencies = ["autosel-none"]'))
    (checkout / "backend.py").write_text(
        BACKEND.replace("Version: 0\\n", "Version: 0\\nRequires-Dist: autosel-none\\n")
    )
    before = stamp_of(checkout)
    failed = run(checkout, "status", code=1)
    assert failed.stdout == ""
    assert "error: autosel and its dependencies cannot be installed" in failed.stderr
    assert "No matching distribution found for autosel-none" in failed.stderr
    assert str(checkout / ".venv" / "autosel-setup.log") in failed.stderr
    assert stamp_of(checkout) == before
    run(checkout, "status", code=1)  # a failed set-up has no stamp


# --- without network, from a folder of wheels ------------------------------------------------------------------------


def wheel(folder: Path, name: str, version: str, files: dict[str, str], *needs: str) -> Path:
    info = f"{name}-{version}.dist-info/"
    needed = "".join(f"Requires-Dist: {need}\n" for need in needs)
    files = {
        **files,
        info + "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}",
        info + "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[info + "RECORD"] = "".join(f"{n},,\n" for n in (*files, info + "RECORD"))
    made = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return made


def torch_wheel(folder: Path, version: str = "2.13.0", *needs: str) -> Path:
    """Make a wheel that pip accepts as torch; `run` reads only its version.py."""
    files = {"torch/__init__.py": "", "torch/version.py": f"__version__ = '{version}+cpu'\ncuda = None\n"}
    return wheel(folder, "torch", version, files, *needs)


BARE = (sys._base_executable, "-S")  # -S: a Python that finds no torch
HOPPER, HOPPER_12_8 = {"cuda": [13, 0], "cc_major": 9}, {"cuda": [12, 8], "cc_major": 9}  # of `driver`


# --- exact releases, from a folder of wheels instead of the network ---------------------------------------------------

ON_X86 = pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine != "x86_64", reason="locks are for Linux on x86-64"
)
LOCK = "locks/py{}{}-cpu.txt".format(*sys.version_info[:2])


def gadget(wheels: Path, version: str) -> str:
    """Put this release among the wheels; returns its line of a lock."""
    made = wheel(wheels, "gadget", version, {"gadget.py": f"VERSION = '{version}'\n"}, "widget")
    return f"gadget=={version} --hash=sha256:{hashlib.sha256(made.read_bytes()).hexdigest()}  # all"


def write_lock(checkout: Path, *lines: str) -> None:
    (checkout / "locks").mkdir(exist_ok=True)
    (checkout / LOCK).write_text("\n".join(("# Python, torch 2.13.0. Tested: here.", *lines, "")))


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """Return a checkout that needs `gadget`, wheels of releases 1.0 and 2.0, and a lock's lines that name the older."""
    folder = tmp_path_factory.mktemp("index")
    checkout, wheels = make_checkout(folder / "checkout"), folder / "wheels"
    wheels.mkdir()
    torch_wheel(wheels)
    widget = wheel(wheels, "widget", "3.0", {"widget.py": ""})
    lines = (
        gadget(wheels, "1.0"),
        f"widget==3.0 --hash=sha256:{hashlib.sha256(widget.read_bytes()).hexdigest()}  # all",
    )
    gadget(wheels, "2.0")
    needs = PYPROJECT.replace("dependencies = []", 'dependencies = ["gadget>=1"]')
    (checkout / "pyproject.toml").write_text(needs)
    return checkout, wheels, lines


def releases(checkout: Path) -> dict[str, str]:
    listed = json.loads(in_venv(checkout, "-m", "pip", "list", "--format", "json"))
    return {one["name"]: one["version"] for one in listed}


@ON_X86
def test_the_release_of_the_lock_is_installed_though_there_is_a_newer_one(index):
    checkout, wheels, lines = index
    write_lock(checkout, *lines)
    run(checkout, "--wheelhouse", str(wheels), "status", python=BARE)
    stamp, there = stamp_of(checkout), releases(checkout)
    assert (stamp["torch"], stamp["lock"]) == ("2.13.0+cpu", LOCK)
    assert (there["torch"], there["gadget"], there["widget"]) == ("2.13.0", "1.0", "3.0")
    assert not stamp["options"]["reuse_torch"]
    assert imported(checkout, "pytest", "sympy") == ["", ""], (
        "packages of the active environment must not be importable"
    )


@ON_X86
def test_another_lock_is_installed_into_the_same_environment(index):
    checkout, wheels, (_, widget) = index
    write_lock(checkout, gadget(wheels, "2.0"), widget)
    run(checkout, "--wheelhouse", str(wheels), "status", python=BARE)
    assert releases(checkout)["gadget"] == "2.0"


@ON_X86
def test_another_file_under_the_locked_version_is_refused(index):
    checkout, wheels, (old, widget) = index
    write_lock(checkout, old.replace("sha256:", "sha256:0")[:-8] + "  # all", widget)
    before = stamp_of(checkout)
    refused = run(checkout, "--wheelhouse", str(wheels), "status", python=BARE, code=1)
    assert "do not match the hashes" in refused.stderr.lower()
    assert stamp_of(checkout) == before and releases(checkout)["gadget"] == "2.0"


@ON_X86
def test_a_requirement_that_the_lock_lacks_is_not_left_out_in_silence(index):
    checkout, wheels, (_, widget) = index
    write_lock(checkout, widget)
    refused = run(checkout, "--wheelhouse", str(wheels), "status", python=BARE, code=1)
    assert f"{LOCK} lacks gadget" in refused.stderr and "locks/generate.py" in refused.stderr


@ON_X86
def test_without_the_lock_it_is_todays_releases_from_then_on(index):
    checkout, wheels, lines = index
    write_lock(checkout, *lines)
    run(checkout, "--wheelhouse", str(wheels), "status", python=BARE)
    assert releases(checkout)["gadget"] == "1.0"
    (checkout / LOCK).unlink()
    gadget(wheels, "3.0")
    write_lock(checkout, *lines)
    for words in (["--wheelhouse", str(wheels), "--no-lock", "status"], ["status"]):
        done = run(checkout, *words, python=BARE)
        assert stamp_of(checkout)["lock"] == "" and stamp_of(checkout)["options"]["no_lock"]
    assert done.stderr == "", "the environment keeps the option"


FAKE_PYTEST = """\
import sys
import gadget
print(gadget.VERSION, *sys.argv[1:])
sys.exit(gadget.VERSION == "3.0")
"""


def test_the_tests_of_todays_releases_are_there(script):
    assert [name for name in script.NEWEST_TESTS if not (CHECKOUT / "tests" / name).exists()] == []


@ON_X86
def test_todays_releases_are_tried_in_a_separate_environment_and_listed(index, script):
    checkout, wheels, lines = index
    write_lock(checkout, *lines)
    gadget(wheels, "3.0")
    wheel(wheels, "pytest", "9.0", {"pytest/__init__.py": "", "pytest/__main__.py": FAKE_PYTEST})
    extras = "".join(f'{name} = ["pytest"]\n' for name in script.NEWEST_EXTRAS)
    with (checkout / "pyproject.toml").open("a") as file:
        file.write(f"[project.optional-dependencies]\n{extras}")
    (checkout / "tests").mkdir()
    before = contents(checkout)
    tried = run(checkout, "--wheelhouse", str(wheels), "test", "--tier", "newest", "-x", python=BARE, code=1)
    assert tried.stdout.startswith("3.0 ") and tried.stdout.endswith(" -x\n")
    assert f"releases that differ from {LOCK}: 1" in tried.stderr and "gadget 1.0 -> 3.0" in tried.stderr
    assert "with today's releases tests fail" in tried.stderr
    gadget(wheels, "4.0")
    again = run(checkout, "--wheelhouse", str(wheels), "test", "--tier", "newest", python=BARE)
    assert "gadget 1.0 -> 4.0" in again.stderr, "a newer release must be found"
    assert contents(checkout) == before, ".venv is unchanged"


@ON_X86
def test_a_lock_is_for_one_machine_python_and_build(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "ROOT", str(tmp_path))
    python = LOCK.removeprefix("locks/").removesuffix("-cpu.txt")
    for name in (f"{python}-cpu", f"{python}-cu126", f"{python}-cu128", "py310-cu130"):
        (tmp_path / "locks").mkdir(exist_ok=True)
        (tmp_path / "locks" / f"{name}.txt").write_text("")
    assert script.lock_of("cpu") == LOCK
    assert script.lock_of("cu128") == f"locks/{python}-cu128.txt"
    assert script.lock_of("cu129") == f"locks/{python}-cu126.txt", (
        "another CUDA 12 build of a reused torch must use this lock"
    )
    assert script.lock_of("cu130") == ""
    monkeypatch.setattr(script.platform, "machine", lambda: "aarch64")
    assert script.lock_of("cpu") == ""


def test_an_extra_that_names_others_brings_their_requirements(script):
    found = script.requirements(["test"])
    assert "hypothesis>=6.110" in found
    assert "starlette>=0.40" in found, "autosel-kernels[daemon] is one of the requirements of test"
    assert not any(need.startswith("autosel") for need in found)


@pytest.fixture
def host(script, tmp_path, monkeypatch):
    """Make an active environment with a torch, packages that it requires and others; and an empty .venv."""
    site, made = tmp_path / "host" / "site-packages", tmp_path / "wheels"
    made.mkdir()
    wheels = (
        torch_wheel(made, "2.12.0", "pinned==1.0", "free>=1", "absent>=1", "never; python_version < '3'"),
        wheel(made, "pinned", "1.0", {"shared/pinned/lib.so": ""}),
        wheel(made, "free", "1.5", {"free.py": ""}, "deep"),
        wheel(made, "deep", "1.0", {"deep/__init__.py": ""}),
        wheel(made, "never", "1.0", {"never.py": ""}),
        wheel(made, "stranger", "1.0", {"stranger.py": "", "shared/stranger/lib.so": ""}),
    )
    for one in wheels:
        zipfile.ZipFile(one).extractall(site)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(script, "ROOT", str(tmp_path))
    Path(script.venv.site_packages).mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(site), *(p for p in sys.path if "site-packages" not in p)])
    return site


def test_a_reused_torch_comes_with_the_files_of_what_it_requires_and_no_others(script, host):
    (host / "deep" / "__pycache__").mkdir()
    script.link_torch(script.torch_to_reuse(None))
    links = Path(script.venv.reused)
    found = {str(p.relative_to(links)) for p in links.rglob("*") if p.is_symlink()}
    assert {name for name in found if "dist-info" not in name} == {"torch", "shared/pinned/lib.so", "free.py", "deep"}
    assert (links / "torch" / "version.py").resolve() == host / "torch" / "version.py"
    assert {name.split("-")[0] for name in found if "dist-info" in name} == {"torch", "pinned", "free", "deep"}


def test_the_release_that_a_reused_torch_asks_for_is_not_replaced_by_the_locks(script, host):
    script.link_torch(script.torch_to_reuse(None))
    assert script.bounded_by_reused() == {"pinned"}
    os.remove(script.venv.reused_pth)
    assert script.bounded_by_reused() == set()


def test_a_torch_that_was_built_in_place_cannot_be_taken_alone(script, host):
    (host / "torch-2.12.0.dist-info" / "RECORD").unlink()
    with pytest.raises(script.Stop, match="not installed from a wheel"):
        script.link_torch(script.torch_to_reuse(None))
    assert not Path(script.venv.reused_pth).exists()


@pytest.mark.parametrize(
    ("gpu", "version", "why"),
    [
        (HOPPER, "2.12.0", "a CPU build, and there is a GPU"),
        (None, "2.9.0", "older than 2.10"),
    ],
)
def test_a_torch_that_cannot_be_reused_is_an_error_not_a_download(script, host, gpu, version, why):
    file = host / "torch" / "version.py"
    file.write_text(file.read_text().replace("2.12.0", version))
    with pytest.raises(script.Stop, match=why):
        script.torch_to_reuse(gpu)


def test_to_reuse_a_missing_torch_is_an_error(tmp_path):
    checkout = make_checkout(tmp_path)
    refused = run(checkout, "--reuse-torch", "status", python=BARE, code=1)
    assert "the active environment has no torch to reuse" in refused.stderr
    assert not (tmp_path / ".venv").exists()


# --- an environment in use --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unused(index):
    checkout, wheels, _ = index
    run(checkout, "--wheelhouse", str(wheels), "status", python=BARE)
    return checkout


@pytest.fixture
def used(unused):
    """Return a checkout with an environment, and a function that starts its Python and waits until it runs."""
    checkout, running = unused, []

    def start_one(*command: str, **more) -> subprocess.Popen[str]:
        words = [*command, "-c", "print('here', flush=True); input()"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        running.append(subprocess.Popen(words, cwd=checkout, text=True, **pipes, **more))
        assert running[-1].stdout.readline() == "here\n"
        return running[-1]

    yield checkout, start_one
    for process in running:
        end(process)


def end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.communicate("\n", timeout=60)


def change(checkout: Path) -> dict[str, int]:
    """Make a set-up necessary; return the present contents of .venv."""
    (checkout / "pyproject.toml").write_text((checkout / "pyproject.toml").read_text() + "# changed\n")
    return contents(checkout)


def contents(checkout: Path) -> dict[str, int]:
    return {str(p): p.stat().st_mtime_ns for p in (checkout / ".venv").rglob("*") if p.exists()}


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere processes are not looked at")
@pytest.mark.parametrize("how", ["by its path", "by a relative path", "activated"])
def test_an_environment_in_use_is_not_changed(used, how):
    checkout, start_one = used
    binaries = checkout / ".venv" / "bin"
    if how == "activated":
        path = f"{binaries}{os.pathsep}{os.environ['PATH']}"
        process = start_one("python", env={**os.environ, "PATH": path, "VIRTUAL_ENV": str(checkout / ".venv")})
    else:
        process = start_one(str(binaries / "python") if how == "by its path" else ".venv/bin/python")
    before = change(checkout)
    refused = run(checkout, "status", python=BARE, code=1)
    assert "error: .venv is in use, and would have to change: pyproject.toml, run or the lock" in refused.stderr
    assert f"process {process.pid}: " in refused.stderr and "stop it" in refused.stderr
    assert contents(checkout) == before
    end(process)
    run(checkout, "status", python=BARE)


def test_a_running_verb_prevents_changes_also_from_other_containers(used, monkeypatch, script):
    """Hold a file lock, which also works for processes that /proc does not show: in another container or host."""
    checkout, _ = used
    (checkout / "autosel" / "cli" / "main.py").write_text("print('here', flush=True); input()\n")
    serving = subprocess.Popen(
        [*BARE, str(checkout / "run"), "serve"], env=offline(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert serving.stdout.readline() == "here\n"
    monkeypatch.setattr(script, "ROOT", str(checkout))
    monkeypatch.setattr(script, "users_of", lambda folder: [])
    monkeypatch.setattr(script.time, "sleep", lambda s: None)
    lock = script.Lock()
    with pytest.raises(script.InUse, match="would have to change: so"):
        lock.alone("so")
    end(serving)
    assert lock.alone("so")
    os.close(lock.fd)


def test_the_gpu_is_used_even_if_the_environment_is_in_use(script, monkeypatch):
    def prepare(extras, options, announce=False):
        raise script.in_use([(1, "serve")], "so")

    monkeypatch.setattr(script, "prepare", prepare)
    with pytest.raises(script.InUse):
        script.prepare_first([("cuda13",), ()], script.OPTIONS)


# --- choosing a torch ------------------------------------------------------------------------------------------------


@pytest.fixture
def pip_that(script, monkeypatch):
    """Replace pip, which has no network here, by a script that records its requests and answers by a rule."""

    def install(succeeds, words="ERROR: No matching distribution found"):
        asked: list[str] = []

        def pip(what, options):
            asked.append(" ".join(what))
            return 0 if succeeds(asked[-1]) else 1

        monkeypatch.setattr(script, "pip", pip)
        monkeypatch.setattr(script, "last_words", lambda: words)
        monkeypatch.setattr(script, "need_space", lambda what: None)
        return asked

    return install


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere plain torch is the CPU build")
def test_without_a_gpu_plain_torch_is_never_requested(script, pip_that):
    asked = pip_that(lambda what: False)
    with pytest.raises(script.Stop) as stopped:
        script.install_torch(None, script.OPTIONS)
    assert len(asked) == 2
    assert all("+cpu" in what for what in asked)
    assert "--accept-cuda-torch" in "\n".join(stopped.value.lines)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere plain torch is the CPU build")
def test_without_a_gpu_the_cuda_build_comes_last_and_only_if_accepted(script, pip_that, capsys):
    asked = pip_that(lambda what: "+cpu" not in what)
    script.install_torch(None, {**script.OPTIONS, "accept_cuda_torch": True})
    assert asked[-1] == f"torch=={script.TORCH}"
    assert "3 GB" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere plain torch is the CPU build")
def test_a_cpu_build_that_pip_can_see_is_taken_at_once(script, pip_that):
    asked = pip_that(lambda what: True)
    script.install_torch(None, script.OPTIONS)
    assert asked == [f"--no-deps torch=={script.TORCH}+cpu"]


@pytest.mark.parametrize(
    ("gpu", "build"),
    [
        (None, "cpu"),
        (HOPPER, "cu130"),
        ({"cuda": [12, 8], "cc_major": 12}, "cu128"),
    ],
)
def test_without_network_it_prints_the_commands_that_fill_a_wheelhouse(script, pip_that, monkeypatch, gpu, build):
    """Print commands for torch from its build's index, with CUDA's libraries for a GPU, and for the lock's releases."""
    pip_that(lambda what: False, words="NewConnectionError: [Errno 101] Network is unreachable")
    monkeypatch.setattr(script, "driver", lambda: gpu)
    with pytest.raises(script.Stop) as stopped:
        script.explain_pip_failure("autosel and its dependencies cannot be installed")
    said = "\n".join(stopped.value.lines)
    version = script.torch_for(gpu)[0]
    assert f"--index-url {script.TORCH_INDEX}{build} torch=={version}+{build}" in said
    assert ("DIR --no-deps --index-url" in said) == (gpu is None)
    if script.lock_of(build):
        assert f"pip download -d DIR --no-deps -r {LOCK.replace('cpu', build)}" in said


@pytest.mark.parametrize(
    ("gpu", "wanted"),
    [
        (HOPPER, "torch==2.13.0+cu130"),
        (HOPPER_12_8, "torch==2.13.0+cu126"),
        ({"cuda": [12, 8], "cc_major": 12}, "torch==2.11.0+cu128"),
    ],
)
def test_with_a_gpu_the_build_its_driver_runs(script, pip_that, monkeypatch, gpu, wanted):
    asked = pip_that(lambda what: True)
    cpu_build = {"version": "2.13.0+cpu", "cuda": None, "file": ""}
    monkeypatch.setattr(script, "torch_of_venv", lambda: cpu_build)  # pip found a +cpu build, which sorts higher
    script.install_torch(gpu, script.OPTIONS)
    assert asked[-1].startswith(wanted + " --index-url")


@pytest.mark.parametrize(
    ("version", "cuda", "gpu", "good"),
    [
        ("2.13.0+cpu", None, None, True),
        ("2.13.0", "13.0", None, True),
        ("2.9.1", None, None, False),
        ("2.10.0", None, None, True),
        ("3.0.0a1", None, None, True),
        ("2.13.0+cpu", None, {"cuda": [13, 0]}, False),
        ("2.13.0", "13.0", {"cuda": [13, 0]}, True),
    ],
)
def test_which_torch_can_be_reused(script, version, cuda, gpu, good):
    assert script.usable({"version": version, "cuda": cuda, "file": ""}, gpu) is good


# --- mistakes and bad machines ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["test", "--tier", "gqu"], "unknown tier 'gqu'"),
        (["--wheelhouse", "/no/such/folder", "tune"], "'/no/such/folder'"),
        (["--wheelhouse"], "takes a folder"),
        (["gpu", "--wheelhouse=/no/such/folder"], "'/no/such/folder'"),
        (["gpu", "--wheelhouse"], "takes a folder"),
        (["setup", "hff"], "unknown extra 'hff'"),
        (["--reuse-torch=1", "setup"], "takes no value"),
        (["test", "--tier", "null,newest"], "--tier newest runs alone"),
        (["wheel", "dist"], "wheel takes no 'dist'"),
    ],
)
def test_a_mistake_is_a_usage_error_before_any_work(tmp_path, arguments, says):
    checkout = make_checkout(tmp_path)
    told = run(checkout, *arguments, code=2)
    assert told.stderr.startswith("error: ")
    assert says in told.stderr
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--help"], "./run test"),
        (["test", "--help"], "--tier TIER"),
        (["test", "-h", "--tier", "null"], "--tier TIER"),
        (["setup", "--help"], "usage: ./run [OPTION ...] setup [EXTRA ...]"),
        (["setup", "hf", "--help"], "--reuse-torch"),
        (["docs", "--help"], "--build"),
        (["wheel", "--help"], "dist/"),
    ],
)
def test_help_needs_no_environment_and_does_not_change_one(tmp_path, words, says):
    checkout = make_checkout(tmp_path)
    told = run(checkout, *words)
    assert says in told.stdout
    assert not (checkout / ".venv").exists()
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "autosel-installing").write_text("in pieces")
    run(checkout, *words)
    assert [p.name for p in (checkout / ".venv").iterdir()] == ["autosel-installing"]


def test_help_of_gpu_needs_no_environment(tmp_path):
    """Run it in a copy of the files that it reads, to check that it creates no file."""
    for folder in ("autosel", "benchmarks/gpu"):
        shutil.copytree(CHECKOUT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(SCRIPT, tmp_path / "run")
    told = run(tmp_path, "gpu", "--help", python=BARE)
    assert "--stage" in told.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["autosel", "benchmarks", "run"]


def test_the_help_of_test_names_every_tier_and_that_of_setup_every_extra(script, capsys):
    script.main(["test", "--help"])
    said = capsys.readouterr().out
    assert all(f"\n    {tier} " in said for tier in (*script.TIERS, script.NEWEST))
    script.main(["setup", "--help"])
    said = capsys.readouterr().out.split()
    assert set(script.project()["optional-dependencies"]) <= set(said)
    with pytest.raises(script.Stop):
        script.main(["setup", "everything"])


def test_for_a_python_without_ensurepip_the_missing_package_is_named(script, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "ROOT", str(tmp_path))
    monkeypatch.setattr(
        script, "quiet", lambda *command: (1, "... because ensurepip is not\navailable.  On Debian ...")
    )
    with pytest.raises(script.Stop) as stopped:
        script.make_venv()
    assert stopped.value.lines[-1].endswith("apt install python{}.{}-venv".format(*sys.version_info[:2]))
    assert not (tmp_path / ".venv").exists()


def test_a_full_disk_is_noticed_before_anything_is_downloaded(script, monkeypatch):
    monkeypatch.setattr(script.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 10**12, 10**9))
    script.need_space("present")
    with pytest.raises(script.Stop) as stopped:
        script.need_space("cpu")
    assert "1.0 GB free, about 2.1 GB needed" in stopped.value.lines[0]


def test_a_disk_that_fills_up_while_pip_writes_is_named(script, pip_that, monkeypatch):
    pip_that(lambda what: False, words="ERROR: Could not install packages due to an OSError: No space left on device")
    monkeypatch.setattr(script, "all_present", lambda lock_file: False)
    with pytest.raises(script.Stop) as stopped:
        script.install_project([], script.OPTIONS, "")
    assert "the disk is full" in "\n".join(stopped.value.lines)


def test_a_python_that_is_too_old_can_read_the_script():
    ast.parse(SCRIPT.read_text(), feature_version=(3, 9))


def run_by_python_39(path: Path) -> subprocess.CompletedProcess[str]:
    pretend = (
        "import runpy, sys; sys.version_info = (3, 9, 2, 'final', 0); sys.argv = ['run', 'tune'];"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    return subprocess.run([sys.executable, "-c", pretend], env={"PATH": str(path)}, capture_output=True, text=True)


def test_a_python_that_is_too_old_gets_a_message(tmp_path):
    told = run_by_python_39(tmp_path)
    assert told.returncode == 1
    assert "needs Python 3.11 or newer" in told.stderr
    assert "this is Python 3.9.2" in told.stderr


def test_a_python_that_is_too_old_hands_over_to_a_newer_one(tmp_path):
    newer = tmp_path / "python3.12"
    newer.write_text('#!/bin/sh\n[ "$1" = -c ] && exit 0\nshift; echo "newer: $@"\n')
    newer.chmod(0o755)
    assert run_by_python_39(tmp_path).stdout == "newer: tune\n"


# --- tiers -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(script, monkeypatch, tmp_path):
    """Return a checkout with some tiers, on a machine without tools."""
    for tier in ("null", "cpu", "gpu", "compile"):
        (tmp_path / "tests" / tier).mkdir(parents=True)
    monkeypatch.setattr(script, "ROOT", str(tmp_path))
    monkeypatch.setattr(script, "driver", lambda: None)
    monkeypatch.setattr(script.shutil, "which", lambda name: None)
    monkeypatch.setattr(script, "nvcc", lambda: None)
    monkeypatch.delenv("CI", raising=False)
    return monkeypatch


def test_without_a_name_the_usual_tiers_run_and_the_others_are_listed_with_command_or_reason(script, machine, tmp_path):
    (tmp_path / "tests" / "flows").mkdir()
    chosen, skipped = script.choose_tiers([])
    assert chosen == ["null", "cpu"]
    assert skipped == [
        ("flows", "./run test --tier flows"),
        ("compile", "no nvcc found (the Triton half: --tier compile)"),
        ("gpu", "no GPU found"),
    ]


def test_in_ci_every_tier_that_the_machine_can_run_is_run(script, machine, tmp_path):
    machine.setenv("CI", "true")
    (tmp_path / "tests" / "flows").mkdir()
    assert script.choose_tiers([])[0] == ["null", "cpu", "flows"]


def test_the_last_lines_of_a_run_name_the_tiers_that_were_left_out(script, machine, tmp_path):
    (tmp_path / "tests" / "flows").mkdir()
    ran = []
    machine.setattr(script, "prepare", lambda *given: None)
    machine.setattr(script, "hand_over", lambda *command: ran.append(command))
    machine.chdir(tmp_path)
    script.run_tests([], script.OPTIONS)
    assert "--remaining=flows: ./run test --tier flows" in ran[0]


def test_in_ci_a_tier_is_skipped_only_without_a_gpu(script, machine, tmp_path):
    """Fail otherwise, so that a machine image that lost its compiler does not pass with one tier less."""
    ran = []
    machine.setattr(script, "prepare", lambda *given: None)
    machine.setattr(script, "hand_over", lambda *command: ran.append(command))
    machine.chdir(tmp_path)
    machine.setenv("CI", "true")
    with pytest.raises(script.Stop) as stop:
        script.run_tests([], script.OPTIONS)
    assert "compile" in str(stop.value) and "gpu" not in str(stop.value) and not ran
    script.run_tests(["--tier", "null,cpu"], script.OPTIONS)
    machine.setattr(script, "nvcc", lambda: "/usr/bin/nvcc")
    script.run_tests([], script.OPTIONS)
    machine.setattr(script, "nvcc", lambda: None)
    machine.delenv("CI")
    script.run_tests([], script.OPTIONS)
    assert len(ran) == 3


@pytest.mark.parametrize(
    ("found", "asked", "installed"),
    [
        (None, ["lint", "cross"], ["lint", "cross", "nvcc"]),
        ("/usr/bin/nvcc", ["lint", "cross"], ["lint", "cross"]),
        (None, ["test"], ["test"]),
    ],
)
def test_cross_compilation_gets_pips_nvcc_if_there_is_none(script, monkeypatch, found, asked, installed):
    seen = []
    monkeypatch.setattr(script, "nvcc", lambda: found)
    monkeypatch.setattr(script, "prepare", lambda extras, options, announce: seen.append(extras))
    script.main(["setup", *asked])
    assert seen == [installed]


def test_pips_nvcc_is_one_release_and_of_the_line_that_the_gpus_extra_takes():
    extras = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (pinned,) = extras["nvcc"]
    wanted, version = pinned.split("==")
    (ranged,) = [need for need in extras["cuda13"] if need.startswith("cuda-toolkit")]
    assert ranged.startswith(f"{wanted}>=13") and re.fullmatch(r"13\.\d+\.\d+", version)
    assert "./run setup lint test cross" in (CHECKOUT / ".ci" / "run").read_text()


def test_in_ci_a_gpu_adds_its_tier(script, machine):
    machine.setattr(script, "driver", lambda: HOPPER)
    machine.setenv("CI", "true")
    assert script.choose_tiers([])[0] == ["null", "cpu", "gpu"]


def test_a_requested_tier_runs_alone_or_gives_the_reason(script, machine):
    assert script.choose_tiers(["null"]) == (["null"], [])
    assert script.choose_tiers(["gpu"]) == ([], [("gpu", "no GPU found")])
    assert script.choose_tiers(["compile"]) == (["compile"], [])  # what needs nvcc is skipped test by test
    assert script.choose_tiers(["fleet"]) == ([], [("fleet", "this version has no tests there")])


def test_the_long_forms_run_only_on_request(script, machine, tmp_path):
    (tmp_path / "tests" / "soak").mkdir()
    chosen, skipped = script.choose_tiers([])
    assert "soak" not in chosen
    assert ("soak", "./run test --tier soak") in skipped
    machine.setenv("CI", "true")
    assert "soak" not in script.choose_tiers([])[0]
    assert script.choose_tiers(["soak"]) == (["soak"], [])


def test_tier_options_are_taken_from_between_pytests(script):
    assert script.split_tiers(["-x", "--tier", "null,cpu", "-k", "rope"]) == (["null", "cpu"], ["-x", "-k", "rope"])
    assert script.split_tiers(["--tier=cpu"]) == (["cpu"], [])


@pytest.mark.parametrize("tier", [path.name for path in (CHECKOUT / "tests").iterdir() if path.is_dir()])
def test_every_folder_of_tests_is_a_tier(script, tier):
    if any((CHECKOUT / "tests" / tier).glob("test_*.py")):
        assert tier in script.TIERS
    with contextlib.suppress(KeyError):
        extras, _ = script.TIERS[tier]
        assert "test" in extras


@pytest.mark.parametrize(
    ("gpu", "toolkit", "extras"),
    [
        (None, True, ()),
        (HOPPER_12_8, False, ("cuda12",)),
        (HOPPER, False, ("cuda13",)),
        (HOPPER, True, ("cuda13-system",)),
    ],
)
def test_gpu_installs_the_packages_that_measure_and_compile_for_the_driver(
    script, simulated, tmp_path, gpu, toolkit, extras
):
    for spelled in (["--wheelhouse", str(tmp_path)], [f"--wheelhouse={tmp_path}"], ["--reuse-torch"]):
        seen = simulated(gpu, extras, toolkit=toolkit)
        script.main(["gpu", "--stage", "parity", *spelled, "--out", "results"])
        folder = "" if spelled == ["--reuse-torch"] else str(tmp_path)
        assert seen.tried == [extras] and seen.options["wheelhouse"] == folder
        assert seen.command[1:] == ("--stage", "parity", "--out", "results")


@pytest.mark.parametrize(
    ("words", "there", "wanted"),
    [(["tune"], False, ("cuda13",)), (["tune"], True, ()), ([], True, ("cuda13",))],
    ids=["first contact", "another verb later", "no verb"],
)
def test_the_first_run_with_a_gpu_installs_the_packages_that_measure_it(script, simulated, words, there, wanted):
    seen = simulated(HOPPER, wanted, ready={"torch": "2.13.0"} if there else None)
    script.main(words)
    assert seen.tried == [wanted]


@pytest.fixture
def simulated(script, monkeypatch):
    """Return simulated(driver, *extras): it simulates a host on which only these extras can be installed, and returns
    the extras that were tried, with the options, and the command that was handed over."""

    def host(gpu, *can_be_had, toolkit=False, ready=None):
        seen = SimpleNamespace(tried=[])

        def prepare(extras, options, announce=False):
            seen.tried.append(extras)
            seen.options = options
            if extras not in can_be_had:
                raise script.Stop("autosel and its dependencies cannot be installed", "no network", "--wheelhouse DIR")

        monkeypatch.setattr(script, "driver", lambda: gpu)
        monkeypatch.setattr(script, "toolkit", lambda: toolkit)
        monkeypatch.setattr(script, "torch_of_venv", lambda: None)
        monkeypatch.setattr(script, "ready", lambda extras, options: ready)
        monkeypatch.setattr(script, "prepare", prepare)
        monkeypatch.setattr(script, "hand_over", lambda *command: setattr(seen, "command", command))
        return seen

    return host


def test_without_those_packages_it_uses_the_cpu_with_a_message(script, simulated, capsys):
    seen = simulated(HOPPER_12_8, ())
    script.main(["best", "attn"])
    said = "".join(capsys.readouterr())
    assert seen.tried == [("cuda12",), ()]
    assert "warning: no cuda12" in said and "no network" in said and "left aside" in said


@pytest.mark.parametrize("words", [["gpu", "--stage", "parity"], ["tune"]], ids=["gpu", "first contact"])
def test_set_up_continues_without_pips_toolkit_if_it_cannot_be_installed(script, simulated, words, capsys):
    """Use a wheelhouse without these 120 MB: parts that need no compiler run, the others name the missing package."""
    seen = simulated(HOPPER, ("cuda13-system",), ())
    script.main(words)
    said = "".join(capsys.readouterr())
    assert seen.tried == [("cuda13",), ("cuda13-system",)]
    assert "warning: no cuda13: autosel" in said and "without pip's CUDA toolkit" in said


def test_gpu_stops_if_no_package_that_measures_a_gpu_can_be_installed(script, simulated):
    simulated(HOPPER, ())
    with pytest.raises(script.Stop, match="cannot be installed"):
        script.main(["gpu"])


def test_a_toolkit_counts_only_with_all_programs_that_are_run(script, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(script, "USUAL_HOME", str(tmp_path / "nowhere"))
    assert not script.toolkit()
    (tmp_path / "bin").mkdir()
    for name in ("nvcc", "compute-sanitizer"):
        assert not script.toolkit()
        (tmp_path / "bin" / name).touch(mode=0o755)
    assert script.toolkit()
