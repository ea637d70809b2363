"""Test the code that only runs with a GPU, on stand-ins for PyTorch's interface to CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autosel import devices
from autosel.candidates.load import load
from autosel.decode import graph, launch, race
from autosel.decode.run import FUSED
from autosel.decode.sample import largest
from autosel.decode.step import Step
from autosel.devices.cuda import capture, nvml
from autosel.devices.cuda import device as cuda_device
from autosel.devices.cuda import probe as gpu_probe
from autosel.devices.cuda.device import Cuda as Gpu
from autosel.errors import UnknownName, UsageError
from autosel.guard import call as guard_call
from autosel.ops import OPS, eager
from autosel.parity.mirror import Mirror
from autosel.race.plan import plan as plan_of
from autosel.values import PythonRecipe
from autosel.workers.arena import Arena
from benchmarks.gpu import child, containment
from benchmarks.gpu.scope import refuse_absent_device
from tests.null import test_guard as guards
from tests.null.cuda_stand_in import TICK_MS, Cuda, OnGpu
from tests.null.test_devices_cuda import H200

ONE = torch.zeros(1)


# --- a step as a graph ------------------------------------------------------------------------------------------------


def test_a_captured_list_runs_only_when_replayed(cuda: Cuda) -> None:
    ops = SimpleNamespace(logits=OnGpu.of(ONE), run_chained=lambda: [cuda.call(i) for i in range(3)])
    replay = graph.captured(ops)  # type: ignore[arg-type]
    warm = len(cuda.made)
    assert cuda.made == [0, 1, 2] * capture.WARM_CALLS
    for _ in range(2):
        replay()
    assert cuda.made[warm:] == [0, 1, 2] * 2


def test_a_list_is_captured_on_a_stream_of_its_own_device(cuda: Cuda) -> None:
    """Independent of the current device: on another device's stream its calls would run at once, and the graph would be
    empty."""
    there = torch.device("cuda", 1)
    graph.captured(SimpleNamespace(logits=SimpleNamespace(device=there), run_chained=lambda: cuda.call(0)))  # type: ignore[arg-type]
    assert cuda.captured_on == [there]


def test_a_list_that_cannot_be_captured_raises_with_the_reason_and_a_fix(cuda: Cuda) -> None:
    cuda.refuses = True
    ops = SimpleNamespace(logits=OnGpu.of(ONE), run_chained=lambda: cuda.call(0))
    with pytest.raises(UsageError, match="cannot be captured") as caught:
        graph.captured(ops)  # type: ignore[arg-type]
    assert "not permitted" in caught.value.why and "--step ops" in caught.value.todo


def test_each_call_of_a_step_has_its_own_time_by_the_devices_clock(cuda: Cuda) -> None:
    def kernels(count: int) -> None:
        for i in range(count):
            cuda.call(i)

    calls = [SimpleNamespace(function=kernels, arguments=(count,)) for count in (1, 3, 0, 2)]
    step = SimpleNamespace(logits=OnGpu.of(ONE), calls=calls)
    spans = devices.of(step.logits).call_spans(step.calls, lambda: 0)
    assert [end - begin for begin, end in spans] == [round(n * TICK_MS * 1e6) for n in (1, 3, 0, 2)]


def test_a_step_has_ended_when_it_is_settled(cuda: Cuda) -> None:
    done: list[str] = []
    cuda.enqueued.append(lambda: done.append("op by op"))
    Step.settle(SimpleNamespace(logits=OnGpu.of(ONE)))  # type: ignore[arg-type]
    assert done == ["op by op"]


def test_a_launch_stopped_by_its_watchdog_raises_after_the_device_reports_it(cuda: Cuda) -> None:
    said = torch.zeros(1, dtype=torch.int32)
    stopped = SimpleNamespace(said=said, logits=OnGpu.of(ONE), _stopped=lambda task: UsageError(f"task {task}"))
    launch.LaunchStep.settle(stopped)  # type: ignore[arg-type]
    cuda.enqueued.append(lambda: said.fill_(5))
    with pytest.raises(UsageError, match="task 4"):
        launch.LaunchStep.settle(stopped)  # type: ignore[arg-type]


def test_the_likeliest_token_is_chosen_on_the_device_of_the_logits() -> None:
    logits = torch.tensor([[-3.0, -1.0, -2.0], [0.5, 0.25, 9.0]], dtype=torch.bfloat16)
    assert largest(OnGpu.of(logits), torch.empty(2, dtype=torch.int64)).tolist() == [1, 2]


# --- memory, rates, samples -------------------------------------------------------------------------------------------


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace the read probe of each GPU: 1e12 bytes/s on the first, 2e12 on the second."""
    monkeypatch.setattr(gpu_probe, "reader", lambda ordinal: lambda: 1e12 * (ordinal + 1))
    cuda_device.reader.cache_clear()
    yield
    cuda_device.reader.cache_clear()


