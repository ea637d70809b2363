"""How many rows of weights share a load of x: closed forms over the L1 of two cores that were measured."""

from __future__ import annotations

import dataclasses

import pytest

from autosel.knobs.cpu import linear
from autosel.knobs.cpu.facts import CpuFacts
from autosel.values import DTypeName, Workload

ZEN_4 = CpuFacts(
    isa="avx512bf16",
    cpus=2,
    l1d_bytes=32 << 10,
    l2_bytes=1 << 20,
    l3_bytes=32 << 20,
    l3_domains=1,
    read_1=33e9,
    read_all=36e9,
    read_l3_domain=198e9,
    flops_1=118e9,
    dot_flops_1=236e9,
    exp_per_s_1=5.6e9,
    dram_latency_s=1.4e-7,
    fork_join_s=4.2e-7,
)
ZEN_5 = dataclasses.replace(ZEN_4, l1d_bytes=48 << 10)


def rows(m: int, k: int, f: CpuFacts, dtype: DTypeName = "bf16") -> object:
    return linear.gemv(Workload(op="linear", dims=(("M", m), ("N", 2048), ("K", k)), dtype=dtype), f)["rows"]


@pytest.mark.parametrize(("m", "k"), [(4, 2048), (5, 2048), (6, 2048), (4, 2560), (5, 2560), (4, 3072)])
def test_where_several_rows_of_weights_would_push_x_out_of_l1_one_follows_another(m: int, k: int) -> None:
    assert rows(m, k, ZEN_4) == 1


@pytest.mark.parametrize(
    ("m", "k", "most"),
    [
        (2, 4096, 8),
        (3, 4096, 8),
        (2, 2048, 8),
        (3, 2048, 8),
        (2, 1024, 8),
        (4, 1024, 4),
        (6, 1536, 4),
        (6, 2560, 4),
        (5, 3072, 4),
        (4, 4096, 4),
    ],
)
def test_where_x_stays_or_never_was_in_l1_as_many_share_it_as_registers_hold_sums_for(
    m: int, k: int, most: int
) -> None:
    assert rows(m, k, ZEN_4) == most


def test_what_x_takes_is_what_the_kernel_keeps_of_it() -> None:
    """bf16 is multiplied in pairs, as it is; fp32 and fp16 are kept in fp32."""
    assert rows(4, 1024, ZEN_4, "fp32") == 1  # 16 KB, and a row of weights is a page
    assert rows(4, 1024, ZEN_4, "fp16") == 4  # half a page
    assert rows(4, 2048, ZEN_4, "fp16") == 4  # 32 KB


def test_a_wider_l1_takes_one_row_after_another_for_any_x_that_lies_in_it() -> None:
    assert [rows(m, 2048, ZEN_5) for m in (2, 3, 4, 5)] == [1, 1, 1, 1]
    assert rows(6, 2048, ZEN_5) == 4  # 24 KB, which passing weights push out
    assert rows(8, 1024, ZEN_5) == 1


def test_one_row_of_x_takes_all_that_registers_hold() -> None:
    assert rows(1, 2048, ZEN_4) == rows(1, 2048, ZEN_5) == 8
