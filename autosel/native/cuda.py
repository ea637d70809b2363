"""nvcc: where it is, what it can compile for, and the command that makes a CUDA source one shared object.

An object holds machine code for one architecture and no PTX: it is built on the machine that runs it, and its digest
names the architecture. Compute capability 9.0 and later are compiled as `90a`, `100a`, ...: without the `a` there is no
wgmma. CUDA's runtime is linked statically, so that the object needs the driver alone.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from autosel import settings

DRIVER = "libcuda.so.1"  # what a GPU's driver installs, and a toolkit does not
LEAST_CC = (8, 0)  # cp.async, bf16 arithmetic
BASE_FLAGS = ("-std=c++17", "-O3", "-lineinfo", "-shared", "-Xcompiler", "-fPIC")
NO_NVCC = (
    "no nvcc found; install the CUDA toolkit, or with pip: cuda-toolkit[nvcc,cccl,cudart], or name it in CUDA_HOME"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvcc:
    path: str
    version: str
    home: Path  # of the toolkit: above bin, include, lib
    architectures: tuple[int, ...]  # 80, 86, ... without the `a`


@cache
def find_nvcc() -> Nvcc | None:
    """CUDA_HOME's, the one on PATH, /usr/local/cuda's, pip's; None when there is none that answers."""
    for path in _places():
        try:
            said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20)
            listed = subprocess.run([path, "--list-gpu-arch"], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            continue
        found = tuple(sorted({int(n) for n in re.findall(r"compute_(\d+)", listed.stdout)}))
        if said.returncode == 0 and found:
            version = next((line for line in said.stdout.splitlines() if "release" in line), "nvcc")
            return Nvcc(path=path, version=version.strip(), home=_home(path), architectures=found)
    return None


def _places() -> Iterator[str]:
    named = settings.cuda_home()
    if named:
        yield str(Path(named) / "bin" / "nvcc")
    on_path = shutil.which("nvcc")
    if on_path:
        yield on_path
    yield "/usr/local/cuda/bin/nvcc"
    package = importlib.util.find_spec("nvidia")  # pip's packages share this namespace
    for folder in package.submodule_search_locations or () if package else ():
        yield from sorted(str(p) for p in Path(folder).glob("*/bin/nvcc"))


def _home(path: str) -> Path:
    """nvcc's own word for it: what is on PATH may be a script or a link."""
    said = subprocess.run([path, "-dryrun", "-E", "-x", "cu", "/dev/null"], capture_output=True, text=True, timeout=20)
    top = re.search(r"^#\$ TOP=(.*)$", said.stderr, flags=re.MULTILINE)
    return Path(top.group(1)).resolve() if top else Path(path).resolve().parents[1]


def architecture(cc: tuple[int, int]) -> str:
    """nvcc's name for a compute capability: `80`, `89`, `90a`, `120a`."""
    return f"{cc[0]}{cc[1]}" + ("a" if cc >= (9, 0) else "")


def target_flags(cc: tuple[int, int]) -> tuple[str, ...]:
    name = architecture(cc)
    return ("-gencode", f"arch=compute_{name},code=sm_{name}")


def why_not(cc: tuple[int, int]) -> str:
    """Why nothing can be compiled here for a device of this compute capability, or ""."""
    if cc < LEAST_CC:
        return f"needs compute capability {LEAST_CC[0]}.{LEAST_CC[1]}; the device has {cc[0]}.{cc[1]}"
    nvcc = find_nvcc()
    if nvcc is None:
        return NO_NVCC
    if cc[0] * 10 + cc[1] not in nvcc.architectures:
        why = f"this nvcc cannot compile for compute capability {cc[0]}.{cc[1]} ({nvcc.version})"
        return f"{why}; install a newer CUDA toolkit, or name it in CUDA_HOME"
    return ""


def command(nvcc: Nvcc, cxx: str, source: Path, flags: tuple[str, ...], output: Path) -> list[str]:
    """Without tvm-ffi's includes and library, which every source needs."""
    libraries = [f"-L{folder}" for folder in (nvcc.home / "lib64", nvcc.home / "lib") if folder.is_dir()]
    return [nvcc.path, "-ccbin", cxx, *BASE_FLAGS, *flags, str(source), "-o", str(output), *libraries]
