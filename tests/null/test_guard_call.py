"""Test that the guard works for operands on any device, and for any default device of the process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autosel import ops
from autosel.guard import judge, rate
from autosel.guard.call import CheckedCall
from autosel.ops.contract import Match
from tests.null import test_guard as guards
from tests.null.test_dispatch import small

# --- another default device ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ops.OPS.values(), ids=lambda op: op.name)
def test_calls_are_checked_under_any_default_device(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check with `torch.set_default_device`, which users set, and which Inductor sets during its warm-up."""
    w = op.cases(small(op))[0].workload
    inputs = op.inputs(w, 1)
    monkeypatch.setattr("autosel.guard.judge.FEW_ULPS", -1.0)  # every result looks wrong, so that every check is made
    watch, told = guards.watched(guards.baseline_of(op, w), op=op, w=w)
    with torch.device("meta"):
        for _ in range(4):
            watch(op.arguments(inputs), (None,) * len(op.outputs(w)) if op.written(w, inputs) is None else ())
    assert not told and watch.troubles == watch.unjudged == 0
    assert watch.rate.checks == 4


def test_a_wrong_kernel_is_found_under_another_default_device_with_its_check() -> None:
    watch, told = guards.watched(guards.scaled)
    with torch.device("meta"):
        given = guards.call(watch)
    assert torch.equal(given, guards.right(guards.X))
    assert [fault.cause for fault in told] == ["kernel"]
    assert rate.CheckRate(policy=rate.Policy()).deep, "otherwise no rows are checked in float64"


# --- a device with little memory -------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Keep the largest size in bytes of a created tensor, without views."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not func.is_view:
            self.nbytes = max(self.nbytes, made.nbytes)
        return made


def test_rows_of_a_paged_cache_copy_only_one_head_of_the_pages_in_use() -> None:
    """Copy only these pages: a block table covers the model's context, not only the sequences."""
    op = ops.find("paged_attn")
    w = op.workload("fp32", {"B": 3, "Hq": 8, "Hkv": 4, "S": 1, "D": 64, "L": 40, "page": 16})
    inputs = op.inputs(w, 1)
    made = guards.baseline_of(op, w)(*op.arguments(inputs), None)
    inputs["block_table"] = torch.nn.functional.pad(inputs["block_table"], (0, 500), value=0)
    with Largest() as seen:
        rows = op.rows(op.workload_of(inputs), inputs, 4, 5)
    pairs = len(rows.inputs["q"])
    assert seen.nbytes == pairs * 3 * 16 * 64 * 4
    assert rows.inputs["k_pages"].shape == (pairs * 3, 16, 1, 64)
    assert isinstance(op.verify(rows.inputs, rows.pick((made,))), Match)


def no_room(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("where", ["autosel.guard.call._keep", "autosel.guard.watch.Judge.look"])
def test_a_check_that_runs_out_of_memory_has_no_result(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where, no_room)
    watch, told = guards.watched(guards.good, policy=guards.CANARY_ONLY)
    for _ in range(rate.CANARY):
        assert watch.gap() == 1
        assert torch.allclose(guards.call(watch), guards.right(guards.X), rtol=1e-6)
    assert watch.gap() == guards.NEVER, "checks without a result are not limited"
    assert not told and watch.troubles == 0


def test_a_replay_that_runs_out_of_memory_does_not_make_the_device_suspect() -> None:
    once = guards.at_calls(lambda n: n > 1, no_room)
    watch, told = guards.watched(guards.scaled, baseline=once)
    assert torch.allclose(guards.call(watch), guards.right(guards.X), rtol=1e-6)
    assert not told and watch.rate.checks == 1


@pytest.mark.parametrize(("pool", "asked"), [(1, 1), (1000, judge.MORE_ROWS)])
def test_a_pool_of_pages_is_not_copied_to_the_host_for_the_few_that_a_call_reads(
    pool: int, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = ops.find("paged_attn")
    w = op.workload("fp32", {"B": 2, "Hq": 4, "Hkv": 2, "S": 1, "D": 8, "L": 40, "page": 16})
    inputs = op.inputs(w, 1)
    for name in ("k_pages", "v_pages"):
        inputs[name] = torch.cat((inputs[name], torch.zeros(pool, 16, 2, 8)))
    monkeypatch.setattr(judge, "WHOLE_BYTES", 1 << 16)
    copied, against = [], judge._against_float64

    def noted(call: Any, rows: Any) -> Any:
        copied.append(sum(t.nbytes for t in rows.inputs.values() if isinstance(t, torch.Tensor)))
        return against(call, rows)

    monkeypatch.setattr(judge, "_against_float64", noted)
    found = judge._everywhere(CheckedCall(op, op.arguments(inputs), (None,)), 1)
    assert len(found) == len(copied) == asked
    assert max(copied) <= 1 << 16
    made = guards.baseline_of(op, w)(*op.arguments(inputs), None)
    assert all(check((made,)) is None for check in found)


def test_kept_values_of_a_write_in_place_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    op = guards.KV
    w = op.workload("fp32", {"B": 2, "Hkv": 2, "S": 3, "D": 8})
    monkeypatch.setattr(judge, "WHOLE_BYTES", 0)
    assert len(judge._everywhere(CheckedCall(op, op.arguments(op.inputs(w, 1)), ()), 1)) == 1


# --- an asynchronous device ------------------------------------------------------------------------------------------


class Device:
    """A device that works asynchronously; each arm has a time on the device and on the host."""

    def __init__(self, clock: guards.Clock) -> None:
        self.clock, self.took_ns = clock, 0

    def end(self) -> None: ...

    def ns(self) -> int:
        return self.took_ns

    def taking(self, *, host_ns: int, device_ns: int) -> guards.Kernel:
        def kernel(*values: Any) -> Any:
            self.clock.ns += host_ns
            self.took_ns = device_ns
            return guards.good(*values)

        return kernel


@pytest.mark.parametrize(
    ("candidate", "baseline", "slow"),
    [
        ({"host_ns": 30_000, "device_ns": 3_000}, {"host_ns": 6_000, "device_ns": 5_000}, False),
        ({"host_ns": 6_000, "device_ns": 5_000}, {"host_ns": 30_000, "device_ns": 3_000}, True),
    ],
    ids=["dear to launch", "dear to run"],
)
def test_speeds_on_a_gpu_are_compared_by_the_clock_of_the_race(
    candidate: dict[str, int], baseline: dict[str, int], slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare device times: races on a GPU replay graphs, and by host time an arm would lose by its launch overhead."""
    clock = guards.Clock()
    device = Device(clock)
    monkeypatch.setattr("autosel.guard.call._held", lambda values: device)
    arms = (device.taking(**candidate), device.taking(**baseline))
    watch, told = guards.watched(arms[0], baseline=arms[1], clock=clock)
    for _ in range(200):
        guards.call(watch)
    assert [fault.cause for fault in told] == (["slow"] if slow else [])
    assert watch.detector.pairs and watch.detector.lost == (watch.detector.pairs if slow else 0)
    assert watch.rate.own_ns == max(candidate.values()), "the share of checks must follow the call's duration"
