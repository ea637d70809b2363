"""Test the number of threads of row ops: closed forms on simulated CPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from autosel.knobs.cpu import rows
from autosel.knobs.cpu.facts import CpuFacts
from autosel.values import Knobs, Workload

Formula = Callable[[Workload, CpuFacts], Knobs]

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


DEAR, ONE_CPU = dataclasses.replace(EIGHT, fork_join_s=1e-3), dataclasses.replace(EIGHT, cpus=1)
SLOWER = dataclasses.replace(EIGHT, fork_join_s=3e-6)
MANY, LONG = at("rmsnorm", M=512, d=4096), at("swiglu", M=1, I=14336)


@pytest.mark.parametrize(
    ("formula", "workload", "cpu", "threads"),
    [
        pytest.param(rows.rmsnorm, at("rmsnorm", M=1, d=8192), EIGHT, 1, id="one row"),
        pytest.param(rows.add_rmsnorm, at("add_rmsnorm", M=1, d=8192), EIGHT, 1, id="one added row"),
        pytest.param(rows.rope, at("rope", M=1, Hq=64, Hkv=8, D=128, R=128), EIGHT, 1, id="one token"),
        pytest.param(rows.swiglu, at("swiglu", M=1, I=8192), EIGHT, 1, id="one gated row"),
        pytest.param(rows.sample, at("sample", B=1, V=128_256, L=0), EIGHT, 1, id="one row of logits"),
        pytest.param(rows.rmsnorm, MANY, EIGHT, 8, id="many rows"),
        pytest.param(rows.swiglu, at("swiglu", M=64, I=14336), EIGHT, 8, id="many gated rows"),
        pytest.param(rows.sample, at("sample", B=3, V=128_256, L=0), EIGHT, 3, id="never more than rows"),
        pytest.param(rows.swiglu, at("swiglu", M=1, I=1 << 18), EIGHT, 8, id="a long gated row is shared"),
        # 14336 times 2.5 exponentials at 2 G/s take 18 us: more than eight fork-joins of 2 us, not of 3.
        pytest.param(rows.swiglu, LONG, EIGHT, 7, id="longer than eight fork-joins"),
        pytest.param(rows.swiglu, LONG, SLOWER, 1, id="shorter than eight fork-joins"),
        pytest.param(rows.rmsnorm, MANY, DEAR, 1, id="an expensive fork-join"),
        pytest.param(rows.rmsnorm, MANY, ONE_CPU, 1, id="one CPU"),
    ],
)
def test_the_number_of_threads_follows_the_work_and_the_cpu(
    formula: Formula, workload: Workload, cpu: CpuFacts, threads: int
) -> None:
    assert formula(workload, cpu)["threads"] == threads


def test_a_norm_takes_the_time_of_its_arithmetic() -> None:
    """Check 64 rows of 4096: 102 us at 64 GFLOP/s, while reading them from L2 would take 13 us."""
    (knob,) = rows.rmsnorm(at("rmsnorm", M=64, d=4096), EIGHT).settings
    assert knob.inputs["serial_s"] == pytest.approx(102.4e-6)
    assert knob.value == 8


def test_the_knob_names_every_input_of_its_formula() -> None:
    (knob,) = rows.rope(at("rope", M=16, Hq=32, Hkv=8, D=128, R=128), EIGHT).settings
    for name in ("shares", "cpus", "serial_s", "fork_join_s"):
        assert name in knob.formula
        assert name in knob.inputs
