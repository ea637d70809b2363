"""Run all mutants: of every op, including faults in the 10,000th call, and of our sources."""

from __future__ import annotations

import pytest

from autosel.fingerprint import take
from autosel.ops import OPS
from autosel.ops.contract import Op
from autosel.testing.mutants.reverse import reverse
from autosel.testing.mutants.score import score
from autosel.testing.mutants.source import KERNELS, score_source

SEED = 26


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_every_mutant_of_an_op_is_killed_or_a_right_kernel(op: Op) -> None:
    found = score(op, SEED, late=True)
    assert found.survived == []
    assert len(found.equivalent) <= 0.05 * found.mutants


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.source)
def test_every_fault_in_the_source_of_a_kernel_is_killed_or_makes_a_right_one(kernel) -> None:
    found = score_source(kernel, take("cpu"), SEED)
    assert found.survived == []
    assert found.mutants >= 9


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_without_a_domain_some_mutant_survives(op: Op) -> None:
    assert reverse(op, SEED).lacking == []
