"""Test all results of the formulas for the models' shapes on the known devices, on emulated threads at a small shape.

These are the settings of a call: grids, threads, splits, rings, chunks. test_emulated_linear.py covers compile-time
parameters.
"""

from __future__ import annotations

import itertools
from functools import cache, partial

import pytest

from autosel.fingerprint import known
from autosel.models.presets import PRESETS
from autosel.models.workloads import workloads
from autosel.ops import OPS
from autosel.ops.contract import Mismatch
from autosel.values import Accepted, DTypeName
from tests.compile.cuda_kernels import DTYPES, KERNELS, compiled_in, results_of, workload
from tests.compile.emulate import emulated, one_dtype
from tests.operands import for_kernel

SHARE = 12  # results of a formula that run per day
BATCHES = (1, 2, 3, 8, 32, 256)
CACHE = {"B": 2, "Hq": 8, "Hkv": 2, "S": 1, "D": 128, "L": 300}
# op -> a shape with several rows, vectors per thread, tiles and splits
SMALL: dict[str, dict[str, int]] = {
    "attn": CACHE,
    "paged_attn": {**CACHE, "page": 16},
    "linear": {"M": 3, "N": 70, "K": 1040},
    "norm_qkv": {"M": 3, "d": 1032, "N": 70},
    "gate_up": {"M": 3, "d": 1032, "I": 70},
    "lm_head": {"M": 3, "V": 70, "d": 1032},
    "rmsnorm": {"M": 3, "d": 4104},
    "add_rmsnorm": {"M": 3, "d": 4104},
    "rope": {"M": 3, "Hq": 8, "Hkv": 2, "D": 64, "R": 64},
    "swiglu": {"M": 3, "I": 4104},
    "geglu": {"M": 3, "I": 4104},
    "kv_append": {"B": 3, "Hkv": 2, "S": 1, "D": 64},
    "sample": {"B": 2, "V": 4099, "L": 9},
}


@cache
def asked(source: str) -> tuple[tuple[int, ...], ...]:
    """Return the distinct sets of call knobs that the kernel's formula gives."""
    kernel, found = KERNELS[source], set()
    for device, model, batch in itertools.product(known.names(), PRESETS.values(), BATCHES):
        fp = known.load(device)
        for plain in workloads(model, batch=batch, context=32_768, ops=(kernel.op,)):
            w = for_kernel(kernel, plain)
            if isinstance(kernel.supports(w, fp), Accepted):
                knobs = kernel.knobs(w, fp)
                found.add(tuple(int(knobs[name]) for name in kernel.knob_args if name != "pdl"))
    return tuple(sorted(found))


def shares(source: str) -> list[tuple[str, DTypeName, int]]:
    dtypes = [d for d in DTYPES if d in KERNELS[source].dtypes]
    return [(source, dtype, first) for dtype in dtypes for first in range(min(SHARE, len(asked(source))))]


def named(share: tuple[str, DTypeName, int]) -> str:
    return "{} {} from {}".format(*share)


@pytest.mark.in_turns({source: partial(shares, source) for source in KERNELS}, label=named, days=3)
def test_a_kernel_is_right_with_all_knobs_its_formula_gives(choice: tuple[str, DTypeName, int]) -> None:
    """Run a twelfth of the sets of a third of the kernels, in one dtype; with --every-target all sets, all dtypes."""
    (source, dtype, first), wrong = choice, []
    kernel = KERNELS[source]
    op = OPS[kernel.op]
    w = workload(source, dtype, SMALL[kernel.op])
    entry = emulated(source, source, *compiled_in(source), one_dtype(dtype))
    for knobs in asked(source)[first::SHARE]:
        results = results_of(entry, w, op.inputs(w, 7), (*knobs, 0), kernel.operands)
        found = op.verify(op.inputs(w, 7), results)
        if isinstance(found, Mismatch):
            wrong.append(f"{knobs}: {found.check}: {found.reason}")
    assert not wrong, "\n".join(wrong)
