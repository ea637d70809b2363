"""Disable a second CUDA runtime, which uses undocumented interfaces of the driver: cupy is linked with one, and PyTorch
loads one by its path. Each of its functions that the device provides jumps there."""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

SYMBOLS, FUNCTION = (2, 11), 2  # elf.h: SHT_SYMTAB, SHT_DYNSYM; STT_FUNC
JUMP = b"\xff\x25\x00\x00\x00\x00"  # jmp [rip]; the address follows


def redirect(library: str, device: ctypes.CDLL) -> int:
    """Redirect functions of the loaded library to the device's; return their number."""
    base, libc, count = _base(library), ctypes.CDLL(None), 0
    for name, offset in _functions(Path(library)):
        if not name.startswith(("cuda", "__cuda")) or not hasattr(device, name):
            continue
        target = ctypes.cast(getattr(device, name), ctypes.c_void_p).value
        at, code = base + offset, JUMP + struct.pack("<Q", target)
        page = at // mmap.PAGESIZE * mmap.PAGESIZE
        length = at + len(code) - page
        if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(length), 7):
            raise OSError(f"{name} of {library} cannot be written")
        ctypes.memmove(at, code, len(code))
        libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(length), 5)
        count += 1
    return count


def beside(device: ctypes.CDLL) -> list[str]:
    """The runtimes that this process has loaded by their own names, but for the device's."""
    named = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    return sorted(path for path in named if "/libcudart.so" in path and path != str(Path(device._name).resolve()))


def _base(library: str) -> int:
    """Return the library's base address in this process."""
    there = str(Path(library).resolve())  # as the system names it
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(there):
            return int(line.partition("-")[0], 16)
    raise OSError(f"{library} is not loaded")


def _functions(library: Path) -> Iterator[tuple[str, int]]:
    data = library.read_bytes()
    (table,), (size, count) = struct.unpack_from("<Q", data, 0x28), struct.unpack_from("<HH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + k * size) for k in range(count)]
    for _, kind, _, _, at, length, link, _, _, each in sections:
        if kind not in SYMBOLS:
            continue
        names = sections[link][4]
        for p in range(at, at + length, each):
            name, info, _, _, value, _ = struct.unpack_from("<IBBHQQ", data, p)
            if info & 15 == FUNCTION and value:
                end = data.index(b"\0", names + name)
                yield data[names + name : end].decode(), value
