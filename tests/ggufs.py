"""Write GGUF files for tests, by the format's description, with any lie in the header."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", U32: "I", 5: "i", F32: "f", BOOL: "?", U64: "Q", 11: "q", 12: "d"}
# Number, weights and bytes of the formats that tests write.
FORMATS = {"F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q8_0": (8, 32, 34),
           "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210), "BF16": (30, 1, 2)}  # fmt: skip
ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor to write: `shape` has the slowest dimension first. `kind` and `offset` replace the correct ones."""

    name: str
    shape: tuple[int, ...]
    format: str
    data: bytes
    kind: int | None = None
    offset: int | None = None


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(found: Any) -> bytes:
    """Encode a value with the type that converters use for it; a pair is (type, bytes) as they are."""
    if isinstance(found, tuple):
        kind, raw = found
        return struct.pack("<I", kind) + bytes(raw)
    if isinstance(found, str):
        return struct.pack("<I", STRING) + string(found)
    if isinstance(found, list):
        return struct.pack("<I", ARRAY) + array(found)
    kind = BOOL if isinstance(found, bool) else F32 if isinstance(found, float) else U32
    return struct.pack(f"<I{SCALARS[kind]}", kind, found)


def array(found: Sequence[Any]) -> bytes:
    if found and isinstance(found[0], str):
        return struct.pack("<IQ", STRING, len(found)) + b"".join(map(string, found))
    kind = BOOL if found and isinstance(found[0], bool) else 5
    return struct.pack(f"<IQ{len(found)}{SCALARS[kind]}", kind, len(found), *found)


def size(shape: tuple[int, ...], format_: str) -> int:
    _, weights, count = FORMATS[format_]
    return math.prod(shape) // weights * count


def gguf(
    metadata: Mapping[str, Any],
    tensors: Sequence[Stored],
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = ALIGNMENT,
) -> bytes:
    """Return a file. `counts` replaces the numbers of tensors and of metadata entries."""
    head = b"GGUF" + struct.pack("<IQQ", version, *(counts or (len(tensors), len(metadata))))
    head += b"".join(string(key) + value(found) for key, found in metadata.items())
    data = b""
    for t in tensors:
        offset = len(data) if t.offset is None else t.offset
        kind = FORMATS[t.format][0] if t.kind is None else t.kind
        dims = struct.pack(f"<I{len(t.shape)}Q", len(t.shape), *reversed(t.shape))
        head += string(t.name) + dims + struct.pack("<IQ", kind, offset)
        data += t.data + bytes(-len(t.data) % alignment)
    return head + bytes(-len(head) % alignment) + data
