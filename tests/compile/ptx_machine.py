"""Run the PTX of a CUDA source, compiled by nvcc, on this CPU (ptx/). It includes the inline assembly. (emulate.py
compiles the source for the CPU instead, which selects the branches without assembly.)

The shared object is built as in a worker, but with PTX instead of machine code, for tensors of the CPU, and linked with
a CUDA runtime whose device is the interpreter.
"""

from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from autosel import resources
from autosel.native import cutlass
from autosel.native.compile import sources_digest
from autosel.native.cuda import architecture, headers
from tests.compile import emulate
from tests.compile.emulate import HERE, includes, kept, tools

Order = Literal["early", "late", "mixed"]
ORDERS: tuple[Order, ...] = ("early", "late", "mixed")
PARTS = sorted((HERE / "ptx").glob("*.h"))
RUNTIME = HERE / "ptx" / "runtime.cpp"
HOPPER = (9, 0)
# -frounding-math: instructions set the CPU's rounding mode. -fno-gnu-unique: each object has its own device.
RUNTIME_FLAGS = (
    *("-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-c"),
    *("-frounding-math", "-fno-gnu-unique", "-fno-semantic-interposition"),
)


@dataclass(frozen=True)
class Built:
    """The entries of a source on the interpreted device."""

    path: Path
    library: ctypes.CDLL
    calls: Iterator[int]

    def entry(self, name: str) -> Callable[..., None]:
        """Return the entry. All memory that it touches must lie in its tensors, except for a step's, whose program
        holds addresses."""
        function = emulate.entry_of(self.path, name)

        def call(*args: Any) -> None:
            turn = next(self.calls)
            self.order(ORDERS[turn % 3], backwards=turn % 2 == 1, seed=turn)
            with nullcontext() if name == "step" else self.memory(args):
                try:
                    function(*args)
                except RuntimeError as error:
                    raise RuntimeError(f"{error}\n{self.failed()}") from None

        return call

    @contextmanager
    def memory(self, args: tuple[Any, ...]) -> Iterator[None]:
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        for t in tensors:
            storage = t.untyped_storage()
            self.library.ptx_allow(ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes()))
        try:
            yield
        finally:
            self.library.ptx_forbid()

    def text(self) -> bytes:
        """Return the PTX that was compiled in."""
        return max(re.findall(rb"\.version [^\0]+", self.path.read_bytes()), key=len)

    def order(self, order: Order, *, backwards: bool = False, seed: int = 0) -> None:
        """Set when asynchronous work runs: at once, as late as a device may run it, or at random times."""
        self.library.ptx_order(ORDERS.index(order), int(backwards), seed)

    @contextmanager
    def races(self, *, same_allowed: bool = False, must_look: bool = True) -> Iterator[None]:
        """Make unordered accesses in small launches an error; `same_allowed`: except stores of the present value, which
        Triton makes from several threads."""
        self.library.ptx_races(2 if same_allowed else 1)
        before = int(self.library.ptx_raced())
        try:
            yield
            looked = int(self.library.ptx_raced()) > before
            assert looked or not must_look, "no launch was small enough to be checked"
        finally:
            self.library.ptx_races(0)

    def sites(self) -> dict[int, str]:
        """Return the lines of executed barriers, fences and waits, with their opcodes."""
        said: bytes = self.library.ptx_sites()
        return {int(line): opcode for line, opcode in (entry.split(" ") for entry in said.decode().splitlines())}

    @contextmanager
    def without(self, line: int) -> Iterator[None]:
        """Remove one of these instructions."""
        self.library.ptx_omit(line)
        try:
            yield
        finally:
            self.library.ptx_omit(0)

    def failed(self) -> str:
        said: bytes = self.library.ptx_failed()
        return said.decode()


@cache
def built(source: str, *macros: str, cc: tuple[int, int] = HOPPER) -> Built:
    """Build kernels/<source>.cu, e.g. `cuda/gemv`; macros as NAME=VALUE."""
    import tvm_ffi  # noqa: F401  (its library, which the object needs)

    return _opened(_linked(source, macros, cc), cc)


def _opened(path: Path, cc: tuple[int, int]) -> Built:
    library = ctypes.CDLL(str(path))
    library.ptx_failed.restype = ctypes.c_char_p
    library.ptx_load.restype = ctypes.c_void_p
    library.ptx_raced.restype = ctypes.c_ulonglong
    library.ptx_sites.restype = ctypes.c_char_p
    library.ptx_device(*cc)
    return Built(path=path, library=library, calls=itertools.count())


def _linked(source: str, macros: tuple[str, ...], cc: tuple[int, int]) -> Path:
    made, runtime = _object(source, macros, cc), interpreter()
    library = next(word for word in includes() if word.startswith("-L"))
    linked = made.with_name(f"{made.stem}-{runtime.stem}.so")
    return emulate.built(linked, *_linker(), str(made), str(runtime), library, "-ltvm_ffi", "-o")


def _linker() -> tuple[str, ...]:
    return tools()[0].path, "-shared", "-Wl,-Bsymbolic"  # a process may hold a real CUDA runtime as well


def interpreter() -> Path:
    """Return the compiled device with its CUDA runtime."""
    compiler, nvcc = tools()
    sources = (part.read_bytes() for part in (RUNTIME, *PARTS))
    made = kept("emulated/ptx", "o", compiler.version, nvcc.version, *RUNTIME_FLAGS, *sources)
    return emulate.built(
        made, compiler.path, *RUNTIME_FLAGS, "-isystem", str(nvcc.home / "include"), str(RUNTIME), "-o"
    )


def _object(source: str, macros: tuple[str, ...], cc: tuple[int, int]) -> Path:
    (compiler, nvcc), found = tools(), cutlass.find_headers()
    file = resources.kernels() / f"{source}.cu"
    name = architecture(cc)
    flags = ["-std=c++17", "-O3", "-Xcompiler", "-fPIC", "-gencode", f"arch=compute_{name},code=compute_{name}"]
    flags += ["--no-compress", "-cudart", "none", "-DAUTOSEL_DEVICE=kDLCPU", *(f"-D{m}" for m in macros)]
    parts = (sources_digest(str(file)), compiler.version, nvcc.version, found.text if found else "", *flags)
    made = kept(f"emulated/{file.stem}-ptx", "o", *parts)
    places = [word for word in includes() if word.startswith("-I")]
    if found is not None:
        places += ["-isystem", str(found.include)]
    words = [*flags, *headers(nvcc), *places, "-c", str(file), "-o"]
    return emulate.built(made, nvcc.path, "-ccbin", compiler.path, *words)


# --- PTX written by a test ------------------------------------------------------------------------------------------

HEAD = ".version 9.0\n.target sm_90a\n.address_size 64\n"


@cache
def bare() -> Built:
    """Return the device without a kernel."""
    runtime = interpreter()
    return _opened(emulate.built(runtime.with_suffix(".so"), *_linker(), str(runtime), "-o"), HOPPER)


def launch(
    text: str,
    name: str,
    *arguments: Any,
    grid: tuple[int, int, int] = (1, 1, 1),
    threads: int = 32,
    cluster: tuple[int, int, int] = (1, 1, 1),
    shared_bytes: int = 0,
    dependent: bool = False,
    together: bool = False,
    order: Order = "early",
    backwards: bool = False,
) -> None:
    """Run a kernel of this PTX; parameters are tensors, or numbers of ctypes.

    Raises RuntimeError with the fault.
    """
    device = bare()
    module = _module(text)
    device.order(order, backwards=backwards, seed=3)
    places = [ctypes.c_uint64(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments]
    room = (ctypes.c_void_p * max(1, len(places)))(*(ctypes.addressof(p) for p in places))
    triples = [(ctypes.c_uint * 3)(*t) for t in (grid, (threads, 1, 1), cluster)]
    with device.memory(arguments):
        said = device.library.ptx_launch(
            ctypes.c_void_p(module),
            name.encode(),
            *triples,
            ctypes.c_size_t(shared_bytes),
            int(dependent),
            int(together),
            room,
        )
    if said:
        raise RuntimeError(device.failed())


@cache
def _module(text: str) -> int:
    made: int | None = bare().library.ptx_load(text.encode())
    if made is None:
        raise RuntimeError(bare().failed())
    return made
