"""Build the libraries that replace CUDA's, and the environment in which a process finds them."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from autosel import settings
from autosel.native.compile import find_compiler
from autosel.native.cuda import find_nvcc
from tests.compile.ptx_machine import HERE as MACHINE
from tests.compile.ptx_machine import PARTS, RUNTIME_FLAGS, interpreter

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
BESIDE = [MACHINE / "ptx" / f"{name}.cpp" for name in ("driver", "nvml")]  # the runtime, from tests/compile
LIBRARIES = ("libcudart.so.13", "libcuda.so.1", "libnvidia-ml.so.1")  # the first contains everything
# Only these symbols are exported; versioned, because PyTorch requires a version.
EXPORTS = "libcudart.so.13 { global: cuda*; __cuda*; cu*; nvml*; ptx_*; local: *; };\n"
# C++ is linked statically: NVRTC, which also does this, fails if another C++ library is found first.
LINK = ("-shared", "-static-libstdc++", "-static-libgcc")


def toolkit() -> Path:
    """Return a folder like a CUDA toolkit's, with these libraries."""
    compiler, nvcc = find_compiler(), find_nvcc()
    if compiler is None or nvcc is None or "release 13" not in nvcc.version:
        sys.exit(f"needs a C++ compiler and nvcc of CUDA 13, has {compiler} and {nvcc}")
    hasher = hashlib.sha256(f"{compiler.version}\0{nvcc.version}\0{EXPORTS}".encode())
    runtime = interpreter()
    hasher.update(runtime.name.encode())  # a digest
    for part in (*BESIDE, *PARTS, *sorted((HERE / "bin").iterdir())):
        hasher.update(part.read_bytes())
    folder = settings.home() / "rehearsal" / hasher.hexdigest()[:16]
    if folder.is_dir():
        return folder
    making = folder.with_suffix(f".{os.getpid()}")
    making.mkdir(parents=True)
    flags = [*RUNTIME_FLAGS, "-isystem", str(nvcc.home / "include")]
    compiling = [
        subprocess.Popen([compiler.path, *flags, str(source), "-o", str(making / f"{source.stem}.o")])
        for source in BESIDE
    ]
    if any(one.wait() for one in compiling):
        sys.exit("the device does not compile")
    _link(compiler.path, making, [str(runtime), *(str(making / f"{source.stem}.o") for source in BESIDE)])
    shutil.copytree(HERE / "bin", making / "bin")
    for part in ("include", "lib64", "nvvm"):
        (making / part).symlink_to(nvcc.home / part)
    try:
        making.rename(folder)
    except OSError:  # another process was faster
        if not folder.is_dir():
            raise
        shutil.rmtree(making)
    return folder


def _link(compiler: str, folder: Path, objects: list[str]) -> None:
    exports = folder / "exports.map"
    exports.write_text(EXPORTS)
    first, *others = LIBRARIES
    names = [f"-Wl,-soname,{first}", f"-Wl,--version-script={exports}"]
    subprocess.run([compiler, *LINK, *names, *objects, "-ldl", "-o", str(folder / first)], check=True)
    empty = folder / "empty.c"
    empty.write_text("")
    for other in others:
        there = [f"-Wl,-soname,{other}", "-Wl,--no-as-needed", f"-L{folder}", f"-l:{first}"]
        subprocess.run([compiler, *LINK, "-x", "c", str(empty), *there, "-o", str(folder / other)], check=True)


def environment(device_bytes: int, *, late: bool, tells: bool) -> dict[str, str]:
    """Return the environment of a Python that finds the device, and its children. Names start like variables that
    autosel lets its workers see; site/sitecustomize.py sets the others."""
    folder, nvcc, triton = toolkit(), find_nvcc(), find_spec("triton")
    assert nvcc is not None
    tools = Path(triton.origin).parent / "backends" / "nvidia" / "bin" if triton and triton.origin else Path()
    return {
        **os.environ,
        "CUDA_REHEARSAL_DEVICE": f"{device_bytes} {int(late)} {int(tells)}",
        "CUDA_REHEARSAL_LIBRARIES": ":".join(LIBRARIES),
        "CUDA_REHEARSAL_ROOT": str(ROOT),
        "CUDA_REHEARSAL_NVCC": nvcc.path,
        "CUDA_REHEARSAL_PTXAS": str(tools / "ptxas"),
        "AUTOSEL_HOME": str(settings.home() / "rehearsal" / "home"),  # its decisions are not valid for a real device
        "CUDA_HOME": str(folder),
        "CUDA_PATH": str(folder),
        "LD_LIBRARY_PATH": str(folder),
        "PATH": f"{folder / 'bin'}:{os.environ.get('PATH', os.defpath)}",
        "PYTHONPATH": str(HERE / "site"),
    }
