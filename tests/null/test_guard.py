"""Test the guard with Python functions that have a known fault, on a clock that only they advance."""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from autosel import dispatch, ops, settings
from autosel.candidates import registry
from autosel.candidates.load import load
from autosel.dispatch.board import Board, this_device
from autosel.guard import NEVER, Held, Policy, Subject, Watch
from autosel.guard.detector import MIN_DWELL_S, Detector
from autosel.guard.rate import CANARY, FIRST_NS, FRESH_CHECKS, FRESH_FACTOR, LEAST, MAX_SHARE, CheckRate
from autosel.ledger import faults
from autosel.ledger.faults import Fault
from autosel.values import Arm, Knobs, PythonRecipe, Workload, digest
from tests.null.test_dispatch import User, arms_of_module, decision, fault_of, publish, small

RMS, ATTN, KV = ops.find("rmsnorm"), ops.find("attn"), ops.find("kv_append")
X, WEIGHT = torch.randn(4, 64), torch.ones(64)
W = RMS.workload("fp32", {"M": 4, "d": 64})
EVERY_CALL = Policy(shadow_rate=1.0, first_ns=math.inf)  # however slow this machine is just now
CANARY_ONLY = Policy(shadow_rate=0.0, first_ns=math.inf)
Kernel = Callable[..., Any]

# --- rate ---------------------------------------------------------------------------------------------------------


def settled(rate: float, seed: int = 1) -> CheckRate:
    """Return a rate after its first checks."""
    return CheckRate(policy=Policy(shadow_rate=rate), random=Random(seed), checks=CANARY + FRESH_CHECKS)


def test_the_first_calls_of_a_bucket_are_all_checked_and_the_next_ones_ten_times_as_often() -> None:
    rate = CheckRate(policy=Policy(shadow_rate=1e-3), random=Random(1))
    for number in range(CANARY + FRESH_CHECKS + 1):
        wanted = 1.0 if number < CANARY else 1e-3 * FRESH_FACTOR if number < CANARY + FRESH_CHECKS else 1e-3
        assert rate.probability == pytest.approx(wanted), number
        assert number >= CANARY or rate.gap() == 1
        rate.checks += 1


def test_gaps_have_the_distribution_of_independent_checks() -> None:
    rate, n = settled(1 / 50), 20_000
    gaps = [rate.gap() for _ in range(n)]
    assert abs(statistics.fmean(gaps) - 50) < 4 * 50 / math.sqrt(n)
    beyond = sum(g > 100 for g in gaps) / n
    expected = (1 - 1 / 50) ** 100
    assert abs(beyond - expected) < 4 * math.sqrt(expected * (1 - expected) / n)
    assert min(gaps) == 1


def test_calls_of_every_layer_of_a_model_are_checked() -> None:
    """Check this for 32 layers that share a kernel: a period of 2000 calls would always check the same two layers."""
    rate, at, seen = settled(1 / 2000), 0, Counter[int]()
    for _ in range(3200):
        at += rate.gap()
        seen[at % 32] += 1
    assert len(seen) == 32
    assert min(seen.values()) > 50, "100 checks of each layer are expected"


@pytest.mark.parametrize("f", [1.0, 0.1, 0.01])
def test_a_fault_of_any_rate_is_found_within_the_documented_calls(f: float) -> None:
    p, runs = 1 / 2000, 2000
    limit = math.log(100) / (p * f)
    chance = Random(7)
    found = []
    for seed in range(runs):
        rate, calls = settled(p, seed), 0
        while True:
            calls += rate.gap()
            if chance.random() < f:
                break
        found.append(calls)
    late = sum(c > limit for c in found) / runs
    assert late < 0.01 + 4 * math.sqrt(0.01 * 0.99 / runs)
    assert abs(statistics.fmean(found) * p * f - 1) < 4 / math.sqrt(runs)


def test_the_duration_of_a_call_excludes_checks() -> None:
    rate = CheckRate(policy=Policy())
    for _ in range(CANARY):
        rate.checked(own_ns=50_000, extra_ns=1_000_000, natural=False)
    assert rate.own_ns == 50_000, "only the first duration is known yet"
    rate.checked(own_ns=50_000, extra_ns=1_000_000, natural=False)
    rate.checked(own_ns=5_000, extra_ns=1_000_000)
    assert rate.own_ns == 5_000
    for _ in range(20):
        rate.checked(own_ns=50_000, extra_ns=1_000_000, natural=False)
    assert rate.own_ns == 5_000
    assert rate.probability * 1_000_000 <= MAX_SHARE * 5_000 * 1.001


