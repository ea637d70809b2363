"""Test that right kernels with unusual methods pass parity: no bound or check treats a method as a fault."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from autosel.ops import OPS
from autosel.parity.check import Proof, Prover, Terms
from autosel.testing.mutants.trial import plain_workload
from autosel.tuning.prove import FIRST_PAIRS
from autosel.values import Parity, Passed
from tests import drawn
from tests.cpu.planting import proof

pytestmark = pytest.mark.usefixtures("preforked")

WAYS = {
    "linear": (
        "linear_split_k", "linear_kahan", "linear_pairwise", "linear_in_double", "linear_backwards",
        "linear_transposed", "linear_threads_per_call", "linear_row_by_row",
    ),
    "attn": (
        "attn_tiles_of_7", "attn_tiles_of_64_backwards", "attn_by_powers_of_two", "attn_in_double",
        "attn_head_by_head", "attn_split_over_keys",
    ),
    "paged_attn": ("paged_by_pages", "paged_in_double"),
    "prefill_attn": ("prefill_query_by_query", "prefill_by_tiles"),
    "kv_append": ("append_backwards", "append_as_bits"),
    "rmsnorm": ("rmsnorm_newton", "rmsnorm_by_halves", "rmsnorm_element_of_a_vector", "rmsnorm_flushing"),
    "add_rmsnorm": ("added_in_double", "added_row_by_row"),
    "rope": ("rope_with_tables", "rope_in_double"),
    "swiglu": ("swiglu_by_powers_of_two", "swiglu_in_double", "swiglu_columns_backwards"),
    "geglu": ("geglu_by_other_functions", "geglu_row_by_row"),
    "norm_qkv": ("norm_qkv_unrounded", "norm_qkv_in_parts"),
    "gate_up": ("gate_up_as_one_product", "gate_up_interleaved"),
    "lm_head": ("head_by_blocks", "head_in_double"),
    "sample": ("sample_row_by_row", "sample_all_rows"),
}  # fmt: skip
ALLOCATING = (
    "linear_row_by_row", "paged_in_double", "rmsnorm_element_of_a_vector", "added_row_by_row", "rope_in_double",
    "swiglu_in_double", "gate_up_interleaved", "head_in_double", "sample_all_rows",
)  # fmt: skip
ALL = [(op, function) for op, functions in WAYS.items() for function in functions]
KERNELS = drawn.share(ALL, days=6)


def proof_of(op: str, function: str, seed: int) -> Proof:
    dtype = "fp32" if function in ("linear_kahan", "rmsnorm_newton", "attn_tiles_of_7") else "bf16"
    workload = plain_workload(OPS[op], dtype, seed)
    return proof(function, workload, module="unusual", writes_out=function not in ALLOCATING)


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Parity]:
    """Return all verdicts, from two workers."""

    def prove(some: list[tuple[str, str]]) -> list[Parity]:
        with Prover(None, Terms(pairs=FIRST_PAIRS), threads=1) as prover:
            return [prover.prove(proof_of(*kernel, seed=1)) for kernel in some]

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(prove, (KERNELS[::2], KERNELS[1::2]))
    return dict(zip([f for _, f in KERNELS[::2] + KERNELS[1::2]], one + other, strict=True))


@pytest.mark.parametrize("function", [function for _, function in KERNELS])
def test_an_unusual_right_kernel_passes(verdicts: dict[str, Parity], function: str) -> None:
    found = verdicts[function]
    assert isinstance(found, Passed), found
    assert found.pairs > 10


def test_every_op_has_two_and_there_are_thirty() -> None:
    assert set(WAYS) == set(OPS)
    assert all(len(functions) >= 2 for functions in WAYS.values())
    assert len(ALL) >= 30
