"""Test formats: their bytes, their names, and the keys of workloads that have one."""

from __future__ import annotations

from fractions import Fraction

import pytest

from autosel.errors import UnknownName
from autosel.formats import (
    CACHE_FORMATS,
    DTYPE_BYTES,
    PLAIN_WEIGHT,
    WEIGHT_FORMATS,
    Part,
    WeightFormat,
    find_cache_format,
    find_weight_format,
)
from autosel.values import Workload

ROW = "linear/M1.N4096.K4096/bf16.weight=fp8_e4m3-row"
# Possible future formats, which parts must be able to express.
INT4 = WeightFormat(
    name="int4-g128",
    code="int4",
    bits=4,
    group=128,
    parts=(
        Part(name="codes", dtype="uint8", per=2),
        Part(name="scales", dtype="bf16", per=128),
        Part(name="zeros", dtype="uint8", per=256),
    ),
)
Q6_K = WeightFormat(
    name="q6_k", code="q6_k", bits=6, group=16, parts=(Part(name="codes", dtype="uint8", per=256, count=210),)
)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_a_plain_matrix_has_the_bytes_of_its_dtype(dtype: str) -> None:
    assert PLAIN_WEIGHT.nbytes(dtype, 48, 100) == 4800 * DTYPE_BYTES[dtype]
    assert PLAIN_WEIGHT.bytes_per_weight(dtype, 7) == DTYPE_BYTES[dtype]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_row_scale_is_shared_by_its_row_for_any_dtype(dtype: str) -> None:
    row = find_weight_format("fp8_e4m3-row")
    assert row.nbytes(dtype, 48, 100) == 4800 + 4 * 48
    assert row.bytes_per_weight(dtype, 100) == Fraction(104, 100)
    assert [part.shape(48, 100) for part in row.parts] == [(48, 100), (48,)]


def test_groups_halves_of_bytes_and_blocks_have_whole_bytes() -> None:
    assert INT4.nbytes("bf16", 3, 256) == 3 * (128 + 2 * 2 + 1)
    assert INT4.bytes_per_weight("bf16", 256) == Fraction(133, 256)
    assert [part.shape(3, 130) for part in INT4.parts] == [(3, 65), (3, 2), (3, 1)]  # the last group is short
    assert Q6_K.bits_per_weight("bf16", 512) == 6.5625


def test_a_cache_counts_one_scale_for_each_element_that_agrees_in_its_dimensions() -> None:
    head = find_cache_format("fp8_e4m3-head")
    dims = {"B": 2, "H": 8, "L": 100}
    assert head.scales_shape(dims) == (8,)
    assert head.nbytes("bf16", 2 * 8 * 100 * 64, dims) == 2 * 8 * 100 * 64 + 4 * 8
    assert find_cache_format("plain").nbytes("bf16", 6400, dims) == 12800


@pytest.mark.parametrize("formats", [WEIGHT_FORMATS, CACHE_FORMATS])
def test_every_format_is_found_by_its_name_which_fits_a_key(formats: dict[str, WeightFormat]) -> None:
    for name, found in formats.items():
        assert found.name == name
        w = Workload(op="linear", dims=(("M", 1),), dtype="bf16", traits=(("weight", name), ("z", 1)))
        assert Workload.parse(w.key).traits == (("weight", name), ("z", "1"))


def test_an_unknown_format_is_refused_with_its_neighbours() -> None:
    with pytest.raises(UnknownName, match="did you mean fp8_e4m3-row"):
        find_weight_format("fp8_e4m3_row")
    with pytest.raises(UnknownName, match="cache format"):
        find_cache_format("int2")


def test_the_formats_of_a_workload_are_its_traits() -> None:
    w = Workload.parse(ROW)
    assert (w.weight_format, w.cache_format) == (WEIGHT_FORMATS["fp8_e4m3-row"], CACHE_FORMATS["plain"])
    assert w.key == ROW and w.bucket == ROW
    assert Workload.parse("attn/B1.Hq8.Hkv2.S1.D64.L512/bf16.cache=fp8_e4m3-head").cache_format.bits == 8


def test_without_the_trait_a_workload_is_plain() -> None:
    w = Workload(op="linear", dims=(("M", 1), ("N", 2), ("K", 3)), dtype="bf16")
    assert w.key == "linear/M1.N2.K3/bf16"
    assert w.weight_format.plain and w.cache_format.plain
