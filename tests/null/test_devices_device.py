"""Test how a step is timed: on a GPU by events of its stream, and also by the host; on a CPU by the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from autosel import devices, models
from autosel.certify.issue import IssueRequest, issue
from autosel.decode import arms, measure
from autosel.decode.run import Plan
from autosel.decode.weights import load_weights
from autosel.devices.cpu.device import Cpu
from autosel.devices.cuda.timing import EventTimer
from autosel.devices.device import StepTimer
from tests.null.cuda_stand_in import TICK_MS, Cuda
from tests.null.test_models import LLAMA_8B, write

TICK_NS = TICK_MS * 1e6


def ticking(*at: int) -> Callable[[], int]:
    times = iter(at)
    return lambda: next(times)


def test_a_gpus_step_is_timed_between_its_events_and_the_read_back_by_the_host(cuda: Cuda) -> None:
    timer = devices.named("cuda:0").timer(ticking(1_000, 9_001_000, 20_000_000, 29_000_000))
    assert isinstance(timer, EventTimer) and timer.by == "CUDA events"
    cuda.call(0)  # before the step
    for calls, host_ns in ((3, 9_000_000), (5, 9_000_000)):
        timer.begin()
        for copy in range(calls):
            cuda.call(copy)
        timer.enqueued()
        cuda.call(9)  # the transfer of the tokens
        took = timer.took()
        assert (took.ns, took.host_ns) == (calls * TICK_NS, host_ns)


def test_an_events_time_is_read_after_the_device_has_reached_it(cuda: Cuda) -> None:
    timer = devices.named("cuda").timer(ticking(0, 1))
    timer.begin()
    timer.enqueued()
    reached = []
    cuda.enqueued.append(lambda: reached.append(1))
    timer.took()
    assert reached == [1]


def test_a_cpus_step_ends_when_its_tokens_are_available() -> None:
    timer = devices.named("cpu").timer(ticking(100, 350))
    assert type(timer) is StepTimer
    timer.begin()
    timer.enqueued()
    assert timer.took().ns == 250


def test_consecutive_steps_are_timed_by_the_clock_of_their_device(cuda: Cuda) -> None:
    """Exclude the host's work between two steps on a GPU."""

    class Step:
        def run(self) -> None:
            for copy in range(3):
                cuda.call(copy)

        def settle(self) -> None:
            cuda.call(9)

    assert EventTimer(lambda: 0).mean_ns(Step(), 4) == 3 * TICK_NS
    assert StepTimer(ticking(100, 900)).mean_ns(Step(), 4) == 200


def test_a_run_on_a_gpu_certifies_both_arms_by_events(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Run steps on this CPU that also enqueue calls of the stand-in, some only when the tokens are read."""
    monkeypatch.setattr(Cpu, "timer", lambda self, clock: EventTimer(clock))
    for arm, calls in ((arms.WrittenArm, 3), (arms.Baseline, 7)):
        busy(monkeypatch, cuda, arm, calls)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128, "head_dim": 16}
    write(tmp_path, {**LLAMA_8B, **sizes, "num_attention_heads": 4, "num_key_value_heads": 2})
    plan = Plan(model=models.load(tmp_path), dtype="fp32", seq=20, iters=4, warmup=1, step="ops")
    run = measure.measure(plan, load_weights(plan))
    assert run.timed_by == "CUDA events"
    assert run.baseline is not None
    assert run.optimised_ns == (3 * TICK_NS,) * 4 and run.baseline.ns == (7 * TICK_NS,) * 4
    assert len(run.optimised_host_ns) == len(run.baseline.host_ns) == 4 and min(run.optimised_host_ns) > 0
    assert run.tokens_equal == 4
    made = issue(run, {}, IssueRequest(repro_cmd="autosel run"))
    assert made.speedup == 7 / 3 and made.host_ms is not None


def busy(monkeypatch: pytest.MonkeyPatch, cuda: Cuda, arm: Any, calls: int) -> None:
    enqueue, tokens = arm.enqueue, arm.tokens

    def enqueued(self: Any) -> None:
        enqueue(self)
        for copy in range(calls):
            cuda.call(copy)

    def told(self: Any) -> Any:
        cuda.call(0)
        return tokens(self)

    monkeypatch.setattr(arm, "enqueue", enqueued)
    monkeypatch.setattr(arm, "tokens", told)
