"""Run a sixth of the guides each day: their Python code and short commands, in the order of the page; other commands
are only parsed, all of them each day."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from autosel.cli.main import VERBS, cli
from tests import drawn
from tests.homes import furnish

ROOT = Path(__file__).resolve().parents[2]
GUIDES = sorted(p for p in (ROOT / "docs" / "guides").glob("*.md") if p.name != "README.md")
BLOCK = re.compile(r"^```(python|console|toml|diff)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"# ([\w./-]+\.(?:py|toml))\n")  # a block that starts like this is that file
CHANGING = ("add-a-format", "add-an-op", "add-a-backend")  # guides that change a checkout run in a copy
# Brief enough to run here, with the exit code they shall have; others measure for minutes, need another environment,
# or are run by their verb's own tests.
RUN = {
    "autosel export --to vllm --fingerprint h200 --model qwen3-8b configs/": 0,
    "autosel export --to sglang --fingerprint h200 --model qwen3-8b configs/": 0,
    "autosel knobs --model llama-8b --fingerprint h200 --json": 0,
    "autosel best attn": 0,
    "autosel race rmsnorm --candidate mine.py:norm --shape M1.d64 --dtype fp32 --case zeros": 4,
    "autosel run --model tiny --seq 32 --iters 10 --warmup 2 --certify mine.jsonl": 0,
    "autosel verify mine.jsonl": 0,
    'autosel race linear --candidate fast.py:late --shape M1.N64.K64 --format e5m2-row --case "nan in w"': 0,
    "autosel run --model tiny --format e5m2-row --seq 32 --iters 10 --warmup 2 --certify mine.jsonl": 0,
    "autosel race relu2 --candidate fast.py:relu2 --shape M1.I64 --dtype fp32 --case -inf": 4,
    "AUTOSEL_ALLOW=fastnorm autosel race rmsnorm --candidate user:fastnorm --shape M3.d64 --dtype fp32 --case zeros": 0,
    "autosel race rmsnorm --candidate fastnorm:rmsnorm --shape M3.d64 --dtype fp32 --case zeros": 0,
    "autosel record -- python generate.py": 0,
    "pip install .": 0,
}
COMMAND = """
def ran_(given, words, code):
    import os, subprocess, sys
    done = subprocess.run([sys.executable, *words], env=os.environ | given, capture_output=True, text=True)
    assert done.returncode == code, (words, done.returncode, done.stdout, done.stderr)


def written_(name, text):
    from pathlib import Path
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)


def changed_(name, hunks):
    from pathlib import Path
    text = Path(name).read_text()
    for old, new in hunks:
        assert text.count(old) == 1, (name, old, "stands in it", text.count(old), "times")
        text = text.replace(old, new)
    Path(name).write_text(text)
