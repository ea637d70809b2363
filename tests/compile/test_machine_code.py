"""Test that every CUDA kernel compiles for every target to the expected code, within its register budget.

Each day a third of the kernels are compiled, for one target, dtype and build, which change too; --every-target: all.
"""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial

import pytest

from autosel import resources
from autosel.candidates.cuda import linear, step
from autosel.fingerprint import known
from autosel.knobs.gpu import persistent
from autosel.knobs.gpu.facts import GpuFacts, facts
from autosel.models.presets import PRESETS
from autosel.native.compile import compile_source
from autosel.native.cuda import target_flags
from autosel.ops import OPS
from autosel.values import DTypeName
from tests.compile.machine_code import Function, functions
from tests.compile.targets import CUDA, Capability
from tests.operands import traits_of

Macros = tuple[str, ...]
Asked = Callable[[Capability], tuple[tuple[str, Macros], ...]]  # dtype and macros, one build each

WIDTHS: tuple[DTypeName, ...] = ("bf16", "fp16", "fp32")
DTYPES = tuple(dtype.upper() for dtype in WIDTHS)


def in_each(
    dtypes: tuple[str, ...] = DTYPES, macros: Callable[[Capability], tuple[Macros, ...]] | None = None
) -> Asked:
    return lambda cc: tuple((dtype, m) for m in (macros(cc) if macros else ((),)) for dtype in dtypes)


ONE = in_each()  # only the dtype is compiled in


def devices(cc: Capability) -> list[GpuFacts]:
    """Return the known devices of this capability; all devices if there is none."""
    found = [facts(known.load(name)) for name in known.names()]
    return [f for f in found if f.cc == cc] or found


@cache
def projections(cc: Capability, source: str = "gemv") -> tuple[Macros, ...]:
    """Return the formula's compile-time parameters."""
    kernel, found = next(k for k in linear.KERNELS if k.source == source), set()
    op = OPS[kernel.op]
    for f in devices(cc):
        for dtype, m, n in itertools.product(kernel.dtypes, range(1, 65), (1024, 4096, 28_672)):
            w = op.workload(dtype, {"M": m, "N": n, "K": 4096}, **traits_of(kernel))
            if not kernel.limits(w, f):
                knobs = kernel.formula(w, f)
                found.add((f"AUTOSEL_ROWS={knobs['rows_per_warp']}", f"AUTOSEL_UNROLL={knobs['unroll']}"))
    return tuple(sorted(found))


