"""Test one case with several builds of a kernel. The reference is computed once, because it takes longer than the
kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from autosel.ops.compare import compare
from autosel.ops.contract import Case, Inputs, Mismatch, Op

Run = Callable[[Inputs], Sequence[Tensor]]  # of separate inputs, which it may write to


def mismatches(
    op: Op, made: Case, seed: int, runs: Mapping[str, Run], baseline: Sequence[Tensor] | None = None
) -> Iterator[tuple[str, Mismatch]]:
    """Run each build on the case and yield those whose results break the op's contract."""
    inputs = made.make(seed)
    judge = judge_of(op, inputs, baseline)
    spare = [inputs] if type(op).verify is Op.verify else []  # that judge has its reference, and reads them no more
    for name, run in runs.items():
        found = judge(run(spare.pop() if spare else made.make(seed)))
        if found is not None:
            yield name, found


def judge_of(
    op: Op, inputs: Inputs, baseline: Sequence[Tensor] | None
) -> Callable[[Sequence[Tensor]], Mismatch | None]:
    """Return `op.verify` for these inputs; an op with its own judgement (ties, supports) is called each time."""
    if type(op).verify is not Op.verify:
        return lambda got: _wrong(op.verify(inputs, got, baseline))
    reference = op.reference(inputs)
    bound = op.bound(inputs, reference)
    return lambda got: _wrong(compare(got, reference, bound, baseline))


def _wrong(found: object) -> Mismatch | None:
    return found if isinstance(found, Mismatch) else None