"""
PIP = ["-m", "pip", "install", "--no-index", "--no-build-isolation", "--no-deps", "--quiet", "--target", "installed"]


def blocks(guide: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(guide.read_text())


def commands(guide: Path) -> list[str]:
    lines = [line for kind, text in blocks(guide) if kind == "console" for line in text.splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


def script(guide: Path) -> str:
    """Return the page as one program."""
    lines = [COMMAND]
    for kind, text in blocks(guide):
        named = NAMED.match(text)
        if named is not None:
            lines.append(f"written_({named[1]!r}, {text[named.end() :]!r})")
        elif kind == "python":
            lines.append(text)
        elif kind == "diff":
            lines.append(changes(text))
        else:
            asked = [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ ")]
            lines += [ran(c) for c in asked if c in RUN]
    return "\n".join(lines)


def ran(command: str) -> str:
    given, words = split(command)
    whole = ["-P", "-m", "autosel.cli.main", *words[1:]] if words[0] == "autosel" else [*PIP, *words[2:]]
    return f"ran_({given!r}, {whole!r}, {RUN[command]})"


def split(command: str) -> tuple[dict[str, str], list[str]]:
    """Split a command into its variables and its words."""
    words = shlex.split(command)
    given = [w for w in words if re.match(r"[A-Z_]+=", w)]
    return dict(w.split("=", 1) for w in given), words[len(given) :]


def changes(diff: str) -> str:
    """Return a call of changed_ that applies a diff: lines start with a blank, - or +, and @@ separates hunks."""
    first, *rest = diff.splitlines()
    hunks: list[list[str]] = [[]]
    for line in rest:
        if line.startswith("@@"):
            hunks.append([])
        else:
            hunks[-1].append(line or " ")
    pairs = [
        tuple("".join(line[1:] + "\n" for line in hunk if line[0] in kept) for kept in (" -", " +")) for hunk in hunks
    ]
    return f"changed_({first.removeprefix('--- ')!r}, {pairs!r})"


def environment(home: Path) -> dict[str, str]:
    kept = {n: v for n, v in os.environ.items() if not n.startswith("AUTOSEL_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    one = {"OMP_NUM_THREADS": "1"}  # other tests run at the same time
    return kept | one | {"AUTOSEL_HOME": str(home), "PYTHONPATH": str(ROOT), "PATH": path}


# TensorRT-LLM 1.2, llmapi/llm_args.py: TorchLlmArgs and CudaGraphConfig, as far as the guide uses them. Both forbid
# other fields, and the largest of batch_sizes is max_batch_size, if that is given too.
TENSORRT_LLM = {"cuda_graph_config": dict, "max_batch_size": int, "max_seq_len": int, "attn_backend": str}
GRAPHS = {"batch_sizes": list, "max_batch_size": int, "enable_padding": bool}


def read_as_tensorrt_llm(options: dict[str, Any]) -> None:
    graphs = options["cuda_graph_config"]
    for given, known in ((options, TENSORRT_LLM), (graphs, GRAPHS)):
        for name, value in given.items():
            assert type(value) is known[name], name
    assert all(type(size) is int and size > 0 for size in graphs["batch_sizes"])
    assert graphs.get("max_batch_size", max(graphs["batch_sizes"])) == max(graphs["batch_sizes"])
    assert max(graphs["batch_sizes"]) <= options["max_batch_size"]  # a graph above it would never run


def copied(folder: Path) -> None:
    """Copy the parts that a checkout needs to run."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for part in ("autosel", "kernels", "fingerprints", "db"):
        shutil.copytree(ROOT / part, folder / part, ignore=ignored)


@pytest.mark.parametrize("guide", drawn.share(GUIDES, days=6), ids=lambda p: p.stem)
def test_a_guide_runs(guide: Path, tmp_path: Path) -> None:
    if guide.stem == "transformers":
        pytest.importorskip("transformers", reason="needs the `hf` extra")
    folder = tmp_path / "work"
    folder.mkdir()
    assert any(kind == "python" for kind, _ in blocks(guide))
    (folder / "guide_.py").write_text(script(guide))
    given = environment(furnish(tmp_path / "home"))
    if guide.stem in CHANGING:
        copied(folder)
        given["PYTHONPATH"] = f"{folder}{os.pathsep}{folder / 'installed'}"
    done = subprocess.run([sys.executable, "guide_.py"], cwd=folder, env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if guide.stem == "tensorrt-llm":
        read_as_tensorrt_llm(json.loads((folder / "options.yaml").read_text()))


def test_every_command_of_a_guide_parses_and_every_short_one_exists() -> None:
    seen = [c for guide in GUIDES for c in commands(guide)]
    assert set(RUN) <= set(seen)
    for command in seen:
        _, words = split(command.replace("e5m2-row", "int8-row"))  # an op that its guide adds to a copy
        if words[:2] == ["pip", "install"]:
            continue
        words = words[2:] if words[1:3] == ["-m", "autosel"] else words  # in another environment's Python
        assert words[0] == "autosel" and words[1] in VERBS, command
        verb = cli.get_command(click.Context(cli), words[1])
        assert verb is not None
        verb.make_context(words[1], words[2:])


def test_every_guide_is_listed() -> None:
    index = (ROOT / "docs" / "guides" / "README.md").read_text()
    assert all(f"({guide.name})" in index for guide in GUIDES)


def test_links_of_the_guides_have_a_target() -> None:
    for guide in [*GUIDES, ROOT / "docs" / "guides" / "README.md"]:
        for link in re.findall(r"\]\(([^)#]+)\)", guide.read_text()):
            assert (guide.parent / link).exists(), (guide.name, link)
