"""Test the planted kernels: each known way to fool a benchmark or a check is a real kernel here, and the intended
check catches it, half of them each day. Right kernels, even unusual ones, pass; a third of them each day.

A plant is caught by parity (this file), by the race or the worker (the test it names), or on a GPU (tests/gpu).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from autosel.ops import OPS
from autosel.parity.check import Proof, Prover, Terms
from autosel.values import Failed, Parity, Passed, Workload
from tests import drawn
from tests.cpu.planting import ATTN, HEADS, LINEAR, RMSNORM, RMSNORM_FP32, WIDE, functional, in_two, proof

pytestmark = pytest.mark.usefixtures("preforked")

TESTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Kernel:
    """One planted kernel: any of `checks` must catch it; `case` is in the name of the case."""

    proof: Proof
    checks: tuple[str, ...]
    case: str = ""


@dataclass(frozen=True)
class Plant:
    """A known trick; `caught_by` are tests of other files that catch it, as file::function."""

    what: str
    kernels: tuple[Kernel, ...]
    caught_by: tuple[str, ...]


def plant(what: str, *kernels: Kernel, caught_by: tuple[str, ...] = ()) -> Plant:
    return Plant(what, kernels, caught_by)


def wrong(function: str, *checks: str, case: str = "", workload: Workload = RMSNORM) -> Kernel:
    return Kernel(proof(function, workload), checks, case)


def allocating(function: str, *checks: str) -> Kernel:
    return Kernel(functional(function), checks)


BURST = "cpu/test_race_bench_plants.py::test_work_left_out_of_a_burst_shows_in_an_unannounced_call_on_new_contents"
PLANTS: Mapping[int, Plant] = {
    1: plant("zeros", wrong("native_zeros", "elements")),
    2: plant("an output left untouched", wrong("native_nothing", "unwritten")),
    3: plant(
        "a last tile left unwritten",
        wrong("leaves_the_tail", "unwritten"),
        wrong("leaves_the_last_row", "unwritten"),
        wrong("native_without_last_tile", "unwritten"),
    ),
    4: plant(
        "the last K or key skipped",
        wrong("forgets_the_last_k", "elements", case="needle", workload=LINEAR),
        wrong("forgets_the_last_key", "elements", "rmse", case="needle at the last", workload=ATTN),
    ),
    5: plant(
        "a mask off by one", caught_by=("cpu/test_ops_contract_variants.py::test_a_wrong_way_is_refused_by_some_case",)
    ),
    6: plant(
        "sums kept in bf16",
        wrong("sums_products_in_bf16", "elements", workload=LINEAR),
        wrong("native_sums_in_bf16", "elements"),
    ),
    7: plant("weights cut down to fp8", wrong("stores_weights_in_fp8", "elements", workload=LINEAR)),
    8: plant("a scale 0.4 % too large", wrong("a_bit_too_large", "elements", "bias")),
    9: plant("truncation for rounding", wrong("native_truncates", "elements", "rmse", "bias")),
    10: plant("NaN swallowed", wrong("native_swallows_nan", "nan_pattern")),
    11: plant(
        "a softmax that subtracts no maximum", wrong("subtracts_no_maximum", "nan_pattern", "elements", workload=ATTN)
    ),
    12: plant(
        "garbage for subnormals",
        wrong("leaves_eps_out", "elements", case="subnormal"),
        wrong("flushes_subnormals", "global_state"),
    ),
    13: plant(
        "a write past the end",
        wrong("writes_past_the_end", "guards"),
        wrong("writes_before_the_start", "guards"),
        wrong("writes_into_the_gaps", "guards"),
        wrong("native_past_the_end", "guards"),
    ),
    14: plant(
        "a masked read past the end",
        wrong("reads_past_the_end", "outside_reads"),
        wrong("native_masked_by_product", "outside_reads"),
    ),
    15: plant(
        "strides ignored",
        wrong("ignores_strides", "outside_reads", case="strided rows"),
        wrong("native_without_strides", "outside_reads", case="strided rows"),
    ),
    16: plant(
        "alignment assumed",
        wrong("native_aligned", "elements", "nan_pattern", "outside_reads"),
        wrong("native_aligned_trap", "crash"),
    ),
    17: plant(
        "an index of 32 bits", wrong("native_int32_index", "crash", "elements", "outside_reads", case="rows beyond")
    ),
    18: plant(
        "a missing barrier",
        wrong("native_without_barrier", "repeat", "elements", "outside_reads", "nan_pattern", "rmse", "bias"),
        caught_by=("gpu/test_plants.py::test_a_missing_barrier_is_found_by_racecheck",),
    ),
    19: plant(
        "a sum in the order of arrival, undeclared",
        wrong("spreads_a_little", "repeat", workload=RMSNORM_FP32),
        wrong("flips_a_coin", "repeat"),
    ),
    20: plant("an input changed", wrong("changes_its_weight", "inputs"), wrong("native_normalises_in_place", "inputs")),
    21: plant("inputs zeroed, so that zeros look right", wrong("zeroes_everything", "inputs")),
    22: plant(
        "a result remembered by address",
        wrong("remembers_by_address", "anti_cache", "outside_reads", "elements"),
        wrong("packs_weights_by_address", "anti_cache", "elements", workload=LINEAR),
    ),
    23: plant(
        "a result remembered by content", wrong("remembers_by_content", "elements", "anti_cache"), caught_by=(BURST,)
    ),
    24: plant("the work of many calls done in one", wrong("works_once_in_eight", "unwritten"), caught_by=(BURST,)),
    25: plant("one output buffer for all calls", allocating("one_static_buffer", "retention")),
    26: plant(
        "a side stream that is never joined",
        caught_by=(
            "gpu/test_plants.py::test_work_left_on_a_side_stream_is_found_by_a_delayed_input",
            "gpu/test_plants.py::test_work_left_on_a_side_stream_is_missing_from_the_graph",
        ),
    ),
    27: plant(
        "a host thread that works later",
        wrong("native_works_later", "unwritten", "repeat"),
        wrong("writes_late", "retention", "guards", "inputs", "repeat", "outside_reads"),
    ),
    28: plant("a tensor subclass that computes when looked at", allocating("returns_a_subclass", "result")),
    29: plant(
        "clocks patched",
        wrong("slows_the_clock", "global_state", case="process-wide state"),
        caught_by=("cpu/test_race_bench_plants.py::test_a_patched_clock_is_not_the_one_that_is_read",),
    ),
    30: plant("a hunt for the expected tensor in memory", wrong("hunts_for_the_answer", "unwritten", "elements")),
    31: plant(
        "a slow warm-up, to cut the samples",
        caught_by=("cpu/test_race_bench_plants.py::test_the_plan_follows_the_baselines_times",),
    ),
    32: plant(
        "lines pinned in the L2",
        caught_by=("gpu/test_plants.py::test_lines_pinned_in_the_l2_do_not_survive_the_reset",),
    ),
    33: plant(
        "special cases for known shapes or seeds",
        wrong("wrong_at_one_width", "elements", case="d127"),
        wrong("right_at_its_own_width", "elements"),
        wrong("precomputed", "elements"),
    ),
    34: plant(
        "the baseline, called silently",
        caught_by=("cpu/test_race_bench_plants.py::test_the_baseline_under_another_name_gains_nothing",),
    ),
    35: plant(
        "residue billed to the rival",
        caught_by=("cpu/test_race_bench_plants.py::test_work_that_an_arm_leaves_running_is_not_timed_with_its_rival",),
    ),
    36: plant(
        "process-wide state changed",
        wrong("sets_threads", "global_state"),
        wrong("seeds_the_generator", "global_state"),
        wrong("allows_tf32", "global_state"),
    ),
    37: plant("a leak", wrong("leaks", "leak"), wrong("leaves_files_open", "leak")),
    38: plant(
        "a hang or a crash",
        wrong("crashes_on_nan", "crash", case="nan"),
        caught_by=(
            "cpu/test_parity.py::test_a_hang_ends_at_the_deadline",
            "cpu/test_pipeline_faults.py::test_every_fault_is_contained_and_its_cause_stored",
        ),
    ),
    39: plant(
        "a forged reply",
        wrong("forges_its_reply", "unwritten"),
        caught_by=("cpu/test_workers.py::test_a_worker_that_replies_slowly_or_invalidly_or_not_at_all_is_ended",),
    ),
    40: plant(
        "state kept for one thread",
        wrong("native_set_up_on_one_thread", "other_thread"),
        wrong("remembers_in_other_threads", "other_thread"),
    ),
    41: plant("one scratch buffer for all callers", wrong("native_static_scratch", "at_once")),
    42: plant("work divided by the first number of threads", wrong("shares_of_the_first_count", "thread_count")),
    43: plant("a storage's start for a tensor's", wrong("reads_from_the_storages_start", "one_storage")),
    44: plant("a result that is remembered", allocating("returns_what_it_remembers", "aliasing")),
    45: plant("new memory taken for zero", wrong("native_sums_into_new_memory", "elements")),
    46: plant(
        "one row of a large result",
        wrong("drops_one_output", "elements", case="at M1 N6000", workload=WIDE),
        wrong("one_output_a_little_off", "elements", case="at M1 N6000", workload=WIDE),
        wrong("forgets_a_head", "elements", case="at B1 Hq48", workload=HEADS),
    ),
}
# Beyond the list: forms of a result, and exceptions.
MORE = (
    wrong("returns_none", "result"),
    wrong("returns_a_copy", "result"),
    allocating("returns_wider", "result"),
    allocating("returns_a_row_too_few", "result"),
    allocating("returns_on_its_side", "result"),
    wrong("raises", "raised"),
    wrong("raises_at_one_width", "raised"),
)
RIGHT = (
    proof("right"),
    proof("right", RMSNORM_FP32),
    functional("allocates"),
    proof("returns_a_list"),
    proof("writes_in_two_halves"),
    proof("keeps_a_workspace_a_thread"),
    proof("spreads_a_little", deterministic=False),
    proof("native_right"),
    proof("native_two_threads"),
    proof("native_scratch_a_thread"),
    proof("calls_the_baseline"),
)
KERNELS = [kernel for plant in PLANTS.values() for kernel in plant.kernels] + list(MORE)
EACH_DAY = {"wrong_at_one_width", "sets_threads", "seeds_the_generator", "slows_the_clock", "crashes_on_nan"}
OTHERS = [kernel for kernel in KERNELS if kernel.proof.digest not in EACH_DAY]
TODAY = [k for k in KERNELS if k.proof.digest in EACH_DAY] + drawn.share(OTHERS, days=4)
RIGHT_TODAY = drawn.share(RIGHT, days=6)  # a right kernel runs the whole proof


def name_of(p: Proof) -> str:
    return f"{p.digest} {p.workload.dtype}{'' if p.candidate.deterministic else ' declared'}"


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Parity]:
    """Return all verdicts, from two series of workers; a worker is replaced if a kernel kills or changes it."""
    proofs = [k.proof for k in TODAY] + RIGHT_TODAY

    def prove(some: list[Proof]) -> list[Parity]:
        with Prover(None, Terms(), threads=1) as prover:
            return [prover.prove(p) for p in some]

    return {name_of(p): verdict for p, verdict in in_two(prove, proofs)}


@pytest.mark.parametrize("kernel", TODAY, ids=lambda k: name_of(k.proof))
def test_a_wrong_kernel_is_caught_by_the_intended_check(verdicts: dict[str, Parity], kernel: Kernel) -> None:
    found = verdicts[name_of(kernel.proof)]
    assert isinstance(found, Failed)
    assert found.check in kernel.checks, found
    assert kernel.case in found.case, found
    assert found.reason


@pytest.mark.parametrize("right", RIGHT_TODAY, ids=name_of)
def test_an_unusual_right_kernel_passes(verdicts: dict[str, Parity], right: Proof) -> None:
    found = verdicts[name_of(right)]
    assert isinstance(found, Passed), found
    assert found.cases > 30
    assert 0 < found.worst <= 1


def test_every_plant_is_caught_somewhere() -> None:
    assert sorted(PLANTS) == list(range(1, 47))
    for number, plant in PLANTS.items():
        assert plant.kernels or plant.caught_by, f"nothing catches plant {number}, {plant.what}"
        for where in plant.caught_by:
            file, _, test = where.partition("::")
            assert f"def {test}(" in (TESTS / file).read_text(), f"plant {number}: there is no {where}"


def test_the_reason_names_the_element_and_the_bound(verdicts: dict[str, Parity]) -> None:
    found = verdicts["wrong_at_one_width bf16"]
    assert isinstance(found, Failed)
    assert {"index", "got", "reference", "allowed"} <= set(found.evidence)


def test_a_failed_hostile_case_tells_its_shape(verdicts: dict[str, Parity]) -> None:
    """Select failures by the names of cases; checks of habits and of the full size have other names."""
    cases = {case.name: case for case in OPS["rmsnorm"].cases(RMSNORM)}
    bf16 = [v for name, v in verdicts.items() if name.endswith(" bf16") and isinstance(v, Failed)]
    failed = [v for v in bf16 if v.check == "elements" and v.case in cases]
    assert failed
    assert [v.evidence["shape"] for v in failed] == [cases[v.case].workload.shape_text for v in failed]


@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("sets_threads", "torch threads"),
        ("seeds_the_generator", "torch random state"),
        ("slows_the_clock", "functions"),
    ],
)
def test_a_changed_process_is_reported_and_not_blamed_on_the_next_candidate(
    verdicts: dict[str, Parity], function: str, what: str
) -> None:
    found = verdicts[f"{function} bf16"]
    assert isinstance(found, Failed)
    assert set(found.evidence) == {what}


def test_a_crash_is_recorded_and_the_next_proof_gets_a_new_worker(verdicts: dict[str, Parity]) -> None:
    names = list(verdicts)
    crashed = verdicts["crashes_on_nan bf16"]
    assert isinstance(crashed, Failed)
    assert crashed.evidence["cause"] == "SIGSEGV"
    following = verdicts[names[names.index("crashes_on_nan bf16") + 1]]
    assert not isinstance(following, Failed) or following.check != "crash"
