"""Every CUDA kernel compiles for every target, within its budget of registers, without spills, to the code it is for.

By default each kernel is compiled for one target, dtype and build, another one each day; --every-target takes all.
"""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import pytest

from autosel import resources
from autosel.candidates.cuda import linear
from autosel.fingerprint import known
from autosel.knobs.gpu.facts import facts
from autosel.native.compile import compile_source
from autosel.native.cuda import target_flags
from autosel.ops import OPS
from tests.compile.machine_code import Function, functions

Macros = tuple[str, ...]
Capability = tuple[int, int]

TARGETS: tuple[Capability, ...] = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))


@cache
def projections(cc: Capability) -> tuple[Macros, ...]:
    """What the formula compiles in on the known devices of this capability; on all, where none of it is known."""
    devices, op = [facts(known.load(name)) for name in known.names()], OPS["linear"]
    kernel, found = linear.KERNELS[0], set()
    assert kernel.op == op.name
    for f in [f for f in devices if f.cc == cc] or devices:
        for dtype, m, n in itertools.product(kernel.dtypes, range(1, 65), (1024, 4096, 28_672)):
            w = op.workload(dtype, {"M": m, "N": n, "K": 4096})
            if not kernel.limits(w, f):
                knobs = kernel.formula(w, f)
                found.add((f"AUTOSEL_ROWS={knobs['rows_per_warp']}", f"AUTOSEL_UNROLL={knobs['unroll']}"))
    return tuple(sorted(found))


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a kernel's own code may use. `registers` = 65536 / (threads * CTAs an SM is to hold).

    Variants for rows that are not aligned may use `slow_registers`, and spill: no speed is claimed for them.
    """

    registers: int
    slow_registers: int = 0
    saved_bytes: int = 0  # registers that a called function saves and restores, which ptxas counts as spills
    builds: Callable[[Capability], tuple[Macros, ...]] = lambda cc: ((),)  # macros, one build each
    wide: tuple[str, ...] = ("LDG.E.128",)  # how aligned variants read memory, and compute
    dtypes: tuple[str, ...] = ("BF16", "FP16", "FP32")
    alone: bool = False  # nothing else runs beside it: no programmatic dependent launch


def aligned(f: Function) -> bool:
    """The last template argument says it; attention has one variant for both."""
    return not f.name.endswith("false>")


PROJECTIONS = Budget(
    registers=128,  # 256 threads, 2 CTAs
    slow_registers=255,
    wide=("LDG.E.NA.LTC128B.128", "LDG.E.128"),  # weights, x
    builds=projections,
)
ATTENTION = Budget(registers=255, wide=("LDGSTS.E.BYPASS.LTC128B.128", "LDS.128"))  # 128 threads, 2 CTAs
TILES = Budget(registers=255, wide=("LDGSTS.E.BYPASS.LTC128B.128", "LDSM", "HMMA"), dtypes=("BF16", "FP16"))
BUDGETS = {
    "attn_decode": ATTENTION,
    "paged_attn_decode": ATTENTION,
    # sm_80 unpacks e4m3 by integer instructions, and ptxas reads the ring by the words they take
    "attn_decode_fp8": replace(ATTENTION, wide=("LDGSTS.E.BYPASS.LTC128B.128",)),
    "attn_decode_mma": TILES,
    "paged_attn_decode_mma": TILES,
    "rmsnorm": Budget(registers=64),  # 1024 threads, 1 CTA
    "add_rmsnorm": Budget(registers=64),
    "rope": Budget(registers=64),
    "swiglu": Budget(registers=64),
    "geglu": Budget(registers=64),
    "kv_append": Budget(registers=64),
    # 512 threads, 2 CTAs; reads a bit and a logit a token; its steps are functions, called a few times a row
    "sample": Budget(registers=64, wide=(), saved_bytes=64),
    "gemv": PROJECTIONS,
    # x is 16 bits wide wherever weights are 8; in fp32 eight rows of it spill 12 bytes on sm_80 and sm_86
    "gemv_fp8": replace(PROJECTIONS, dtypes=("BF16", "FP16")),
    "norm_qkv": PROJECTIONS,
    "gate_up": PROJECTIONS,
    "lm_head": PROJECTIONS,
    "step": Budget(
        registers=255,  # 128 threads, 2 CTAs
        wide=("LDG.E.NA.LTC128B.128", "LDGSTS.E.BYPASS.LTC128B.128", "ATOMG"),
        builds=lambda cc: tuple(
            (f"AUTOSEL_M={m}", f"AUTOSEL_HEAD_ROWS={r}", f"AUTOSEL_LANES={lanes}", f"AUTOSEL_UNROLL={u}")
            for m, r, lanes, u in ((1, 4, 32, 8), (8, 8, 32, 4), (2, 2, 32, 8))
        ),
        alone=True,
    ),
}
# The probes are no candidates: NVRTC compiles them; test_machine_code_of_probes.py has what they must be.
SOURCES = sorted(p.stem for p in (resources.kernels() / "cuda").glob("*.cu") if p.stem != "probes")


def test_every_kernel_has_a_budget() -> None:
    assert sorted(BUDGETS) == SOURCES


@dataclass(frozen=True, kw_only=True)
class Build:
    source: str
    cc: Capability
    dtype: str
    macros: Macros

    def __str__(self) -> str:
        values = ",".join(m.removeprefix("AUTOSEL_") for m in self.macros)
        return " ".join([self.source, f"sm_{self.cc[0]}{self.cc[1]}", self.dtype, *([values] if values else [])])


def builds(source: str) -> list[Build]:
    budget = BUDGETS[source]
    return [
        Build(source=source, cc=cc, dtype=dtype, macros=macros)
        for cc in TARGETS
        for macros in budget.builds(cc)
        for dtype in budget.dtypes
    ]


@pytest.mark.in_turns({source: partial(builds, source) for source in SOURCES})
def test_a_kernel_keeps_its_budget_on_its_targets(choice: Build) -> None:
    found = functions(choice.source, choice.cc, f"AUTOSEL_{choice.dtype}", *choice.macros)
    wrong = [f"{f.name}: {why}" for f in found for why in _faults(f, BUDGETS[choice.source], choice.cc)]
    assert found and not wrong, "\n".join([str(choice), *wrong])


@pytest.mark.in_turns(lambda: SOURCES)
def test_a_kernel_builds_as_a_tune_would_build_it(choice: str) -> None:
    """By the whole command: nvcc's pass for the host and the link refuse things that its device pass does not."""
    macros = ("AUTOSEL_BF16", *BUDGETS[choice].builds((9, 0))[0])
    built = compile_source(f"cuda/{choice}.cu", (*target_flags((9, 0)), *(f"-D{m}" for m in macros)))
    listed = subprocess.run(["nm", "-D", "--defined-only", built.path], capture_output=True, text=True, check=True)
    assert f"__tvm_ffi_{choice}\n" in listed.stdout


