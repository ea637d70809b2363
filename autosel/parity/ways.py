"""Ways in which a worker calls a candidate: plainly, from other threads, in inference mode, on views of one storage.

A server calls a kernel from any of its threads. Other threads here get the modes of the worker's main thread.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from autosel import devices
from autosel.native import threads
from autosel.ops.compare import bits
from autosel.values import from_json
from autosel.workers.arena import Arenas, Ref

HERE, OTHER, NEW, ONE_STORAGE = "", "another thread", "a new thread", "one storage"
INFERENCE, UNPREPARED = "inference mode", "weights not prepared"
START_TOGETHER_S = 60.0
PAUSED, PAUSE_S, PAUSES_S = 2, 2e-4, 0.1  # passes with pauses; seconds of one pause; seconds after which pauses end
M_PERTURB, NEW_MEMORY = -6, 0x7F  # option in malloc.h; the value of new bytes, 3.4e38 as bf16 and fp32
_OTHER: list[ThreadPoolExecutor] = []
_COUNT = [0]  # the initial number of PyTorch's threads; 0 until it is changed

Call = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """A call's arguments and outputs."""

    arguments: Sequence[Any]
    outputs: Sequence[Any]

    def with_new_outputs(self) -> list[Any]:
        """Return the same arguments with new outputs."""
        return [*self.arguments, *(None if out is None else out.clone() for out in self.outputs)]


def called(way: str, call: Call) -> Any:
    """Run the call in the thread or mode that `way` names; return its result."""
    if way == OTHER:
        if not _OTHER:
            _OTHER.append(ThreadPoolExecutor(1, initializer=_taking_along()))
        return _OTHER[0].submit(call).result()
    if way == NEW:
        with ThreadPoolExecutor(1, initializer=_taking_along()) as pool:
            return pool.submit(call).result()
    if way == INFERENCE:
        with torch.inference_mode():
            return call()
    return call()


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """The results of a call, and its operands."""

    results: list[Any]
    operands: Sequence[Any]


def at_once(function: Call, queues: Sequence[Sequence[Operands]], passes: int) -> list[list[Made]]:
    """Run each queue's calls in a separate thread, all at the same time, several times.

    Each call of each pass gets separate outputs. For every call, return the first result that differs from the first
    pass, else the last result.

    After these passes each queue runs slowly while the others run: its thread pauses whenever native code returns to
    Python code. Without pauses, threads on a busy core alternate only every few milliseconds, and each completes many
    calls of a short kernel in between.
    """
    runs = [[[operands.with_new_outputs() for operands in queue] for _ in range(passes + PAUSED)] for queue in queues]
    start, done = threading.Barrier(len(queues)), threading.Event()

    def run(calls: Sequence[Sequence[Sequence[Any]]]) -> list[list[Any]]:
        start.wait(START_TOGETHER_S)
        return [[function(*operands) for operands in one_pass] for one_pass in calls]

    def run_slowly(calls: Sequence[Sequence[Sequence[Any]]]) -> list[list[Any]]:
        try:
            with _pausing():
                return run(calls)
        finally:
            done.set()

    def run_beside(calls: Sequence[Sequence[Sequence[Any]]]) -> None:
        start.wait(START_TOGETHER_S)
        while not done.is_set():
            for operands in calls[-1]:
                function(*operands)

    with ThreadPoolExecutor(len(queues), initializer=_taking_along()) as pool:
        returned = list(pool.map(run, [calls[:passes] for calls in runs]))
        for slow, calls in enumerate(runs):
            done.clear()
            others = [pool.submit(run_beside, beside) for number, beside in enumerate(runs) if number != slow]
            returned[slow] += pool.submit(run_slowly, calls[passes:]).result()
            for other in others:
                other.result()
    return [
        [_odd([Made(results=listed(r), operands=o) for r, o in zip(made, passed, strict=True)])
         for made, passed in zip(zip(*results, strict=True), zip(*calls, strict=True), strict=True)]
        for results, calls in zip(returned, runs, strict=True)
    ]  # fmt: skip


@contextmanager
def _pausing() -> Iterator[None]:
    """Pause this thread whenever native code returns to Python code, until PAUSES_S have passed."""
    until = time.perf_counter() + PAUSES_S

    def pause(_: FrameType, event: str, __: Any) -> None:
        if event == "c_return" and time.perf_counter() < until:
            time.sleep(PAUSE_S)

    sys.setprofile(pause)
    try:
        yield
    finally:
        sys.setprofile(None)


def _odd(made: Sequence[Made]) -> Made:
    def same(one: Made) -> bool:
        return len(one.results) == len(made[0].results) and all(map(_equal, one.results, made[0].results))

    return next((one for one in made if not same(one)), made[-1])


def _equal(one: Any, other: Any) -> bool:
    """Compare bitwise if both are tensors of the same shape and dtype."""
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return one is other
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(bits(one), bits(other))


def listed(returned: Any) -> list[Any]:
    return list(returned) if isinstance(returned, (tuple, list)) else [returned]


def _taking_along() -> Callable[[], None]:
    """Return a function that gives a new thread the modes of this thread."""
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    take_devices = devices.taking_along()

    def take() -> None:
        torch.set_grad_enabled(grad)
        assert torch.get_default_dtype() == dtype
        take_devices()

    return take


def use_threads(count: int, *, served: bool) -> None:
    """Set the number of PyTorch's threads; 0: the initial number. `served`: C++ kernels run on them, as in a server."""
    _COUNT[0] = _COUNT[0] or torch.get_num_threads()
    torch.set_num_threads(count or _COUNT[0])
    threads.use(openmp=served, wake=True)


def other_work() -> None:
    """Run the work of a model between two calls of a kernel: products, a sort, a softmax, a copy to another dtype."""
    x = torch.linspace(-3.0, 3.0, 96 * 96).view(96, 96)
    for dtype in (torch.float32, torch.bfloat16):
        (x.to(dtype) @ x.to(dtype)).softmax(-1).sort(-1)


def in_one_storage(reference: Mapping[str, Any], arenas: Arenas) -> torch.Tensor:
    """Return the tensor of a reference as a view of the arena's whole storage, at its offset."""
    ref: Ref = from_json(Ref, reference)
    arena, dtype = arenas[ref.arena], getattr(torch, ref.dtype)
    whole = torch.frombuffer(arena.memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(whole, ref.offset // dtype.itemsize, ref.shape, ref.strides)


def fill_new_memory() -> None:
    """Make malloc fill new memory with numbers, as in a process that has run for long; in a fresh one it is zero."""
    try:
        ctypes.CDLL(None).mallopt(M_PERTURB, NEW_MEMORY ^ 0xFF)
    except AttributeError:  # not glibc
        return
