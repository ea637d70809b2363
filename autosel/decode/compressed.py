"""A checkpoint of compressed-tensors (`pack-quantized`) as named tensors: `x.weight` stands for its packed parts.

A matrix [N, K] is stored as `weight_packed` int32 [N, K / codes of a word], the first code in the lowest bits and
offset by half the range, `weight_scale` [N, groups] and `weight_shape` [2]. Codes of 4 bits have autosel's own order;
codes of 8 bits differ in the offset.

Asymmetric codes also have `weight_zero_point`, packed along N with the same offset: int32 [N / codes of a word,
groups]; older files have int8 [N, groups] without offset. `weight_g_idx` [K] is the group of each column, if groups are
not of neighbours: such codes are dequantised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NoReturn

import torch
from torch import Tensor

from autosel.decode.safetensors import Entry, Tensors
from autosel.decode.words import WORD_BITS, exact, unpacked
from autosel.errors import BadConfig
from autosel.formats import PLAIN
from autosel.models.quantised import Scheme
from autosel.models.shape import ModelShape
from autosel.ops.weight import BLOCK, Weight

PACKED, SCALE, SHAPE, ZERO, ORDER = (
    f".weight_{part}" for part in ("packed", "scale", "shape", "zero_point", "g_idx")
)  # fmt: skip
WORD_BYTES = WORD_BITS // 8
SCALE_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMatrix:
    """A matrix by its own shape, and how it is stored: its parts, or one plain tensor."""

    shape: tuple[int, ...]
    packed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class InScheme:
    """Tensors of a checkpoint whose layers are stored in one scheme; a subclass reads them."""

    described_by: ClassVar[str] = "config.json"
    tensors: Tensors
    scheme: Scheme
    entries: Mapping[str, StoredMatrix]

    @property
    def place(self) -> Path:
        return self.tensors.place

    def note(self, shape: ModelShape, dtype: str) -> str:
        """Describe how matrices are stored, and what the weights are read as."""
        return self.scheme.note(self.place.name, shape.weight, dtype)

    def codes(self, shape: ModelShape) -> Callable[[str, Weight], None] | None:
        """Return the function that reads a matrix as it is stored, if that is the weight format."""
        return self._read_codes if PLAIN != shape.weight == self.scheme.format else None

    def read_into(self, name: str, out: Tensor) -> None:
        """Read a tensor, dequantised and rounded once. Raises BadConfig."""
        if not self.entries[name].packed:
            self.tensors.read_into(name, out)
            return
        self._refuse_shape(name, out.shape)
        self._dequantise(name, out)
        if not out.isfinite().all():
            self._refuse(name, f"has scales that make weights that are not finite in {dtype_name(out.dtype)}")

    def _dequantise(self, name: str, out: Tensor) -> None:
        """Read the weights of a matrix in codes. Raises BadConfig."""
        raise NotImplementedError

    def _read_codes(self, name: str, out: Weight) -> None:
        """Read a matrix as it is stored. Raises BadConfig."""
        raise NotImplementedError

    def _entry(self, name: str) -> Entry:
        if name not in self.tensors.entries:
            self._refuse(name, "is missing")
        return self.tensors.entries[name]

    def _numbers(self, name: str, shape: tuple[int, ...] = ()) -> Tensor:
        """Read a tensor of scales, in its own dtype, of this shape if one is given."""
        entry = self._entry(name)
        if entry.dtype not in SCALE_DTYPES:
            self._refuse(name, f"is {entry.dtype}; supported: {', '.join(SCALE_DTYPES)}")
        scales = torch.empty(shape or entry.shape, dtype=SCALE_DTYPES[entry.dtype])
        self._raw(name, scales, entry.dtype)
        if not scales.isfinite().all():
            self._refuse(name, "is not finite")
        return scales

    def _words(self, name: str, *shape: int) -> Tensor:
        found = torch.empty(shape, dtype=torch.int32)
        self._raw(name, found, "I32")
        return found

    def _order(self, name: str, k: int) -> Tensor:
        """Read the group of each column, int64 [K]."""
        found, count = self._words(name, k), self._groups_in(k)
        wrong = found[(found < 0) | (found >= count)]
        if wrong.numel():
            self._refuse(name, f"names the group {int(wrong[0])} of {count}")
        return found.long()

    def _neighbours(self, k: int) -> Tensor:
        """Return the group of each column where groups are of neighbours, int64 [K]."""
        return torch.arange(k) // (self.scheme.group or k)

    def _groups_in(self, k: int) -> int:
        return -(-k // (self.scheme.group or k))

    def _raw(self, name: str, out: Tensor, dtype: str) -> None:
        entry = self._entry(name)
        if entry.dtype != dtype or entry.shape != tuple(out.shape):
            self._refuse(name, f"is {entry.dtype} {list(entry.shape)}, {dtype} {list(out.shape)} is expected")
        self.tensors.read_raw(name, out)

    def _refuse_shape(self, name: str, expected: tuple[int, ...]) -> None:
        if self.entries[name].shape != expected:
            self._refuse(name, f"is {list(self.entries[name].shape)}, config.json says {list(expected)}")

    def _refuse(self, name: str, why: str) -> NoReturn:
        todo = "fetch the checkpoint again if its config.json may belong to other weights"
        raise BadConfig(f"{self.place}: {name} {why}", todo=todo)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressed(InScheme):
    """Tensors of a compressed-tensors checkpoint."""

    def _dequantise(self, name: str, out: Tensor) -> None:
        base, (n, k) = name.removesuffix(".weight"), out.shape
        words, scales = self._packed(base, n, k), self._numbers(base + SCALE)
        groups = self._order(base + ORDER, k) if self.scheme.ordered else self._neighbours(k)
        if scales.shape != (n, self._groups_in(k)):
            self._refuse(base + SCALE, f"has {list(scales.shape)} scales, groups of {self.scheme.group or k} expected")
        zeros, each = self._zeros(base, *scales.shape), max(1, BLOCK // k)
        for first in range(0, n, each):
            rows = slice(first, first + each)
            found = unpacked(words[rows], self.scheme.bits)[:, :k]
            out[rows] = exact(found, zeros[rows], scales[rows], groups).to(out.dtype)

    def _read_codes(self, name: str, out: Weight) -> None:
        self._refuse_shape(name, out.shape)
        base, (n, k) = name.removesuffix(".weight"), out.shape
        codes = self._packed(base, n, k).view(torch.uint8)
        if self.scheme.bits == 8:
            codes = (codes ^ 0x80).view(torch.int8)[:, :k]
        out.codes[:, : codes.shape[1]] = codes
        scales, groups = self._numbers(base + SCALE), self._groups_in(k)
        if scales.numel() != n * groups:
            self._refuse(base + SCALE, f"has {list(scales.shape)} scales, {[n, groups]} are expected")
        zeros = self._zeros(base, n, groups) if self.scheme.zeros else None
        if not put_scales(out, scales.view(n, groups), zeros):
            better = "bf16" if scales.dtype == torch.bfloat16 else "fp16"
            self._refuse(
                base + SCALE, f"is not exact in {dtype_name(out.scales.dtype)}. Use --dtype {better}, or --format plain"
            )

    def _packed(self, base: str, n: int, k: int) -> Tensor:
        return self._words(base + PACKED, n, -(-k * self.scheme.bits // WORD_BITS))

    def _zeros(self, base: str, n: int, groups: int) -> Tensor:
        """Return the zero points [N, groups] of unsigned codes."""
        half = 1 << self.scheme.bits - 1
        if not self.scheme.zeros:
            return torch.full((n, groups), half, dtype=torch.int32)
        if self._entry(base + ZERO).dtype == "I8":
            plain = torch.empty(n, groups, dtype=torch.int8)
            self._raw(base + ZERO, plain, "I8")
            found = plain.int() + half
            if (wrong := plain[(found < 0) | (found >= 2 * half)]).numel():
                self._refuse(base + ZERO, f"has the zero point {int(wrong[0])} of codes of {self.scheme.bits} bits")
            return found
        words = self._words(base + ZERO, -(-n * self.scheme.bits // WORD_BITS), groups)
        return unpacked(words.T, self.scheme.bits)[:, :n].T


def open_compressed(tensors: Tensors, scheme: Scheme) -> Compressed:
    """Return the tensors by the names of matrices."""
    packed = [name.removesuffix(PACKED) for name in tensors.entries if name.endswith(PACKED)]
    hidden = {base + part for base in packed for part in (PACKED, SCALE, SHAPE)}
    hidden |= {base + ZERO for base in packed if scheme.zeros} | {base + ORDER for base in packed if scheme.ordered}
    entries = {n: StoredMatrix(shape=e.shape, packed=False) for n, e in tensors.entries.items() if n not in hidden}
    for base in packed:
        n, k = words_shape(tensors, base + PACKED)
        entries[f"{base}.weight"] = StoredMatrix(shape=(n, k * WORD_BITS // scheme.bits), packed=True)
    return Compressed(tensors=tensors, scheme=scheme, entries=entries)


def put_scales(out: Weight, scales: Tensor, zeros: Tensor | None) -> bool:
    """Store scales [N, groups] and zero points of unsigned codes. Return False if the matrix's dtype does not hold a
    scale.
    """
    into = out.scales if zeros is None else out.scales[:, ::2]
    into.copy_(scales.reshape(into.shape))
    if zeros is not None:
        out.scales[:, 1::2] = zeros - 128 if out.format.scaling == "zeros-8" else zeros
    return torch.equal(into.double().flatten(), scales.double().flatten())


def words_shape(tensors: Tensors, name: str) -> tuple[int, int]:
    """Return the shape of a tensor of words. Raises BadConfig if it is no matrix, or empty."""
    shape = tensors.entries[name].shape
    if len(shape) == 2 and min(shape):
        return shape[0], shape[1]
    raise BadConfig(
        f"{tensors.place}: {name} is {list(shape)}", why="a matrix is expected", todo="fetch the checkpoint again"
    )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
