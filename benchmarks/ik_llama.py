"""Run decode steps of ik_llama.cpp, a fork of llama.cpp, through a library built against its header (ik_llama.cpp)."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autosel.native.compile import find_compiler

SOURCE = Path(__file__).with_suffix(".cpp")
BATCH = 512  # tokens of a prompt at a time
HEADERS = ("include", "ggml/include")


class Stream:
    """A cache that holds the given tokens, and can be rewound to them."""

    def __init__(self, built: Path, file: Path, held: NDArray[np.int32], *, threads: int, repack: bool) -> None:
        self.library, self.held = _library(built), len(held)
        room = -(-(len(held) + 64) // 256) * 256
        self.stream = self.library.ik_stream(_model(built, file, repack), room, BATCH, threads, True)
        if not self.stream:
            raise SystemExit(f"ik_llama.cpp could not make a context of {room} tokens")
        for first in range(0, len(held), BATCH):
            self._feed(held[first : first + BATCH], first)

    def logits(self, token: int, vocabulary: int) -> NDArray[np.float32]:
        """Return the logits after one more token, which the cache then forgets. The next call overwrites them."""
        found = self._feed(np.array([token], np.int32), self.held)
        self.library.ik_rewind(self.stream, self.held)
        return np.ctypeslib.as_array(found, shape=(vocabulary,))

    def _feed(self, tokens: NDArray[np.int32], first: int) -> ctypes._Pointer[ctypes.c_float]:
        given = tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        found: ctypes._Pointer[ctypes.c_float] = self.library.ik_feed(self.stream, given, len(tokens), first)
        if not found:
            raise SystemExit("ik_llama.cpp could not run its step")
        return found


@cache
def _model(built: Path, file: Path, repack: bool) -> int:
    """Load the weights, once for all contexts."""
    found: int | None = _library(built).ik_model(str(file).encode(), repack)
    if not found:
        raise SystemExit(f"ik_llama.cpp could not load {file}")
    return found


@cache
def _library(built: Path) -> ctypes.CDLL:
    """Compile the four functions against the checkout's header and shared libraries, and load them."""
    compiler = find_compiler()
    shared = [next(built.rglob(name), None) for name in ("libllama.so", "libggml.so")]
    if compiler is None or None in shared:
        raise SystemExit(f"needs a C++ compiler, and libllama.so and libggml.so below {built}")
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "ik_llama.so"
        found = [f"-Wl,-rpath,{path.parent}" for path in shared if path]
        headers = [f"-I{built / name}" for name in HEADERS]
        command = [compiler.path, "-O2", "-std=c++17", "-shared", "-fPIC", *headers, str(SOURCE), "-o", str(made)]
        subprocess.run([*command, *map(str, shared), *found], check=True)
        library = ctypes.CDLL(str(made))
    library.ik_model.restype = library.ik_stream.restype = ctypes.c_void_p
    library.ik_feed.restype = ctypes.POINTER(ctypes.c_float)
    library.ik_model.argtypes = [ctypes.c_char_p, ctypes.c_bool]
    library.ik_stream.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_bool]
    library.ik_feed.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32), ctypes.c_int, ctypes.c_int]
    library.ik_rewind.argtypes = [ctypes.c_void_p, ctypes.c_int]
    return library
