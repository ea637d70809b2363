"""Test that the documentation matches the code: current blocks, valid links, existing commands and constants."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import click
import pytest

from autosel import settings
from autosel.cli.main import VERBS, cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CHANGELOG.md"]
EXECUTABLE = {"autosel", "./run"}


def module(path):
    """Import a script outside the package by its file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    made = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = made
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def generate():
    return module(ROOT / "docs" / "generate.py")


@pytest.fixture(scope="module")
def figures():
    return module(ROOT / "benchmarks" / "figures.py")


def fences(page):
    """Return (language, text) of each fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def prose(page):
    """Return the page without fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def by_name(page):
    return str(page.relative_to(ROOT))


# --- generated blocks -------------------------------------------------------------------------------------------------


def test_every_generated_block_is_current():
    done = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def page(generate, tmp_path, monkeypatch):
    path = tmp_path / "page.md"
    monkeypatch.setattr(generate, "pages", lambda: [path])
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    return path


def test_an_outdated_block_is_found_and_rewritten(generate, page):
    page.write_text("before\n<!-- generated: settings -->\n\nan old table\n\n<!-- end -->\nafter\n")
    assert list(generate.rewrite(write=False)) == [page]
    assert "an old table" in page.read_text()
    assert list(generate.rewrite(write=True)) == [page]
    assert list(generate.rewrite(write=False)) == []
    text = page.read_text()
    assert "AUTOSEL_EFFORT" in text
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")


def test_every_block_of_the_generator_is_used(generate):
    used = {m["name"] for page in PAGES for m in generate.BLOCK.finditer(page.read_text())}
    assert used == set(generate.BLOCKS)


# --- pages ------------------------------------------------------------------------------------------------------------