def test_checks_take_no_more_than_their_share_of_the_time() -> None:
    rate = settled(1 / 2000)
    rate.checked(own_ns=5_000, extra_ns=1_000_000)
    assert rate.probability * 1_000_000 <= MAX_SHARE * 5_000 * 1.001
    rate.checked(own_ns=5_000_000, extra_ns=1_000_000)
    rate.checked(own_ns=5_000, extra_ns=1_000_000)
    assert rate.probability * 1_000_000 <= MAX_SHARE * 5_000 * 1.001, "one slow call must not set the rate"
    fresh = CheckRate(policy=Policy(), checks=CANARY)
    fresh.checked(own_ns=5_000, extra_ns=1_000_000)
    assert fresh.probability == rate.probability, "the share also holds in a bucket's first hours"
    cheap = settled(1 / 2000)
    cheap.checked(own_ns=5_000_000, extra_ns=1_000_000)
    assert cheap.probability == 1 / 2000
    asked = CheckRate(policy=Policy(shadow_rate=0.5, max_share=math.inf), checks=CANARY + FRESH_CHECKS)
    asked.checked(own_ns=5_000, extra_ns=1_000_000)
    assert asked.probability == 0.5


def test_a_rate_of_zero_checks_the_first_calls_only() -> None:
    assert settled(0.0).gap() == NEVER
    assert CheckRate(policy=Policy(shadow_rate=0.0)).gap() == 1


def test_a_call_without_a_shadow_check_may_have_a_spot_check_with_a_separate_probability() -> None:
    rate = settled(1 / 100)
    assert rate.probability == 1 / 100 and rate.draws_shadow(), "no spot check is available"
    rate.spots = True
    assert rate.probability == pytest.approx(1 / 100 + (1 - 1 / 100) / 25)
    n = 20_000
    shadows = sum(rate.draws_shadow() for _ in range(n))
    share = 0.01 / rate.probability
    assert abs(shadows - n * share) < 4 * math.sqrt(n * share * (1 - share))


def test_three_of_the_first_checks_compute_float64_and_all_later_ones() -> None:
    def deep(n: int) -> bool:
        return CheckRate(policy=Policy(), checks=n).deep

    assert [n for n in range(CANARY) if deep(n)] == [0, 7, 31]
    assert all(deep(n) for n in range(CANARY, CANARY + 50))


@pytest.mark.parametrize("wanted", [LEAST, 10, 31, CANARY])
def test_a_second_limits_the_number_of_long_first_calls(wanted: int) -> None:
    rate = CheckRate(policy=Policy(shadow_rate=0.0))
    while rate.canary:
        rate.checked(own_ns=1e6, extra_ns=1.01 * FIRST_NS / wanted if wanted < CANARY else 1e6)
    assert rate.checks == rate.first == wanted
    assert rate.gap() == NEVER and rate.deep


def test_a_call_of_minutes_is_still_checked_a_few_times() -> None:
    rate = CheckRate(policy=Policy())
    for _ in range(LEAST):
        assert rate.gap() == 1
        rate.checked(own_ns=1e9, extra_ns=60e9)
    assert not rate.canary and rate.probability < 1e-4


# --- detector -----------------------------------------------------------------------------------------------------


def test_an_arm_that_wins_is_never_demoted() -> None:
    detector, coin = Detector(), Random(1)
    for _ in range(100_000):
        detector.add(coin.random() < 0.2)
        assert not detector.alarm


# --- a watch on a simulated clock ---------------------------------------------------------------------------------


class Clock:
    """Count nanoseconds, which only kernels advance; wall time is separate."""

    def __init__(self) -> None:
        self.ns, self.wall = 0, datetime(2026, 1, 1, 12, tzinfo=UTC)

    def __call__(self) -> int:
        return self.ns

    def now(self) -> datetime:
        return self.wall

    def taking(self, ns: float, kernel: Kernel) -> Kernel:
        def timed(*values: Any) -> Any:
            self.ns += int(ns)
            return kernel(*values)

        return timed


def good(x: Tensor, weight: Tensor, eps: float, offset: float, out: Tensor | None = None) -> Tensor:
    made = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight + offset)
    return made if out is None else out.copy_(made)


def watched(
    candidate: Kernel,
    *,
    op: Any = RMS,
    w: Workload = W,
    baseline: Kernel | None = None,
    policy: Policy = EVERY_CALL,
    clock: Clock | None = None,
    **changes: Any,
) -> tuple[Watch, list[Fault]]:
    clock, told = clock or Clock(), []
    subject = Subject(
        op=op,
        decision=decision(w, nobody(), **changes),
        candidate=candidate,
        baseline=baseline or baseline_of(op, w),
    )
    watch = Watch(subject=subject, policy=policy, report=told.append, random=Random(3), clock=clock, now=clock.now)
    return watch, told


def baseline_of(op: Any, w: Workload) -> Kernel:
    """Return the baseline of a workload."""
    kernel: Kernel = load(op, registry.baseline(op.name).recipe(w, this_device(), Knobs()), "", {})
    return kernel


def nobody() -> Arm:
    recipe = PythonRecipe(target="nowhere:kernel")
    return Arm(candidate="user:kernel", backend="USER", recipe=recipe, knobs={}, digest=digest("user:kernel"))


