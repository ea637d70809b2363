"""Formats of stored weights and caches: codes, their scales, and the bytes that they take.

    find_weight_format("fp8_e4m3-row").nbytes("bf16", 4096, 4096)    # codes and scales of a matrix [4096, 4096]

`plain` is the format of an ordinary tensor: a code is a number of the workload's dtype. A format defines an exact value
for each weight from code, scale and zero (autosel/ops/weight.py). This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from autosel.errors import UnknownName

DTypeName = Literal["bf16", "fp16", "fp32", "fp8_e4m3"]
DTYPES: tuple[DTypeName, ...] = ("bf16", "fp16", "fp32", "fp8_e4m3")
DTYPE_BYTES: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8_e4m3": 1}

PartDType = Literal["bf16", "fp16", "fp32", "fp8_e4m3", "int8", "uint8"]
PART_BYTES: Mapping[str, int] = {**DTYPE_BYTES, "int8": 1, "uint8": 1}
PLAIN = "plain"

# What `scales` holds: a scale per group; a scale and an offset per group; a scale and a zero point per group, of
# unsigned codes of 4 bits or of signed codes of 8; blocks of 256 weights as in GGUF's Q4_K and Q6_K, or with the scales
# of Q6_K and the offsets of Q4_K.
Scaling = Literal["one", "pair", "zeros", "zeros-8", "q4_k", "q6_k", "q6_k-m"]
WITH_ZEROS: tuple[Scaling, ...] = ("zeros", "zeros-8")
WITH_OFFSETS: tuple[Scaling, ...] = ("pair", *WITH_ZEROS, "q4_k", "q6_k-m")


# --- weights ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One tensor of a stored matrix, with `count` elements for every `per` weights along K, or per row if `per` is 0.

    Without a dtype it has the workload's.
    """

    name: Literal["codes", "scales", "zeros"]
    dtype: PartDType | None = None
    per: int = 1
    count: int = 1

    def shape(self, n: int, k: int) -> tuple[int, ...]:
        """Return the shape of this part of a matrix [n, k]: one dimension if a row has one element."""
        if not self.per and self.count == 1:
            return (n,)
        return n, self.count * (math.ceil(k / self.per) if self.per else 1)

    def nbytes(self, dtype: str, n: int, k: int) -> int:
        return math.prod(self.shape(n, k)) * PART_BYTES[self.dtype or dtype]


