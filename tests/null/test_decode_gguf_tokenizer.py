"""Test that texts are tokenized by the tokenizer inside a GGUF file, or that it is refused by the name of its entry."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from autosel import models
from autosel.decode import gguf_tokenizer
from autosel.decode.gguf_tokenizer import encode
from autosel.decode.prompt import prompts, text_to_score
from autosel.decode.run import Plan
from autosel.errors import BadConfig, UsageError
from tests.ggufs import ARRAY, F32, gguf

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6


def floats(numbers: list[float]) -> tuple[int, bytes]:
    return ARRAY, struct.pack(f"<IQ{len(numbers)}f", F32, len(numbers), *numbers)


def write(path: Path, **entries: Any) -> Path:
    found = {"general.architecture": "llama"} | {f"tokenizer.ggml.{k}": v for k, v in entries.items() if v is not None}
    path.write_bytes(gguf(found, []))
    return path


def byte_level(path: Path, **changes: Any) -> Path:
    """Write a vocabulary of printable ASCII, `th`, `the`, ` the`, `whole` (no merge makes it), a control token."""
    pytest.importorskip("transformers.integrations.gguf", reason="needs the extra `hf`")
    tokens = [chr(c) for c in range(33, 127)] + ["Ġ", "th", "the", "Ġthe", "whole", "<|start|>"]
    kinds = [NORMAL] * (len(tokens) - 1) + [CONTROL]
    entries = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": kinds, "bos_token_id": 99}
    return write(path, **entries | {"merges": ["t h", "th e", "Ġ the"]} | changes)


def char(c: str) -> int:
    return ord(c) - 33


def test_byte_level_tokens_follow_merges_and_control_tokens_stay_whole(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "m.gguf")
    assert encode("the the", path) == [96, 97]
    assert encode("<|start|>a thx", path) == [99, char("a"), 94, 95, char("x")]
    assert encode("whole", path) == [char(c) for c in "whole"]


def test_a_llama_3_file_begins_with_bos_and_takes_words_of_its_vocabulary(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "m.gguf", pre="llama-bpe")
    assert encode("whole", path) == [99, 98]
    assert encode("12345", path)[1:] == [char(c) for c in "12345"]
    silent = byte_level(tmp_path / "s.gguf", pre="llama-bpe", add_bos_token=False)
    assert encode("the", silent) == [96]
    told = byte_level(tmp_path / "t.gguf", add_bos_token=True)
    assert encode("the", told) == [99, 96]


def test_sentencepiece_tokens_follow_scores_and_unknown_characters_are_bytes(tmp_path: Path) -> None:
    pytest.importorskip("transformers.integrations.gguf", reason="needs the extra `hf`")
    pieces = ["▁", "t", "h", "e", "th", "the", "▁the"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    scores = [0.0] * 259 + [-9.0, -8.0, -7.0, -6.0, -1.0, -2.0, -3.0]
    path = write(
        tmp_path / "m.gguf", model="llama", tokens=tokens, token_type=kinds, scores=floats(scores), bos_token_id=1,
        eos_token_id=2, unknown_token_id=0,
    )  # fmt: skip
    assert encode("the the", path) == [1, 265, 265]
    assert encode("the é", path) == [1, 265, 259, 3 + 0xC3, 3 + 0xA9]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": "t5"}, r"tokenizer.ggml.model = 't5'"),
        ({"pre": "newest"}, r"tokenizer.ggml.pre = 'newest'"),
        ({"pre": None}, r"tokenizer.ggml.pre = None"),
        ({"tokens": None}, "its tokenizer cannot be read"),
        ({"merges": ["the", "x"]}, "its tokenizer cannot be read"),
    ],
)
def test_another_tokenizer_is_refused_by_its_entry(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(BadConfig, match=told):
        encode("the", byte_level(tmp_path / "m.gguf", **changes))


def test_prompts_and_texts_use_it(tmp_path: Path) -> None:
    path, shape = byte_level(tmp_path / "m.gguf"), models.load("llama-1b")
    (tmp_path / "t.txt").write_text("the the the")
    plan = Plan(model=shape, weights=str(path), prompt=str(tmp_path / "t.txt"), seq=4)
    assert prompts(plan).rows == [[96, 97, 97]]
    found = text_to_score(tmp_path / "t.txt", plan)
    assert (found.tokenizer, found.tokens) == ("checkpoint", (96, 97, 97))


def test_a_file_without_a_tokenizer_needs_token_ids(tmp_path: Path) -> None:
    path, shape = write(tmp_path / "m.gguf"), models.load("llama-1b")
    (tmp_path / "t.txt").write_text("the")
    with pytest.raises(UsageError, match="a text prompt needs the checkpoint's tokenizer"):
        prompts(Plan(model=shape, weights=str(path), prompt=str(tmp_path / "t.txt"), seq=2))
    assert text_to_score(tmp_path / "t.txt", Plan(model=shape, weights=str(path))).tokenizer == "bytes"


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = byte_level(tmp_path / "m.gguf")

    def absent(path: Path) -> Any:
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

    monkeypatch.setattr(gguf_tokenizer, "_made", absent)
    with pytest.raises(UsageError, match="needs the package transformers, of the extra hf"):
        encode("the", path)
