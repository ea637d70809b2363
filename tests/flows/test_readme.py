"""Run the contents of README.md and docs/kernels.md: code blocks, the example kernels, the cheap commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.homes import furnish

ROOT = Path(__file__).resolve().parents[2]
README, KERNELS = ROOT / "README.md", ROOT / "docs" / "kernels.md"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a home without a ledger."""
    return furnish(tmp_path_factory.mktemp("readme") / "home")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Provide a kernel author's folder with the example kernels."""
    example, narrowed = blocks(KERNELS, "python")
    (tmp_path / "mykernels.py").write_text(example)
    (tmp_path / "narrowed.py").write_text(narrowed)
    return tmp_path


def python(home: Path, folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {n: v for n, v in os.environ.items() if not n.startswith("AUTOSEL_")}
    environment |= {"AUTOSEL_HOME": str(home), "PYTHONPATH": f"{ROOT}:{folder}", **variables}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )


def autosel(home: Path, folder: Path, line: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return python(home, folder, "-m", "autosel.cli.main", *line.split(), **variables)


def test_the_example_of_the_readme_runs_and_names_the_serving_kernel(home: Path, tmp_path: Path) -> None:
    (example,) = blocks(README, "python")
    assert len([line for line in example.splitlines() if line]) <= 6
    done = python(home, tmp_path, "-c", example)
    assert done.returncode == 0, done.stderr
    assert "attn  B1 H32/8 D128 L8192 bf16   torch:sdpa" in done.stdout  # without proven kernels: the baseline
    assert "reason    nothing is decided here yet" in done.stdout


@pytest.mark.parametrize(
    "line", ["--help", "knobs --fingerprint h200 --explain", "fingerprint h200", "doctor --settings", "db info"]
)
def test_cheap_commands_of_the_documentation_run(home: Path, tmp_path: Path, line: str) -> None:
    shown = " ".join(" ".join(p.read_text().split()) for p in (README, *(ROOT / "docs").glob("*.md")))
    assert line == "--help" or f"autosel {line}" in shown
    done = autosel(home, tmp_path, line)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_example_kernel_passes_parity_and_is_raced(home: Path, folder: Path) -> None:
    line = "race rmsnorm --candidate mykernels:fused"
    assert f"autosel {line}" in KERNELS.read_text()
    done = autosel(home, folder, f"{line} --json")
    assert done.returncode in (0, 5), done.stderr  # 5: this machine was too noisy to decide
    (found,) = json.loads(done.stdout)["races"]
    assert found["parity"]["outcome"] == "passed"
    assert {"user:fused", "torch:rmsnorm"} <= set(found["verdict"]["timings"])


def test_a_kernel_that_restricts_its_workloads_gives_its_reason(home: Path, folder: Path) -> None:
    ask = """
import narrowed
from autosel import ops
from autosel.candidates import registry
from autosel.fingerprint import known
fp = known.load("h200")
for d in (512, 4096):
    w = ops.find("rmsnorm").workload("bf16", {"M": 1, "d": d})
    print(registry.find("rmsnorm", "user:wide").supports(w, fp))
"""
    done = python(home, folder, "-c", ask)
    assert done.returncode == 0, done.stderr
    refused, accepted = done.stdout.splitlines()
    assert refused == "Rejected(reason='rows of 512 are too short for it')"
    assert accepted == "Accepted()"


def test_an_installed_package_is_not_imported_until_it_is_allowed(home: Path, folder: Path) -> None:
    """Test the entry point of the guide in an installed distribution."""
    (entry,) = blocks(KERNELS, "toml")
    group, line = re.search(r'entry-points\."(.*?)"\]\n(\S+ = "\S+")', entry).groups()  # type: ignore[union-attr]
    name, _, target = line.replace('"', "").partition(" = ")
    package, _, module = target.partition(".")
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {target}\n")
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text("print('imported')\n")
    (folder / package / f"{module}.py").write_text(blocks(KERNELS, "python")[0])
    ask = "from autosel.candidates import registry\nprint([c.name for c in registry.all_candidates('rmsnorm')])"
    quiet = python(home, folder, "-c", ask)
    assert "imported" not in quiet.stdout
    assert "user:" not in quiet.stdout
    allowed = python(home, folder, "-c", ask, AUTOSEL_ALLOW=name)
    assert "imported" in allowed.stdout, allowed.stderr
    assert "'user:fused', 'user:careless'" in allowed.stdout
