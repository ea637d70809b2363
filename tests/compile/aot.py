"""Run a Triton kernel's host code for a device that is not present: every launch becomes a compilation.

Operands are `meta` tensors of the real shapes (no memory), and the driver only names the target, so the compilation is
exactly the one that the host code would launch with these knobs: same specialisation, options and grid.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

os.environ.setdefault("TRITON_CACHE_DIR", str(Path(os.environ["AUTOSEL_HOME"]) / "cache" / "triton"))

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from autosel.candidates.load import load
from autosel.candidates.triton.base import TritonKernel
from autosel.fingerprint import known
from autosel.knobs.gpu.facts import GpuFacts, facts
from autosel.ops import OPS
from autosel.ops.contract import Op
from autosel.ops.stored import mapped
from autosel.values import Accepted, Workload
from tests.compile.triton_kernels import Shape
from tests.operands import traits_of

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Launch:
    """One compiled launch. `spill_bytes` is local memory per thread, `shared_bytes` shared memory per CTA."""

    kernel: str
    grid: tuple[int, ...]
    ttir: str
    ptx: str
    cubin: bytes
    threads: int
    registers: int
    spill_bytes: int
    shared_bytes: int

    def sass(self) -> str:
        return _tool("nvdisasm", self.cubin, "-c")

    def instructions(self, name: str) -> list[str]:
        """Return lines of machine code with the instruction (`LDG`, but not `LDGSTS`)."""
        return re.findall(rf"^.*\b{name}\b.*$", self.sass(), re.MULTILINE)


class NamedTarget:
    """Provide the part of a driver that compiling needs."""

    def __init__(self, cc: tuple[int, int]) -> None:
        self.arch = cc[0] * 10 + cc[1]

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # launches are cached by device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def instead(cc: tuple[int, int], then: Callable[[Any, Any, list[Any]], None]) -> Iterator[None]:
    """Compile the launches inside the block for `cc`; pass the result of each, its grid and its arguments to `then`."""
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        made = run(self, *args, grid=grid, warmup=True, **options)
        named = {name: value for name, value in options.items() if name in self.signature.parameters}
        bound = self.signature.bind(*args, **named)
        bound.apply_defaults()
        then(made, grid, list(bound.arguments.values()))

    JITFunction.run = compile_only
    driver.set_active(NamedTarget(cc))
    try:
        yield
    finally:
        JITFunction.run = run


@contextmanager
def captured(cc: tuple[int, int]) -> Iterator[list[Launch]]:
    """Compile the launches inside the block for `cc`, and collect them in order."""
    launches: list[Launch] = []
    with instead(cc, lambda made, grid, _: launches.append(_launch(made, grid))):
        yield launches


def _launch(made: Any, grid: tuple[int, ...]) -> Launch:
    usage = _tool("cuobjdump", made.asm["cubin"], "--dump-resource-usage")
    fields = dict(part.split(":")[:2] for part in usage.replace("\n", " ").split() if part.count(":") == 1)
    return Launch(
        kernel=made.metadata.name,
        grid=tuple(grid),
        ttir=made.asm["ttir"],
        ptx=made.asm["ptx"],
        cubin=made.asm["cubin"],
        threads=32 * made.metadata.num_warps,
        registers=int(fields["REG"]),
        spill_bytes=int(fields["LOCAL"]) + int(fields["STACK"]),
        shared_bytes=made.metadata.shared,
    )


def _tool(name: str, cubin: bytes, *options: str) -> str:
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([TOOLS / name, *options, file.name], capture_output=True, text=True, check=True).stdout


def problems(
    kernel: TritonKernel, device: str, shapes: Iterable[Shape], dtypes: Iterable[str], *, spills: bool
) -> list[str]:
    """Compile the launches of the host code at these shapes on a known device; return the faults.

    With `spills`, registers spilled to local memory beyond `may_spill` count as faults too.
    """
    f, found = facts(known.load(device)), []
    for (dims, traits), dtype in product(shapes, dtypes):
        w = OPS[kernel.op].workload(dtype, dims, **traits, **traits_of(kernel))
        if not isinstance(kernel.supports(w, known.load(device)), Accepted):
            continue
        for launch in launches(kernel, device, w):
            where = f"{kernel.name} {w.key} on {device}: {launch.kernel}"
            found += [f"{where}: {what}" for what in wrong(launch, f, may_spill(w) if spills else None)]
    return found


def launches(kernel: TritonKernel, device: str, w: Workload) -> list[Launch]:
    fp, op = known.load(device), OPS[kernel.op]
    knobs = kernel.knobs(w, fp)
    function = load(op, kernel.recipe(w, fp, knobs), "", knobs.values)
    with captured(facts(fp).cc) as made:
        function(*without_memory(op, w))
    assert made, f"{kernel.name} launched nothing at {w.key}"
    return made


def may_spill(w: Workload) -> int | None:
    """Return the allowed bytes per thread; None for any number.

    Four registers are allowed in the dtypes that are served, because they stay in L1 (lm_head for eight rows spills
    two). In fp32, which has no tensor cores, no speed is claimed: kernels spill 16 to 408 bytes, and attention for 256
    positions 7 KB.
    """
    return None if w.dtype == "fp32" else 16


def wrong(launch: Launch, f: GpuFacts, may_spill_bytes: int | None) -> Iterator[str]:
    """Return the faults; `may_spill_bytes` None ignores spills."""
    target = re.search(r"^\.target (\S+)", launch.ptx, re.MULTILINE)
    if target is None or target[1].rstrip("af") != f"sm_{f.cc[0]}{f.cc[1]}":
        yield f"compiled for {target and target[1]}"
    if launch.shared_bytes > f.smem_per_cta:
        yield f"{launch.shared_bytes} bytes of shared memory; a CTA has {f.smem_per_cta}"
    if f.occupancy(threads=launch.threads, regs=launch.registers, smem=launch.shared_bytes) < 1:
        yield f"{launch.threads} threads of {launch.registers} registers do not fit an SM"
    if may_spill_bytes is not None and launch.spill_bytes > may_spill_bytes:
        yield f"{launch.spill_bytes} bytes a thread spilled to local memory"
    for stride in narrow(launch.ttir):
        yield f"{stride} is multiplied in 32 bits"
    if any(size > most for size, most in zip(launch.grid, (2**31 - 1, 65_535, 65_535), strict=False)):
        yield f"grid {launch.grid}"


def narrow(ttir: str) -> list[str]:
    """Return strides that are used without an extension to 64 bits: rows, heads or tokens of a slice may be so far
    apart that the product exceeds 2^31, and no operand of a test is that large."""
    lines = ttir.splitlines()
    return [
        stride
        for stride in sorted(set(re.findall(r"%(stride_\w+): i32", ttir)))
        if any(re.search(rf"%{stride}\b", line) and not re.search(r"arith\.extsi|tt\.func", line) for line in lines)
    ]


def without_memory(op: Op, w: Workload) -> list[Any]:
    """Return arguments and outputs with the workload's shapes and strides on the `meta` device."""
    with FakeTensorMode():
        values = [*op.arguments(op.inputs(w, 0)), *op.allocate(w)]
    return [mapped(v, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")) for v in values]
