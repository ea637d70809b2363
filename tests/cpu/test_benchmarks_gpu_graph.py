"""Test how the graph stage judges a replay. CUDA's graphs are simulated: the calls of a capture are repeated into the
same results; kernels and contents are real, on this CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autosel import fingerprint
from autosel.candidates.registry import find
from autosel.devices.cpu.device import Cpu
from autosel.devices.cuda.timing import Replayed
from autosel.devices.device import NO_OUTPUTS
from autosel.ops import OPS
from benchmarks.gpu.__main__ import parsed
from benchmarks.gpu.entrants import Entry, entrant
from benchmarks.gpu.graph import replayed, whole_step
from benchmarks.gpu.instrument import Timer
from benchmarks.gpu.scope import scope_of
from tests.flows.test_benchmarks_gpu import CONFIG

Arguments = tuple[Any, ...]


class Graph:
    """Record the calls of a capture, each with its result."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[..., Any], Arguments, Any]] = []

    def replay(self) -> None:
        for call, arguments, result in self.calls:
            made = call(*arguments)
            if isinstance(result, torch.Tensor) and made is not result:
                result.copy_(made)


class Cuda(Cpu):
    """Take samples as on a GPU."""

    on_host = False

    def __init__(self, patch: pytest.MonkeyPatch, *, refuses: bool = False) -> None:
        super().__init__()
        self.into: Graph | None = None
        self.refuses = refuses

        class Event:
            def __init__(self, enable_timing: bool) -> None: ...
            def record(self) -> None: ...
            def synchronize(self) -> None: ...
            def elapsed_time(self, end: Event) -> float:
                return 1e-3

        class Stream:
            def __init__(self, on: object = None) -> None: ...

            def wait_stream(self, other: Stream) -> None: ...

        @contextmanager
        def stream(_: object) -> Iterator[None]:
            yield

        stand_ins: dict[str, Any] = {
            "Event": Event, "CUDAGraph": Graph, "Stream": Stream, "graph": self.capture, "stream": stream,
            "current_stream": Stream, "synchronize": lambda *_: None, "_sleep": lambda cycles: None,
            "device": stream, "set_stream": lambda stream: None, "graph_pool_handle": lambda: (0, 1),
            "current_device": lambda: 0,
        }  # fmt: skip
        for name, value in stand_ins.items():
            patch.setattr(torch.cuda, name, value)

    @contextmanager
    def capture(self, into: Graph, pool: object, stream: object) -> Iterator[None]:
        self.into = into
        try:
            yield
        finally:
            self.into = None

    def timed(self, call: Callable[..., Any], calls: Any, outputs: Any = NO_OUTPUTS) -> Replayed:
        def recorded(*arguments: Any) -> Any:
            if self.into is None:
                return call(*arguments)
            if self.refuses:
                raise RuntimeError("operation not permitted when stream is capturing")
            made = call(*arguments)
            self.into.calls.append((call, arguments, made))
            return made

        return Replayed(recorded, [(*arguments, *outputs[0]) for arguments in calls], torch.device("cuda", 0))


def outcome(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    *,
    allocates: bool = False,
    spoil: Callable[..., Any] | None = None,
    refuses: bool = False,
) -> str:
    """Return the stage's result for a candidate of rmsnorm; `spoil` wraps its call."""
    fp = fingerprint.take("cpu")
    w = OPS["rmsnorm"].workload("bf16", {"M": 3, "d": 512})
    entry, timer = Entry(candidate=find("rmsnorm", name), workload=w), Timer(fp, "cpu")
    timer.bench.device = Cuda(monkeypatch, refuses=refuses)
    arm = replace(entrant(entry.candidate, w, fp), writes_out=not allocates)
    if spoil is not None:
        timer.bench.load(arm)
        loaded = timer.bench.arms[arm.loaded_name]
        loaded.call = spoil(loaded.call)
    timer.seat(w, {name: arm}, copies=1)
    found = replayed(timer, entry)
    timer.close()
    return f"{found['outcome']} as {found['how']}"


@pytest.mark.parametrize("allocates", [False, True])
@pytest.mark.parametrize("name", ["torch:rmsnorm", "cpp:rmsnorm"])
def test_a_replay_on_other_contents_is_judged_and_compared_with_a_call(
    monkeypatch: pytest.MonkeyPatch, name: str, *, allocates: bool
) -> None:
    """Test a candidate that allocates its result, and one that writes into an output."""
    assert outcome(monkeypatch, name, allocates=allocates) == "right as graph"


def test_a_candidate_that_cannot_be_captured_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(monkeypatch, "cpp:rmsnorm", refuses=True) == "not captured as queue"


def test_a_kernel_that_keeps_the_contents_of_its_capture_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a kernel that is right only for the contents of its first call."""

    def held(call: Callable[..., Any]) -> Callable[..., Any]:
        known: list[torch.Tensor] = []

        def first(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, y: torch.Tensor) -> torch.Tensor:
            call(x, weight, eps, offset, y)
            known.append(y.clone())
            return y.copy_(known[0])

        return first

    assert outcome(monkeypatch, "cpp:rmsnorm", spoil=held) == "wrong as graph"


def test_a_kernel_that_gives_other_bits_each_time_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wavering(call: Callable[..., Any]) -> Callable[..., Any]:
        turns = [0]

        def called(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, y: torch.Tensor) -> torch.Tensor:
            call(x, weight, eps, offset, y)
            turns[0] += 1
            return y.mul_(1.0 + 2.0**-7 * (turns[0] % 2))

        return called

    assert outcome(monkeypatch, "cpp:rmsnorm", spoil=wavering) in ("differs as graph", "wrong as graph")


# --- a whole step -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("refuses", "outcome"), [(False, "right as graph"), (True, "not captured as queue")])
def test_a_whole_step_is_captured_and_its_replay_gives_the_logits_of_the_calls(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcome: str, *, refuses: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    scope = scope_of(parsed(["--device", "cpu", "--model", str(tmp_path), "--seq", "64", "--layers", "1"]))
    played = Cuda(monkeypatch, refuses=refuses)
    monkeypatch.setattr(Cpu, "timed", lambda self, *given: played.timed(*given))
    found = whole_step(scope)
    assert f"{found['outcome']} as {found['how']}" == outcome
    assert found["ok"] == (not refuses) and found["graph_ms"] > 0 and found["calls"] > 5
