"""Read the values of a GGUF header one after the other, each checked against the rest of the file."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from autosel.errors import BadConfig

HEADER_LIMIT = 256 << 20  # bytes before the data; the largest published vocabularies take about 20 MiB
STRING_LIMIT = 16 << 20  # a chat template takes about 20 KiB
ARRAY_LIMIT = 1 << 23  # entries of an array; vocabularies have up to 262,144
KEPT = 1024  # skip longer arrays of numbers; arrays of layers are shorter, arrays of vocabularies longer

# Number in the file -> struct's letter. 8 is a string, 9 an array.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9

MetadataValue = Any  # bool, int, float, str or MetadataArray


@dataclass(frozen=True, slots=True, repr=False)
class MetadataArray:
    """An array in the metadata. `numbers` is None for one of strings, and for one with more than KEPT entries."""

    count: int
    numbers: tuple[Any, ...] | None = None

    def __repr__(self) -> str:
        """Return what an error shows."""
        return f"an array of {self.count}" if self.numbers is None else str(list(self.numbers))


class Cursor:
    """Position in a GGUF header. Every method raises BadConfig; `what` names the value in its message."""

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self.file, self.path, self.size = file, path, size
        self.at, self.end = 0, min(size, HEADER_LIMIT)

    def take(self, count: int, what: str) -> bytes:
        """Return the next `count` bytes."""
        self.refuse_beyond(count, what)
        data = self.file.read(count)
        if len(data) != count:
            raise BadConfig(f"{self.path} ended while it was read", why="it was truncated after it was opened")
        self.at += count
        return data

    def refuse_beyond(self, count: int, what: str) -> None:
        if count <= self.end - self.at:
            return
        limit = "the file ends" if self.end == self.size else "headers may end"
        raise incomplete(self.path, f"{what} takes {count} bytes at byte {self.at}; {limit} at byte {self.end}")

    def unsigned(self, width: int, what: str) -> int:
        return int.from_bytes(self.take(width, what), "little")

    def count(self, most: int, what: str) -> int:
        """Return a count of at most `most`."""
        found = self.unsigned(8, what)
        if found > most:
            raise incomplete(self.path, f"{what} is {found}; at most {most} are expected")
        return found

    def string(self, what: str, most: int = STRING_LIMIT) -> str:
        length = self.count(most, f"the length of {what}")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise incomplete(self.path, f"{what} is not UTF-8: {error.reason}") from error

    def value(self, what: str) -> MetadataValue:
        """Return a metadata value with its type in front."""
        kind = self.unsigned(4, f"the type of {what}")
        if kind == ARRAY:
            return self._array(what)
        if kind == STRING:
            return self.string(what)
        if kind not in SCALARS:
            raise incomplete(self.path, f"{what} has the unknown type {kind}")
        return self._scalars(SCALARS[kind], 1, what)[0]

    def _scalars(self, letter: str, count: int, what: str) -> tuple[Any, ...]:
        data = self.take(count * struct.calcsize(letter), what)
        if letter == "?" and not set(data) <= {0, 1}:
            raise incomplete(self.path, f"{what} is neither true nor false: byte {max(data)}")
        return struct.unpack(f"<{count}{letter}", data)

    def _array(self, what: str) -> MetadataArray:
        kind = self.unsigned(4, f"the entry type of {what}")
        count = self.count(ARRAY_LIMIT, f"the length of {what}")
        if kind == STRING:
            self._skip_strings(count, what)
            return MetadataArray(count)
        if kind not in SCALARS:
            raise incomplete(self.path, f"{what} has entries of the unknown type {kind}")
        if count <= KEPT:
            return MetadataArray(count, self._scalars(SCALARS[kind], count, what))
        self._skip(count * struct.calcsize(SCALARS[kind]), what)
        return MetadataArray(count)

    def _skip_strings(self, count: int, what: str) -> None:
        self.refuse_beyond(8 * count, what)
        for _ in range(count):
            length = int.from_bytes(self.take(8, what), "little")
            if length:
                self._skip(length, what)

    def _skip(self, count: int, what: str) -> None:
        self.refuse_beyond(count, what)
        self.file.seek(count, 1)
        self.at += count


def incomplete(path: Path, why: str) -> BadConfig:
    return BadConfig(f"{path} is not a complete GGUF file", why=why, todo="fetch the file again")