def anchors(path):
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_links_have_a_target(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


def test_every_page_is_listed_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text()
    assert [p.name for p in (ROOT / "docs").glob("*.md") if p.name != "README.md" and f"({p.name})" not in index] == []


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_code_blocks_name_their_language_and_parse(page):
    for language, text in fences(page):
        assert language in ("text", "python", "sh", "toml", "cpp"), text[:80]
        if language == "python":
            ast.parse(text)
        if language == "toml":
            tomllib.loads(text)


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_written_lines_fit_the_line_length(page):
    text = re.sub(r"<!-- generated:.*?<!-- end -->", "", page.read_text(), flags=re.DOTALL)
    assert [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")] == []


def test_no_text_installs_the_other_project_called_autosel():
    """Check this, because that name on PyPI belongs to another project."""
    bad = re.compile(r"(pip|uv|pipx)[ \w-]* " + "install" + r"( -{1,2}[\w-]+)* ['\"]?autosel(?![\w-])")
    assert bad.search("pip " + "install autosel")
    folders = ("autosel", "docs", "benchmarks", "kernels", "tests", ".ci")
    files = [p for f in folders for p in (ROOT / f).rglob("*") if p.suffix in (".py", ".md", ".cpp", ".h", ".txt", "")]
    for path in [*files, *ROOT.glob("*.md"), ROOT / "run", ROOT / "pyproject.toml"]:
        if path.is_file() and "__pycache__" not in path.parts:
            assert not bad.search(path.read_text(errors="replace")), path


# --- the README -------------------------------------------------------------------------------------------------------


def test_no_transcript_of_the_readme_is_longer_than_a_screen():
    shown = [text for language, text in fences(ROOT / "README.md") if language == "text"]
    assert shown and all(text.count("\n") <= 24 for text in shown)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_picture_of_the_readme_is_drawn_from_the_stored_results(theme):
    drawing = module(ROOT / "benchmarks" / "figure_readme.py")
    assert drawing.path(theme).read_text() == drawing.svg(theme), "run: python benchmarks/figure_readme.py"
    assert f"docs/{drawing.path(theme).name}" in (ROOT / "README.md").read_text()


def test_the_figures_of_the_picture_are_those_of_the_readme():
    found = list(module(ROOT / "benchmarks" / "figure_readme.py").contexts())
    text = (ROOT / "README.md").read_text()
    for arm, form in (("eager", "{:.1f}"), ("llama.cpp", "{:.2f}")):
        *first, last = (form.format(context.times[arm]) for context in found)
        assert f"{', '.join(first)} and {last} times" in text


# --- the site ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hooks():
    return module(ROOT / "docs" / "hooks.py")


def test_every_page_is_in_the_navigation_of_the_site_once(hooks):
    listed = re.findall(r"(?:: |- )([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    written = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")} - {"README.md"}
    assert sorted(listed) == sorted(written | set(hooks.SOURCES))


@pytest.mark.parametrize(
    ("source", "here", "text", "adapted"),
    [
        ("README.md", "index.md", "[a](docs/cli.md#run)", "[a](cli.md#run)"),
        ("README.md", "index.md", "[docs/](docs/README.md) [b](#limits)", "[docs/](pages.md) [b](#limits)"),
        ("README.md", "index.md", "![c](docs/results.svg) [LICENSE](LICENSE)", "![c](results.svg) LICENSE"),
        ("docs/README.md", "pages.md", "[g](guides/README.md)", "[g](guides/README.md)"),
        ("docs/guides/vllm.md", "guides/vllm.md", "[m](../method.md) `[a](b)`", "[m](../method.md) `[a](b)`"),
        ("docs/guides/vllm.md", "guides/vllm.md", "[p](../README.md) [q](../../x.py)", "[p](../pages.md) q"),
        ("docs/cli.md", "cli.md", "[w](https://x.org/a.md)", "[w](https://x.org/a.md)"),
        ("docs/cli.md", "cli.md", "| `a \\| b` | c \\| d |", "| `a | b` | c \\| d |"),
    ],
)
def test_links_and_tables_are_adapted_to_the_site(hooks, source, here, text, adapted):
    assert hooks.adapted(text, here, source) == adapted


# --- commands, settings, errors, constants ----------------------------------------------------------------------------


def commands(page):
    """Each command of ours that a page tells somebody to type: fenced as sh, indented, or in backquotes."""
    text = page.read_text()
    lines = [line for language, block in fences(page) if language == "sh" for line in block.splitlines()]
    lines += re.findall(r"^    (.*)$", prose(page), re.MULTILINE)
    lines += re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    for line in lines:
        words = shlex.split(re.split(r"\s{3,}|\s#", line)[0].replace("'", ""))
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        if words and words[0] in EXECUTABLE and len(words) > 1:
            yield words


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_documented_commands_have_verbs_and_options_that_exist(page):
    context = click.Context(cli, info_name="autosel")
    for words in commands(page):
        verb, rest = words[1], words[2:]
        if verb.startswith("-") or (words[0] == "./run" and verb in ("docs", "test", "setup", "wheel", "VERB")):
            continue
        if words[0] == "./run" and verb == "gpu":
            source = (ROOT / "benchmarks" / "gpu" / "__main__.py").read_text()
            known = {*re.findall(r'"(--[a-z-]+)"', source), "--wheelhouse", "--reuse-torch", "--no-lock", "--help"}
            assert {w.partition("=")[0] for w in rest if w.startswith("-")} <= known, words
            continue
        assert verb in VERBS or verb in ("VERB", "OP"), words
        if verb not in VERBS:
            continue
        command = cli.get_command(context, verb)
        if isinstance(command, click.Group):
            assert rest, words
            command = command.commands[rest.pop(0)]
        known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help", "-h"}
        assert {w.partition("=")[0] for w in rest if re.match(r"--?[a-z]", w)} <= known, words


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_documented(verb):
    assert f"\n## {verb}\n" in (ROOT / "docs" / "cli.md").read_text()


def test_every_variable_the_documentation_names_is_one_that_is_read():
    known = {s.variable for s in settings.SETTINGS} | {"AUTOSEL_SPELLING"}
    for page in PAGES:
        assert set(re.findall(r"\bAUTOSEL_[A-Z]+\b", prose(page))) <= known, page


def exit_rows():
    """Return exit code -> its rows: (meaning, verbs)."""
    found, code = {}, ""
    for line in (ROOT / "docs" / "errors.md").read_text().split("<!-- generated")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and (cells[0].isdigit() or (not cells[0] and code)):
            code = cells[0] or code
            found.setdefault(int(code), []).append(cells[1:])
    return found


def test_every_exit_code_of_an_error_is_explained_and_none_besides(generate):
    kinds = list(generate.error_classes())
    assert {"NotReproduced", "MissedObjective", "EnvironmentFault"} <= {kind.name for kind in kinds}
    assert {kind.exit_code for kind in kinds} | {0} == set(exit_rows())
    for rows in exit_rows().values():
        assert all(who and "no verb" not in who for _, who in rows)


def test_exit_codes_in_a_verbs_help_are_documented_for_it():
    context, told = click.Context(cli, info_name="autosel"), {}
    for verb in VERBS:
        command = cli.get_command(context, verb)
        texts = [command.help or "", *(getattr(p, "help", "") or "" for p in command.params)]
        for tail in re.findall(r"[Ee]xit codes?:? (.*?)(?:\n\n|$)", "\0".join(texts).replace("\0", "\n\n"), re.DOTALL):
            told.setdefault(verb, set()).update(map(int, re.findall(r"(?:^|[.,] |\n)([1-6])(?=[ :.]|$)", tail)))
    assert {verb: told[verb] for verb in ("run", "race", "verify", "status")} == {
        "run": {3, 4},
        "race": {2, 4, 5},
        "verify": {3, 5},
        "status": {1},
    }
    for verb, codes in told.items():
        for code in codes:
            assert any(f"`{verb}" in who or who == "every verb" for _, who in exit_rows()[code]), (verb, code)


OBJECTS = {"candidate": "candidates.base.Candidate", "ledger": "ledger.store.Ledger", "registry": "candidates.registry"}


def test_every_function_of_the_pipeline_exists():
    text = (ROOT / "docs" / "architecture.md").read_text().partition("## The pipeline")[2].partition("## Layers")[0]
    names = re.findall(r"^\|[^|`]+\| `([\w.]+)", text, re.MULTILINE)
    assert len(names) > 9
    for name in names:
        first, _, rest = name.removeprefix("autosel.").partition(".")
        found = importlib.import_module("autosel")
        for part in filter(None, f"{OBJECTS.get(first, first)}.{rest}".split(".")):
            if not hasattr(found, part):
                importlib.import_module(f"{found.__name__}.{part}")
            found = getattr(found, part)


SAID = (
    ("race.plan", "AA_SESSIONS", "After {} sessions"),
    ("race.plan", "MAX_TAIL_SAMPLES", "or has {} samples"),
    ("race.plan", "DELTA_UNCALIBRATED", "delta falls from {:.0%} to"),
    ("race.plan", "DELTA_CALIBRATED", "to {:.0%}."),
    ("race.judge", "ROLLING", "last {} baseline samples"),
    ("race.judge", "TAIL_SLACK", "tau is {} times"),
    ("race.evidence", "E_PAIRS", "`E >= {}`"),
    ("race.evidence", "E_TAIL", "must reach {}."),
    ("race.evidence", "TAIL_RATE_INVERSE", "p0 = 1/{}:"),
    ("race.run", "CEILING_SLACK", "faster than {} times the probe's best"),
    ("ledger.key", "LIFETIME_BUDGET", "a budget of {} per key"),
)


@pytest.mark.parametrize(("where", "name", "words"), SAID, ids=[name for _, name, _ in SAID])
def test_the_method_states_the_numbers_of_the_code(where, name, words):
    text = " ".join((ROOT / "docs" / "method.md").read_text().split()).replace(" %", "%")
    assert words.format(getattr(import_module(f"autosel.{where}"), name)) in text


# --- figures ----------------------------------------------------------------------------------------------------------


def test_kept_figures_are_complete_and_not_from_a_quick_run(figures):
    for document in figures.stored():
        assert document["quick"] is False
        assert [f["name"] for f in sorted(document["figures"], key=lambda f: f["name"])] == sorted(
            g.name for g in figures.GOALS
        )
        for f in document["figures"]:
            stored = figures.FigureRow(**{k: v for k, v in f.items() if k != "verdict"})
            assert figures.verdict(figures.goal(f["name"]), stored) == f["verdict"]


def test_every_entry_of_the_changelog_is_in_a_group():
    """Check the groups of Keep a Changelog: each once per version, in order."""
    known = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    _, *versions = re.split(r"^## .*$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert versions
    for version in versions:
        before, *groups = re.split(r"^### ", version, flags=re.MULTILINE)
        assert not before.strip()
        found = [group.partition("\n")[0] for group in groups]
        assert found == [name for name in known if name in found]
