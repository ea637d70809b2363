"""Test the Triton kernels without a GPU: compiled for every target, and proven in Triton's interpreter.

Both take long, so each day runs another part. tests/soak/test_triton.py runs everything, and counts spills as faults.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton: the `cross` extra")

import torch
import triton
import triton.language as tl

from autosel.candidates.triton.attention import WIDEST_HEAD
from autosel.ops import OPS
from autosel.values import Passed
from tests import drawn
from tests.compile.aot import captured, launches, narrow, problems
from tests.compile.triton_kernels import DTYPES, KERNELS, PLANS, SHAPES, TARGETS, workload
from tests.drawn import todays
from tests.operands import kind_of

HERE = Path(__file__).parent
APPROXIMATED = ("triton:swiglu", "triton:geglu", "triton:rmsnorm")
SHARE = 47  # share of the hostile cases per day; not a multiple of the dtypes, so that each case runs in every dtype
SHORT_PLANS = [plan for plan in PLANS if "attn" not in plan.kernel]  # attention's whole proof takes minutes


@pytest.mark.parametrize("name", drawn.share(list(KERNELS), days=8))
def test_a_triton_kernel_compiles_for_the_targets_at_their_own_knobs(name: str) -> None:
    """Compile an eighth of the kernels per day, for two targets and two shapes."""
    kernel, number = KERNELS[name], list(KERNELS).index(name)
    shapes, devices = SHAPES[kind_of(kernel)], list(TARGETS.values())
    found = problems(kernel, todays(devices, number), shapes[:1], ("bf16",), spills=False)
    device, shape, dtype = todays(list(itertools.product(devices, shapes, DTYPES)), number)
    found += problems(kernel, device, [shape], (dtype,), spills=False)
    assert found == []


@pytest.mark.parametrize("target", drawn.share(sorted(TARGETS), days=3), ids=lambda cc: f"sm_{cc[0]}{cc[1]}")
def test_weights_and_keys_are_loaded_16_bytes_at_a_time(target: tuple[int, int]) -> None:
    device = TARGETS[target]
    (gemv,) = launches(KERNELS["linear triton:gemv"], device, workload("linear", 0, "bf16"))
    assert "LDG.E" in gemv.sass() and all(".128" in line for line in gemv.instructions("LDG"))
    (decode,) = launches(KERNELS["attn triton:attn_decode"], device, workload("attn", 0, "bf16"))
    assert decode.instructions("LDGSTS") and all(".128" in line for line in decode.instructions("LDGSTS"))
    assert decode.instructions("HMMA")


@triton.jit
def _first_of_row(x, stride_x, WIDE: tl.constexpr):
    row = tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
    tl.store(x + row * stride_x, 0.0)


@pytest.mark.parametrize("wide", [False, True])
def test_a_stride_multiplied_in_32_bits_is_found(wide: bool) -> None:
    with captured((9, 0)) as launched:
        _first_of_row[(2,)](torch.empty(2, 7, device="meta"), 7, WIDE=wide)
    assert narrow(launched[0].ttir) == ([] if wide else ["stride_x"])


@pytest.mark.parametrize("op", ["attn", "paged_attn", "prefill_attn"])
def test_attention_is_interpreted_at_its_widest_head_and_with_capped_scores(op: str) -> None:
    plans = [plan for plan in PLANS if plan.kernel.startswith(f"{op} ")]
    widths = [case.workload["D"] for plan in plans for case in OPS[op].cases(plan.proof("bf16").workload)]
    assert max(widths) == WIDEST_HEAD
    assert any(plan.traits.get("softcap") for plan in plans)


def test_triton_kernels_meet_their_contracts_in_the_interpreter() -> None:
    """A 47th of the hostile cases and of the array's rows of a third of the kernels, in one dtype each; compiled,
    test_ptx_triton.py has more of the cases."""
    command = [sys.executable, str(HERE / "some_cases.py"), str(drawn.turn()), str(SHARE)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout == ""
    assert ran.stderr.count(" s  ") in (len(PLANS) // 3, len(PLANS) // 3 + 1)  # each plan reports its time


def test_fp32_rows_meet_their_contracts_with_a_gpus_own_exponentials_roots_and_quotients() -> None:
    """Run one of the plans per day."""
    plans = [plan.kernel for plan in PLANS if plan.kernel.partition(" ")[2] in APPROXIMATED]
    command = [sys.executable, str(HERE / "approximate.py"), todays(plans)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout == ""
    assert " plans" in ran.stderr and "\n0 plans" not in f"\n{ran.stderr}"


def test_each_part_of_the_hostile_cases_runs_in_each_dtype() -> None:
    days = range(SHARE * len(DTYPES))
    assert len({(day % SHARE, DTYPES[day % len(DTYPES)]) for day in days}) == len(days)  # as some_cases.py takes them


def test_a_triton_kernel_passes_the_whole_proof_in_a_worker() -> None:
    """Run one of the short plans per day, in one dtype."""
    plan, dtype = todays(list(itertools.product(SHORT_PLANS, DTYPES)))
    found = plan.prove(dtype)
    assert isinstance(found, Passed), found
