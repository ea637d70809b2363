"""Compile a CUDA source for a device that is not present, and read registers, spills and instructions."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from autosel import resources
from autosel.native.compile import sources_digest
from autosel.native.cuda import headers, target_flags
from tests.compile.emulate import includes, keep, kept, output_of, tools

# An instruction counts as the first of these that its opcode starts with. Assembler names: CUDA Binary Utilities.
OF_INTEREST = (
    "LDG.E.NA.LTC128B.128", "LDG.E.128", "LDG", "LDGSTS.E.BYPASS.LTC128B.128", "LDGSTS", "STG.E.128", "STG", "LDS.128",
    "LDS", "LDSM", "STS", "LDL", "STL", "SHFL", "BAR", "FFMA", "HMMA", "QMMA", "F2FP", "MUFU", "DFMA", "DMUL", "ATOMG",
    "RED", "ACQBULK", "PREEXIT", "CCTL",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """One kernel's machine code."""

    name: str  # demangled, without return type and arguments
    registers: int
    stack_bytes: int  # including the functions that it calls
    spill_bytes: int
    shared_bytes: int  # static
    instructions: Mapping[str, int]  # opcode up to its first modifiers that matter, in order of appearance -> count


def functions(source: str, cc: tuple[int, int], *macros: str) -> tuple[Function, ...]:
    """Return every __global__ function of kernels/cuda/<source>.cu for one target; cached by digest of all inputs."""
    _, nvcc = tools()
    flags = ["-std=c++17", "-O3", *target_flags(cc), *(f"-D{m}" for m in macros)]
    parts = (Path(__file__).read_bytes(), sources_digest(f"cuda/{source}.cu"), nvcc.version, *flags)
    file = kept(f"machine-code/{source}", "json", *parts)
    if not file.is_file():
        flags += [*headers(nvcc), *(i for i in includes() if i.startswith("-I")), "-Xptxas", "-v"]
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder) / "kernel.cubin"
            said = output_of(nvcc.path, *flags, "-cubin", f"{resources.kernels()}/cuda/{source}.cu", "-o", str(cubin))
            found = read_functions(said, cubin)
        with keep(file) as made:
            made.write_text(json.dumps([asdict(f) for f in found]))
    return tuple(Function(**row) for row in json.loads(file.read_text()))


def read_functions(said: str, cubin: Path, kinds: Sequence[str] = OF_INTEREST) -> tuple[Function, ...]:
    """Return the functions of a cubin, with the output of ptxas -v about them."""
    usage, code = _usage(said), _instructions(cubin)
    names = _demangled(list(usage))
    return tuple(Function(name=names[n], **usage[n], instructions=_counted(code.get(n, []), kinds)) for n in usage)


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
    told = subprocess.run([filt], input="\n".join(names), capture_output=True, text=True, timeout=20).stdout
    short = {}
    for mangled, full in zip(names, told.splitlines(), strict=True):
        text = re.sub(r"\(anonymous namespace\)::|autosel::", "", full).removeprefix("void ")
        short[mangled] = text.partition("(")[0]
    return short


def _disassembler() -> str:
    """Return nvdisasm: on PATH, next to nvcc, from pip, or from Triton's wheel."""
    places = [tools()[1].home / "bin"]
    for package, below in (("nvidia", "*/bin"), ("triton", "backends/nvidia/bin")):
        found = importlib.util.find_spec(package)
        for folder in (found.submodule_search_locations or ()) if found else ():
            places += sorted(Path(folder).glob(below))
    tool = shutil.which("nvdisasm", path=os.pathsep.join([os.environ["PATH"], *map(str, places)]))
    assert tool is not None, "no nvdisasm: pip install nvidia-cuda-nvdisasm, or triton"
    return tool


def _instructions(cubin: Path) -> dict[str, list[str]]:
    """Return the opcodes of each function, by mangled name."""
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in output_of(_disassembler(), "-c", str(cubin)).splitlines():
        section = re.match(r"\s*\.section\s+\.text\.(\S+?),", line)
        if section:
            current = found.setdefault(section.group(1), [])
        opcode = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", line)
        if opcode:
            current.append(opcode.group(1))
    return found


def _counted(opcodes: list[str], kinds: Sequence[str]) -> dict[str, int]:
    found = (next((k for k in kinds if f"{opcode}.".startswith(f"{k}.")), "") for opcode in opcodes)
    return dict(Counter(kind for kind in found if kind))
