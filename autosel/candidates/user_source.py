"""A user's own kernel in C++ or CUDA: a file that exports one function through tvm-ffi, raced like any other.

    #include <tvm/ffi/container/tensor.h>
    #include <tvm/ffi/function.h>
    using tvm::ffi::TensorView;
    static void mine(TensorView x, TensorView weight, double eps, double offset, TensorView y) { ... }
    TVM_FFI_DLL_EXPORT_TYPED_FUNC(mine, mine);

It takes the op's arguments, then its outputs (autosel/ops/<op>.py lists both). Headers of kernels/cpu/ and
kernels/cuda/ can be included by name: tensor.h, simd.h, launch.cuh. AUTOSEL_BF16, _FP16 or _FP32 is defined for the
dtype.
"""

from __future__ import annotations

import re
from pathlib import Path

from autosel import devices, resources
from autosel.candidates.base import Checked
from autosel.devices.device import Language
from autosel.errors import UsageError
from autosel.files import read_named
from autosel.knobs.cpu.facts import ISA_FLAGS
from autosel.knobs.cpu.facts import facts as cpu_facts
from autosel.knobs.gpu.facts import facts as gpu_facts
from autosel.native import cuda
from autosel.native.compile import NO_COMPILER, find_compiler
from autosel.values import Backend, Fingerprint, Knobs, NativeRecipe, Recipe, Workload

SUFFIXES = (".cpp", ".cc", ".cu")
MOST_BYTES = 4 << 20
_EXPORT = re.compile(r"^\s*(?:TVM_FFI_DLL_EXPORT_TYPED_FUNC|AUTOSEL_EXPORT)\(\s*(\w+)", re.MULTILINE)


class UserSource(Checked):
    """`user:<file>`: the kernel `entry` of a source file. Every build reads the file again."""

    backend: Backend = "USER"

    def __init__(self, op: str, file: Path, entry: str) -> None:
        self.op, self.file, self.entry, self.name = op, file, entry, f"user:{file.name}"

    @property
    def language(self) -> Language:
        return "CUDA" if self.file.suffix == ".cu" else "C++"

    def why_not(self, w: Workload, fp: Fingerprint) -> str:
        if not devices.runs(fp.kind, self.language):
            kind = "CUDA" if self.language == "CUDA" else "CPU"
            return f"a {kind} source; the device is a {devices.KINDS[fp.kind].noun}"
        if find_compiler() is None:
            return NO_COMPILER
        return cuda.why_not(gpu_facts(fp).cc) if self.language == "CUDA" else ""

    def recipe(self, w: Workload, fp: Fingerprint, knobs: Knobs) -> Recipe:
        if self.language == "CUDA":
            target = (*cuda.target_flags(gpu_facts(fp).cc), "-Xptxas", "-v")
        else:
            target = ISA_FLAGS[cpu_facts(fp).isa]
        return NativeRecipe(source=str(self.file), entry=self.entry, flags=(*target, *own_flags(self.file, w.dtype)))


def own_flags(file: Path, dtype: str) -> tuple[str, ...]:
    folder = "cuda" if file.suffix == ".cu" else "cpu"
    return (f"-DAUTOSEL_{dtype.upper()}", f"-I{resources.kernels() / folder}")


def is_source(target: str) -> bool:
    """Return True if a --candidate names a C++ or CUDA file (`kernel.cpp`, `kernel.cu:entry`)."""
    return Path(target.partition(":")[0]).suffix in SUFFIXES


def from_source(target: str, op: str) -> UserSource:
    """Return the candidate `FILE` or `FILE:entry`. Raises BadConfig, UsageError."""
    path, _, entry = target.partition(":")
    file = Path(path).expanduser().resolve()
    text = read_named(file, MOST_BYTES).decode(errors="replace")
    exported = tuple(dict.fromkeys(_EXPORT.findall(text)))
    if not exported:
        raise UsageError(
            f"{path} exports no function",
            why="a kernel is called through tvm-ffi, by its exported name",
            todo=f"add TVM_FFI_DLL_EXPORT_TYPED_FUNC({op}, {op}); at its end",
        )
    if entry and entry not in exported:
        raise UsageError(f"{path} exports no {entry}", why=f"it exports {', '.join(exported)}")
    if not entry and len(exported) > 1:
        raise UsageError(
            f"{path} exports several functions", why=", ".join(exported), todo=f"name one: {path}:{exported[0]}"
        )
    return UserSource(op, file, entry or exported[0])


# --- the compiler's log -----------------------------------------------------------------------------------------------

_USED = re.compile(r"Used (\d+) registers")
_SPILLED = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_SHARED = re.compile(r"(\d+) bytes smem")


def resources_in(log: str) -> str:
    """Return the largest registers, spills and shared memory in the log of ptxas -v; "" if the log lacks them."""
    registers = [int(n) for n in _USED.findall(log)]
    if not registers:
        return ""
    spilled = max((int(a) + int(b) for a, b in _SPILLED.findall(log)), default=0)
    shared = max((int(n) for n in _SHARED.findall(log)), default=0)
    return f"{max(registers)} registers per thread, {spilled} bytes spilled, {shared} bytes of static shared memory"
