"""A checkpoint of compressed-tensors (`pack-quantized`) as named tensors: `x.weight` stands for its packed parts.

A matrix [N, K] is stored as `weight_packed` int32 [N, K / codes of a word], the first code in the lowest bits and
offset by half the range, `weight_scale` [N, groups] and `weight_shape` [2]. Codes of 4 bits have autosel's own order;
codes of 8 bits differ in the offset.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from autosel.decode.safetensors import Entry, Tensors
from autosel.errors import BadConfig
from autosel.formats import WeightFormat, find_weight_format
from autosel.ops.weight import Weight, empty

PACKED, SCALE, SHAPE = ".weight_packed", ".weight_scale", ".weight_shape"
WORD_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A matrix by its own shape, and how it is stored: its parts, or one plain tensor."""

    shape: tuple[int, ...]
    packed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressed:
    """Tensors of a checkpoint whose layers are stored in one weight format."""

    described_by: ClassVar[str] = "config.json"
    tensors: Tensors
    format: WeightFormat
    entries: Mapping[str, Place]

    @property
    def place(self) -> Path:
        return self.tensors.place

    def note(self, format: str, dtype: str) -> str:
        """Describe the stored format, and what the weights are read as."""
        read = "read as they are" if format == self.format.name else f"dequantised to {dtype} when loaded"
        return f"weights: {self.format.name} (compressed-tensors) in {self.place.name}, {read}"

    def codes(self, format: str) -> Callable[[str, Weight], None] | None:
        """Return the function that reads a matrix as it is stored, if that is the weight format."""
        return self._read_codes if format == self.format.name else None

    def read_into(self, name: str, out: Tensor) -> None:
        """Read a tensor, dequantised and rounded once. Raises BadConfig."""
        if not self.entries[name].packed:
            self.tensors.read_into(name, out)
            return
        stored = empty(self.format, *out.shape, dtype=self._scale_dtype(name))
        self._read_codes(name, stored)
        out.copy_(stored.dequantised(out.dtype))

    def _read_codes(self, name: str, out: Weight) -> None:
        base, (n, k) = name.removesuffix(".weight"), out.shape
        if tuple(out.shape) != self.entries[name].shape:
            self._refuse(name, f"is {list(self.entries[name].shape)}, config.json says {[n, k]}")
        words = torch.empty(n, -(-k * self.format.bits // (8 * WORD_BYTES)), dtype=torch.int32)
        self._raw(base + PACKED, words, "I32")
        codes = words.view(torch.uint8)
        if self.format.bits == 8:
            codes = (codes ^ 0x80).view(torch.int8)[:, :k]
        out.codes[:, : codes.shape[1]] = codes
        scales = torch.empty(self._entry(base + SCALE).shape, dtype=self._scale_dtype(name))
        self._raw(base + SCALE, scales, self._entry(base + SCALE).dtype)
        if scales.numel() != out.scales.numel():
            self._refuse(base + SCALE, f"has {list(scales.shape)} scales, {list(out.scales.shape)} are expected")
        out.scales.copy_(scales.view(out.scales.shape))
        if not out.scales.isfinite().all() or not torch.equal(out.scales.double().flatten(), scales.double().flatten()):
            self._refuse(base + SCALE, f"is not finite, or not exact in {str(out.scales.dtype).removeprefix('torch.')}")

    def _scale_dtype(self, name: str) -> torch.dtype:
        known = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
        stored = self._entry(name.removesuffix(".weight") + SCALE).dtype
        if stored not in known:
            self._refuse(name.removesuffix(".weight") + SCALE, f"is {stored}; supported: {', '.join(known)}")
        return known[stored]

    def _entry(self, name: str) -> Entry:
        if name not in self.tensors.entries:
            self._refuse(name, "is missing")
        return self.tensors.entries[name]

    def _raw(self, name: str, out: Tensor, dtype: str) -> None:
        entry = self._entry(name)
        if entry.dtype != dtype or entry.shape != tuple(out.shape):
            self._refuse(name, f"is {entry.dtype} {list(entry.shape)}, {dtype} {list(out.shape)} is expected")
        self.tensors.read_raw(name, out)

    def _refuse(self, name: str, why: str) -> None:
        raise BadConfig(
            f"{self.place}: {name} {why}",
            todo="fetch the checkpoint again: its config.json may belong to other weights",
        )


def open_compressed(tensors: Tensors, format: str) -> Compressed:
    """Return the tensors by the names of matrices. Raises BadConfig for packed weights that config.json denies."""
    packed = [name.removesuffix(PACKED) for name in tensors.entries if name.endswith(PACKED)]
    found = find_weight_format(format)
    if found.plain:
        raise BadConfig(
            f"{tensors.place} has {packed[0]}{PACKED}, and its config.json no quantization_config",
            todo="fetch the checkpoint again",
        )
    hidden = {base + part for base in packed for part in (PACKED, SCALE, SHAPE)}
    entries = {n: Place(shape=e.shape, packed=False) for n, e in tensors.entries.items() if n not in hidden}
    for base in packed:
        words = tensors.entries[base + PACKED].shape
        n, k = words if len(words) == 2 else (0, 0)
        entries[f"{base}.weight"] = Place(shape=(n, k * 8 * WORD_BYTES // found.bits), packed=True)
    return Compressed(tensors=tensors, format=found, entries=entries)
