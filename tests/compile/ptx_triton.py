"""Run Triton's kernels on this CPU as compiled for a device: the PTX of each launch is interpreted.

Unlike Triton's own interpreter (interpreted.py), this runs the compiler's output: layouts, shared memory, asynchronous
copies and their waits, mma and wgmma, specialisation on values and alignment.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from autosel.fingerprint import known
from autosel.knobs.gpu.facts import facts
from autosel.values import DTypeName
from tests.compile.aot import instead
from tests.compile.ptx_machine import ORDERS, bare, launch
from tests.compile.triton_kernels import KERNELS, Plan, failures_of

# The C type of each of Triton's parameter types; a pointer is the tensor.
NUMBERS = {
    "i1": ctypes.c_int8, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64,
    "u1": ctypes.c_uint8, "u8": ctypes.c_uint8, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float, "fp64": ctypes.c_double,
}  # fmt: skip


@contextmanager
def played(cc: tuple[int, int]) -> Iterator[list[str]]:
    """Compile the launches inside the block for `cc` and run them; yield the list of their kernels' names."""
    launched: list[str] = []

    def play(made: Any, grid: Any, values: list[Any]) -> None:
        _play(made, grid, values, len(launched))
        launched.append(made.metadata.name)

    with instead(cc, play):
        yield launched


def _play(made: Any, grid: Any, values: list[Any], turn: int) -> None:
    passed: list[Any] = []
    for kind, value in zip(made.src.signature.values(), values, strict=True):
        if kind != "constexpr":
            passed.append(value if kind.startswith("*") else NUMBERS[kind](value))
    assert made.metadata.global_scratch_size == made.metadata.profile_scratch_size == 0
    sizes = (*grid, 1, 1)
    launch(
        made.asm["ptx"],
        made.metadata.name,
        *passed,
        *(ctypes.c_uint64(0) for _ in range(2)),  # memory that it does not request
        grid=(sizes[0], sizes[1], sizes[2]),
        threads=32 * made.metadata.num_warps,
        shared_bytes=made.metadata.shared,
        dependent=bool(made.metadata.launch_pdl),
        order=ORDERS[turn % 3],
        backwards=turn % 2 == 1,
    )


def failures(plan: Plan, dtype: DTypeName, share: int, turn: int, *, races: bool = False) -> Iterator[str]:
    """Return the faults in every `share`-th hostile case of the plan, from the `turn`-th; with races if requested."""
    fp = known.load(plan.device)

    @contextmanager
    def around() -> Iterator[None]:
        looked = bare().races(same_allowed=True, must_look=False) if races else nullcontext()
        with played(facts(fp).cc) as launched, looked:
            yield
        assert launched, f"{plan.label} launched nothing"

    return failures_of(plan.label, plan.proof_of(KERNELS[plan.kernel], dtype), fp, share, turn, around)