def call(watch: Watch, x: Tensor = X, out: Tensor | None = None) -> Tensor:
    result: Tensor = watch((x, WEIGHT, 1e-6, 0.0), (out,))
    return result


def right(x: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, (64,), WEIGHT, 1e-6)


def calls_until(told: list[Fault], watch: Watch, most: int) -> int:
    for number in range(most):
        call(watch)
        if told:
            return number + 1
    return most


def test_a_slowdown_of_30_percent_is_demoted_and_no_arm_before_it() -> None:
    clock = Clock()
    speed = {"ns": 700}

    def kernel(*values: Any) -> Any:
        clock.ns += speed["ns"]
        return good(*values)

    watch, told = watched(kernel, baseline=clock.taking(800, good), clock=clock)
    for _ in range(500):
        call(watch)
    assert not told
    speed["ns"] = 910
    pairs = watch.detector.pairs
    calls_until(told, watch, 100)
    assert told[0].cause == "slow"
    # Winning always, M is 1.5; then M + 3.5 grows by 1.4 a pair: 5 * 1.4^23 > 10^4 + 3.5 > 5 * 1.4^22.
    assert watch.detector.pairs - pairs == 23
    assert "lost 23 of" in told[0].reason


def test_a_new_promotion_stays_for_an_hour() -> None:
    clock = Clock()
    clock.wall = datetime(2026, 1, 1, 0, 30, tzinfo=UTC)
    watch, told = watched(clock.taking(910, good), baseline=clock.taking(700, good), clock=clock)
    for _ in range(CANARY + 100):
        call(watch)
    assert not told
    clock.wall += timedelta(seconds=MIN_DWELL_S / 2)
    call(watch)
    assert [f.cause for f in told] == ["slow"]


def test_a_pin_and_a_tie_are_never_slow() -> None:
    for state, ns in (("pinned", 900), ("promoted", 700)):
        clock = Clock()
        watch, told = watched(clock.taking(ns, good), baseline=clock.taking(700, good), clock=clock, state=state)
        for _ in range(200):
            call(watch)
        assert not told, state


def test_both_arms_go_first_equally_often() -> None:
    first, order = Counter[str](), []

    def named(name: str) -> Kernel:
        def kernel(*values: Any) -> Any:
            order.append(name)
            return good(*values)

        return kernel

    watch, _ = watched(named("candidate"), baseline=named("baseline"))
    for _ in range(400):
        order.clear()
        call(watch)
        first[order[0]] += 1
    assert abs(first["candidate"] - 200) < 4 * 10


# --- wrong results ------------------------------------------------------------------------------------------------


def scaled(*values: Any) -> Tensor:
    return good(*values).mul_(1.001)


def at_calls(these: Callable[[int], bool], wrong: Kernel = scaled) -> Kernel:
    """Return a good kernel that is wrong at these calls, counted from 1."""
    numbers = itertools.count(1)
    return lambda *values: wrong(*values) if these(next(numbers)) else good(*values)


def other(*values: Any) -> Tensor:
    """Return a right result that differs from the baseline's."""
    made = good(*values)
    return made.copy_(torch.nextafter(made, torch.full_like(made, math.inf)))


def test_the_caller_gets_the_baselines_result_of_the_first_calls_and_the_candidates_later() -> None:
    watch, told = watched(other)
    for number in range(CANARY + 5):
        assert torch.equal(call(watch), right(X)) == (number < CANARY)
    assert not told


def test_long_calls_have_fewer_first_checks_which_still_find_a_wrong_kernel() -> None:
    clock = Clock()
    slow: dict[str, Any] = {"baseline": clock.taking(FIRST_NS / 2, baseline_of(RMS, W)), "clock": clock}
    always = Policy(shadow_rate=1.0, max_share=math.inf)
    watch, told = watched(clock.taking(FIRST_NS / 10, other), policy=always, **slow)
    assert [torch.equal(call(watch), right(X)) for _ in range(LEAST + 3)] == [True] * LEAST + [False] * 3
    assert not told and f"{LEAST + 3} calls checked" in watch.describe()
    watch, told = watched(clock.taking(FIRST_NS / 10, scaled), policy=Policy(), **slow)
    assert torch.equal(call(watch), right(X)) and told[0].evidence["canary"] is True


@pytest.mark.parametrize("given", [False, True], ids=["allocated", "out"])
def test_a_wrong_kernel_is_found_at_its_first_call_and_the_caller_does_not_notice(given: bool) -> None:
    watch, told = watched(scaled)
    out = torch.zeros_like(X) if given else None
    result = call(watch, out=out)
    assert torch.equal(result, right(X))
    assert out is None or result is out
    (fault,) = told
    assert fault.cause == "kernel"
    assert fault.reason.startswith("wrong in service: elements: element [")
    assert fault.reason.endswith("wrong in 3 of 3 replays: the kernel")
    assert fault.evidence["canary"] is True
    assert watch.gap() == NEVER
    assert torch.equal(call(watch), right(X)), "holders of the watch must get the baseline"