# Bits of a plain weight in the smallest lossless layout (kernels/cpu/packed.h). A race assumes that every arm with a
# layout reads at least this much: a smaller claim is not accepted.
LEAST_BITS: Mapping[str, int] = {"bf16": 12}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How a matrix w[N, K] is stored.

    `code` names the numbers of the codes, `bits` the bits of a code (0: as many as the workload's dtype), `group` how
    many neighbours along K share a scale (0: a row). `scaling` names how the part `scales` holds the scales of groups,
    and what is added to their weights (autosel/ops/scales.py). `exact` means that every matrix of the workload's dtype
    can be stored without loss.
    """

    name: str
    code: str
    bits: int
    group: int
    parts: tuple[Part, ...]
    scaling: Scaling = "one"
    exact: bool = False

    @property
    def plain(self) -> bool:
        return self.name == PLAIN

    @property
    def offsets(self) -> bool:
        """Return True if a group also has an offset, which is added to each of its weights. A zero point z is the
        offset -scale * z.
        """
        return self.scaling in WITH_OFFSETS

    def nbytes(self, dtype: str, n: int, k: int) -> int:
        """Return the bytes of a stored matrix [n, k]; `dtype` is the workload's."""
        return sum(part.nbytes(dtype, n, k) for part in self.parts)

    def least_share(self, dtype: str) -> Fraction:
        """Return the bytes of a stored matrix in the smallest lossless layout of autosel, relative to `nbytes`."""
        own = PART_BYTES[self.parts[0].dtype or dtype] * 8
        return Fraction(LEAST_BITS.get(dtype, own), own) if self.plain else Fraction(1)

    def bytes_per_weight(self, dtype: str, k: int) -> Fraction:
        """Return the bytes per weight of a matrix with rows of k: codes, and their share of scales and zeros."""
        return Fraction(self.nbytes(dtype, 1, k), k)

    def bits_per_weight(self, dtype: str, k: int) -> float:
        return float(8 * self.bytes_per_weight(dtype, k))


NIBBLES = Part(name="codes", dtype="uint8", per=128, count=64)  # codes of 4 bits; a row is whole lines of 64 bytes
OCTETS = Part(name="codes", dtype="int8")
FLOATS = Part(name="codes", dtype="fp8_e4m3")


def _scaled_rows(name: str, code: str, dtype: PartDType) -> WeightFormat:
    """Return the format with codes of eight bits and one fp32 scale per row."""
    parts = (Part(name="codes", dtype=dtype), Part(name="scales", dtype="fp32", per=0))
    return WeightFormat(name=name, code=code, bits=8, group=0, parts=parts)


def _scaled_groups(name: str, codes: Part, bits: int, group: int, scale: PartDType | None = None) -> WeightFormat:
    """Return the format of codes with a scale for each group of neighbours along K (0: a row), and no zeros."""
    parts = (codes, Part(name="scales", dtype=scale, per=group))
    code = "e4m3" if codes is FLOATS else f"int{bits}"
    return WeightFormat(name=name, code=code, bits=bits, group=group, parts=parts)


def _paired(name: str, scaling: Scaling, group: int, scale: PartDType | None = None) -> WeightFormat:
    """Return the format of codes with two numbers for each group: unsigned ones of 4 bits, or signed ones of 8."""
    codes, code, bits = (OCTETS, "int8", 8) if scaling == "zeros-8" else (NIBBLES, "uint4", 4)
    parts = (codes, Part(name="scales", dtype=scale, per=group, count=2))
    return WeightFormat(name=name, code=code, bits=bits, group=group, parts=parts, scaling=scaling)


def _blocks(scaling: Scaling, code: str, bits: int, group: int, scales: int) -> WeightFormat:
    """Return the format with blocks of 256 weights, so many bytes of them for scales."""
    parts = (
        Part(name="codes", dtype="uint8", per=256, count=32 * bits),
        Part(name="scales", dtype="uint8", per=256, count=scales),
    )
    return WeightFormat(name=scaling, code=code, bits=bits, group=group, parts=parts, scaling=scaling)


PLAIN_WEIGHT = WeightFormat(name=PLAIN, code=PLAIN, bits=0, group=0, parts=(Part(name="codes"),), exact=True)
WEIGHT_FORMATS: Mapping[str, WeightFormat] = {
    found.name: found
    for found in (
        PLAIN_WEIGHT,
        _scaled_rows("fp8_e4m3-row", "e4m3", "fp8_e4m3"),
        _scaled_groups("fp8_e4m3-g128", FLOATS, 8, 128, "fp32"),
        _scaled_rows("int8-row", "int8", "int8"),
        _scaled_groups("int4-row", NIBBLES, 4, 0, "fp32"),
        _scaled_groups("int4-g32", NIBBLES, 4, 32),
        _scaled_groups("int4-g64", NIBBLES, 4, 64),
        _scaled_groups("int4-g128", NIBBLES, 4, 128),
        _scaled_groups("int8-g128", OCTETS, 8, 128),
        _scaled_groups("q4_0", NIBBLES, 4, 32, "fp16"),
        _scaled_groups("q8_0", OCTETS, 8, 32, "fp16"),
        _paired("q4_1", "pair", 32, "fp16"),
        _blocks("q4_k", "q4_k", 4, 32, 20),
        _blocks("q6_k", "q6_k", 6, 16, 18),
        _blocks("q6_k-m", "q6_k", 6, 16, 28),
        _paired("uint4-g32", "zeros", 32),
        _paired("uint4-g64", "zeros", 64),
        _paired("uint4-g128", "zeros", 128),
        _paired("uint4-row", "zeros", 0, "fp32"),
        _paired("uint8-g128", "zeros-8", 128),
        _paired("uint8-row", "zeros-8", 0, "fp32"),
    )
}


CODED = tuple(name for name, found in WEIGHT_FORMATS.items() if not found.plain)


def find_weight_format(name: str) -> WeightFormat:
    """Return the weight format with this name. Raises UnknownName with the nearest names."""
    if name not in WEIGHT_FORMATS:
        raise UnknownName("weight format", name, tuple(WEIGHT_FORMATS))
    return WEIGHT_FORMATS[name]


# --- caches ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFormat:
    """How keys, or values, [B, H, L, D] are stored.

    `scaled` names the dimensions of the scales; elements with equal indices in them share a scale: ("H",) is one scale
    per KV head. Without a dtype it is the workload's.
    """

    name: str
    code: str
    bits: int
    dtype: PartDType | None = None
    scale: PartDType | None = None
    scaled: tuple[str, ...] = ()

    @property
    def plain(self) -> bool:
        return self.name == PLAIN

    def scales_shape(self, dims: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(dims[name] for name in self.scaled)

    def nbytes(self, dtype: str, elements: int, dims: Mapping[str, int]) -> int:
        """Return the bytes of `elements` codes with the scales of a cache of these dimensions (B, H, L)."""
        scales = math.prod(self.scales_shape(dims)) * PART_BYTES[self.scale] if self.scale else 0
        return elements * PART_BYTES[self.dtype or dtype] + scales


PLAIN_CACHE = CacheFormat(name=PLAIN, code=PLAIN, bits=0)
CACHE_FORMATS: Mapping[str, CacheFormat] = {
    found.name: found
    for found in (
        PLAIN_CACHE,
        CacheFormat(name="fp8_e4m3-head", code="e4m3", bits=8, dtype="fp8_e4m3", scale="fp32", scaled=("H",)),
    )
}


def find_cache_format(name: str) -> CacheFormat:
    """Return the cache format with this name. Raises UnknownName with the nearest names."""
    if name not in CACHE_FORMATS:
        raise UnknownName("cache format", name, tuple(CACHE_FORMATS))
    return CACHE_FORMATS[name]


# --- ops that became formats -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Former:
    """Present form of an op of versions before 2026-11-25: another op and a trait, its operands in the old order."""

    op: str
    trait: Literal["weight", "cache"]
    format: str
    operands: tuple[str, ...]


FORMER_OPS: Mapping[str, Former] = {
    "gemv_fp8": Former(
        op="linear",
        trait="weight",
        format="fp8_e4m3-row",
        operands=("x", "w.codes", "w.scales", "bias", "residual"),
    ),
    "attn_decode_fp8": Former(
        op="attn",
        trait="cache",
        format="fp8_e4m3-head",
        operands=(
            "q", "k.codes", "v.codes", "k.scales", "v.scales", "lengths", "max_len", "scale", "window", "softcap",
        ),
    ),
}  # fmt: skip
