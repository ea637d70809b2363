"""Write a checkpoint in codes: a folder of compressed-tensors (`pack-quantized`), from a folder in an ordinary dtype.

    made = write_checkpoint(Path("llama"), "int4-g128", Path("llama-int4"))

The projections of every layer are rounded to nearest in the format; embedding, output head and norms are copied byte
by byte, and so are the files of the tokenizer. transformers, vLLM and `decode.compressed` read the result.

One tensor at a time is in memory. The folder is written under another name and renamed when it is complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from autosel import files, models
from autosel.decode.compressed import PACKED, SCALE, SHAPE, WORD_BYTES, ZERO
from autosel.decode.run import Listener, Silent
from autosel.decode.safetensors import BITS, CHUNK, INDEX, SINGLE, Entry, Tensors, open_folder
from autosel.decode.weights import refuse_other_tensors
from autosel.decode.words import WORD_BITS, words_of
from autosel.errors import BadConfig, UsageError
from autosel.formats import WeightFormat, find_weight_format
from autosel.models.fields import read_document
from autosel.models.quantised import scheme_of
from autosel.ops.contract import DTYPE
from autosel.ops.weight import Weight, quantise

FORMATS = (
    "int8-row", "int8-g128", "int4-g32", "int4-g64", "int4-g128", "uint4-g32", "uint4-g64", "uint4-g128",
)  # fmt: skip
PROJECTION = re.compile(r"\blayers\.\d+\.(self_attn\.[qkvo]|mlp\.(gate|up|down))_proj\.weight$")
STORED = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}  # names of dtypes in a safetensors header
SPARE_BYTES = 64 << 20  # of the disk, for headers and copied files
COPIED = (
    "tokenizer*", "vocab*", "merges.txt", "*.model", "special_tokens_map.json", "added_tokens.json", "chat_template*",
    "generation_config.json", "LICENSE*", "NOTICE*",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCheckpoint:
    """The written checkpoint. Bytes are those of all tensors."""

    folder: str
    format: str
    source_bytes: int
    bytes: int
    bits_per_weight: float  # of the matrices in codes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """A tensor of the new checkpoint; `source` is the name of the tensor that it is made from."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: str

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel() * BITS[self.dtype] // 8


def write_checkpoint(folder: Path, format: str, out: Path, listener: Listener | None = None) -> WrittenCheckpoint:
    """Write `folder` in a format of FORMATS as the new folder `out`.

    Raises UsageError (out exists, no room on the disk), BadConfig (unreadable, already in codes, not whole groups).
    """
    found, shape, tensors = find_weight_format(format), models.load(folder), open_folder(folder)
    if scheme_of(folder) is not None:
        raise BadConfig(
            f"{folder} is in codes already", why="rounding codes again loses more", todo="name the original"
        )
    refuse_other_tensors(tensors, shape)
    shards = _shards(tensors, found, STORED[shape.dtype])
    need = sum(part.size for parts in shards.values() for part in parts)
    with _renamed(out, need + SPARE_BYTES) as making:
        writer = _Writer(tensors, found, DTYPE[shape.dtype], making, listener or Silent())
        for file, parts in shards.items():
            writer.write(file, parts)
        if len(shards) > 1 or SINGLE not in shards:
            named = {part.name: file for file, parts in shards.items() for part in parts}
            index = {"metadata": {"total_size": need}, "weight_map": dict(sorted(named.items()))}
            _write_json(making / INDEX, index)
        config = read_document(folder / "config.json")
        _write_json(making / "config.json", {**config, "quantization_config": scheme(found)})
        _copy_others(folder, making)
    return WrittenCheckpoint(
        folder=str(out),
        format=format,
        source_bytes=sum(entry.size for entry in tensors.entries.values()),
        bytes=need,
        bits_per_weight=_bits(tensors, shards, found),
    )


def _bits(tensors: Tensors, shards: Mapping[str, Sequence[_Stored]], found: WeightFormat) -> float:
    parts = [p for shard in shards.values() for p in shard if p.name.endswith((PACKED, SCALE, ZERO))]
    weights = sum(torch.Size(e.shape).numel() for name, e in tensors.entries.items() if PROJECTION.search(name))
    return 8 * sum(part.size for part in parts) / weights