def one_element(*values: Any) -> Tensor:
    made = good(*values)
    made[217, 3] += 1.0
    return made


def test_one_wrong_element_outside_the_sampled_rows_is_found_by_the_baselines_dissent() -> None:
    watch, told = watched(one_element, w=W.at(M=400))
    call(watch, torch.randn(400, 64))
    assert told[0].evidence["index"] == [217, 3]


def test_one_call_with_large_but_right_differences_does_not_disable_the_dissent_check() -> None:
    x = torch.randn(400, 64)
    watch, told = watched(at_calls(lambda n: n > 200, one_element), w=W.at(M=400))
    watch.rate.checks = CANARY
    watch.judge.usual = 1e9
    for _ in range(200):
        call(watch, x)
    assert not told
    call(watch, x)
    assert told[0].evidence["index"] == [217, 3]


def test_a_kernel_that_turns_wrong_later_is_found_by_the_shadow() -> None:
    watch, told = watched(at_calls(lambda n: n > 60))
    results = [call(watch) for _ in range(70)]
    assert told
    assert told[0].evidence["canary"] is False
    assert all(torch.allclose(r, right(X), rtol=1e-6) for r in results), "checked calls must return right results"


def test_a_kernel_wrong_for_some_inputs_is_found_when_they_come() -> None:
    def afraid_of_nines(*values: Any) -> Tensor:
        return scaled(*values) if values[0][0, 0] > 9 else good(*values)

    watch, told = watched(afraid_of_nines)
    for _ in range(50):
        call(watch)
    assert not told
    x = X.clone()
    x[0, 0] = 10
    assert torch.equal(call(watch, x), right(x))
    assert told[0].cause == "kernel"


def nan_in_one(*values: Any) -> Tensor:
    made = good(*values)
    made[2, 7] = math.nan
    return made


def narrow(*values: Any) -> Tensor:
    return good(*values)[:2]


def in_halves(*values: Any) -> Tensor:
    return good(*values).bfloat16()


def nothing(*values: Any) -> None:
    return None


@pytest.mark.parametrize(
    ("kernel", "check"),
    [(nan_in_one, "nonfinite"), (narrow, "result"), (in_halves, "result"), (nothing, "result")],
    ids=lambda p: getattr(p, "__name__", p),
)
def test_a_missing_result_is_reported(kernel: Kernel, check: str) -> None:
    watch, told = watched(kernel)
    assert torch.equal(call(watch), right(X))
    assert told[0].evidence["check"] == check


def test_nan_in_the_inputs_is_not_blamed_on_an_arm() -> None:
    x = X.clone()
    x[1, 5] = math.nan
    watch, told = watched(good)
    for _ in range(CANARY + 5):
        call(watch, x)
    assert not told


def test_a_kernel_that_writes_into_its_inputs_does_not_affect_the_baseline() -> None:
    def spoils(x: Tensor, *values: Any) -> Tensor:
        made = good(x, *values)
        x.zero_()
        return made

    for seed in range(4):  # in both orders
        watch, told = watched(spoils)
        watch.random = Random(seed)
        x = X.clone()
        assert torch.equal(call(watch, x), right(X))
        assert torch.equal(x, X)
        assert "it wrote into its input x" in told[0].reason


def test_an_output_that_is_an_input_is_not_read_after_it_was_written() -> None:
    watch, told = watched(good)
    for _ in range(CANARY + 8):
        x = X.clone()
        assert torch.allclose(call(watch, x, out=x), right(X), rtol=1e-6)
    assert not told


def test_attention_outside_the_hull_of_its_values_is_found_in_heads_that_no_row_samples() -> None:
    w = ATTN.workload("fp32", {"B": 4, "Hq": 8, "Hkv": 8, "S": 1, "D": 8, "L": 32})
    inputs = ATTN.inputs(w, 1)
    base = baseline_of(ATTN, w)

    def wild(*values: Any) -> Tensor:
        made: Tensor = base(*values)
        made[3, 5, 0, 2] = 100.0
        return made

    watch, told = watched(wild, op=ATTN, w=w)
    watch.judge.usual = 1e12  # the dissent check is not used
    watch(ATTN.arguments(inputs), (None,))
    assert told[0].evidence["check"] == "hull"
    assert told[0].evidence["index"] == [3, 5, 0, 2]


def test_right_kernels_of_every_op_pass_every_check_on_their_own_inputs() -> None:
    """Run the baseline against itself, including hull and float64 rows."""
    for op in ops.OPS.values():
        first = op.cases(small(op))[0].workload
        inputs = op.inputs(first, 1)
        watch, told = watched(baseline_of(op, first), op=op, w=first)
        outs = (None,) * len(op.allocate(first))
        for _ in range(4):
            watch(op.arguments(inputs), outs)
        assert not told, (op.name, told)
        assert watch.rate.checks == 4, op.name
        assert watch.troubles == watch.unjudged == 0, op.name