def _faults(f: Function, budget: Budget, cc: Capability) -> list[str]:
    found = []
    registers = budget.registers if aligned(f) else budget.slow_registers or budget.registers
    if f.registers > registers:
        found.append(f"{f.registers} registers, budget {registers}")
    if aligned(f) and max(f.spill_bytes, f.stack_bytes) > budget.saved_bytes:
        found.append(f"{f.spill_bytes} bytes spilled, a stack of {f.stack_bytes}")
    if f.shared_bytes > 1024:  # the driver's own, on sm_90 and later
        found.append(f"{f.shared_bytes} bytes of static shared memory; a launch must say what it uses")
    if aligned(f):
        found += [f"no {wide}: {dict(f.instructions)}" for wide in budget.wide if not f.instructions.get(wide)]
    if cc >= (9, 0) and not budget.alone and not (f.instructions.get("ACQBULK") and f.instructions.get("PREEXIT")):
        found.append("no programmatic dependent launch")
    return found


STREAMING = ("gemv", "gemv_fp8", "norm_qkv", "gate_up", "lm_head")


@pytest.mark.in_turns(lambda: STREAMING)
def test_weights_are_on_their_way_before_the_kernel_waits_for_its_producer(choice: str) -> None:
    """In the machine code, where ptxas might have moved them behind."""
    found = [f for f in functions(choice, (9, 0), "AUTOSEL_BF16", "AUTOSEL_ROWS=1", "AUTOSEL_UNROLL=4") if aligned(f)]
    assert found
    for f in found:
        at = [f.order.index(i) for i in ("PREEXIT", "LDG.E.NA.LTC128B.128", "ACQBULK", "LDG.E.128")]
        assert at == sorted(at), (f.name, f.order)
