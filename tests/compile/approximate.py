"""`python tests/compile/approximate.py [WORD ...]`: fp32 batteries in the interpreter with a GPU's approximations.

The interpreter's exp2, rsqrt and quotients are exact. A GPU's have the errors of the PTX manual: 2^-22 (ex2.approx),
2^-22.9 (rsqrt.approx), two units in the last place (div.full). Here each result has the full error, up or down
depending on its bits. `tl.exp` is ex2.approx of x log2(e), rounded. WORDs select plans by label; failures are printed.
"""

# ruff: noqa: E402, T201  (sets the path first; prints its findings)

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import interpreted  # noqa: F401  (first: it decides that kernels are interpreted)
import numpy as np
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.compile.triton_kernels import PLANS

LOG2E = np.float32(1.4426950408889634)
EXP2, RSQRT, QUOTIENT = 2.0**-22, 2.0**-22.9, 2.0**-22


def astray(exact: np.ndarray, most: float) -> np.ndarray:
    """Return each fp32 value with this relative error, up or down depending on its bits."""
    if exact.dtype != np.float32:
        return exact
    mixed = np.ascontiguousarray(exact).view(np.uint32) * np.uint32(2_654_435_761)
    sign = np.where(mixed >> 31, 1.0, -1.0)
    return np.where(np.isfinite(exact), exact * (1 + sign * most), exact).astype(np.float32)


def exp2(values: np.ndarray) -> np.ndarray:
    exact = np.exp2(values)
    return np.where(values == np.floor(values), exact, astray(exact, EXP2))


_rsqrt, _divide = InterpreterBuilder.create_rsqrt, InterpreterBuilder.create_fdiv


def _divided(self: Any, left: Any, right: Any) -> Any:
    exact = _divide(self, left, right)
    return TensorHandle(astray(exact.data, QUOTIENT), exact.dtype)


def _rooted(self: Any, of: Any) -> Any:
    exact = _rsqrt(self, of)
    return TensorHandle(astray(exact.data, RSQRT), exact.dtype)


InterpreterBuilder.create_exp2 = lambda self, of: TensorHandle(exp2(of.data), of.dtype)
InterpreterBuilder.create_exp = lambda self, of: TensorHandle(exp2((of.data * LOG2E).astype(of.data.dtype)), of.dtype)
InterpreterBuilder.create_fdiv, InterpreterBuilder.create_rsqrt = _divided, _rooted


def main(words: list[str]) -> None:
    np.seterr(all="ignore")
    plans = [plan for plan in PLANS if any(word in plan.kernel for word in words)]
    for plan in plans:
        for failure in plan.failures("fp32", 1, 0):
            print(failure, flush=True)
    print(f"{len(plans)} plans", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
