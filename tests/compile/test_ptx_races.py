"""Find races in the compiled kernels: their PTX runs on this CPU, and two accesses are an error if no barrier, wait,
release and acquire, or fence orders them. Hopper's product is in test_ptx_cutlass.py, with its build.

Shapes are small, but with several blocks, splits merged in a workspace, reused ring slots, and handovers of warps.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="needs Triton: the `cross` extra")

from autosel.ops import OPS
from autosel.ops.contract import Mismatch
from tests import drawn
from tests.compile import cuda_kernels
from tests.compile.cuda_kernels import compiled_in, results_of, workload
from tests.compile.ptx_machine import built
from tests.compile.ptx_triton import failures
from tests.compile.triton_kernels import PLANS, Plan

CACHE = {"B": 1, "Hq": 8, "Hkv": 1, "S": 2, "D": 64, "L": 150}
CUTS = ((32, 2, 32), (16, 3, 1 << 20), (64, 2, 77))  # tile, stages, chunk
GRIDS = ((3, 1), (2, 4), (1, 2))  # grid, split_k
ROWS = ((96, 3), (32, 2))  # threads, grid

# kernel: shape, traits, knobs of a call except pdl
KERNELS: dict[str, tuple[dict[str, int], dict[str, Any], tuple[tuple[int, ...], ...]]] = {
    "rmsnorm": ({"M": 3, "d": 520}, {}, ROWS),
    "add_rmsnorm": ({"M": 3, "d": 520}, {"sandwich": 1}, ROWS),
    "rope": ({"M": 3, "Hq": 4, "Hkv": 2, "D": 64, "R": 64}, {}, ROWS),
    "swiglu": ({"M": 3, "I": 520}, {}, ((3,),)),
    "geglu": ({"M": 3, "I": 520}, {}, ((3,),)),
    "sample": ({"B": 2, "V": 900, "L": 20}, {}, ((2,), (1,))),
    "kv_append": ({"B": 2, "Hkv": 2, "S": 3, "D": 64}, {"page": 16}, ((2,),)),
    "gemv": ({"M": 3, "N": 30, "K": 1032}, {"residual": True}, GRIDS),
    "gemv_fp8": ({"M": 3, "N": 30, "K": 1040}, {"bias": True}, GRIDS),
    "norm_qkv": ({"M": 3, "d": 520, "N": 30}, {}, GRIDS),
    "gate_up": ({"M": 3, "d": 520, "I": 30}, {}, GRIDS),
    "lm_head": ({"M": 3, "d": 520, "V": 70}, {"greedy": 1}, GRIDS),
    "attn_decode": (CACHE, {}, CUTS),
    "attn_decode_mma": (CACHE, {}, CUTS),
    "attn_decode_fp8": (CACHE, {}, CUTS),
    "paged_attn_decode": ({**CACHE, "page": 16}, {}, CUTS),
    "paged_attn_decode_mma": ({**CACHE, "page": 16}, {}, CUTS),
}


def choices() -> list[tuple[str, tuple[int, int]]]:
    return [(name, cc) for cc in ((9, 0), (8, 0)) for name in KERNELS]


def label(choice: tuple[str, tuple[int, int]]) -> str:
    return f"{choice[0]} {choice[1][0]}.{choice[1][1]}"


@pytest.mark.in_turns(choices, label=label)
def test_a_compiled_kernel_has_no_races(choice: tuple[str, tuple[int, int]]) -> None:
    name, cc = choice
    kernel = Kernel(name, cc)
    with kernel.device.races():
        assert kernel.failures() == []


@pytest.mark.in_turns(lambda: list(PLANS), label=lambda plan: plan.label)
def test_a_compiled_triton_kernel_has_no_races(choice: Plan) -> None:
    assert list(failures(choice, "bf16", 12, drawn.turn(), races=True)) == []


def test_each_missing_barrier_and_fence_is_detected() -> None:
    """Test a kernel whose blocks meet in a workspace, a third of its barriers and fences each day. Its results reveal
    only half of the omissions.
    """
    kernel = Kernel("lm_head", (9, 0))
    assert kernel.failures() == []
    sites = kernel.device.sites()
    assert {"bar.sync", "membar.gl"} <= set(sites.values())
    for line, opcode in drawn.share(list(sites.items()), days=3):
        with kernel.device.races(), kernel.device.without(line):
            assert kernel.failures() != [], f"{opcode} at line {line}"


class Kernel:
    def __init__(self, name: str, cc: tuple[int, int]) -> None:
        dims, traits, self.knobs = KERNELS[name]
        self.device = built(f"cuda/{name}", *compiled_in(name), cc=cc)
        self.workload, self.entry = workload(name, "bf16", dims, **traits), self.device.entry(name)
        self.operands = cuda_kernels.KERNELS[name].operands

    def failures(self) -> list[str]:
        """Return the failures over all knobs, three times each, once for each order."""
        calls = [(chosen, self.failure(chosen)) for chosen in self.knobs for _ in range(3)]
        return [f"{chosen}: {found}" for chosen, found in calls if found]

    def failure(self, chosen: tuple[int, ...]) -> str:
        op, w = OPS[self.workload.op], self.workload
        try:
            results = results_of(self.entry, w, op.inputs(w, 5), (*chosen, 0), self.operands)
        except RuntimeError as error:
            return str(error)
        found = op.verify(op.inputs(w, 5), results)
        return f"{found.check}: {found.reason}" if isinstance(found, Mismatch) else ""