def test_the_read_rate_is_that_of_the_device_that_was_named(cuda: Cuda, readers: None) -> None:
    for name, rate in (("cuda", 1e12), ("cuda:0", 1e12), ("cuda:1", 2e12)):
        assert devices.named(name).read_windows() == [rate]


def test_memory_is_that_of_the_device_that_was_named(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7 if device.index == 1 else 5)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70, 99) if str(device)[-1] == "1" else (50, 99))
    both = [devices.named(name) for name in ("cuda:1", "cuda")]
    assert [one.peak_bytes() for one in both] == [7, 5]
    assert [one.free_bytes() for one in both] == [70, 50]
    scopes = [SimpleNamespace(on_gpu=on, device="cuda:1") for on in (True, False)]
    assert [containment.free_bytes(scope) for scope in scopes] == [70, 0]  # type: ignore[arg-type]


def test_a_gpus_operands_are_copies_and_its_samples_replays(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = devices.named("cuda:1")
    assert made.torch_device == torch.device("cuda", 1)
    monkeypatch.setattr(Gpu, "torch_device", torch.device("cpu"))  # where the copies of this test must be
    value = torch.arange(12.0).view(3, 4)[:, 1:]
    for copy in (made.resident(value), made.streamed(value)):
        assert torch.equal(copy, value) and copy.stride() == value.stride() and copy.data_ptr() != value.data_ptr()
    timed = made.timed(cuda.call, [(0,), (1,)])
    assert timed.sample(4) == TICK_MS * 1e6 and list(timed.graphs) == [4]


# --- proofs and the guard ---------------------------------------------------------------------------------------------


def test_errors_of_the_device_are_raised_where_its_results_are_awaited(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, done = Mirror("cuda:1"), []
    cuda.enqueued.append(lambda: done.append(1))
    mirror.pull([], {})
    assert done == [1]

    def fault() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    cuda.enqueued.append(fault)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        mirror.pull([], {})


def test_the_gpu_without_a_number_is_the_first(cuda: Cuda) -> None:
    assert Mirror("cuda").torch_device == torch.device("cuda", 0)


def test_an_arena_is_mirrored_once_in_the_devices_own_memory(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gpu, "torch_device", torch.device("meta"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    mirror, arena = Mirror("cuda"), Arena(4096)
    buffer = mirror._buffer(arena)
    assert (buffer.device.type, buffer.numel(), mirror._buffer(arena) is buffer) == ("meta", arena.size_bytes, True)


def test_no_call_is_checked_during_a_capture_and_every_call_afterwards(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let a wrong kernel's result go into the graph: a comparison would have to wait, which a capture forbids."""
    capturing = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    watch, told = guards.watched(lambda x, *_: torch.full_like(x, 2.0))
    given = (OnGpu.of(guards.X), guards.WEIGHT, 1e-6, 0.0)
    assert torch.equal(torch.as_tensor(watch(given, (None,))).as_subclass(torch.Tensor), torch.full((4, 64), 2.0))
    assert not told
    capturing = False
    guards.call(watch)
    assert len(told) == 1


def test_a_time_is_read_after_the_work_is_done(cuda: Cuda) -> None:
    done: list[int] = []
    cuda.enqueued.append(lambda: done.append(1))
    guard_call._settle([ONE, 3])
    assert done == []
    guard_call._settle([ONE, OnGpu.of(ONE)])
    assert done == [1]


class Breakable:
    """A device that a kernel has broken: every query and wait raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broken = False
        for module, name in ((torch.cuda, "synchronize"), (torch, "equal"), (torch, "empty_strided")):
            monkeypatch.setattr(module, name, self.unless_broken(getattr(module, name)))

    def unless_broken(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **named: Any) -> Any:
            if self.broken:
                raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
            return call(*args, **named)

        return made

    def breaks(self, *values: Any) -> torch.Tensor:
        """Break the device without an error at the launch."""
        made = guards.good(*values)
        self.broken = True
        return made


@pytest.fixture
def breakable(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> Breakable:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return Breakable(monkeypatch)


GIVEN = (OnGpu.of(guards.X), OnGpu.of(guards.WEIGHT), 1e-6, 0.0)


def test_a_kernel_that_breaks_the_device_is_blamed_in_either_order_of_arms(breakable: Breakable) -> None:
    """Blame it, because otherwise the server would restart with the same kernel forever."""
    first = set()
    for seed in range(6):
        breakable.broken = False
        watch, told = guards.watched(breakable.breaks, baseline=breakable.unless_broken(guards.good))
        watch.random = Random(seed)
        try:
            watch(GIVEN, (None,))
            first.add("baseline")
        except torch.AcceleratorError:  # there is no result to return
            first.add("candidate")
        assert [f.cause for f in told] == ["raised"]
        assert "illegal memory access" in told[0].reason
    assert first == {"baseline", "candidate"}


def test_a_kernel_that_breaks_the_device_on_a_replay_is_blamed_and_the_device_is_not(breakable: Breakable) -> None:
    calls = 0

    def wrong_then_worse(*values: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return guards.scaled(*values) if calls == 1 else breakable.breaks(*values)

    watch, told = guards.watched(wrong_then_worse, baseline=breakable.unless_broken(guards.good))
    watch(GIVEN, (None,))
    assert [f.cause for f in told] == ["kernel"]


def test_for_a_device_that_was_already_broken_no_arm_is_blamed(breakable: Breakable) -> None:
    def ends(*values: Any) -> torch.Tensor:
        raise AssertionError("it is not run")

    for seed in range(4):
        watch, told = guards.watched(ends, baseline=ends)
        watch.random = Random(seed)
        breakable.broken = True
        with pytest.raises(torch.AcceleratorError):
            watch(GIVEN, (None,))
        assert not told


def test_decisions_for_a_gpus_tensors_are_found_by_the_identity_of_its_tune(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nvml, "read", lambda ordinal: H200)
    devices._identified.cache_clear()
    found, unknown = devices.device_at(devices.place_of(OnGpu.of(ONE)))
    devices._identified.cache_clear()
    assert (found.kind, found.name, unknown) == ("cuda", "NVIDIA H200", "")
    assert found.identity == nvml.identity_of(H200) and found.rates == {}


# --- the stages of `./run gpu` ----------------------------------------------------------------------------------------


def test_a_fault_of_the_device_is_found_after_the_unit_that_made_it(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert child.fault_of_device() == ""

    def fault() -> None:
        raise torch.AcceleratorError("CUDA error: misaligned address\nCUDA kernel errors might be reported later")

    cuda.enqueued.append(fault)
    assert child.fault_of_device() == "CUDA error: misaligned address"


def test_a_missing_gpu_is_refused_by_its_number(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: (8, 0))
    for name in ("cpu", "cuda", "cuda:1"):
        refuse_absent_device(name)
    with pytest.raises(UsageError, match="no GPU 2"):
        refuse_absent_device("cuda:2")
    with pytest.raises(UnknownName, match="gpu"):
        refuse_absent_device("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="no GPU found"):
        refuse_absent_device("cuda")


def test_a_gpu_that_no_kernel_is_for_is_refused_before_the_first_stage(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: ((9, 0), (7, 5))[number])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "Tesla T4")
    refuse_absent_device("cuda")
    with pytest.raises(UsageError, match="no kernel supports GPU 1") as caught:
        refuse_absent_device("cuda:1")
    assert "Tesla T4 has compute capability 7.5" in caught.value.why and "8.0" in caught.value.why


# --- a race of whole steps --------------------------------------------------------------------------------------------


def test_a_race_times_a_gpus_steps_by_events(cuda: Cuda, readers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the host's clock; the time of each step is a number of calls of the device."""
    monkeypatch.setattr(race, "last_level_bytes", lambda fp: 1)
    plan: Any = SimpleNamespace(device="cuda:1")
    scene: Any = SimpleNamespace(plan=plan, clock=lambda: 0, fp=None)

    def step(calls: int) -> Any:
        return SimpleNamespace(run=lambda: [cuda.call(i) for i in range(calls)], settle=cuda.settle)

    seat = race.StepSeat(race.Steps(scene=scene, chain=FUSED, arms={}), ["ops:step", "graph:step"], plan_of(2e6))
    seat.written = {"ops:step": step(3), "graph:step": step(2)}
    times, _ = seat.pair(["graph:step", "ops:step"], calls=4, samples=3)
    assert times == {"graph:step": [2 * TICK_MS * 1e6] * 3, "ops:step": [3 * TICK_MS * 1e6] * 3}
    assert seat.probe() == 2e12


def test_a_token_is_sampled_during_a_capture_without_querying_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Skip unneeded work only if the device may be queried; the result is the same."""

    class Unasked(torch.Tensor):
        def __bool__(self) -> bool:
            raise RuntimeError("operation not permitted when stream is capturing")

    op = OPS["sample"]
    inputs = op.inputs(op.workload("bf16", {"B": 3, "V": 257, "L": 8}), 1)
    inputs |= {"top_k": torch.zeros_like(inputs["top_k"]), "top_p": torch.ones_like(inputs["top_p"])}
    looked = eager.sample(*op.arguments(inputs))
    monkeypatch.setattr(eager, "_may_not_ask", lambda logits: True)
    inputs |= {name: inputs[name].as_subclass(Unasked) for name in ("top_k", "top_p")}
    assert eager.sample(*op.arguments(inputs)).tolist() == looked.tolist()


@pytest.mark.parametrize("capturing", [False, True])
def test_only_gpu_streams_are_queried_for_a_capture(capturing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert eager._may_not_ask(OnGpu.of(ONE)) is capturing
    assert eager._may_not_ask(ONE) is False


# --- several GPUs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("current", "entered"), [(0, []), (1, ["cuda:0"])])
def test_a_library_is_called_with_its_operands_gpu_as_the_current_one(
    current: int, entered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set the current device, because Triton launches on it and refuses operands of another."""
    made: list[str] = []

    @contextmanager
    def device(asked: torch.device) -> Iterator[None]:
        made.append(str(asked))
        yield

    stand_ins = {"device_count": lambda: 2, "current_device": lambda: current, "device": device}
    for name, value in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, value)
    swiglu = load(OPS["swiglu"], PythonRecipe(target="autosel.ops.eager:swiglu"), "", {})
    gate = torch.ones(1, 8)
    assert torch.equal(swiglu(gate, gate, torch.empty(1, 8)), swiglu(OnGpu.of(gate), gate, torch.empty(1, 8)))
    assert made == entered


def test_a_decode_has_its_device_as_the_current_one(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(torch.cuda, "device", lambda asked: made.append(asked) or nullcontext())
    for name in ("cpu", "cuda:1"):
        with devices.named(name).current():
            pass
    assert made == [torch.device("cuda", 1)]
