"""Kernels that an adversary would write are refused by the whole array of their op; a quarter of them each day."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from autosel import fingerprint
from autosel.ops import OPS
from autosel.parity.check import Proof, Prover, Terms
from autosel.testing.mutants.trial import plain_workload
from autosel.values import Failed, Parity
from tests import drawn
from tests.cpu.planting import proof

pytestmark = pytest.mark.usefixtures("preforked")

WRONG = {
    "linear": (
        "linear_ends_early_after_whole_vectors", "linear_adds_bias_before_a_rounding_in_odd_rows",
        "linear_in_halves_of_half_precision", "linear_keeps_a_panel_of_the_largest_shape",
        "linear_reads_a_pair_twice", "linear_saturates_as_fp16", "linear_drops_bias_in_a_corner",
        "linear_takes_scales_of_the_rest_as_positive", "linear_keeps_weights_by_the_first_codes",
    ),
    "attn": (
        "attn_drops_a_key_that_ends_a_tile", "attn_of_one_key_is_nothing", "attn_groups_by_powers_of_two",
        "attn_caps_what_is_masked", "attn_scales_queries_in_their_dtype", "attn_is_causal_by_the_longest",
        "attn_counts_windows_from_the_longest", "attn_shares_lengths_beyond_the_eighth",
        "attn_of_equal_lengths_is_dense", "attn_plans_by_tiles",
    ),
    "paged_attn": (
        "paged_without_page_0", "paged_with_a_table_of_its_own_width", "paged_window_from_the_page",
        "paged_keeps_its_plan_while_lengths_stay",
    ),
    "prefill_attn": ("prefill_window_one_wider_beyond_a_tile", "prefill_deals_heads_in_turn"),
    "kv_append": (
        "append_quietens_nan", "append_takes_the_first_page_for_all", "append_swaps_where_one_head_takes_many",
        "append_never_writes_the_first_slot_of_a_later_page", "append_swaps_in_a_corner",
    ),
    "rmsnorm": (
        "rmsnorm_with_eps_outside", "rmsnorm_by_the_width_before", "rmsnorm_clips_squares",
        "rmsnorm_raises_tiny_eps", "rmsnorm_has_shares_for_three", "rmsnorm_keeps_roots_of_known_rows",
        "rmsnorm_without_eps_in_inference_mode",
    ),
    "add_rmsnorm": ("added_reads_what_it_has_written", "added_to_itself_counts_once"),
    "rope": (
        "rope_takes_the_rest_from_q", "rope_wraps_positions_at_a_million", "rope_leaves_the_last_odd_pair",
        "rope_with_tables_a_row_short",
    ),
    "swiglu": ("swiglu_cuts_off_far_gates", "swiglu_skips_shut_gates", "swiglu_of_itself"),
    "geglu": ("geglu_takes_tanh_for_the_tail",),
    "norm_qkv": ("norm_qkv_of_the_first_row", "norm_qkv_repeats_a_column"),
    "gate_up": (
        "gate_up_with_another_activation_in_the_tail", "gate_up_swaps_the_last_odd_column",
        "gate_up_doubles_the_offset_in_a_corner",
    ),
    "lm_head": ("head_prefers_the_last_of_equals", "head_starts_from_zero"),
    "sample": ("sample_penalises_each_mention", "sample_stops_at_padding", "sample_rewards_nothing",
        "sample_divides_negative_logits", "sample_takes_top_p_of_all", "sample_looks_at_the_first_half",
        "sample_shares_top_p_beyond_the_eighth",),
}  # fmt: skip
DAYS = 8  # a day's share takes 20 s
KERNELS = drawn.share([(op, function) for op, functions in WRONG.items() for function in functions], DAYS)
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

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(prove, (KERNELS[::2], KERNELS[1::2]))
    return dict(zip([f for _, f in KERNELS[::2] + KERNELS[1::2]], one + other, strict=True))


@pytest.mark.parametrize("function", [function for _, function in KERNELS])
def test_an_adversarial_kernel_is_refused(verdicts: dict[str, Parity], function: str) -> None:
    found = verdicts[function]
    assert isinstance(found, Failed), found
    assert found.check not in ("raised", "crash", "timeout"), found
