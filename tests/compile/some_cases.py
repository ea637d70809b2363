"""`python tests/compile/some_cases.py TURN SHARE [WORD ...]`: run part of some batteries in the interpreter.

A third of the kernels run, another third each turn.

It needs a separate process, because a process that imported Triton to compile cannot interpret. It prints one failure
per line, and on stderr the time of each plan. WORDs select the plans whose label has them all.
"""

# ruff: noqa: E402, T201  (sets the path first; prints its findings)

from __future__ import annotations

import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import interpreted  # noqa: F401  (first: it decides that kernels are interpreted)
import numpy as np
import torch

from tests.compile.triton_kernels import DTYPES, PLANS


def main(turn: int, share: int, words: list[str]) -> None:
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    for number, plan in enumerate(PLANS):
        if (turn + number) % 3 == 0 and all(word in plan.label for word in words):
            started, round_ = time.monotonic(), turn // 3 + number
            dtype = DTYPES[round_ % 3]
            for failure in plan.failures(dtype, share, round_):
                print(failure, flush=True)
            print(f"{time.monotonic() - started:6.1f} s  {dtype}  {plan.label}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