# --- what is written --------------------------------------------------------------------------------------------------


def _shards(tensors: Tensors, found: WeightFormat, scale: str) -> dict[str, list[_Stored]]:
    """Return the tensors of each new file: the files of the source, with smaller elements after larger ones."""
    made: dict[str, list[_Stored]] = {}
    for name, entry in tensors.entries.items():
        parts = _parts(tensors, name, entry, found, scale)
        made.setdefault(entry.file.name, []).extend(parts)
    return {file: sorted(parts, key=lambda p: (-BITS[p.dtype], p.name)) for file, parts in sorted(made.items())}


def _parts(tensors: Tensors, name: str, entry: Entry, found: WeightFormat, scale: str) -> list[_Stored]:
    if not PROJECTION.search(name):
        _refuse_other_matrix(tensors, name, entry)
        return [_Stored(name=name, dtype=entry.dtype, shape=entry.shape, source=name)]
    n, k = entry.shape
    if found.group and k % found.group:
        raise BadConfig(
            f"{tensors.place}: {name} has rows of {k} weights, which are not whole groups of {found.group}",
            why="compressed-tensors and its readers expect whole groups",
            todo="use --format int8-row, or smaller groups",
        )
    base, groups = name.removesuffix(".weight"), k // (found.group or k)
    parts = {PACKED: ("I32", (n, _words(k, found))), SCALE: (scale, (n, groups)), SHAPE: ("I64", (2,))}
    if found.scaling == "zeros":
        parts[ZERO] = ("I32", (_words(n, found), groups))
    return [_Stored(name=base + part, dtype=d, shape=s, source=name) for part, (d, s) in parts.items()]


