"""What each thread of a worker has set for itself: floating-point control words, priority, blocked signals.

    threads_of(worker.pid)      # {"mxcsr 1f80, x87 037f, nice 0, policy 0, blocked 0000000000000000": "python (4711)"}

Every thread is stopped for some microseconds and its registers are read (ptrace), so that the threads of any pool are
seen: OpenMP's, PyTorch's, our own team's, and those that a candidate has started. Where the system forbids that, the
control words are left out.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

SEIZE, INTERRUPT, DETACH, GET_FP_REGISTERS, GET_REGISTER_SET = 0x4206, 0x4207, 17, 14, 0x4204  # linux/ptrace.h
NT_PRFPREG = 2  # linux/elf.h
WAIT_FOR_THREADS = 0x40000000  # __WALL
MXCSR_CONTROL = 0xFFC0  # without the six flags that arithmetic sets
FPCR_CONTROL = 0x07FFFF00
REGISTERS_BYTES = 1024


def threads_of(pid: int) -> dict[str, str]:
    """Return each distinct state of the process's threads, with the name and number of one thread that is in it."""
    found: dict[str, str] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            name, fields = _stat(task)
            blocked = (task / "status").read_text().partition("SigBlk:")[2].split()[0]
        except OSError:  # it has ended
            continue
        words = f"{_control_words(int(task.name))}nice {fields[16]}, policy {fields[38]}, blocked {blocked}"
        found.setdefault(words, f"{name} ({task.name})")
    return found


def _stat(task: Path) -> tuple[str, list[str]]:
    """Return a thread's name, and the fields of /proc/PID/task/TID/stat from its state (field 3) on."""
    before, _, after = (task / "stat").read_text().rpartition(")")
    return before.partition("(")[2], after.split()


def _control_words(tid: int) -> str:
    """Return the control words with a comma behind, or "" where they cannot be read."""
    read = {"x86_64": _x86, "aarch64": _arm}.get(platform.machine())
    if read is None:
        return ""
    with _stopped(tid) as stopped:
        return read(tid) if stopped else ""


@contextmanager
def _stopped(tid: int) -> Iterator[bool]:
    """Stop a thread meanwhile. False: it may not be traced, or it has ended."""
    ptrace = _ptrace()
    if ptrace(SEIZE, tid, None, None) < 0:
        yield False
        return
    try:
        ptrace(INTERRUPT, tid, None, None)
        yield os.WIFSTOPPED(os.waitpid(tid, WAIT_FOR_THREADS)[1])
    finally:
        ptrace(DETACH, tid, None, None)


def _x86(tid: int) -> str:
    buffer = ctypes.create_string_buffer(REGISTERS_BYTES)  # struct user_fpregs_struct
    if _ptrace()(GET_FP_REGISTERS, tid, None, ctypes.cast(buffer, ctypes.c_void_p)) < 0:
        return ""
    control, mxcsr = (int.from_bytes(buffer.raw[at : at + size], "little") for at, size in ((0, 2), (24, 4)))
    return f"mxcsr {mxcsr & MXCSR_CONTROL:04x}, x87 {control:04x}, "


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _arm(tid: int) -> str:
    buffer = ctypes.create_string_buffer(REGISTERS_BYTES)  # struct user_fpsimd_state: 32 vectors, fpsr, fpcr
    vector = _Vector(ctypes.cast(buffer, ctypes.c_void_p), REGISTERS_BYTES)
    where = ctypes.cast(ctypes.byref(vector), ctypes.c_void_p)
    if _ptrace()(GET_REGISTER_SET, tid, ctypes.c_void_p(NT_PRFPREG), where) < 0:
        return ""
    return f"fpcr {int.from_bytes(buffer.raw[516:520], 'little') & FPCR_CONTROL:08x}, "


@cache
def _ptrace() -> Callable[..., int]:
    function = ctypes.CDLL(None, use_errno=True).ptrace
    function.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    function.restype = ctypes.c_long
    found: Callable[..., int] = function
    return found
