"""Run the PTX of Hopper's product, as compiled by nvcc, on this CPU, with TMA, mbarriers, clusters and wgmma.

By default a 48th of the cases of one build run, which change each day; --every-target runs all of all builds.
"""

from __future__ import annotations

import itertools
from functools import cache, partial

import pytest
import torch

from autosel.native import cutlass
from tests import drawn
from tests.compile import cuda_kernels
from tests.compile.cuda_kernels import failure
from tests.compile.cutlass_asked import Build, builds
from tests.compile.cutlass_builds import assembled, faults, recipe_of
from tests.compile.ptx_machine import HOPPER, Built, built
from tests.compile.test_emulated_cutlass import OP, cases, check_logits, grid_case

pytestmark = pytest.mark.skipif(bool(cutlass.why_not()), reason=cutlass.why_not())
PARTS = 48  # of the cases of a build, which take minutes; one part a day


@cache
def choices() -> list[Build]:
    return [b for b in builds() if b.source == "gemm_sm90"]


in_turns = pytest.mark.in_turns(choices, label=lambda b: b.label)


def product(build: Build) -> Built:
    return built(f"cutlass/{build.source}", *(f[2:] for f in recipe_of(build).flags if f.startswith("-D")))


def plans(build: Build) -> tuple[tuple[int, int, int], ...]:
    """Return split_k, sms, pdl: with more tiles than CTAs, and with CTAs without a tile."""
    wide = build.knobs["cluster"]
    splits = ((3, 6, 0), (1, 5 * wide, 0), (2, 4, 0)) if build.knobs["stream_k"] else ((1, 2 * wide, 1),)
    return ((1, 4 * wide, 0), *splits, (1, wide, 0))


def sides(build: Build) -> tuple[int, int]:
    """Return the rows and columns of the output that a cluster computes at a time."""
    k = build.knobs
    long, short = k["tile_m"] * k["cluster"], k["tile_n"]
    return (short, long) if k["swap"] else (long, short)


@pytest.mark.in_turns(choices, label=lambda b: b.label, days=2, shift=1)
def test_the_product_has_the_expected_machine_code(choice: Build) -> None:
    wrong = faults(choice, assembled(product(choice).text(), HOPPER))
    assert not wrong, "\n".join([choice.label, *wrong])


@pytest.mark.in_turns(choices, label=lambda b: b.label, days=3)
def test_the_product_meets_its_contract_in_every_case(choice: Build, request: pytest.FixtureRequest) -> None:
    parts = range(PARTS) if request.config.getoption("--every-target") else (drawn.turn() // len(choices()) % PARTS,)
    battery = zip(cases(choice.dtype), itertools.cycle(plans(choice)), strict=False)
    todays = (one for number, one in enumerate(battery) if number % PARTS in parts)
    assert cuda_kernels.faults(todays, partial(failure, product(choice).entry("gemm_sm90"))) == []


@in_turns
def test_many_tiles_of_which_the_last_are_ragged_are_each_computed_once(choice: Build) -> None:
    rows, columns = sides(choice)
    made = grid_case(choice.dtype, rows + 8 + 3, 2 * columns + 40, 72 + 64 * choice.knobs["stages"])
    for plan in plans(choice):
        assert failure(product(choice).entry("gemm_sm90"), made, plan) is None


@in_turns
def test_the_order_in_which_copies_and_products_end_does_not_change_a_bit(choice: Build) -> None:
    inputs, made = OP.inputs(OP.workload(choice.dtype, {"M": 9, "N": 136, "K": 392}), 4), product(choice)
    results = []
    for plan in plans(choice)[:2]:
        for _ in range(6):  # early, late and mixed, forwards and backwards
            y = torch.full((9, 136), float("nan"), dtype=inputs["x"].dtype)
            made.entry("gemm_sm90")(inputs["x"], inputs["w"], None, None, y, *plan)
            results.append((plan, y))
        assert all(torch.equal(y, results[-1][1]) for p, y in results if p == plan)


@in_turns
def test_logits_are_the_bits_of_the_projection(choice: Build) -> None:
    made = product(choice)
    check_logits(made.entry("gemm_sm90"), made.entry("lm_head_sm90"), choice.dtype, *plans(choice)[0])


@in_turns
def test_the_product_has_no_races(choice: Build) -> None:
    """Run more tiles than CTAs, so that a ring's slots are reused."""
    rows, columns = sides(choice)
    device, depth = product(choice), 72 + 64 * choice.knobs["stages"]
    inputs = OP.inputs(OP.workload(choice.dtype, {"M": rows + 11, "N": columns + 40, "K": depth}), 4)
    y = torch.full((rows + 11, columns + 40), float("nan"), dtype=inputs["x"].dtype)
    for plan in plans(choice):
        for _ in range(3):
            with device.races():
                device.entry("gemm_sm90")(inputs["x"], inputs["w"], None, None, y, *plan)
