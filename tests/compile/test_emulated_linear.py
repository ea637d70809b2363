"""Test the CUDA projections on emulated threads: every hostile case and dtype, with alternating grids and splits.

By default a quarter of the projections and dtypes run, in one build, which change each day; --every-target runs all.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest

from autosel.ops import OPS
from autosel.ops.contract import Case, Mismatch
from autosel.values import DTypeName
from tests import drawn
from tests.compile import cuda_kernels
from tests.compile.cuda_kernels import DTYPES, KERNELS, Battery, Knobs, compiled_in, faults, workload
from tests.compile.emulate import emulated, one_dtype

LINEAR: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"M": 17, "N": 512, "K": 1024}, {}),
    ({"M": 5, "N": 64, "K": 256}, {"bias": True, "residual": True}),
]
WORKLOADS: dict[str, list[tuple[dict[str, int], dict[str, Any]]]] = {
    "gemv": LINEAR,
    "norm_qkv": [({"M": 17, "d": 512, "N": 256}, {}), ({"M": 3, "d": 256, "N": 96}, {"offset": 1.0})],
    "gate_up": [({"M": 17, "d": 256, "I": 128}, {"activation": a}) for a in (0, 1, 2)],
    "gemv_fp8": LINEAR,
    "lm_head": [({"M": 17, "d": 256, "V": 512}, {}), ({"M": 3, "d": 256, "V": 512}, {"greedy": 1})],
}
# grid, split_k, pdl
PLANS = ((264, 1, 0), (2, 1, 1), (3, 2, 0), (1, 8, 0), (5, 4, 1))
# AUTOSEL_ROWS, AUTOSEL_UNROLL: one row with many loads in flight (few x), many rows (many x)
BUILDS = ((1, 4), (2, 2), (4, 4), (1, 2), (2, 4), (1, 1))


def battery(source: str, dtype: DTypeName) -> Battery:
    plans = itertools.cycle(PLANS)
    for dims, traits in WORKLOADS[source]:
        for made in OPS[KERNELS[source].op].cases(workload(source, dtype, dims, **traits)):
            yield made, next(plans)


def failure(source: str, build: tuple[int, int], made: Case, plan: Knobs) -> Mismatch | None:
    entry = emulated(source, source, *compiled_in(source, *build), one_dtype(made.workload.dtype))
    return cuda_kernels.failure(entry, made, plan, KERNELS[source].operands)


@pytest.mark.in_turns(lambda: BUILDS, label="{0[0]} rows, {0[1]} loads".format)
@pytest.mark.parametrize(("source", "dtype"), drawn.share(list(itertools.product(WORKLOADS, DTYPES)), days=12))
def test_a_projection_meets_its_contract_in_every_case(source: str, dtype: DTypeName, choice: tuple[int, int]) -> None:
    assert faults(battery(source, dtype), partial(failure, source, choice)) == []
