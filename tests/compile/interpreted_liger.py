"""Run liger-kernel's Triton kernels in Triton's interpreter, behind autosel's wrappers.

Loaded in a worker as `tests.compile.interpreted_liger:rope`. This module adds what a compiler does and the interpreter
does not: a float argument becomes an fp32 scalar; bf16 is added and multiplied in fp32 and rounded; a function of the
device's library is provided.
"""

from __future__ import annotations

from typing import Any

from tests.compile import interpreted  # first: after this import triton.jit interprets

# isort: split

import numpy as np
import triton.language as tl
from liger_kernel.ops import fused_add_rms_norm, rms_norm  # type: ignore[import-not-found,unused-ignore]
from liger_kernel.ops import geglu as gelu
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from autosel.candidates.libraries.liger import add_rmsnorm, geglu, rmsnorm, rope, swiglu

__all__ = ["add_rmsnorm", "geglu", "rmsnorm", "rope", "swiglu"]

_convert = interpreter._implicit_cvt


def _scalar(argument: Any) -> Any:
    if isinstance(argument, float):
        return tl.tensor(TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32)
    return _convert(argument)


def _rounded(name: str) -> Any:
    plain = getattr(InterpreterBuilder, name)

    def operation(self: Any, left: Any, right: Any) -> Any:
        if left.dtype.scalar != tl.bfloat16:
            return plain(self, left, right)
        wide = [TensorHandle(interpreted.widen(t.data), tl.float32) for t in (left, right)]
        return TensorHandle(interpreted.narrow(plain(self, *wide).data), tl.bfloat16)

    return operation


interpreter._implicit_cvt = _scalar
for _name in ("create_fadd", "create_fsub", "create_fmul"):
    setattr(InterpreterBuilder, _name, _rounded(_name))


def _elementwise(function: Any) -> Any:
    """Provide a function of the device's library for which the interpreter has no code."""

    def apply(x: Any) -> Any:
        return tl.tensor(TensorHandle(function(x.handle.data), x.handle.dtype), x.type)

    return apply


rms_norm.rsqrt = fused_add_rms_norm.rsqrt = _elementwise(lambda x: 1 / np.sqrt(x))
gelu.tanh = _elementwise(np.tanh)
