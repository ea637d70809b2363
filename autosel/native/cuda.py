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
    "no nvcc found; install the CUDA toolkit, or with pip: cuda-toolkit[nvcc,nvvm,crt,cccl,cudart], or name it in "
    "CUDA_HOME"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvcc:
    path: str
    version: str
    home: Path  # of the toolkit: above bin, include, lib
    architectures: tuple[int, ...]  # 80, 86, ... without the `a`
    beside: tuple[Path, ...] = ()  # where more of the same toolkit is


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
            home = _home(path)
            return Nvcc(path=path, version=version.strip(), home=home, architectures=found, beside=_beside(home))
    return None


def _places() -> Iterator[str]:
    named = settings.cuda_home()
    if named:
        yield str(Path(named) / "bin" / "nvcc")
    on_path = shutil.which("nvcc")
    if on_path:
        yield on_path
    yield "/usr/local/cuda/bin/nvcc"
    for folder in pips():
        yield from sorted(str(p) for p in folder.glob("*/bin/nvcc"))


def pips() -> list[Path]:
    """Where pip puts CUDA's packages: one folder in each environment that Python sees."""
    package = importlib.util.find_spec("nvidia")  # a namespace that they share
    folders = package.submodule_search_locations if package else None
    return list(dict.fromkeys(Path(folder).resolve() for folder in folders or ()))


def _beside(home: Path) -> tuple[Path, ...]:
    """The rest of a toolkit of pip's: an environment that reuses another's torch installs nvcc, and finds the runtime's
    headers there already, where nvcc does not look."""
    folders = pips()
    if home.parent not in folders:
        return ()
    return tuple(other for folder in folders if (other := folder / home.name) != home and other.is_dir())


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
    places = [nvcc.home / "lib64", nvcc.home / "lib", *(home / "lib" for home in nvcc.beside)]
    libraries = [f"-L{folder}" for folder in places if folder.is_dir()]
    output_and_libraries = ["-o", str(output), *libraries]
    return [nvcc.path, "-ccbin", cxx, *BASE_FLAGS, *flags, *headers(nvcc), str(source), *output_and_libraries]


def headers(nvcc: Nvcc) -> list[str]:
    """For nvcc's command line: headers of its toolkit that it would not find by itself."""
    folders = [home / "include" / part for home in nvcc.beside for part in ("", "cccl")]
    return [word for folder in folders if folder.is_dir() for word in ("-isystem", str(folder))]
