"""Test that right kernels with unusual methods pass parity: no bound or check treats a method as a fault."""

from __future__ import annotations

from collections import Counter

import pytest

from autosel.ops import OPS
from autosel.parity.check import Proof, Prover, Terms
from autosel.testing.mutants.trial import plain_workload
from autosel.tuning.prove import FIRST_PAIRS
from autosel.values import Parity, Passed
from tests import drawn
from tests.cpu import unusual
from tests.cpu.planting import in_two, kernels_of, proof

pytestmark = pytest.mark.usefixtures("preforked")

ALL = kernels_of(unusual)
KERNELS = drawn.share(ALL, days=6)


def proof_of(op: str, function: str, seed: int) -> Proof:
    dtype = "fp32" if function in ("linear_kahan", "rmsnorm_newton", "attn_tiles_of_7") else "bf16"
    workload = plain_workload(OPS[op], dtype, seed)
    return proof(function, workload, module="unusual", writes_out=function not in unusual.ALLOCATING)


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Parity]:
    """Return all verdicts, from two workers."""

    def prove(some: list[tuple[str, str]]) -> list[Parity]:
        with Prover(None, Terms(pairs=FIRST_PAIRS), threads=1) as prover:
            return [prover.prove(proof_of(*kernel, seed=1)) for kernel in some]

    return {function: verdict for (_, function), verdict in in_two(prove, KERNELS)}


@pytest.mark.parametrize("function", [function for _, function in KERNELS])
def test_an_unusual_right_kernel_passes(verdicts: dict[str, Parity], function: str) -> None:
    found = verdicts[function]
    assert isinstance(found, Passed), found
    assert found.pairs > 10


def test_every_op_has_two_and_there_are_thirty() -> None:
    counts = Counter(op for op, _ in ALL)
    assert set(counts) == set(OPS)
    assert min(counts.values()) >= 2
    assert len(ALL) >= 30