@cache
def whole_steps(cc: Capability) -> tuple[tuple[str, Macros], ...]:
    """Return the formula's compile-time parameters for the named models, each in one of its dtypes, in turns: the
    builds share all code except the unpacking of a vector."""
    found: dict[Macros, list[str]] = {}
    for dtype, f, model, rows in itertools.product(WIDTHS, devices(cc), PRESETS.values(), range(1, 9)):
        attn = OPS["attn"].workload(
            dtype, {"B": rows, "Hq": model.Hq, "Hkv": model.Hkv, "S": 1, "D": model.D, "L": 8192}
        )
        if persistent.fits(rows, model.D, dtype) or persistent.crowded(attn, f):
            continue
        smallest = OPS["linear"].workload(dtype, {"M": rows, "N": model.d, "K": model.d})
        flags = step.recipe(dtype, persistent.persistent(attn, smallest, f), ()).flags
        dtypes = found.setdefault(tuple(flag.removeprefix("-D") for flag in flags if "=" in flag), [])
        dtypes += [dtype.upper()] if dtype.upper() not in dtypes else []
    sets = sorted(found, key=lambda macros: macros[::-1])  # rows last, so that each occurs with every dtype
    return tuple((found[macros][n % len(found[macros])], macros) for n, macros in enumerate(sets))


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limit a kernel's own code. `registers` = 65536 / (threads * CTAs that an SM must hold).

    Nothing spills, except `stack_bytes`. Variants for unaligned rows may use `slow_registers`, and spill: no speed is
    claimed for them.
    """

    registers: int
    slow_registers: int = 0
    stack_bytes: int = 0  # of the code outside all loops over memory
    more_stack_bytes: Mapping[tuple[Capability, str], int] = field(default_factory=dict)  # in single functions
    builds: Asked = ONE
    wide: tuple[str, ...] = ("LDG.E.128",)  # the instructions with which aligned variants read memory and compute
    alone: bool = False  # it runs alone: no programmatic dependent launch


def aligned(f: Function) -> bool:
    """Return True for aligned variants, by the last template argument; attention has one variant for both."""
    return not f.name.endswith("false>")


PROJECTIONS = Budget(
    registers=128,  # 256 threads, 2 CTAs
    slow_registers=255,
    wide=("LDG.E.NA.LTC128B.128", "LDG.E.128"),  # weights, x
    builds=in_each(DTYPES, projections),
)
ATTENTION = Budget(registers=255, wide=("LDGSTS.E.BYPASS.LTC128B.128", "LDS.128"))  # 128 threads, 2 CTAs
TILES = Budget(registers=255, wide=("LDGSTS.E.BYPASS.LTC128B.128", "LDSM", "HMMA"), builds=in_each(("BF16", "FP16")))
BUDGETS = {
    "attn_decode": ATTENTION,
    "paged_attn_decode": ATTENTION,
    # sm_80 unpacks e4m3 by integer instructions, and ptxas reads the ring in their word size
    "attn_decode_fp8": replace(ATTENTION, wide=("LDGSTS.E.BYPASS.LTC128B.128",)),
    "attn_decode_mma": TILES,
    "paged_attn_decode_mma": TILES,
    "rmsnorm": Budget(registers=64),  # 1024 threads, 1 CTA
    "add_rmsnorm": Budget(registers=64),
    "rope": Budget(registers=64),
    "swiglu": Budget(registers=64),
    "geglu": Budget(registers=64),
    "kv_append": Budget(registers=64),
    "sample": Budget(registers=64, wide=()),  # 512 threads, 2 CTAs; reads a bit and a logit per token
    "gemv": PROJECTIONS,
    # x is 16 bits wide wherever weights are 8; in fp32 eight rows of it spill 12 bytes on sm_80 and sm_86
    "gemv_fp8": replace(PROJECTIONS, builds=in_each(("BF16", "FP16"), partial(projections, source="gemv_fp8"))),
    "norm_qkv": PROJECTIONS,
    "gate_up": PROJECTIONS,
    "lm_head": PROJECTIONS,
    "step": Budget(
        registers=255,  # 128 threads, 2 CTAs; for few query rows the kernel caps them for 3
        wide=("LDG.E.NA.LTC128B.128", "LDGSTS.E.BYPASS.LTC128B.128", "ATOMG"),
        stack_bytes=8,  # the task and the step, which are read once per task
        # With 168 registers, three values that are set before the first task, and read once per task.
        more_stack_bytes={((10, 0), "step_walk<float>"): 16},
        builds=whole_steps,
        alone=True,
    ),
}
PROBES = {"probes", "grid_sync"}  # no candidates: NVRTC compiles them; test_machine_code_of_probes.py has their budget
SOURCES = sorted({p.stem for p in (resources.kernels() / "cuda").glob("*.cu")} - PROBES)


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
    asked = BUDGETS[source].builds
    return [Build(source=source, cc=cc, dtype=dtype, macros=macros) for cc in CUDA for dtype, macros in asked(cc)]


# Kernels that are instances of the same templates take nvcc a minute, so one of them runs per day.
ALIKE = (("attn_decode", "paged_attn_decode", "attn_decode_fp8"), ("attn_decode_mma", "paged_attn_decode_mma"))
GROUPS = {sources[0]: sources for sources in ALIKE} | {s: (s,) for s in SOURCES if not any(s in a for a in ALIKE)}


def builds_of(group: tuple[str, ...]) -> list[Build]:
    return [build for source in group for build in builds(source)]


@pytest.mark.in_turns({name: partial(builds_of, group) for name, group in GROUPS.items()}, days=6)
def test_a_kernel_keeps_its_budget_on_its_targets(choice: Build) -> None:
    found = functions(choice.source, choice.cc, f"AUTOSEL_{choice.dtype}", *choice.macros)
    wrong = [f"{f.name}: {why}" for f in found for why in _faults(f, BUDGETS[choice.source], choice.cc)]
    assert found and not wrong, "\n".join([str(choice), *wrong])


@pytest.mark.in_turns(lambda: SOURCES, days=2)
def test_a_kernel_builds_as_a_tune_would_build_it(choice: str) -> None:
    """Run the whole command, because nvcc's host pass and the linker find errors that the device pass does not."""
    dtype, macros = BUDGETS[choice].builds((9, 0))[0]
    flags = (*target_flags((9, 0)), f"-DAUTOSEL_{dtype}", *(f"-D{m}" for m in macros))
    built = compile_source(f"cuda/{choice}.cu", flags)
    listed = subprocess.run(["nm", "-D", "--defined-only", built.path], capture_output=True, text=True, check=True)
    assert f"__tvm_ffi_{choice}\n" in listed.stdout


def _faults(f: Function, budget: Budget, cc: Capability) -> list[str]:
    found = []
    registers = budget.registers if aligned(f) else budget.slow_registers or budget.registers
    if f.registers > registers:
        found.append(f"{f.registers} registers, budget {registers}")
    # values on the stack are stored when they are set and when they change
    stack_bytes = budget.more_stack_bytes.get((cc, f.name), budget.stack_bytes)
    if aligned(f) and (f.stack_bytes > stack_bytes or f.spill_bytes > 2 * budget.stack_bytes):
        found.append(f"{f.spill_bytes} bytes spilled, a stack of {f.stack_bytes}")
    if f.shared_bytes > 1024:  # the driver's share, on sm_90 and later
        found.append(f"{f.shared_bytes} bytes of static shared memory; a launch must say what it uses")
    if aligned(f):
        found += [f"no {wide}: {dict(f.instructions)}" for wide in budget.wide if not f.instructions.get(wide)]
    if cc >= (9, 0) and not budget.alone and not (f.instructions.get("ACQBULK") and f.instructions.get("PREEXIT")):
        found.append("no programmatic dependent launch")
    return found


STREAMING = ("gemv", "gemv_fp8", "norm_qkv", "gate_up", "lm_head")


@pytest.mark.in_turns(lambda: STREAMING, days=2, shift=1)
def test_loads_of_weights_are_issued_before_the_kernel_waits_for_its_producer(choice: str) -> None:
    """Check the machine code, in which ptxas might have moved the loads after the wait."""
    found = [f for f in functions(choice, (9, 0), "AUTOSEL_BF16", "AUTOSEL_ROWS=1", "AUTOSEL_UNROLL=4") if aligned(f)]
    assert found
    for f in found:
        order = list(f.instructions)
        at = [order.index(i) for i in ("PREEXIT", "LDG.E.NA.LTC128B.128", "ACQBULK", "LDG.E.128")]
        assert at == sorted(at), (f.name, order)