def _words(codes: int, found: WeightFormat) -> int:
    return -(-codes * found.bits // WORD_BITS)


def _refuse_other_matrix(tensors: Tensors, name: str, entry: Entry) -> None:
    """Refuse a matrix that the scheme would claim to be in codes, because it belongs to a Linear layer."""
    if len(entry.shape) < 2 or name.endswith(("embed_tokens.weight", "lm_head.weight")):
        return
    raise BadConfig(
        f"{tensors.place}: {name} is no projection of a text decoder",
        why="only the decoder's projections, embedding and output head are supported",
        todo="name a checkpoint of the language model alone",
    )


def scheme(found: WeightFormat) -> dict[str, Any]:
    weights: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": found.group or None,
        "num_bits": found.bits,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "group" if found.group else "channel",
        "symmetric": found.scaling != "zeros",
        "type": "int",
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def packed(w: Weight) -> Tensor:
    """Return int32 words [N, words of a row]: the first code in the lowest bits, offset by half the range."""
    used = -(-w.shape[1] * w.format.bits // 8)
    octets = w.codes[:, :used] if w.format.bits == 4 else w.codes.view(torch.uint8) ^ 0x80
    whole = torch.nn.functional.pad(octets, (0, -used % WORD_BYTES)).contiguous()
    return whole.view(torch.int32)


# --- writing ----------------------------------------------------------------------------------------------------------


@contextmanager
def _renamed(out: Path, need: int) -> Iterator[Path]:
    """Provide a folder that becomes `out` at the end; an exception, Ctrl-C too, removes it."""
    making = out.absolute().parent / f".{out.name}.{os.getpid()}"
    try:
        if out.exists() or out.is_symlink():
            raise UsageError(f"{out} exists already", todo="name a new folder with -o")
        if not making.parent.is_dir():
            raise UsageError(f"cannot write {out}", why=f"folder {making.parent} does not exist", todo="check the path")
        free = shutil.disk_usage(making.parent).free
        if free < need:
            raise UsageError(
                f"{out} needs {need / 2**30:.2f} GiB; {free / 2**30:.2f} GiB are free on its disk",
                todo="name a folder on another disk with -o",
            )
        shutil.rmtree(making, ignore_errors=True)  # from a killed process with the same number
        making.mkdir()
    except OSError as error:
        raise UsageError(f"cannot write {out}", why=error.strerror or str(error), todo="check the path") from error
    try:
        yield making
        if out.exists():
            raise UsageError(f"{out} was created meanwhile", todo="name a new folder with -o")
        making.rename(out)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise


class _Writer:
    """Writes the files of a checkpoint; counts the tensors of all."""

    def __init__(
        self, tensors: Tensors, found: WeightFormat, dtype: torch.dtype, making: Path, listener: Listener
    ) -> None:
        self.tensors, self.dtype, self.making, self.listener = tensors, dtype, making, listener
        # Scales have the dtype of the model, also where autosel's own format has fp32: readers expect it.
        parts = (replace(part, dtype=None) if part.name == "scales" else part for part in found.parts)
        self.format = replace(found, parts=tuple(parts))
        self.done = 0

    def write(self, file: str, parts: Sequence[_Stored]) -> None:
        header, starts = _header(parts)
        with (self.making / file).open("wb") as target:
            target.write(header)
            for source in dict.fromkeys(part.source for part in parts):
                self.listener.stage("quantise", source, self.done, len(self.tensors.entries))
                made = {part.name: len(header) + starts[part.name] for part in parts if part.source == source}
                self._write_source(target, source, made)
                self.done += 1
            _settle(target)

    def _write_source(self, target: BinaryIO, source: str, starts: Mapping[str, int]) -> None:
        if source in starts:
            target.seek(starts[source])
            self._copy(target, self.tensors.entries[source])
            return
        for name, part in self._coded(source).items():
            target.seek(starts[name])
            target.write(part.contiguous().view(-1).view(torch.uint8).numpy().tobytes())

    def _coded(self, source: str) -> dict[str, Tensor]:
        """Return the parts of a matrix in codes. Raises BadConfig for a weight that is not finite."""
        w = torch.empty(self.tensors.entries[source].shape, dtype=self.dtype)
        self.tensors.read_into(source, w)
        if not w.isfinite().all():
            first = w.isfinite().logical_not().nonzero()[0].tolist()
            raise BadConfig(
                f"{self.tensors.entries[source].file}: {source} has the weight {float(w[tuple(first)])} at {first}",
                why=f"it is not finite in {str(self.dtype).removeprefix('torch.')}, so its group has no scale",
                todo="fetch the checkpoint again, or name another",
            )
        made, base = quantise(w, self.format), source.removesuffix(".weight")
        assert isinstance(made, Weight)
        scales, found = made.scales.view(len(w), -1), {base + PACKED: packed(made), base + SHAPE: torch.tensor(w.shape)}
        if self.format.scaling != "zeros":
            return {**found, base + SCALE: scales}
        zeros = words_of(scales[:, 1::2].T, self.format.bits).T
        return {**found, base + SCALE: scales[:, ::2], base + ZERO: zeros}

    def _copy(self, target: BinaryIO, entry: Entry) -> None:
        try:
            with files.opened(entry.file) as file:
                file.seek(entry.start)
                left = entry.size
                while left and (data := file.read(min(left, CHUNK))):
                    target.write(data)
                    left -= len(data)
        except OSError as error:
            if error.filename is None:  # of the target: no room on the disk
                raise
            raise BadConfig(f"{entry.file} cannot be read", why=error.strerror or str(error)) from error
        if left:
            raise BadConfig(f"{entry.file} ended while it was read", why="it was truncated after it was opened")


def _header(parts: Sequence[_Stored]) -> tuple[bytes, dict[str, int]]:
    """Return the bytes before the tensors, and where each tensor begins after them."""
    told: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, at = {}, 0
    for part in parts:
        starts[part.name] = at
        told[part.name] = {"dtype": part.dtype, "shape": part.shape, "data_offsets": [at, at + part.size]}
        at += part.size
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, starts


def _settle(target: BinaryIO) -> None:
    target.flush()
    os.fsync(target.fileno())


def _write_json(path: Path, data: Any) -> None:
    with path.open("wb") as target:
        target.write(json.dumps(data, indent=2).encode() + b"\n")
        _settle(target)


def _copy_others(folder: Path, making: Path) -> None:
    """Copy the files of the tokenizer, and what a licence asks to keep."""
    for path in sorted({path for pattern in COPIED for path in folder.glob(pattern) if path.is_file()}):
        try:
            with files.opened(path) as file, (making / path.name).open("wb") as target:
                shutil.copyfileobj(file, target)
                _settle(target)
        except files.NotReadable as error:
            raise BadConfig(f"{path} cannot be read", why=str(error)) from error
