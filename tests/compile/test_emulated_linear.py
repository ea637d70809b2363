"""Test the CUDA projections on emulated threads: every hostile case and dtype, with alternating grids and splits.

By default a quarter of the projections and dtypes run, in one build, which change each day; --every-target runs all.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from autosel.ops import OPS
from autosel.ops.contract import Case, Mismatch, Op
from autosel.parity.truth import run_baseline
from autosel.values import DTypeName
from tests import drawn
from tests.compile.emulate import emulated, one_dtype
from tests.operands import SCALED_ROWS, passed

DTYPES: tuple[DTypeName, ...] = ("bf16", "fp16", "fp32")
WORKLOADS: dict[str, list[tuple[dict[str, int], dict[str, Any]]]] = {
    "linear": [({"M": 17, "N": 512, "K": 1024}, {}), ({"M": 5, "N": 64, "K": 256}, {"bias": True, "residual": True})],
    "norm_qkv": [({"M": 17, "d": 512, "N": 256}, {}), ({"M": 3, "d": 256, "N": 96}, {"offset": 1.0})],
    "gate_up": [({"M": 17, "d": 256, "I": 128}, {"activation": a}) for a in (0, 1, 2)],
    "linear fp8_e4m3-row": [
        ({"M": 17, "N": 512, "K": 1024}, {}),
        ({"M": 5, "N": 64, "K": 256}, {"bias": True, "residual": True}),
    ],
    "lm_head": [({"M": 17, "d": 256, "V": 512}, {}), ({"M": 3, "d": 256, "V": 512}, {"greedy": 1})],
}
# grid, split_k, pdl
PLANS = ((264, 1, 0), (2, 1, 1), (3, 2, 0), (1, 8, 0), (5, 4, 1))
# AUTOSEL_ROWS, AUTOSEL_UNROLL: one row with many loads in flight (few x), many rows (many x)
BUILDS = ((1, 4), (2, 2), (4, 4), (1, 2), (2, 4), (1, 1))


def contract(name: str) -> tuple[Op, dict[str, Any]]:
    """Return the op of an entry of WORKLOADS, and the trait of the format of its weights."""
    op, _, weight = name.partition(" ")
    return OPS[op], {"weight": weight} if weight else {}


def failure(op: Op, made: Case, build: tuple[int, int], plan: tuple[int, ...]) -> Mismatch | None:
    fp8 = not made.workload.weight_format.plain
    source = "gemv_fp8" if fp8 else {"linear": "gemv"}.get(op.name, op.name)
    macros = (f"AUTOSEL_ROWS={build[0]}", f"AUTOSEL_UNROLL={build[1]}", one_dtype(made.workload.dtype))
    entry = emulated(source, source, *macros)
    inputs = made.make(11)
    outputs = [o for o in op.allocate(made.workload, fill=float("nan")) if o is not None]
    entry(*passed(op, inputs, SCALED_ROWS if fp8 else ()), *outputs, *plan)
    found = op.verify(made.make(11), outputs, run_baseline(op, made.make(11)))
    return found if isinstance(found, Mismatch) else None


@pytest.mark.in_turns(lambda: BUILDS, label="{0[0]} rows, {0[1]} loads".format)
@pytest.mark.parametrize(("name", "dtype"), drawn.share(list(itertools.product(WORKLOADS, DTYPES)), days=12))
def test_a_projection_meets_its_contract_in_every_case(name: str, dtype: DTypeName, choice: tuple[int, int]) -> None:
    (op, formats), wrong, turn = contract(name), [], 0
    for dims, traits in WORKLOADS[name]:
        for made in op.cases(op.workload(dtype, dims, **traits, **formats)):
            plan, turn = PLANS[turn % len(PLANS)], turn + 1
            found = failure(op, made, choice, plan)
            if found is not None:
                wrong.append(f"{made.workload.key} {made.name}, {choice} {plan}: {found.check}: {found.reason}")
    assert not wrong, "\n".join(wrong)
