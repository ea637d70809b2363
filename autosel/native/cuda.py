"""Find nvcc, list its targets, and build the command that compiles a CUDA source into a shared object.

An object holds machine code for one architecture and no PTX: it is built on the machine that runs it, and its digest
names the architecture. Compute capability 9.0 and later are compiled as `90a`, `100a`, ..., because wgmma needs the
`a`. CUDA's runtime is linked statically, so the object needs only the driver.
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

DRIVER = "libcuda.so.1"  # installed by a GPU's driver, but not by a toolkit
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
    home: Path  # root of the toolkit, with bin, include and lib
    architectures: tuple[int, ...]  # 80, 86, ... without the `a`
    beside: tuple[Path, ...] = ()  # another folder with parts of the same toolkit


@cache
def find_nvcc() -> Nvcc | None:
    """Return nvcc from CUDA_HOME, PATH, /usr/local/cuda or pip; None if none of them runs."""
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
    """Yield pip's CUDA folders: one in each environment that Python sees."""
    package = importlib.util.find_spec("nvidia")  # the packages' common namespace
    folders = package.submodule_search_locations if package else None
    return list(dict.fromkeys(Path(folder).resolve() for folder in folders or ()))


def _beside(home: Path) -> tuple[Path, ...]:
    """Return the folders with the rest of pip's toolkit. An environment that reuses another one's torch installs only
    nvcc, and the runtime's headers are in the other environment, where nvcc does not look."""
    folders = pips()
    if home.parent not in folders:
        return ()
    return tuple(other for folder in folders if (other := folder / home.name) != home and other.is_dir())


def _home(path: str) -> Path:
    """Return the toolkit's root as nvcc reports it, because the nvcc on PATH may be a script or a link."""
    said = subprocess.run([path, "-dryrun", "-E", "-x", "cu", "/dev/null"], capture_output=True, text=True, timeout=20)
    top = re.search(r"^#\$ TOP=(.*)$", said.stderr, flags=re.MULTILINE)
    return Path(top.group(1)).resolve() if top else Path(path).resolve().parents[1]


def architecture(cc: tuple[int, int]) -> str:
    """Return nvcc's name for a compute capability: `80`, `89`, `90a`, `120a`."""
    return f"{cc[0]}{cc[1]}" + ("a" if cc >= (9, 0) else "")


def target_flags(cc: tuple[int, int]) -> tuple[str, ...]:
    name = architecture(cc)
    return ("-gencode", f"arch=compute_{name},code=sm_{name}")


def why_not(cc: tuple[int, int]) -> str:
    """Return the reason why nvcc cannot compile for this compute capability here, or ""."""
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
    """Return the command line, without tvm-ffi's includes and library, which every source needs."""
    places = [nvcc.home / "lib64", nvcc.home / "lib", *(home / "lib" for home in nvcc.beside)]
    libraries = [f"-L{folder}" for folder in places if folder.is_dir()]
    output_and_libraries = ["-o", str(output), *libraries]
    return [nvcc.path, "-ccbin", cxx, *BASE_FLAGS, *flags, *headers(nvcc), str(source), *output_and_libraries]


def headers(nvcc: Nvcc) -> list[str]:
    """Return nvcc's flags for headers of its toolkit that it does not find automatically."""
    folders = [home / "include" / part for home in nvcc.beside for part in ("", "cccl")]
    return [word for folder in folders if folder.is_dir() for word in ("-isystem", str(folder))]
