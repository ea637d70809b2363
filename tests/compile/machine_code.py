"""Compile a CUDA source for a device that is not present, and read registers, spills and instructions."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autosel import resources, settings
from autosel.native.compile import sources_digest
from autosel.native.cuda import Nvcc, find_nvcc, headers, target_flags
from tests.compile.emulate import includes, keep


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """One kernel's machine code. `order`: the listed instructions, once each, in order of first appearance."""

    name: str  # demangled, without return type and arguments
    registers: int
    stack_bytes: int  # including the functions that it calls
    spill_bytes: int
    shared_bytes: int  # static
    instructions: Mapping[str, int]  # opcode up to its first modifiers that matter -> count
    order: tuple[str, ...]


def functions(source: str, cc: tuple[int, int], *macros: str) -> tuple[Function, ...]:
    """Return every __global__ function of kernels/cuda/<source>.cu for one target; cached by digest of all inputs."""
    nvcc = find_nvcc()
    assert nvcc is not None
    flags = ["-std=c++17", "-O3", *target_flags(cc), *(f"-D{m}" for m in macros)]
    reader = Path(__file__).read_bytes()
    text = "\0".join([sources_digest(f"cuda/{source}.cu"), nvcc.version, *flags])
    kept = settings.home() / "machine-code" / f"{source}-{hashlib.sha256(reader + text.encode()).hexdigest()[:24]}.json"
    if not kept.is_file():
        found = _compiled(nvcc, resources.kernels() / "cuda" / f"{source}.cu", flags)
        keep(kept, json.dumps([asdict(f) for f in found]))
    return tuple(Function(**{**f, "order": tuple(f["order"])}) for f in json.loads(kept.read_text()))


def _compiled(nvcc: Nvcc, source: Path, flags: list[str]) -> list[Function]:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        only = [i for i in includes() if i.startswith("-I")]
        words = [*flags, *headers(nvcc), *only, "-Xptxas", "-v", "-cubin", str(source), "-o", str(cubin)]
        command = [nvcc.path, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[:4000]
        code = _instructions(cubin)
    usage = _usage(done.stderr)
    names = _demangled(list(usage))
    return [Function(name=names[n], **usage[n], **code.get(n, _counted([]))) for n in usage]


def _usage(log: str) -> dict[str, dict[str, int]]:
    """Return the output of ptxas -v by mangled name: an entry's own usage first, then that of functions it calls."""
    found: dict[str, dict[str, int]] = {}
    name = ""
    for line in log.splitlines():
        entry = re.search(r"Compiling entry function '(\S+)'", line)
        if entry:
            name = entry.group(1)
            found[name] = {"registers": 0, "stack_bytes": 0, "spill_bytes": 0, "shared_bytes": 0}
        stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line)
        if stack and name:
            found[name]["stack_bytes"] += int(stack.group(1))
            found[name]["spill_bytes"] += int(stack.group(2))
        used = re.search(r"Used (\d+) registers", line)
        if used and name:
            found[name]["registers"] = int(used.group(1))
            shared = re.search(r"(\d+) bytes smem", line)
            found[name]["shared_bytes"] = int(shared.group(1)) if shared else 0
    return found


def _demangled(names: list[str]) -> dict[str, str]:
    filt = shutil.which("c++filt") or shutil.which("cu++filt")
    if filt is None or not names:
        return {n: n for n in names}
    told = subprocess.run(
        [filt], input="\n".join(names), capture_output=True, text=True, timeout=20
    ).stdout.splitlines()
    short = {}
    for mangled, full in zip(names, told, strict=True):
        text = re.sub(r"\(anonymous namespace\)::|autosel::", "", full).removeprefix("void ")
        short[mangled] = text.partition("(")[0]
    return short


# --- instructions ----------------------------------------------------------------------------------------------------

# An instruction counts as the first of these that its opcode starts with. Assembler names: CUDA Binary Utilities.
OF_INTEREST = (
    "LDG.E.NA.LTC128B.128", "LDG.E.128", "LDG", "LDGSTS.E.BYPASS.LTC128B.128", "LDGSTS", "STG.E.128", "STG", "LDS.128",
    "LDS", "LDSM", "STS", "LDL", "STL", "SHFL", "BAR", "FFMA", "HMMA", "QMMA", "F2FP", "MUFU", "DFMA", "DMUL", "ATOMG",
    "RED", "ACQBULK", "PREEXIT", "CCTL",
)  # fmt: skip


def disassembler() -> str | None:
    """Return nvdisasm: next to nvcc, on PATH, from pip, or from Triton's wheel."""
    nvcc = find_nvcc()
    places = [nvcc.home / "bin"] if nvcc else []
    for package, below in (("nvidia", "*/bin"), ("triton", "backends/nvidia/bin")):
        found = importlib.util.find_spec(package)
        for folder in (found.submodule_search_locations or ()) if found else ():
            places += sorted(Path(folder).glob(below))
    beside = next((str(p / "nvdisasm") for p in places if (p / "nvdisasm").is_file()), None)
    return shutil.which("nvdisasm") or beside


def _instructions(cubin: Path) -> dict[str, dict[str, Any]]:
    tool = disassembler()
    assert tool is not None, "no nvdisasm: pip install nvidia-cuda-nvdisasm, or triton"
    done = subprocess.run([tool, "-c", str(cubin)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[:1000]
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in done.stdout.splitlines():
        section = re.match(r"\s*\.section\s+\.text\.(\S+?),", line)
        if section:
            current = found.setdefault(section.group(1), [])
        opcode = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", line)
        if opcode:
            current.append(opcode.group(1))
    return {name: _counted(opcodes) for name, opcodes in found.items()}


def _counted(opcodes: list[str]) -> dict[str, Any]:
    counts: dict[str, int] = {"total": len(opcodes)}
    order: list[str] = []
    for opcode in opcodes:
        kind = next((k for k in OF_INTEREST if opcode.startswith(k) and opcode[len(k) : len(k) + 1] in ("", ".")), None)
        if kind is None:
            continue
        counts[kind] = counts.get(kind, 0) + 1
        if kind not in order:
            order.append(kind)
    return {"instructions": counts, "order": tuple(order)}
