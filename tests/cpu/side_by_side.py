"""Test one case with several builds of a kernel. The reference is computed once, because it takes longer than the
kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from autosel.ops.contract import Case, Inputs, Mismatch, Op

Run = Callable[[Inputs], Sequence[Tensor]]  # of separate inputs, which it may write to


def mismatches(
    op: Op, made: Case, seed: int, runs: Mapping[str, Run], baseline: Sequence[Tensor] | None = None
) -> Iterator[tuple[str, Mismatch]]:
    """Run each build on the case and yield those whose results break the op's contract."""
    inputs = made.make(seed)
    own = op.own_judge(inputs)
    judge = own or op.judge(inputs)
    spare = [] if own else [inputs]  # a bound has its reference, and reads them no more
    for name, run in runs.items():
        found = judge(run(spare.pop() if spare else made.make(seed)), baseline)
        if isinstance(found, Mismatch):
            yield name, found
