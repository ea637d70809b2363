"""Read the header of a GGUF file (versions 2 and 3, little endian).

The format: `GGUF`, version, number of tensors, number of metadata entries; the entries (key, type, value); for each
tensor its name, dimensions with the fastest first, block format and offset; then the data, aligned. A header can claim
anything, so every claim is checked against the file's size before it is used. Nothing is mapped, so a file that is
truncated while it is read gives an error, not a signal.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from autosel import files
from autosel.errors import BadConfig
from autosel.models.gguf.block import BLOCKS, Block
from autosel.models.gguf.cursor import Cursor, MetadataValue, incomplete

MAGIC = b"GGUF"
VERSIONS = (2, 3)
TENSOR_LIMIT, ENTRY_LIMIT = 1 << 16, 1 << 12  # Llama 405B has 1,138 tensors; files have about 30 metadata entries
KEY_LIMIT = (1 << 16) - 1  # the format's own limits: bytes of a key, of a tensor's name, number of dimensions
NAME_LIMIT, DIMENSIONS = 64, 4
ALIGNMENT, ALIGNMENT_LIMIT = 32, 1 << 20
ELEMENT_LIMIT = 1 << 48
FLOATS_LIMIT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """Place of one tensor. `shape` has the slowest dimension first, as in PyTorch."""

    name: str
    shape: tuple[int, ...]
    block: Block
    start: int  # byte offset in the file
    size: int  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """Header of a GGUF file."""

    path: Path
    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, GgufTensor]

    def formats(self) -> str:
        """Return the names of the formats of its tensors, the one with most bytes first: `Q4_1, Q8_0, F32`."""
        total: dict[str, int] = {}
        for tensor in self.tensors.values():
            total[tensor.block.name] = total.get(tensor.block.name, 0) + tensor.size
        return ", ".join(sorted(total, key=lambda name: -total[name]))

    def floats(self, name: str) -> tuple[float, ...]:
        """Return the numbers of a short F32 tensor. Raises BadConfig."""
        tensor = self.tensors[name]
        count = math.prod(tensor.shape)
        if tensor.block.name != "F32" or count > FLOATS_LIMIT:
            raise BadConfig(
                f"{self.path}: {name} is {tensor.block.name} {list(tensor.shape)}",
                why=f"at most {FLOATS_LIMIT} numbers of F32 are expected",
            )
        try:
            with files.opened(self.path) as file:
                file.seek(tensor.start)
                data = file.read(tensor.size)
        except OSError as error:
            raise BadConfig(f"{self.path} cannot be read", why=error.strerror or str(error)) from error
        if len(data) != tensor.size:
            raise BadConfig(f"{self.path} ended while it was read", why="it was truncated after it was opened")
        return struct.unpack(f"<{count}f", data)


def read_gguf(path: Path) -> GgufFile:
    """Return the header of a GGUF file. Raises BadConfig."""
    try:
        with files.opened(path) as file:
            return _header(Cursor(file, path, os.fstat(file.fileno()).st_size))
    except OSError as error:
        raise BadConfig(f"{path} cannot be read", why=error.strerror or str(error), todo="check the path") from error


def _header(cursor: Cursor) -> GgufFile:
    _refuse_other_version(cursor)
    tensors = cursor.count(TENSOR_LIMIT, "the number of tensors")
    entries = cursor.count(ENTRY_LIMIT, "the number of metadata entries")
    metadata = _metadata(cursor, entries)
    alignment = _alignment(cursor.path, metadata)
    found = [_tensor(cursor, alignment) for _ in range(tensors)]
    placed = _placed(cursor, found, _aligned(cursor.at, alignment), alignment)
    return GgufFile(path=cursor.path, metadata=metadata, tensors=placed)


def _refuse_other_version(cursor: Cursor) -> None:
    magic = cursor.take(len(MAGIC), "the magic number")
    if magic != MAGIC:
        raise BadConfig(f"{cursor.path} is not a GGUF file", why=f"it begins with {magic!r}, not {MAGIC!r}")
    version = cursor.unsigned(4, "the version")
    if version in VERSIONS:
        return
    big_endian = version and not version & 0xFFFF
    raise BadConfig(
        f"{cursor.path}: GGUF version {version} is not supported",
        why="the file is big endian" if big_endian else f"supported: versions {VERSIONS[0]} and {VERSIONS[1]}",
        todo="convert the model again with a current llama.cpp, for a little-endian machine",
    )


def _metadata(cursor: Cursor, count: int) -> dict[str, MetadataValue]:
    found: dict[str, MetadataValue] = {}
    for i in range(count):
        key = cursor.string(f"metadata key {i}", KEY_LIMIT)
        if key in found:
            raise incomplete(cursor.path, f"the metadata key {key!r:.80} appears twice")
        found[key] = cursor.value(f"{key!r:.80}")
    return found


def _alignment(path: Path, metadata: Mapping[str, MetadataValue]) -> int:
    found = metadata.get("general.alignment", ALIGNMENT)
    if type(found) is not int or not 1 <= found <= ALIGNMENT_LIMIT or found & (found - 1):
        raise incomplete(
            path, f"general.alignment is {found!r:.40}; a power of two up to {ALIGNMENT_LIMIT} is expected"
        )
    return found


def _tensor(cursor: Cursor, alignment: int) -> GgufTensor:
    """Return a tensor whose `start` still counts from the beginning of the data."""
    name = cursor.string("a tensor's name", NAME_LIMIT)
    what = f"tensor {name!r}"
    dimensions = cursor.unsigned(4, f"{what}: the number of dimensions")
    if not 1 <= dimensions <= DIMENSIONS:
        raise incomplete(cursor.path, f"{what} has {dimensions} dimensions; 1 to {DIMENSIONS} are expected")
    shape = tuple(cursor.unsigned(8, f"{what}: a dimension") for _ in range(dimensions))[::-1]
    kind, start = cursor.unsigned(4, f"{what}: the format"), cursor.unsigned(8, f"{what}: the offset")
    if kind not in BLOCKS:
        raise incomplete(cursor.path, f"{what} has the unknown format {kind}")
    block, elements = BLOCKS[kind], math.prod(shape)
    if not 1 <= elements <= ELEMENT_LIMIT:
        raise incomplete(cursor.path, f"{what} has the shape {list(shape)}")
    if shape[-1] % block.weights:
        raise incomplete(
            cursor.path, f"{what}: rows of {shape[-1]} are not whole {block.name} blocks of {block.weights}"
        )
    if start % alignment:
        raise incomplete(cursor.path, f"{what} begins at byte {start} of the data, which is not aligned to {alignment}")
    return GgufTensor(name=name, shape=shape, block=block, start=start, size=elements // block.weights * block.bytes)


def _placed(cursor: Cursor, tensors: list[GgufTensor], base: int, alignment: int) -> dict[str, GgufTensor]:
    """Return the tensors by name. They must fill the data exactly, apart from padding: a header that omits a tensor
    moves the data of all others.
    """
    found: dict[str, GgufTensor] = {}
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.start):
        what = f"tensor {tensor.name!r}"
        if tensor.name in found:
            raise incomplete(cursor.path, f"{what} appears twice")
        if tensor.start != _aligned(end, alignment):
            kind = "overlaps another tensor" if tensor.start < end else "leaves a gap before it"
            raise incomplete(cursor.path, f"{what} at byte {tensor.start} of the data {kind}")
        end = tensor.start + tensor.size
        if base + end > cursor.size:
            raise incomplete(cursor.path, f"{what} ends at byte {base + end}, the file at byte {cursor.size}")
        found[tensor.name] = replace(tensor, start=base + tensor.start)
    if cursor.size > base + _aligned(end, alignment):
        raise incomplete(cursor.path, f"the tensors end at byte {base + end}, the file at byte {cursor.size}")
    return found


def _aligned(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment
