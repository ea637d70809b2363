"""Test the number of threads of row ops: closed forms on simulated CPUs."""

from __future__ import annotations

import dataclasses

import pytest

from autosel.knobs.cpu import rows
from autosel.knobs.cpu.facts import CpuFacts
from autosel.values import Workload

EIGHT = CpuFacts(
    isa="avx2",
    cpus=8,
    l1d_bytes=32 << 10,
    l2_bytes=1 << 20,
    l3_bytes=32 << 20,
    l3_domains=1,
    read_1=20e9,
    read_all=80e9,
    read_l3_domain=80e9,
    flops_1=64e9,
    dot_flops_1=64e9,
    exp_per_s_1=2e9,
    dram_latency_s=1e-7,
    fork_join_s=2e-6,
)


def at(op: str, **dims: int) -> Workload:
    return Workload(op=op, dims=tuple(dims.items()), dtype="bf16")


@pytest.mark.parametrize(
    ("formula", "workload"),
    [
        (rows.rmsnorm, at("rmsnorm", M=1, d=8192)),
        (rows.add_rmsnorm, at("add_rmsnorm", M=1, d=8192)),
        (rows.rope, at("rope", M=1, Hq=64, Hkv=8, D=128, R=128)),
        (rows.swiglu, at("swiglu", M=1, I=8192)),
        (rows.sample, at("sample", B=1, V=128_256, L=0)),
    ],
)
def test_one_row_gets_one_thread(formula: object, workload: Workload) -> None:
    assert formula(workload, EIGHT)["threads"] == 1  # type: ignore[operator]


def test_many_rows_get_every_thread() -> None:
    assert rows.rmsnorm(at("rmsnorm", M=512, d=4096), EIGHT)["threads"] == 8
    assert rows.swiglu(at("swiglu", M=64, I=14336), EIGHT)["threads"] == 8


def test_a_norm_takes_the_time_of_its_arithmetic() -> None:
    """Check 64 rows of 4096: 102 us at 64 GFLOP/s, while reading them from L2 would take 13 us."""
    (knob,) = rows.rmsnorm(at("rmsnorm", M=64, d=4096), EIGHT).settings
    assert knob.inputs["serial_s"] == pytest.approx(102.4e-6)
    assert knob.value == 8


def test_there_are_never_more_threads_than_rows() -> None:
    assert rows.sample(at("sample", B=3, V=128_256, L=0), EIGHT)["threads"] == 3


def test_a_single_long_gated_row_is_shared() -> None:
    assert rows.swiglu(at("swiglu", M=1, I=1 << 18), EIGHT)["threads"] == 8


def test_how_long_a_call_must_be_follows_the_measured_fork_join() -> None:
    """Check one row of 18 us, 14336 times 2.5 exponentials at 2 G/s: more than eight fork-joins of 2 us, not of 3."""
    row = at("swiglu", M=1, I=14336)
    assert rows.swiglu(row, dataclasses.replace(EIGHT, fork_join_s=3e-6))["threads"] == 1
    assert rows.swiglu(row, EIGHT)["threads"] == 7


def test_an_expensive_fork_join_keeps_one_thread() -> None:
    dear = dataclasses.replace(EIGHT, fork_join_s=1e-3)
    assert rows.rmsnorm(at("rmsnorm", M=512, d=4096), dear)["threads"] == 1


def test_one_cpu_is_one_thread() -> None:
    assert rows.rmsnorm(at("rmsnorm", M=512, d=4096), dataclasses.replace(EIGHT, cpus=1))["threads"] == 1


def test_the_knob_names_every_input_of_its_formula() -> None:
    (knob,) = rows.rope(at("rope", M=16, Hq=32, Hkv=8, D=128, R=128), EIGHT).settings
    for name in ("shares", "cpus", "serial_s", "fork_join_s"):
        assert name in knob.formula
        assert name in knob.inputs
