"""GGUF headers that are whole, and many that are not: read or refused, never half."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from autosel.errors import BadConfig
from autosel.models.gguf import BLOCKS, GgufFile, cursor, read_gguf
from tests.ggufs import ARRAY, BOOL, FORMATS, STRING, Stored, gguf, size

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.tokens": ["a", "b", ""],
    "tokenizer.ggml.token_type": [1, -1, 3],
}


def stored(name: str = "a.weight", shape: tuple[int, ...] = (3, 32), format_: str = "Q8_0", **changes: Any) -> Stored:
    return Stored(name, shape, format_, bytes(size(shape, format_)), **changes)


TENSORS = (stored(), stored("b.weight", (5,), "F32"), stored("c.weight", (2, 256), "Q6_K"))


def read(folder: Path, content: bytes) -> GgufFile:
    path = folder / "model.gguf"
    path.write_bytes(content)
    return read_gguf(path)


def refused(folder: Path, content: bytes, match: str) -> None:
    with pytest.raises(BadConfig, match=match) as found:
        read(folder, content)
    assert "model.gguf" in str(found.value)


# --- whole -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_and_places_of_tensors_are_read(tmp_path: Path, version: int) -> None:
    found = read(tmp_path, gguf(METADATA, TENSORS, version=version))
    assert found.metadata["llama.block_count"] == 2
    assert found.metadata["tokenizer.ggml.add_bos_token"] is True
    assert found.metadata["tokenizer.ggml.tokens"] == cursor.MetadataArray(3)
    assert found.metadata["tokenizer.ggml.token_type"] == cursor.MetadataArray(3, (1, -1, 3))
    assert [t.shape for t in found.tensors.values()] == [(3, 32), (5,), (2, 256)]
    assert [t.size for t in found.tensors.values()] == [3 * 34, 20, 2 * 210]
    starts = [t.start for t in found.tensors.values()]
    assert [s - starts[0] for s in starts] == [0, 128, 160]
    assert starts[0] % 32 == 0
    assert found.formats() == "Q6_K, Q8_0, F32"


def test_another_alignment_is_followed(tmp_path: Path) -> None:
    content = gguf(METADATA | {"general.alignment": 256}, TENSORS, alignment=256)
    assert [t.start % 256 for t in read(tmp_path, content).tensors.values()] == [0, 0, 0]


def test_a_file_may_end_without_padding(tmp_path: Path) -> None:
    content = gguf(METADATA, TENSORS)
    assert len(read(tmp_path, content[:-28]).tensors) == 3  # the last tensor takes 420 bytes of 448
    refused(tmp_path, content[:-29], r"'c\.weight' ends at byte \d+, the file at byte \d+")


def test_a_long_array_of_numbers_is_skipped(tmp_path: Path) -> None:
    found = read(tmp_path, gguf({"scores": [7] * 5000, "after": 1}, TENSORS))
    assert found.metadata == {"scores": cursor.MetadataArray(5000), "after": 1}


def test_a_short_tensor_of_numbers_is_read(tmp_path: Path) -> None:
    numbers = Stored("rope_freqs.weight", (3,), "F32", struct.pack("<3f", 1.0, 2.5, 8.0))
    found = read(tmp_path, gguf(METADATA, (*TENSORS, numbers)))
    assert found.floats("rope_freqs.weight") == (1.0, 2.5, 8.0)
    with pytest.raises(BadConfig, match=r"a\.weight is Q8_0 \[3, 32\]"):
        found.floats("a.weight")
    os.truncate(tmp_path / "model.gguf", 64)
    with pytest.raises(BadConfig, match="ended while it was read"):
        found.floats("rope_freqs.weight")


def test_the_formats_that_tests_write_are_those_of_the_parser() -> None:
    ours = {b.name: (number, b.weights, b.bytes) for number, b in BLOCKS.items()}
    assert {name: ours[name] for name in FORMATS} == FORMATS


# --- not whole -------------------------------------------------------------------------------------------------------


def test_every_shorter_file_is_refused(tmp_path: Path) -> None:
    content = gguf(METADATA, TENSORS)
    for length in range(len(content) - 28):
        refused(tmp_path, content[:length], "not a complete GGUF file|not a GGUF file")


LIES = {
    "another file": (b"PK\3\4" + bytes(99), r"it begins with b'PK"),
    "version 1": (gguf(METADATA, TENSORS, version=1), "version 1 is not supported"),
    "big endian": (gguf(METADATA, TENSORS, version=3 << 24), "the file is big endian"),
    "more tensors": (gguf(METADATA, TENSORS, counts=(4, 6)), "not a complete GGUF file"),
    "fewer tensors": (gguf(METADATA, TENSORS, counts=(2, 6)), r"the tensors end at byte \d+, the file at byte"),
    "2^60 tensors": (gguf(METADATA, TENSORS, counts=(1 << 60, 6)), f"number of tensors is {1 << 60}"),
    "more entries": (gguf(METADATA, TENSORS, counts=(3, 7)), "not a complete GGUF file"),
    "2^60 entries": (gguf(METADATA, TENSORS, counts=(3, 1 << 60)), f"metadata entries is {1 << 60}"),
    "a string of 2^60": (gguf({"x": (STRING, struct.pack("<Q", 1 << 60))}, ()), f"length of 'x' is {1 << 60}"),
    "a string past the end": (gguf({"x": (STRING, struct.pack("<Q", 9999))}, ()), "'x' takes 9999 bytes at byte"),
    "an array of 2^60": (gguf({"x": (ARRAY, struct.pack("<IQ", 4, 1 << 60))}, ()), f"length of 'x' is {1 << 60}"),
    "an array past the end": (gguf({"x": (ARRAY, struct.pack("<IQ", 12, 9999))}, ()), "'x' takes 79992 bytes"),
    "strings past the end": (gguf({"x": (ARRAY, struct.pack("<IQ", STRING, 1 << 22))}, ()), "'x' takes"),
    "an array of arrays": (gguf({"x": (ARRAY, struct.pack("<IQ", ARRAY, 1))}, ()), "entries of the unknown type 9"),
    "an unknown type": (gguf({"x": (13, b"")}, ()), "'x' has the unknown type 13"),
    "neither true nor false": (gguf({"x": (BOOL, b"\7")}, ()), "'x' is neither true nor false: byte 7"),
    "no text": (gguf({"x": (STRING, b"\1" + bytes(7) + b"\xff")}, ()), "'x' is not UTF-8"),
    "alignment 0": (gguf({"general.alignment": 0}, TENSORS), "general.alignment is 0"),
    "alignment 24": (gguf({"general.alignment": 24}, TENSORS), "general.alignment is 24"),
    "alignment x": (gguf({"general.alignment": "x"}, TENSORS), "general.alignment is 'x'"),
    "misaligned": (gguf({}, (stored(offset=8),)), r"'a\.weight' begins at byte 8 of the data, .* aligned to 32"),
    "a gap": (gguf({}, (stored(offset=32),)), r"'a\.weight' at byte 32 of the data leaves a gap"),
    "overlap": (gguf({}, (stored(), stored("b", offset=64))), "'b' at byte 64 of the data overlaps"),
    "the same place": (gguf({}, (stored(), stored("b", offset=0))), "at byte 0 of the data overlaps"),
    "an offset of 2^62": (gguf({}, (stored(offset=1 << 62),)), "leaves a gap"),
    "twice": (gguf({}, (stored(), stored(offset=128))), r"'a\.weight' appears twice"),
    "an unknown format": (gguf({}, (stored(kind=4),)), r"'a\.weight' has the unknown format 4"),
    "no whole blocks": (gguf({}, (stored(kind=12),)), r"'a\.weight': rows of 32 are not whole Q4_K blocks of 256"),
    "no elements": (gguf({}, (Stored("a", (0, 32), "Q8_0", b""),)), r"'a' has the shape \[0, 32\]"),
    "2^80 elements": (gguf({}, (Stored("a", (1 << 40, 1 << 40), "F32", b""),)), "'a' has the shape"),
    "2^47 elements": (gguf({}, (Stored("a", (1 << 42, 32), "F32", b""),)), r"'a' ends at byte \d+"),
    "five dimensions": (gguf({}, (Stored("a", (1,) * 5, "F32", bytes(4)),)), "'a' has 5 dimensions"),
    "a long name": (gguf({}, (stored("x" * 65),)), "length of a tensor's name is 65"),
    "a long key": (gguf({"x" * (1 << 16): 1}, ()), "length of metadata key 0 is 65536"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_named_with_its_value(tmp_path: Path, name: str) -> None:
    content, match = LIES[name]
    refused(tmp_path, content, match)


def test_a_key_that_appears_twice_is_refused(tmp_path: Path) -> None:
    content = gguf({"aaaa": 1, "bbbb": 2}, ()).replace(b"bbbb", b"aaaa")
    refused(tmp_path, content, "'aaaa' appears twice")


def test_a_refusal_takes_no_memory(tmp_path: Path) -> None:
    big = gguf({"x": (ARRAY, struct.pack("<IQ", STRING, 1 << 20))}, ())
    path = tmp_path / "model.gguf"
    path.write_bytes(big)
    os.truncate(path, 1 << 36)  # sparse: its strings are empty
    tracemalloc.start()
    with pytest.raises(BadConfig):
        read_gguf(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20


@pytest.mark.parametrize("kind", ["folder", "missing", "pipe"])
def test_only_a_regular_file_is_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.gguf"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(BadConfig, match="cannot be read"):
        read_gguf(path)
