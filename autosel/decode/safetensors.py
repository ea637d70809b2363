"""A folder of safetensors files as named tensors: headers are read strictly, tensors straight into place.

The format: eight bytes of header length (little endian), that many bytes of JSON giving dtype, shape and data_offsets
of each tensor, then the data. A header can claim anything, so every claim is checked against the file's size before it
is used. Nothing is mapped, so a file that is truncated while it is read gives an error, not a signal.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import torch
from torch import Tensor

from autosel import devices, files
from autosel.errors import BadConfig
from autosel.models.shape import ModelShape
from autosel.values import parse_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HEADER_LIMIT = 100 << 20  # the format's own limit
INDEX_LIMIT = 64 << 20
CHUNK = 64 << 20  # bytes converted at a time
DTYPES: Mapping[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "BF16": 16, "F16": 16, "I16": 16, "U16": 16,
        "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8, "F6_E2M3": 6, "F6_E3M2": 6,
        "F4": 4}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Place of one tensor."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # byte offset in the file
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """Tensors of a checkpoint folder, by name."""

    described_by: ClassVar[str] = "config.json"
    place: Path
    entries: Mapping[str, Entry]

    def note(self, shape: ModelShape, dtype: str) -> str:
        return ""  # stored in an ordinary dtype, and rounded at most once

    def codes(self, shape: ModelShape) -> None:
        return None  # a checkpoint with codes is refused

    def read_into(self, name: str, out: Tensor) -> None:
        """Read a tensor into `out`, converted to its dtype. Raises BadConfig for a tensor of another shape or kind."""
        entry = self.entries[name]
        self._refuse(name, entry, out)
        try:
            with files.opened(entry.file) as file:
                file.seek(entry.start)
                _fill(file, entry, out.view(-1))
        except OSError as error:
            raise BadConfig(f"{entry.file} cannot be read", why=error.strerror or str(error)) from error

    def read_raw(self, name: str, out: Tensor) -> None:
        """Read a tensor's bytes, as they are, into one of the same size. Raises BadConfig."""
        entry = self.entries[name]
        if not entry.size:
            raise BadConfig(f"{entry.file}: {name} is empty", todo="fetch the checkpoint again")
        try:
            with files.opened(entry.file) as file:
                file.seek(entry.start)
                data = file.read(entry.size)
        except OSError as error:
            raise BadConfig(f"{entry.file} cannot be read", why=error.strerror or str(error)) from error
        if len(data) != entry.size or out.nbytes != entry.size:
            raise BadConfig(f"{entry.file} ended while {name} was read", todo="fetch the checkpoint again")
        out.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def _refuse(self, name: str, entry: Entry, out: Tensor) -> None:
        if entry.dtype not in DTYPES:
            raise BadConfig(
                f"{entry.file}: {name} is {entry.dtype}",
                why="quantised weights are a different workload, not bf16 at lower cost",
                todo="name the unquantised checkpoint",
            )
        if entry.shape != tuple(out.shape):
            raise BadConfig(
                f"{entry.file}: {name} is {list(entry.shape)}, config.json says {list(out.shape)}",
                todo="fetch the checkpoint again: its config.json belongs to other weights",
            )


def open_folder(folder: Path) -> Tensors:
    """Return every tensor of the checkpoint. Raises BadConfig for missing, truncated or inconsistent files."""
    index = folder / INDEX
    if _true(index.is_file):
        return _sharded(folder, index)
    if _true((folder / SINGLE).is_file):
        return Tensors(place=folder, entries=read_header(folder / SINGLE))
    files = sorted(p.name for p in folder.iterdir()) if _true(folder.is_dir) else []
    pickled = [f for f in files if f.endswith(".bin")] or [f for f in files if Path(f).suffix.startswith(".pt")]
    raise BadConfig(
        f"{folder} has no {SINGLE} and no {INDEX}",
        why=f"{pickled[0]} is a pickle, which can run code when read" if pickled else "",
        todo="name a checkpoint saved as safetensors",
    )


