"""Compile kernels/cutlass/ for devices that are not present, and for emulated threads on this CPU; cache by digest."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autosel import resources, settings
from autosel.native import cutlass
from autosel.native.compile import _command, find_compiler, source_digest, sources_digest
from autosel.native.cuda import architecture, find_nvcc
from autosel.values import NativeRecipe
from tests.compile.emulate import FLAGS, HERE, held_back, includes, keep
from tests.compile.machine_code import _usage, disassembler

FIRST = HERE / "cutlass_first.h"
# Opcodes counted by their first part. UTMALDG, UTMASTG: TMA; HGMMA: wgmma; LDGSTS: cp.async; LDSM: ldmatrix.
OPCODES = ("HGMMA", "UTMALDG", "UTMASTG", "WARPGROUP", "SYNCS", "HMMA", "LDGSTS", "LDSM", "LDL", "STL", "ACQBULK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """The machine code of one __global__ function."""

    name: str  # mangled
    registers: int
    stack_bytes: int
    spill_bytes: int
    instructions: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    kernels: tuple[Kernel, ...]
    advice: tuple[str, ...]  # warnings of ptxas
    seconds: float  # on one core


def compiled(recipe: NativeRecipe) -> Compiled:
    """Compile a recipe with the command of compile_source: device code, host code, link."""
    parts = (Path(__file__).read_text(), source_digest(recipe.source, recipe.flags))
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    kept = settings.home() / "machine-code" / f"{recipe.entry}-{digest}.json"
    if not kept.is_file():
        keep(kept, json.dumps(asdict(_compiled(recipe))))
    told = json.loads(kept.read_text())
    kernels = tuple(Kernel(**k) for k in told["kernels"])
    return Compiled(kernels=kernels, advice=tuple(told["advice"]), seconds=told["seconds"])


def _compiled(recipe: NativeRecipe) -> Compiled:
    with tempfile.TemporaryDirectory() as folder:
        told = (*recipe.flags, "-Xptxas", "-v", "-keep", "-keep-dir", folder)
        command = _command(resources.kernels() / recipe.source, told, Path(folder) / "kernel.so")
        before = os.times()
        done = subprocess.run(command, capture_output=True, text=True, timeout=290)
        assert done.returncode == 0, (done.stdout + done.stderr)[:4000]
        seconds = _seconds_since(before)
        return _read(done.stdout + done.stderr, _opcodes(next(Path(folder).glob("*.cubin"))), seconds)


def assembled(ptx: bytes, cc: tuple[int, int]) -> Compiled:
    """Assemble this PTX with nvcc's assembler, as in a whole build."""
    nvcc = find_nvcc()
    assert nvcc is not None
    with tempfile.TemporaryDirectory() as folder:
        text, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        text.write_bytes(ptx)
        tool = Path(nvcc.path).resolve().with_name("ptxas")
        before = os.times()
        command = [str(tool), "-v", f"-arch=sm_{architecture(cc)}", str(text), "-o", str(cubin)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[:4000]
        return _read(done.stdout + done.stderr, _opcodes(cubin), _seconds_since(before))


def _seconds_since(before: os.times_result) -> float:
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def _read(said: str, code: Mapping[str, Mapping[str, int]], seconds: float) -> Compiled:
    usage = {name: {k: v for k, v in used.items() if k != "shared_bytes"} for name, used in _usage(said).items()}
    kernels = tuple(Kernel(name=name, **used, instructions=code.get(name, {})) for name, used in usage.items())
    advice = tuple(re.findall(r"\(C\d+\)[^\n]{0,120}|[Pp]otential [Pp]erformance [Ll]oss[^\n]{0,120}", said))
    return Compiled(kernels=kernels, advice=advice, seconds=seconds)


def _opcodes(cubin: Path) -> dict[str, dict[str, int]]:
    tool = disassembler()
    assert tool is not None, "no nvdisasm: pip install nvidia-cuda-nvdisasm, or triton"
    done = subprocess.run([tool, "-c", str(cubin)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[:1000]
    found: dict[str, dict[str, int]] = {}
    current: dict[str, int] = {}
    for line in done.stdout.splitlines():
        section = re.match(r"\s*\.section\s+\.text\.(\S+?),", line)
        if section:
            current = found.setdefault(section.group(1), {})
        opcode = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", line)
        if opcode and opcode.group(1) in OPCODES:
            current[opcode.group(1)] = current.get(opcode.group(1), 0) + 1
    return found


def emulated(source: str, entry: str, *macros: str) -> Callable[..., None]:
    """Return an entry of kernels/cutlass/<source>.cu on emulated threads (simt.h)."""
    import tvm_ffi

    function: Callable[..., Any] = getattr(tvm_ffi.load_module(str(_emulated(source, macros))), entry)
    return function


@contextmanager
def overlapped(source: str, *macros: str) -> Iterator[None]:
    """Run dependent launches like `emulate.overlapped`."""
    with held_back(_emulated(source, macros)):
        yield


def _emulated(source: str, macros: tuple[str, ...]) -> Path:
    compiler, nvcc, headers = find_compiler(), find_nvcc(), cutlass.find_headers()
    assert compiler is not None
    assert nvcc is not None
    assert headers is not None
    file = resources.kernels() / "cutlass" / f"{source}.cu"
    flags = [*FLAGS, "-DAUTOSEL_DEVICE=kDLCPU", *(f"-D{m}" for m in macros)]
    hasher = hashlib.sha256((HERE / "simt.h").read_bytes() + FIRST.read_bytes())
    for part in (sources_digest(str(file)), compiler.version, headers.text, *flags):
        hasher.update(part.encode() + b"\0")
    made = settings.home() / "emulated" / f"{source}-{hasher.hexdigest()[:24]}.so"
    if made.is_file():
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    system = ["-isystem", str(headers.include), "-isystem", str(nvcc.home / "include" / "cccl")]
    forced = ["-x", "c++", "-include", str(FIRST), "-include", str(HERE / "simt.h")]
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        output = Path(folder) / made.name
        command = [compiler.path, *flags, *system, *forced, str(file), "-o", str(output), *includes()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=290)
        assert done.returncode == 0, done.stderr[:4000]
        output.rename(made)
    return made
