"""Check that prose stays plain: few hard turns of phrase, and docstrings that start with an imperative or a noun.

A turn of phrase is only a signal, so the limits leave a wide margin. Rewrite the sentences that a failure lists.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CHANGELOG.md", "docs")
PACKAGES = (
    "candidates", "certify", "cli", "daemon", "decode", "demo", "devices", "dispatch", "fingerprint", "fleet", "guard",
    "integrations", "knobs", "ledger", "models", "native", "ops", "parity", "race", "testing", "tuning", "workers",
)  # fmt: skip
FOLDERS = (*(f"autosel/{name}" for name in PACKAGES), "benchmarks", "kernels/triton", "tests")
TURNS = re.compile(
    r"\b(whoever|whichever|nobody|for want of|to be had|anew|thereof|at hand|says so|(?:is|are|was) (?:said|told)|"
    r"beside (?:it|them|the|this|these|an?)|stands? (?:in|still)|goes on|of (?:its|their) own|by itself|gives? way|"
    r"(?:is|are) asked|asks? (?:for|of)|in place of|that of|what (?:is|was|are|it|they)|there was none|lies? in)\b",
    re.IGNORECASE,
)
OPENINGS = re.compile(r"(What|Who|Whose|Of|Whether|Is|Are|Where|Until|Beside|Nobody|Neither)\b")
WORDS = re.compile(r"[A-Za-z][A-Za-z'-]+")
PER_THOUSAND, OPENING_SHARE = 5.0, 0.05


def paragraphs(page: Path) -> list[str]:
    """Return the written lines of a page, without generated blocks and code."""
    text = re.sub(r"<!-- generated:.*?<!-- end -->|```.*?```", "", page.read_text(), flags=re.DOTALL)
    return [line for line in text.splitlines() if line.strip() and not line.startswith("    ")]


def docstrings(file: Path) -> Iterator[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(file.read_text())):
        words = ast.get_docstring(node) if isinstance(node, kinds) else None
        if words:
            yield words


def files(place: str, ending: str) -> list[Path]:
    path = ROOT / place
    return [path] if path.is_file() else sorted(path.rglob(f"*{ending}"))


def refuse_turns(passages: list[str]) -> None:
    words = sum(len(WORDS.findall(passage)) for passage in passages)
    hits = [passage for passage in passages if TURNS.search(passage)]
    assert words
    assert 1000 * sum(len(TURNS.findall(hit)) for hit in hits) / words <= PER_THOUSAND, "\n\n".join(hits)


@pytest.mark.parametrize("place", PAGES)
def test_pages_have_few_hard_turns_of_phrase(place: str) -> None:
    refuse_turns([line for page in files(place, ".md") for line in paragraphs(page)])


@pytest.mark.parametrize("place", FOLDERS)
def test_docstrings_have_few_hard_turns_of_phrase_and_open_with_an_imperative_or_a_noun(place: str) -> None:
    found = [words for file in files(place, ".py") for words in docstrings(file)]
    refuse_turns(found)
    bad = [words for words in found if OPENINGS.match(words)]
    assert len(bad) <= OPENING_SHARE * len(found), "\n\n".join(bad)