def _sharded(folder: Path, index: Path) -> Tensors:
    data = _json(index, INDEX_LIMIT)
    named = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(named, dict) or not all(isinstance(f, str) for f in named.values()):
        raise BadConfig(f"{index} has no weight_map", why="it must name the file of each tensor")
    files = sorted(set(named.values()))
    for file in files:
        if Path(file).name != file:
            raise BadConfig(f"{index} names the file {file!r}", why="a shard must be in the folder of its index")
    missing = [f for f in files if not _true((folder / f).is_file)]
    if missing:
        raise BadConfig(
            f"{folder} lacks {', '.join(f[:100] for f in missing[:3])}{' ...' if len(missing) > 3 else ''}",
            why=f"{index.name} names {len(files)} shards; {len(files) - len(missing)} exist",
            todo="fetch the missing files",
        )
    headers = {file: read_header(folder / file) for file in files}
    lost = [name for name, file in named.items() if name not in headers[file]]
    if lost:
        raise BadConfig(f"{folder / named[lost[0]]} lacks {lost[0]}", why=f"{index.name} lists it in that file")
    return Tensors(place=folder, entries={name: headers[file][name] for name, file in named.items()})


def _true(of_path: Callable[[], bool]) -> bool:
    try:
        return of_path()
    except OSError:  # a name that is too long, or a folder without access
        return False


def read_header(path: Path) -> dict[str, Entry]:
    """Return the tensors of one file. Raises BadConfig."""
    try:
        with files.opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(HEADER_LIMIT, size - 8):
                raise _bad(path, f"the header claims {length} bytes in a file of {size}")
            text = file.read(length)
    except OSError as error:
        raise BadConfig(f"{path} cannot be read", why=error.strerror or str(error)) from error
    try:
        header = parse_json(text, what=path.name, depth=4)
    except ValueError as error:
        raise _bad(path, str(error)) from error
    if not isinstance(header, dict):
        raise _bad(path, "the header is not an object")
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, told, 8 + length) for name, told in header.items()}
    _check_extent(path, entries, 8 + length, size)
    return entries


def _entry(path: Path, name: str, told: Any, base: int) -> Entry:
    if not isinstance(told, dict) or set(told) != {"dtype", "shape", "data_offsets"}:
        raise _bad(path, f"{name!r:.80} does not have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = told["dtype"], told["shape"], told["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _bad(path, f"{name!r:.80} has the unknown dtype {dtype!r:.40}")
    if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
        raise _bad(path, f"{name!r:.80} has shape {shape!r:.60}, data_offsets {offsets!r:.60}")
    size = -(-math.prod(shape) * BITS[dtype] // 8)
    if offsets[1] - offsets[0] != size:
        raise _bad(path, f"{name!r:.80}: {dtype}{shape} takes {size} bytes, its offsets span {offsets[1] - offsets[0]}")
    return Entry(file=path, dtype=dtype, shape=tuple(shape), start=base + offsets[0], size=size)


def _sizes(value: Any) -> bool:
    whole = isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) for n in value)
    return whole and len(value) <= 8 and all(0 <= n < 1 << 62 for n in value)


def _check_extent(path: Path, entries: Mapping[str, Entry], base: int, size: int) -> None:
    """Check that the tensors fill the data part exactly: no overlap, no gap, nothing past the end."""
    at = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].size)):
        if entry.start != at:
            kind = "overlaps another tensor" if entry.start < at else "leaves a gap before it"
            raise _bad(path, f"{name!r:.80} {kind}")
        at += entry.size
    if at != size:
        raise _bad(path, f"the tensors end at byte {at}, the file at {size}")


def _fill(file: BinaryIO, entry: Entry, out: Tensor) -> None:
    dtype = DTYPES[entry.dtype]
    if out.dtype == dtype and devices.on_host(out.device.type):
        _read(file, entry, out)
        return
    each = CHUNK // dtype.itemsize
    buffer = torch.empty(min(each, out.numel()), dtype=dtype)
    for start in range(0, out.numel(), each):
        part = out[start : start + each]
        _read(file, entry, buffer[: part.numel()])
        part.copy_(buffer[: part.numel()])


def _read(file: BinaryIO, entry: Entry, into: Tensor) -> None:
    target = memoryview(into.view(torch.uint8).numpy())  # type: ignore[arg-type]
    while target:
        count = file.readinto(target)  # type: ignore[attr-defined]
        if not count:
            raise BadConfig(f"{entry.file} ended while it was read", why="it was truncated after it was opened")
        target = target[count:]


def _json(path: Path, limit: int) -> Any:
    try:
        return parse_json(files.read_named(path, limit), what=path.name)
    except ValueError as error:
        raise BadConfig(f"{path} is not JSON", why=str(error), todo="fetch the file again") from error


def _bad(path: Path, why: str) -> BadConfig:
    return BadConfig(f"{path} is not a complete safetensors file", why=why, todo="fetch the file again")
