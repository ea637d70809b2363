"""Test contests between arms with and without a layout: cold copies, bytes and memory."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from autosel.candidates.cpp.linear import lossless_12
from autosel.ops import OPS
from autosel.ops.attn import ragged_lengths
from autosel.race.contest import Contest, Entrant, SharedOperands
from autosel.race.judge import CLONE
from autosel.race.worker import RaceProcess, Workers, WorkerSeat
from autosel.tuning.contend import refuse_without_memory, with_roofline
from autosel.values import Layout, NativeRecipe, Prepared, Timing, Verdict

W = OPS["linear"].workload("bf16", {"M": 1, "N": 256, "K": 1024})
BYTES = 256 * 1024 * 2


def entrant(name: str, layout: Layout | None = None) -> Entrant:
    recipe = NativeRecipe(source="cpu/gemv.cpp", entry="gemv", layout=layout)
    return Entrant(candidate=name, op="linear", recipe=recipe, digest=name, knobs={}, writes_out=True)


def contest(*layouts: Layout | None) -> Contest:
    base = entrant("base")
    challengers = tuple(entrant(f"arm{i}", layout) for i, layout in enumerate(layouts))
    return Contest(
        workload=W, baseline=base, incumbent=base, challengers=challengers, margins={}, llc_bytes=10 * BYTES
    )  # fmt: skip


def test_there_are_enough_copies_for_prepared_weights_to_be_cold() -> None:
    plain, packed = contest(None), contest(None, lossless_12("w"))
    assert (plain.least_share, packed.least_share) == (1.0, 0.75)
    for c, copies in ((plain, 31), (packed, 41)):
        operands = SharedOperands(W, 1, c.llc_bytes, least_share=c.least_share)
        assert operands.copies == copies
        operands.close()


@pytest.mark.parametrize("claimed", [0.75, 0.1])
def test_the_ceiling_of_an_arm_with_a_layout_is_the_smallest_lossless_one(claimed: float) -> None:
    """Read at 12 bits per weight, 1.33 times the probe's rate is possible; without a layout it is not."""
    c = contest(None, replace(lossless_12("w"), share=claimed))
    workers = Workers(threads=1, rng=Random(1))
    seat = WorkerSeat(RaceProcess(workers), c, ["base", "arm0", "arm1", CLONE], None)
    assert [seat.moved_bytes(arm) for arm in seat.arms] == [BYTES, BYTES, BYTES * 3 // 4, BYTES]
    workers.close()


@pytest.mark.parametrize(
    ("batch", "traits", "read"),
    [(4, {"ragged": True}, float(ragged_lengths(4, 1024).sum()) / 4096), (1, {"window": 128}, 0.125), (1, {}, 1.0)],
    ids=["unequal lengths", "window", "all"],
)
def test_a_kernel_is_not_blamed_for_parts_of_a_cache_that_no_call_reads(
    batch: int, traits: dict[str, Any], read: float
) -> None:
    """At the rate of memory, it takes the time of the slots in reach, not that of the whole cache."""
    w = OPS["attn"].workload("bf16", {"B": batch, "Hq": 9, "Hkv": 3, "S": 1, "D": 64, "L": 1024}, **traits)
    base = replace(entrant("base"), op="attn")
    c = Contest(workload=w, baseline=base, incumbent=base, challengers=(), margins={}, llc_bytes=1 << 20)
    workers = Workers(threads=1, rng=Random(1))
    seat = WorkerSeat(RaceProcess(workers), c, ["base"], None)
    assert seat.moved_bytes("base") == pytest.approx(read * seat.operands.streamed_bytes, rel=0.05)
    workers.close()


@pytest.mark.parametrize(
    ("op", "dims", "window", "llc_mb", "cold"),
    [
        ("linear", {"M": 1, "N": 2048, "K": 2048}, 0, 32, True),
        ("linear", {"M": 1, "N": 192, "K": 576}, 0, 16, True),
        ("linear", {"M": 1, "N": 192, "K": 576}, 0, 32, False),  # 256 copies are 57 MB
        ("attn", {"B": 1, "Hq": 9, "Hkv": 3, "S": 1, "D": 64, "L": 4096}, 0, 32, True),
        ("attn", {"B": 1, "Hq": 9, "Hkv": 3, "S": 1, "D": 64, "L": 4096}, 128, 32, False),
        ("rope", {"M": 1, "Hq": 9, "Hkv": 3, "D": 64, "R": 64}, 0, 32, False),
    ],
)
def test_memory_limits_only_calls_that_three_caches_of_other_data_separate(
    op: str, dims: dict[str, int], window: int, llc_mb: int, cold: bool
) -> None:
    w = OPS[op].workload("bf16", dims, **({"window": window} if window else {}))
    operands = SharedOperands(w, 1, llc_mb << 20)
    assert operands.is_cold is cold
    operands.close()


@pytest.mark.parametrize(("traits", "outputs"), [({}, 1), ({"greedy": 1}, 0)], ids=["logits", "tokens"])
def test_results_that_a_bound_can_judge_are_compared_with_the_baselines_by_it(
    traits: dict[str, int], outputs: int
) -> None:
    """Logits have a bound, so that only those far from the baseline's need a check in float64; tokens have none."""
    operands = SharedOperands(OPS["lm_head"].workload("bf16", {"M": 1, "V": 640, "d": 64}, **traits), 1, 1 << 20)
    assert len(operands.largest_bounds(seed=1)) == outputs
    operands.close()


def test_prepared_weights_count_as_memory_of_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("autosel.tuning.contend._refuse", lambda need, *_: asked.append(need))
    for c in (contest(None), contest(lossless_12("w"))):
        refuse_without_memory([c])
    assert asked[1] - asked[0] == pytest.approx(0.75 * (BYTES + 4 * 10 * BYTES), rel=0.01)


def test_the_roofline_of_a_winner_with_a_layout_uses_the_bytes_that_it_reads() -> None:
    moved = OPS["linear"].bytes_moved(W)
    took = Timing(median_us=100.0, lo_us=99.0, hi_us=101.0, p95_us=120.0, min_us=98.0, samples=9)
    timed: dict[str, Any] = {"timings": {"arm0": took}, "read_bytes_per_s": moved / 100e-6}
    verdict = Verdict(outcome="promote", winner="arm0", reason="", effect=None, **timed)
    packed = Prepared(layout="lossless-12", version=3, bytes=BYTES * 3 // 4, plain_bytes=BYTES, seconds=0.1)
    assert with_roofline(verdict, W).roofline == pytest.approx(1.0)
    assert with_roofline(replace(verdict, prepared=packed), W).roofline == pytest.approx(0.75, rel=0.01)