# --- blame --------------------------------------------------------------------------------------------------------


def test_a_result_that_is_not_wrong_again_is_a_suspected_race() -> None:
    watch, told = watched(at_calls(lambda n: n == 1))
    assert torch.equal(call(watch), right(X))
    assert told[0].cause == "race"
    assert told[0].evidence["candidate_wrong"] == 0


def test_a_baseline_that_disagrees_with_itself_makes_the_device_suspect() -> None:
    watch, told = watched(scaled, baseline=at_calls(lambda n: n % 2 == 0))
    call(watch)
    assert told[0].cause == "device"
    assert "2 of 4 runs" in told[0].reason


def wrong_too(*values: Any) -> Tensor:
    return scaled(*values).mul_(1.01)


def test_no_arm_is_blamed_if_the_baseline_fails_too(caplog: pytest.LogCaptureFixture) -> None:
    watch, told = watched(scaled, baseline=wrong_too)
    expected = wrong_too(X, WEIGHT, 1e-6, 0.0)
    for _ in range(3):
        assert torch.equal(call(watch), expected), "the call must still return the baseline's result"
    assert not told
    assert watch.unjudged == 3
    assert caplog.text.count("cannot be judged") == 1


def test_checks_without_a_result_are_limited() -> None:
    """Limit such checks: a serving GPU seldom has memory for the baseline, so not every call may try."""

    def no_room(*values: Any) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    for kernel, baseline in ((good, no_room), (scaled, wrong_too)):
        watch, told = watched(kernel, baseline=baseline, policy=CANARY_ONLY)
        for _ in range(CANARY):
            assert watch.gap() == 1
            call(watch)
        assert watch.gap() == NEVER and not told


def test_a_guard_that_cannot_check_gives_the_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, told = watched(good)
    monkeypatch.setattr(watch.judge, "look", lambda *a, **k: (_ for _ in ()).throw(MemoryError("no room")))
    for _ in range(3):
        assert torch.equal(call(watch), right(X))
    assert [f.cause for f in told] == ["unchecked"]
    assert "no room" in told[0].reason


# --- in place -----------------------------------------------------------------------------------------------------


def append(k: Tensor, v: Tensor, positions: Tensor, table: Tensor | None, *caches: Tensor) -> Any:
    (k_cache, v_cache), s = caches, k.shape[2]
    for b, at in enumerate(positions.tolist()):
        k_cache[b, :, at : at + s], v_cache[b, :, at : at + s] = k[b], v[b]
    return k_cache, v_cache


def writes_beside(k: Tensor, v: Tensor, positions: Tensor, table: Tensor | None, *caches: Tensor) -> Any:
    append(k, v, positions + 1, table, *caches)
    return append(k, v, positions, table, *caches)


def writes_nothing(k: Tensor, v: Tensor, positions: Tensor, table: Tensor | None, *caches: Tensor) -> Any:
    return caches


@pytest.mark.parametrize("kernel", [append, writes_beside, writes_nothing])
@pytest.mark.parametrize("seed", range(4))
def test_a_cache_contains_the_baselines_values_in_either_order(kernel: Kernel, seed: int) -> None:
    w = KV.workload("fp32", {"B": 2, "Hkv": 2, "S": 3, "D": 8})
    inputs = KV.inputs(w, seed)
    wanted = KV.reference(inputs)
    watch, told = watched(kernel, op=KV, w=w)
    watch.random = Random(seed)
    k_cache, v_cache = watch(KV.arguments(inputs), ())
    assert k_cache is inputs["k_cache"]
    assert torch.equal(k_cache.double(), wanted[0])
    assert torch.equal(v_cache.double(), wanted[1])
    assert bool(told) == (kernel is not append)


# --- raising ------------------------------------------------------------------------------------------------------


def raises(*values: Any) -> Tensor:
    raise ZeroDivisionError("no such tile")


def test_a_call_whose_kernel_raises_returns_the_baselines_result() -> None:
    for checked in (True, False):
        watch, told = watched(raises)
        result = (
            call(watch) if checked else watch.raised(ZeroDivisionError("no such tile"), (X, WEIGHT, 1e-6, 0.0), (None,))
        )
        assert torch.equal(result, right(X))
        assert told[0].cause == "raised"
        assert told[0].reason == "raised in service: ZeroDivisionError: no such tile"


def test_arguments_outside_the_contract_and_memory_are_not_the_kernels_fault() -> None:
    watch, told = watched(raises)
    strided = torch.randn(4, 128)[:, ::2]
    with pytest.raises(ZeroDivisionError):
        call(watch, strided)
    error = ZeroDivisionError("no such tile")
    with pytest.raises(ZeroDivisionError):
        watch.raised(error, (strided, WEIGHT, 1e-6, 0.0), (None,))
    x = X.clone()
    with pytest.raises(ZeroDivisionError):  # it may have overwritten x already
        watch.raised(error, (x, WEIGHT, 1e-6, 0.0), (x,))
    other = torch.randn(40, 64)
    assert torch.equal(watch.raised(error, (other, WEIGHT, 1e-6, 0.0), (None,)), right(other))
    assert torch.equal(watch.raised(MemoryError(), (X, WEIGHT, 1e-6, 0.0), (None,)), right(X))
    assert not told


