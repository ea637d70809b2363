"""Check that a file of tests is named after what it tests, so that developers find the tests of a module."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIERS = ("null", "cpu", "flows")

# Files about more than one module, and about files that are not modules.
TOPICS = {
    "cuda_stand_in": "lines of many modules that only a process with a GPU runs, on a stand-in for PyTorch's CUDA",
    "drawn": "tests/drawn.py",
    "deploy": "deploy/ and its page, docs/containers.md",
    "integrations_attention": "vllm_attention and sglang_attention, which share one contract",
    "layout": "this file",
    "parsers": "every parser of outside data, on random input",
    "readme": "README.md",
    "run_script": "./run",
    "style": "the language of pages and docstrings",
}


def modules() -> set[str]:
    """Return the allowed names of test files, words joined by underscores: ledger_store, kernels_cpu_team, locks."""
    files = [path.relative_to(ROOT / "autosel") for path in (ROOT / "autosel").rglob("*.py")]
    files += [path.relative_to(ROOT) for path in (ROOT / "benchmarks").rglob("*.py")]
    files += [path.relative_to(ROOT) for path in (ROOT / "kernels").rglob("*.*")]
    files += [path.relative_to(ROOT) for path in (ROOT / "tests").glob("*.py")]
    files += [path.relative_to(ROOT) for path in ROOT.glob("*.py")]
    return {"_".join(path.with_suffix("").parts) for path in files}


def packages() -> set[str]:
    """Return the names of packages, in the same spelling."""
    folders = [path.parent.relative_to(ROOT / "autosel") for path in (ROOT / "autosel").rglob("*.py")]
    folders += [Path("benchmarks/gpu"), Path("docs"), Path("docs/guides"), Path("locks")]
    return {"_".join(path.parts) for path in folders if path.parts}


def names_what_it_tests(stem: str) -> bool:
    """Return True for the name of a topic, a package or a module, and for a module with an aspect."""
    name = stem.removeprefix("test_")
    if name in TOPICS or name in packages():
        return True
    words = name.split("_")
    return any("_".join(words[:count]) in modules() for count in range(1, len(words) + 1))


@pytest.mark.parametrize("tier", TIERS)
def test_each_file_is_named_after_a_module_a_package_or_a_topic(tier: str) -> None:
    stems = [path.stem for path in (ROOT / "tests" / tier).glob("test_*.py")]
    assert stems
    unknown = [stem for stem in stems if not names_what_it_tests(stem)]
    assert not unknown, f"name them test_PACKAGE_MODULE[_ASPECT].py, or add a topic in {__file__}: {unknown}"


def test_each_topic_has_a_file() -> None:
    stems = {path.stem for tier in TIERS for path in (ROOT / "tests" / tier).glob("test_*.py")}
    assert not {f"test_{topic}" for topic in TOPICS} - stems
