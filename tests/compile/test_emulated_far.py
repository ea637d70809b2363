"""Test CUDA kernels on emulated threads with rows, or a cache's pages, more than 2^31 elements apart.

Parity requires it of every candidate (battery.FAR_ROWS); here kernels are tested without a device, a third of them each
day, in one dtype; --every-target tests all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from autosel.candidates.cuda.base import CudaKernel
from autosel.ops import OPS
from autosel.ops.contract import Case, Mismatch
from autosel.parity.battery import FAR_TOUCHED_BYTES
from autosel.parity.check import far_case
from autosel.parity.stage import FAR, far_strides, place, room_for
from autosel.values import DTypeName
from autosel.workers.arena import Arena
from tests import drawn
from tests.compile.cuda_kernels import DTYPES, KERNELS, compiled_in, workload
from tests.compile.emulate import emulated, one_dtype
from tests.compile.test_emulated_knobs import SMALL, asked

# Rows of whole 16-byte vectors in every dtype; parity's case has other rows.
ALIGNED: dict[str, dict[str, int]] = {
    "linear": {"M": 5, "N": 70, "K": 1024},
    "norm_qkv": {"M": 5, "d": 1024, "N": 70},
    "gate_up": {"M": 5, "d": 1024, "I": 70},
    "lm_head": {"M": 5, "V": 70, "d": 1024},
}
DAYS = 3  # for all kernels
APART = -(-FAR // 4 // 64) * 64  # five rows of this stride are more than 2^31 elements


def far(kernel: CudaKernel, dtype: DTypeName, *, aligned: bool) -> tuple[Case, Mapping[str, Sequence[int]]]:
    """A case, and the strides of its operands whose rows are far apart."""
    op = OPS[kernel.op]
    if aligned:
        w = workload(kernel.source, dtype, ALIGNED[kernel.op])
        return Case(name="far rows", workload=w, make=lambda seed: op.inputs(w, seed)), {"x": (APART, 1)}
    found = far_case([*op.cases(workload(kernel.source, dtype, SMALL[kernel.op]))])
    assert found is not None
    return found, far_strides(found.make(1))


def failure(kernel: CudaKernel, case: Case, strides: Mapping[str, Sequence[int]]) -> str:
    op, inputs = OPS[kernel.op], case.make(7)
    entry = emulated(kernel.source, kernel.source, *compiled_in(kernel.source), one_dtype(case.workload.dtype))
    outputs_bytes = sum(o.nbytes for o in op.allocate(case.workload) if o is not None)
    with Arena(room_for(inputs, strides, outputs_bytes), touched_bytes=FAR_TOUCHED_BYTES) as arena:
        placed = place(arena, op, case.workload, inputs, strides=strides)
        placed.fill("none")
        there = {piece.name: arena.tensor(piece.ref) for piece in placed.pieces}
        outputs = [there[piece.name] for piece in placed.pieces if piece.role == "out"]
        operands = kernel.operands or [a.name for a in op.args]
        given = [there[name] if name in there else inputs[name] for name in operands]
        entry(*given, *outputs, *asked(kernel.source)[0], 0)
        damage = placed.damage()
        found = op.verify(case.make(7), placed.results())
    if damage is not None:
        return damage.reason
    return f"{found.check}: {found.reason}" if isinstance(found, Mismatch) else ""


def dtypes(kernel: CudaKernel) -> list[DTypeName]:
    """Return those of today, of which each has its turn: a kernel's days are DAYS apart."""
    supported = [dtype for dtype in DTYPES if dtype in kernel.dtypes]
    return supported if drawn.every else [supported[drawn.turn() // DAYS % len(supported)]]


WHOLE_VECTORS = [source for source, kernel in KERNELS.items() if kernel.op in ALIGNED]


@pytest.mark.parametrize(
    ("source", "aligned"),
    [(s, False) for s in drawn.share(list(KERNELS), days=DAYS)]
    + [(s, True) for s in drawn.share(WHOLE_VECTORS, days=DAYS)],
)
def test_a_kernel_reaches_rows_beyond_two_to_the_31_elements(source: str, aligned: bool) -> None:
    """Run the code for any rows, or for rows of whole vectors (`aligned`)."""
    kernel = KERNELS[source]
    wrong = {dtype: failure(kernel, *far(kernel, dtype, aligned=aligned)) for dtype in dtypes(kernel)}
    assert not any(wrong.values()), wrong