# --- the board ----------------------------------------------------------------------------------------------------

USER_MODULE = """
import torch
def good(x, weight, eps, offset):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight + offset)
def sevens(x, weight, eps, offset):
    return torch.full_like(x, 7)
switch = {"raise": False, "calls": 0}
def moody(x, weight, eps, offset):
    switch["calls"] += 1
    if switch["raise"]:
        raise RuntimeError("bad mood")
    return good(x, weight, eps, offset)
def homely(x, weight, eps, offset):
    if x.device.type != "cpu":
        raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")
    return good(x, weight, eps, offset)
def average(q, k, v, lengths, max_len, scale, window, softcap):
    return torch.nn.functional.scaled_dot_product_attention(q, k[:, :, :max_len], v[:, :, :max_len], enable_gqa=True)
def wild(q, k, v, lengths, max_len, scale, window, softcap):
    return torch.full_like(q, 9)
"""


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> User:
    return arms_of_module(tmp_path_factory.mktemp("user") / "guard_test_kernels.py", USER_MODULE)


@pytest.fixture
def home(home: Path) -> Path:
    home.mkdir()
    return home


def journal(home: Path) -> list[Path]:
    return sorted((home / "faults").glob("*.json"))


def test_a_fault_demotes_the_build_for_all_shapes_and_moves_the_epoch(
    home: Path, user: User, caplog: pytest.LogCaptureFixture
) -> None:
    good_build = decision(W.at(M=3), user("good"), id=43)
    publish(home, [decision(W, user("sevens")), decision(W.at(M=2), user("sevens"), id=42), good_build])
    with dispatch.use(home) as board:
        best, bound = dispatch.best("rmsnorm"), dispatch.best("rmsnorm", like=(X[:2], WEIGHT))
        third = dispatch.best("rmsnorm", like=(X[:3], WEIGHT))
        assert bound.candidate == "user:sevens"
        assert dispatch.epoch() == 0
        assert torch.equal(best(X, WEIGHT), right(X)), "the first call must return a right result"
        assert dispatch.epoch() == 1
        assert bound.candidate == "torch:rmsnorm", "another shape must not serve the same build"
        assert "wrong in service" in bound.reason
        assert third.candidate == "user:good", "another build"
        assert torch.equal(bound(X[:2], WEIGHT), right(X[:2]))
        assert dispatch.best("rmsnorm", like=(X, WEIGHT)).candidate == "torch:rmsnorm", "bound afterwards"
        board.refresh()
        assert dispatch.epoch() == 1, "the journal has no new fault"
        for _ in range(50):
            best(X, WEIGHT)
    assert len(journal(home)) == 1
    assert caplog.text.count("no longer serves: wrong in service") == 1


def test_a_demotion_outlives_the_process_and_reaches_its_neighbours(home: Path, user: User) -> None:
    publish(home, [decision(W, user("sevens"))])
    neighbour = Board(home)
    elsewhere = neighbour.bind(RMS, (X, WEIGHT))
    with dispatch.use(home):
        dispatch.best("rmsnorm")(X, WEIGHT)
    neighbour.refresh()
    assert elsewhere.candidate == "torch:rmsnorm"
    assert neighbour.epoch == 1
    neighbour.close()
    later = Board(home)  # a new process knows only the files
    assert later.bind(RMS, (X, WEIGHT)).candidate == "torch:rmsnorm"
    journal(home)[0].unlink()
    later.refresh()
    assert later.bind(RMS, (X, WEIGHT)).candidate == "user:sevens", (
        "a fault that a ledger has recorded must not demote again"
    )
    later.close()


def test_a_home_that_cannot_be_written_holds_the_fault_for_the_process(
    home: Path, user: User, caplog: pytest.LogCaptureFixture
) -> None:
    publish(home, [decision(W, user("sevens"))])
    (home / "faults").write_text("a file where the folder should be")  # root ignores modes
    with dispatch.use(home) as board:
        best = dispatch.best("rmsnorm")
        assert torch.equal(best(X, WEIGHT), right(X))
        assert "holds for this process only" in caplog.text
        board._stamp = (0, 0, 0, 0)
        board.refresh()
        assert torch.equal(best(X, WEIGHT), right(X))
        assert "wrong in service" in best.explain()


