"""Triton's kernels as Triton compiles them for a device, run on this CPU: of each launch the PTX is interpreted.

Unlike Triton's own interpreter (interpreted.py) this has what the compiler made of the kernel: layouts, shared memory,
asynchronous copies and the waits for them, mma and wgmma, specialisation on values and alignment.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from autosel.candidates.load import load
from autosel.fingerprint import known
from autosel.knobs.gpu.facts import facts
from autosel.ops import OPS
from autosel.ops.contract import Mismatch
from autosel.parity.check import cases_of
from autosel.parity.session import Proof
from autosel.parity.truth import run_baseline
from autosel.values import DTypeName
from tests.compile.aot import NamedTarget
from tests.compile.ptx_machine import ORDERS, bare, launch
from tests.compile.triton_kernels import KERNELS, Plan, replaced

# What a parameter of each of Triton's types is passed as; a pointer is the tensor itself.
NUMBERS = {
    "i1": ctypes.c_int8, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64,
    "u1": ctypes.c_uint8, "u8": ctypes.c_uint8, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float, "fp64": ctypes.c_double,
}  # fmt: skip


@contextmanager
def played(cc: tuple[int, int]) -> Iterator[list[str]]:
    """Launches inside the block are compiled for `cc` and run; gives their kernels' names, in order."""
    launched: list[str] = []
    turns = itertools.count()
    run = JITFunction.run

    def compile_and_play(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        made = run(self, *args, grid=grid, warmup=True, **options)
        named = {name: value for name, value in options.items() if name in self.signature.parameters}
        bound = self.signature.bind(*args, **named)
        bound.apply_defaults()
        _play(made, grid, list(bound.arguments.values()), next(turns))
        launched.append(made.metadata.name)

    JITFunction.run = compile_and_play
    driver.set_active(NamedTarget(cc))
    try:
        yield launched
    finally:
        JITFunction.run = run


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
        *(ctypes.c_uint64(0) for _ in range(2)),  # room that it does not ask for
        grid=(sizes[0], sizes[1], sizes[2]),
        threads=32 * made.metadata.num_warps,
        shared_bytes=made.metadata.shared,
        dependent=bool(made.metadata.launch_pdl),
        order=ORDERS[turn % 3],
        backwards=turn % 2 == 1,
    )


def failures(plan: Plan, dtype: DTypeName, share: int, turn: int, *, races: bool = False) -> Iterator[str]:
    """What is wrong in every `share`-th hostile case of the plan from the `turn`-th, in words; races too, if asked."""
    kernel, fp = KERNELS[plan.kernel], known.load(plan.device)
    op = OPS[kernel.op]
    w = op.workload(dtype, plan.dims, **plan.traits)
    knobs = replaced(kernel.knobs(w, fp), plan.knobs)
    proof = Proof(candidate=kernel, recipe=kernel.recipe(w, fp, knobs), digest="", knobs=knobs, workload=w)
    function = load(op, proof.recipe, "", knobs.values)
    for case in cases_of(op, proof, fp)[turn % share :: share]:
        inputs = case.make(11)
        before = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}
        outputs = op.allocate(case.workload, fill=float("nan"))
        where = f"{plan.label} {dtype}: {case.workload.key} {case.name}"
        try:
            looked = bare().races(same_allowed=True, must_look=False) if races else nullcontext()
            with played(facts(fp).cc) as launched, looked:
                function(*op.arguments(inputs), *outputs)
        except RuntimeError as error:
            yield f"{where}: {error}"
            continue
        assert launched, f"{where}: launched nothing"
        written = {a.name: inputs[a.name] for a in op.args if a.role == "inout"}
        got = [written[n] if n in written else outputs[i] for i, n in enumerate(op.output_names)]
        found = op.verify(before, got, run_baseline(op, before))
        if isinstance(found, Mismatch):
            yield f"{where}: {found.check}: {found.reason}"
