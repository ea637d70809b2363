"""Kernels that an adversary would write are refused by the whole array of their op; a quarter of them each day."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autosel import fingerprint
from autosel.ops import OPS
from autosel.parity.check import Proof, Prover, Terms
from autosel.testing.mutants.trial import plain_workload
from autosel.values import Failed, Parity
from tests import drawn
from tests.cpu import adversarial
from tests.cpu.planting import in_two, kernels_of, proof

pytestmark = pytest.mark.usefixtures("preforked")

DAYS = 8  # a day's share takes 20 s
KERNELS = drawn.share(kernels_of(adversarial), DAYS)
INT8 = "int8-row"
IN_INT8 = ("linear_takes_scales_of_the_rest_as_positive", "linear_keeps_weights_by_the_first_codes")


def proof_of(op: str, function: str) -> Proof:
    dtype = {"linear_in_halves_of_half_precision": "fp16", "gate_up_with_another_activation_in_the_tail": "fp32"}
    w = plain_workload(OPS[op], dtype.get(function, "bf16"), 1)
    w = replace(w, traits=(("weight", INT8),)) if function in IN_INT8 else w
    found = proof(function, w, module="adversarial")
    if function in IN_INT8:
        found.candidate.formats = frozenset({INT8})
    return found


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Parity]:
    """Return all verdicts, from two pairs of workers; every trait is varied, but for kernels of one format."""
    fp = fingerprint.take("cpu")

    def prove(some: list[tuple[str, str]]) -> list[Parity]:
        with Prover(fp, Terms(), threads=1) as own, Prover(fp, Terms(traits=True), threads=1) as varied:
            return [(own if f in IN_INT8 else varied).prove(proof_of(op, f)) for op, f in some]

    return {function: verdict for (_, function), verdict in in_two(prove, KERNELS)}


@pytest.mark.parametrize("function", [function for _, function in KERNELS])
def test_an_adversarial_kernel_is_refused(verdicts: dict[str, Parity], function: str) -> None:
    found = verdicts[function]
    assert isinstance(found, Failed), found
    assert found.check not in ("raised", "crash", "timeout"), found
