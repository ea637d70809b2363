"""The guides do what they say: their Python and their brief commands run in the order of the page; all are accepted."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from autosel.cli.main import VERBS, cli

ROOT = Path(__file__).resolve().parents[2]
GUIDES = sorted(p for p in (ROOT / "docs" / "guides").glob("*.md") if p.name != "README.md")
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Brief enough to run here, with the exit code they shall have; others measure for minutes, need another environment,
# or are run by their verb's own tests.
RUN = {
    "autosel race rmsnorm --candidate mine.py:norm --shape M1.d64 --dtype fp32 --case zeros": 4,
    "autosel run --model tiny --seq 32 --iters 10 --warmup 2 --certify mine.jsonl": 0,
    "autosel verify mine.jsonl": 0,
}
COMMAND = """
def ran_(words, code):
    import subprocess, sys
    done = subprocess.run([sys.executable, "-P", "-m", "autosel.cli.main", *words], capture_output=True, text=True)
    assert done.returncode == code, (words, done.returncode, done.stdout, done.stderr)
"""


def blocks(guide: Path) -> list[tuple[str, str]]:
    return [(kind, text) for kind, text in BLOCK.findall(guide.read_text())]


def commands(guide: Path) -> list[str]:
    lines = [line for kind, text in blocks(guide) if kind == "console" for line in text.splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


def script(guide: Path) -> str:
    """The page as one program."""
    lines = [COMMAND]
    for kind, text in blocks(guide):
        if kind == "python":
            lines.append(text)
        else:
            asked = [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ ")]
            lines += [f"ran_({shlex.split(c)[1:]!r}, {RUN[c]})" for c in asked if c in RUN]
    return "\n".join(lines)


def environment(home: Path) -> dict[str, str]:
    kept = {n: v for n, v in os.environ.items() if not n.startswith("AUTOSEL_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    one = {"OMP_NUM_THREADS": "1"}  # other tests run beside this one
    return kept | one | {"AUTOSEL_HOME": str(home), "PYTHONPATH": str(ROOT), "PATH": path}


@pytest.mark.parametrize("guide", GUIDES, ids=lambda p: p.stem)
def test_a_guide_runs(guide: Path, tmp_path: Path) -> None:
    if guide.stem == "transformers":
        pytest.importorskip("transformers", reason="needs the `hf` extra")
    folder = tmp_path / "work"
    folder.mkdir()
    assert any(kind == "python" for kind, _ in blocks(guide))
    (folder / "guide_.py").write_text(script(guide))
    done = subprocess.run(
        [sys.executable, "guide_.py"], cwd=folder, env=environment(tmp_path / "home"), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_every_command_of_a_guide_parses_and_the_brief_ones_are_all_there() -> None:
    seen = [c for guide in GUIDES for c in commands(guide)]
    assert set(RUN) <= set(seen)
    for command in seen:
        words = shlex.split(command)
        assert words[0] == "autosel" and words[1] in VERBS, command
        verb = cli.get_command(click.Context(cli), words[1])
        assert verb is not None
        verb.make_context(words[1], words[2:])


def test_every_guide_is_listed() -> None:
    index = (ROOT / "docs" / "guides" / "README.md").read_text()
    assert all(f"({guide.name})" in index for guide in GUIDES)


def test_links_of_the_guides_lead_somewhere() -> None:
    for guide in [*GUIDES, ROOT / "docs" / "guides" / "README.md"]:
        for link in re.findall(r"\]\(([^)#]+)\)", guide.read_text()):
            assert (guide.parent / link).exists(), (guide.name, link)