def test_a_decision_made_after_the_fault_serves(home: Path, user: User) -> None:
    publish(home, [decision(W, user("good"))])
    faults.write(home, fault_of(decision(W, user("good"))))
    with dispatch.use(home):
        assert dispatch.best("rmsnorm", like=(X, WEIGHT)).reason == "wrong"
        publish(home, [decision(W, user("good"), id=44, created_at="2026-01-02T00:00:00.000000+00:00")])
        dispatch.refresh()
        assert dispatch.best("rmsnorm", like=(X, WEIGHT)).candidate == "user:good"


def test_a_suspect_device_runs_baselines_only_and_a_slow_arm_elsewhere_still_serves(user: User) -> None:
    d = decision(W, user("good"))
    elsewhere = decision(W.at(M=1), user("good"), id=42)
    other = decision(W.at(M=2), user("sevens"), id=43)

    def held(cause: Any) -> list[bool]:
        return [bool(Held([fault_of(d, cause=cause)], d.hw_id).why(x)) for x in (d, elsewhere, other)]

    assert held("device") == [True, True, True]
    assert held("kernel") == held("race") == held("raised") == [True, True, False]
    assert held("slow") == [True, False, False]
    assert Held([fault_of(d, cause="device")], "another device").why(d) == ""


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"cause": "kernel"}', b"\xff" * 50, b"[" * 10_000],
    ids=["empty", "cut", "part", "bytes", "deep"],
)
def test_an_invalid_journal_file_disables_nothing(
    home: Path, user: User, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    publish(home, [decision(W, user("good"))])
    (home / "faults").mkdir()
    (home / "faults" / "x.json").write_bytes(content)
    with dispatch.use(home):
        assert dispatch.best("rmsnorm", like=(X, WEIGHT)).candidate == "user:good"
    assert "x.json" in caplog.text


def test_a_journal_that_others_could_have_written_is_ignored(home: Path, user: User) -> None:
    d = decision(W, user("good"))
    publish(home, [d])
    path = faults.write(home, fault_of(d))
    path.chmod(0o666)
    with dispatch.use(home):
        assert dispatch.best("rmsnorm", like=(X, WEIGHT)).candidate == "user:good"
    path.chmod(0o600)
    with dispatch.use(home):
        assert dispatch.best("rmsnorm", like=(X, WEIGHT)).candidate == "torch:rmsnorm"


def test_the_journal_keeps_the_values_of_a_check_including_nan(home: Path, user: User) -> None:
    fault = fault_of(decision(W, user("good")), evidence={"got": math.nan, "near": [1.0, -math.inf]})
    found = faults.read(faults.write(home, fault))
    assert found == replace(fault, evidence={"got": "nan", "near": [1.0, "-inf"]})
    assert len(list((home / "faults").iterdir())) == 1
    faults.write(home, fault)
    assert len(list((home / "faults").iterdir())) == 1, "the same fault has two files"


def test_guard_off_means_off(home: Path, user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(home, [decision(W, user("sevens")), decision(W.at(M=2), user("moody"), id=42)])
    monkeypatch.setenv("AUTOSEL_GUARD", "off")
    settings.read.cache_clear()
    with dispatch.use(home):
        best = dispatch.best("rmsnorm")
        assert best(X, WEIGHT).eq(7).all()
        assert "guard" not in dispatch.best("rmsnorm", like=(X, WEIGHT)).explain()
        best(X[:2], WEIGHT)
        switch_of(user)["raise"] = True
        try:
            for run in (best, dispatch.best("rmsnorm", like=(X[:2], WEIGHT))):
                with pytest.raises(RuntimeError, match="bad mood"):
                    run(X[:2], WEIGHT)
        finally:
            switch_of(user)["raise"] = False
    assert not (home / "faults").exists()


def test_the_settings_determine_the_rate_of_checks(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Policy.from_settings() == Policy(on=True, shadow_rate=1 / 2000, max_share=MAX_SHARE)
    for given, wanted in (("0.25", 0.25), ("0", 0.0), ("7", 1.0)):
        monkeypatch.setenv("AUTOSEL_SHADOW_RATE", given)
        settings.read.cache_clear()
        spots = Policy().spot_rate if wanted else 0.0  # a rate of 0 checks the first calls only, in either way
        assert Policy.from_settings() == Policy(on=True, shadow_rate=wanted, spot_rate=spots, max_share=math.inf)


def switch_of(user: User) -> Any:
    recipe = user("moody").recipe
    assert isinstance(recipe, PythonRecipe)
    function = load(RMS, recipe, "", {})
    import guard_test_kernels  # type: ignore[import-not-found]  # put on the path by load

    assert callable(function)
    return guard_test_kernels.switch


@pytest.mark.parametrize("kind", ["bound", "by shape"])
def test_between_checks_only_the_candidate_runs_and_if_it_raises_the_baseline_answers(
    home: Path, user: User, kind: str
) -> None:
    publish(home, [decision(W, user("moody"))])
    board = Board(home, CANARY_ONLY)
    run: Any = board.bind(RMS, (X, WEIGHT)) if kind == "bound" else board.selection(RMS)
    switch = switch_of(user)
    switch["calls"] = 0
    for _ in range(CANARY + 50):
        run(X, WEIGHT)
    assert switch["calls"] == CANARY + 50
    switch["raise"] = True
    try:
        assert torch.equal(run(X, WEIGHT), right(X))
        assert board.epoch == 1
        assert torch.equal(run(X, WEIGHT), right(X))
        assert switch["calls"] == CANARY + 51, "the demotion must be immediate"
    finally:
        switch["raise"] = False
        board.close()
    assert sum(use.calls for use in board.uses()) == CANARY + 52
    assert sum(use.calls for use in board.uses() if use.candidate == "user:moody") == CANARY + 51


@pytest.mark.parametrize("policy", [EVERY_CALL, CANARY_ONLY], ids=["checked", "between checks"])
def test_arguments_on_another_device_than_the_bound_one_do_not_count_against_an_arm(
    home: Path, user: User, policy: Policy
) -> None:
    publish(home, [decision(W, user("homely"))])
    board = Board(home, policy)
    bound = board.bind(RMS, (X, WEIGHT))
    for _ in range(CANARY):
        bound(X, WEIGHT)
    elsewhere: Tensor = bound(X.to("meta"), WEIGHT.to("meta"))
    assert elsewhere.device.type == "meta", "the baseline must run on any device"
    assert bound.candidate == "user:homely" and board.epoch == 0 and not journal(home)
    board.close()


def test_all_callables_of_a_bucket_share_its_first_calls(home: Path, user: User) -> None:
    publish(home, [decision(W, user("good"))])
    board = Board(home, CANARY_ONLY)
    layers = [board.bind(RMS, (X, WEIGHT)) for _ in range(CANARY)]
    for layer in layers:
        layer(X, WEIGHT)
    (watch,) = board._watches.values()
    assert watch.rate.checks == CANARY
    late = board.bind(RMS, (X, WEIGHT))
    late(X, WEIGHT)
    board.selection(RMS)(X, WEIGHT)
    assert watch.rate.checks == CANARY
    for told in (late.explain(), board.selection(RMS).explain()):
        assert f"guard     {CANARY} calls checked; now no call is checked" in told
    publish(home, [decision(W, user("good")), decision(W.at(M=1), user("sevens"), id=42)])
    board.refresh()
    late(X, WEIGHT)
    assert next(iter(board._watches.values())).rate.checks == CANARY, "a new snapshot must not start them again"
    board.close()


def test_explain_shows_the_share_of_checked_calls(home: Path, user: User) -> None:
    publish(home, [decision(W, user("good"))])
    board = Board(home, Policy(shadow_rate=1 / 2000, max_share=math.inf))
    bound = board.bind(RMS, (X, WEIGHT))
    bound(X, WEIGHT)
    assert f"guard     1 of the first {CANARY} calls checked\n" in bound.explain()
    while "now" not in bound.explain():
        bound(X, WEIGHT)
    assert "; now 1 call in 200 is compared with the baseline" in bound.explain(), (
        "a new bucket must be checked ten times as often"
    )
    board.close()


def test_each_part_of_a_split_bucket_has_its_own_guard(home: Path, user: User) -> None:
    w = ATTN.workload("fp32", {"B": 1, "Hq": 2, "Hkv": 1, "S": 1, "D": 8, "L": 96})
    short = decision(w, user("average"), length_range=(65, 96), id=1)
    publish(home, [short, decision(w, user("wild"), length_range=(97, 128), id=2)])
    q, k, v = torch.randn(1, 2, 1, 8), torch.randn(1, 1, 128, 8), torch.randn(1, 1, 128, 8)
    with dispatch.use(home) as board:
        for run in (dispatch.best("attn", like=(q, k, v, None, 80)), dispatch.best("attn")):
            for _ in range(CANARY + 3):
                run(q, k, v, max_len=80)
            wanted = torch.nn.functional.scaled_dot_product_attention(q, k[:, :, :120], v[:, :, :120], enable_gqa=True)
            assert torch.allclose(run(q, k, v, max_len=120), wanted, rtol=1e-5, atol=1e-6)
        assert board.epoch == 1
        assert "user:average" in dispatch.best("attn", like=(q, k, v, None, 80)).candidate
        assert dispatch.best("attn", like=(q, k, v)).candidate == registry.baseline("attn").name


def test_a_forked_child_checks_and_reports_independently(home: Path, user: User) -> None:
    publish(home, [decision(W, user("sevens"))])
    with dispatch.use(home) as board:
        bound = dispatch.best("rmsnorm", like=(X, WEIGHT))
        (watch,) = board._watches.values()
        watch.lock.acquire()  # as if another thread held it
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            good_result = torch.equal(bound(X, WEIGHT), right(X))
            os._exit(0 if good_result and board.epoch == 1 else 1)
        watch.lock.release()
        assert os.waitpid(child, 0)[1] == 0
    assert len(journal(home)) == 1
