"""Run autosel's Triton kernels in Triton's interpreter, as candidates: `interpreted:gemv` is kernels/triton/gemv.py on
a CPU.

Imported first in a worker, because `triton.jit` compiles or interprets depending on the time of Triton's import.

The interpreter (3.6 to 3.9) keeps bf16 as uint16 and e4m3 as uint8, and calculates with these: `dot` multiplies the bit
patterns, a conversion to bf16 truncates the low half and loses subnormals. Three functions are replaced by a GPU's
behaviour. The other replacements are for speed: operands are not copied, and work that is equal for every operation is
done once.
"""

from __future__ import annotations

import math
import os
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

assert interpreter is not None


def widen(bits: np.ndarray) -> np.ndarray:
    """Convert bf16 in uint16 to fp32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """Convert fp32 to bf16 in uint16, to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


# The number of each byte, because the interpreter treats e4m3 as uint8.
E4M3 = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn).float().numpy()


def _cast(self: Any, source: Any, target: Any) -> Any:
    have, want = source.dtype.scalar, target.scalar
    if have == want:
        return TensorHandle(source.data, want)
    data = widen(source.data) if have == tl.bfloat16 else source.data
    if have == tl.float8e4nv:
        data = E4M3[source.data]
    if want == tl.bfloat16:
        return TensorHandle(narrow(data), want)
    with np.errstate(over="ignore", invalid="ignore"):
        return TensorHandle(data.astype(interpreter._get_np_dtype(target)), want)


def _dot(self: Any, a: Any, b: Any, d: Any, precision: Any, most: Any) -> Any:
    left, right = (widen(t.data) if t.dtype.scalar == tl.bfloat16 else t.data.astype(np.float32) for t in (a, b))
    with np.errstate(over="ignore", invalid="ignore"):
        return TensorHandle(np.matmul(left, right) + d.data, d.dtype.scalar)


InterpreterBuilder.cast_impl = _cast
InterpreterBuilder.create_fp_to_fp = lambda self, source, target, rounding: _cast(self, source, target)
InterpreterBuilder.create_dot = _dot


# --- errors that only a compiler for a GPU reports -------------------------------------------------------------------

_run = interpreter.GridExecutor.__call__


def _launch(self: Any, *arguments: Any, **options: Any) -> None:
    warps = options.get("num_warps", 4)
    if warps not in (1, 2, 4, 8, 16, 32):
        raise ValueError(f"num_warps = {warps}: Triton compiles for a power of two, up to 32")
    _run(self, *arguments, **options)


interpreter.GridExecutor.__call__ = _launch


# --- speed ------------------------------------------------------------------------------------------------------------

_patch = interpreter._patch_lang


@cache
def _patched_once() -> Any:
    """Replace the language's functions by interpreted ones once, at the first launch."""
    scope = _patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    scope._changes.clear()
    # Triton 3.6 converts an array of one element to a number, which recent NumPy refuses.
    tl.tensor.__index__ = lambda self: int(self.handle.data.item())
    return scope


@cache
def _shape(shape: tuple[int, ...]) -> tuple[Any, Any]:
    return tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])


def _tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _shape(tuple(type.shape) if type.is_block() else ())


interpreter.GridExecutor._init_args_hst = lambda self, arguments, options: (arguments, options)
interpreter.GridExecutor._restore_args_dev = lambda self, *_: None
interpreter._patch_lang = lambda _: _patched_once()
tl.tensor.__init__ = _tensor


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    module, _, function = name.partition("__")
    return getattr(import_module(f"autosel.triton_kernels.{module}"), function or module)
