"""Time a kernel, PyTorch and a plain streaming read of the same operands, interleaved in one run.

Each round visits every arm in shuffled order. A visit waits until the previous arm's threads have stopped spinning,
runs once untimed, to wake its own threads, then once timed. Copies of the operands rotate, so that three last-level
caches of data were read since a copy was last used. On a shared machine the read rate varies by a factor of two or
more within a run; therefore a ratio is computed from the times of one round.
"""

from __future__ import annotations

import ctypes
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autosel.candidates.base import Candidate
from autosel.candidates.load import load
from autosel.devices.cpu import probe
from autosel.devices.cpu.idle import wait_until_idle
from autosel.native.compile import compile_source
from autosel.ops import OPS
from autosel.values import Accepted, Fingerprint, NativeRecipe, Workload
from autosel.workers import pages

LEAST_ROUNDS = 9

Quartiles = tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interleaved:
    """The kernel's best time, and quartiles over rounds of each other arm's time over the kernel's."""

    best_us: float
    rounds: int
    over: dict[str, Quartiles]


def measure(
    kernels: Sequence[Candidate],
    w: Workload,
    fp: Fingerprint,
    rivals: Mapping[str, Callable[..., Any]],
    budget_s: float,
) -> Interleaved:
    """Time the first of the C++ kernels that supports w against the rivals and the arm `read`."""
    op = OPS[w.op]
    inputs = op.inputs(w, 1)
    streamed = [a.name for a in op.args if a.role == "streamed"]
    streamed_bytes = sum(inputs[n].numel() * inputs[n].element_size() for n in streamed)
    copies = 1 + -(-3 * int(fp.identity["l3_bytes"]) // streamed_bytes)
    operands = [{**inputs, **{n: pages.clone(inputs[n]) for n in streamed}} for _ in range(copies)]
    kernel = next(k for k in kernels if k.op == w.op and isinstance(k.supports(w, fp), Accepted))
    times = timed(w, {"read": reader(streamed, fp), "cpp": loaded(kernel, w, fp), **rivals}, operands, budget_s)
    own = times.pop("cpp")
    over = {arm: quartiles([a / b for a, b in zip(taken, own, strict=True)]) for arm, taken in times.items()}
    return Interleaved(best_us=min(own) * 1e6, rounds=len(own), over=over)


def timed(
    w: Workload,
    arms: Mapping[str, Callable[..., Any]],
    operands: Sequence[Mapping[str, Any]],
    budget_s: float,
) -> dict[str, list[float]]:
    """Return the seconds of each arm's calls; `read` takes operands and returns its seconds."""
    op = OPS[w.op]
    outputs = op.allocate(w)
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    turn, order, rng, end = 0, list(arms), random.Random(1), time.perf_counter() + budget_s
    while len(times["cpp"]) < LEAST_ROUNDS or time.perf_counter() < end:
        rng.shuffle(order)
        for arm in order:
            wait_until_idle()
            for counts in (False, True):
                turn += 1
                given = operands[turn % len(operands)]
                took = arms[arm](given) if arm == "read" else _seconds(arms[arm], (*op.arguments(given), *outputs))
                if counts:
                    times[arm].append(took)
    return times


def loaded(kernel: Candidate, w: Workload, fp: Fingerprint) -> Callable[..., Any]:
    """Return a C++ kernel for w with the knobs of its closed forms."""
    knobs = kernel.knobs(w, fp)
    recipe = kernel.recipe(w, fp, knobs)
    assert isinstance(recipe, NativeRecipe)
    return load(OPS[w.op], recipe, compile_source(recipe.source, recipe.flags).digest, knobs.values)


def reader(streamed: Sequence[str], fp: Fingerprint) -> Callable[[Mapping[str, Any]], float]:
    """Return a function that reads these operands once on all cores by the fingerprint's probe; it returns seconds."""
    probes, threads = probe.load(), int(fp.identity["cpus"])

    def read(operands: Mapping[str, Any]) -> float:
        total = 0.0
        for name in streamed:
            size = operands[name].numel() * operands[name].element_size()
            at = ctypes.c_void_p(operands[name].data_ptr())
            total += size / probes.windows("read", at, size, size, 0, threads, seconds=0.0)[0]
        return total

    return read


def _seconds(call: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def quartiles(values: list[float]) -> Quartiles:
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high
