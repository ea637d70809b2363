"""`python tests/compile/compiled_by.py CC`: compile every Triton kernel for one known device of that compute
capability, with the first Triton on the path; print its version, then one fault per line.

It uses the first shape of each op, in bf16, with the device's knobs.
"""

# ruff: noqa: T201  (prints its findings)

from __future__ import annotations

import sys

import triton

from tests.compile.aot import problems
from tests.compile.triton_kernels import KERNELS, SHAPES, TARGETS
from tests.operands import kind_of


def main(major: int, minor: int) -> None:
    print(triton.__version__)
    device = TARGETS[major, minor]
    for name, kernel in KERNELS.items():
        try:
            found = problems(kernel, device, SHAPES[kind_of(kernel)][:1], ("bf16",), spills=False)
        except Exception as error:  # any error of a compiler is the result
            found = [f"{type(error).__name__}: {error}"]
        for problem in found:
            print(f"{name}: {problem}", flush=True)


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1].split(".")))
