"""Time kernels and a plain streaming read of the same operands, for benchmarks that interleave them."""

from __future__ import annotations

import ctypes
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autosel.candidates.base import Candidate
from autosel.candidates.load import load
from autosel.devices.cpu import probe
from autosel.devices.cpu.idle import wait_until_idle
from autosel.native.compile import compile_source
from autosel.ops import OPS
from autosel.values import Accepted, Fingerprint, NativeRecipe, Workload

LEAST_ROUNDS = 9


def timed(
    w: Workload,
    arms: Mapping[str, Callable[..., Any]],
    operands: Sequence[Mapping[str, Any]],
    budget_s: float,
    *,
    wait: bool = True,
) -> dict[str, list[float]]:
    """Return the seconds of each arm's calls; `read` takes operands and returns its seconds.

    Each round visits every arm in shuffled order, untimed then timed, on the next copy of the operands. `wait`: for
    the spinning threads of other arms to stop.
    """
    op = OPS[w.op]
    outputs = op.allocate(w)
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    turn, order, rng, end = 0, list(arms), random.Random(1), time.perf_counter() + budget_s
    while len(times["cpp"]) < LEAST_ROUNDS or time.perf_counter() < end:
        rng.shuffle(order)
        for arm in order:
            if wait:
                wait_until_idle()
            for counts in (False, True):
                turn += 1
                given = operands[turn % len(operands)]
                took = arms[arm](given) if arm == "read" else _seconds(arms[arm], (*op.arguments(given), *outputs))
                if counts:
                    times[arm].append(took)
    return times


def ours(kernels: Sequence[Candidate], w: Workload, fp: Fingerprint) -> Callable[..., Any]:
    """Return the first C++ kernel for w with the knobs of its closed forms."""
    kernel = next(k for k in kernels if k.op == w.op and isinstance(k.supports(w, fp), Accepted))
    knobs = kernel.knobs(w, fp)
    recipe = kernel.recipe(w, fp, knobs)
    assert isinstance(recipe, NativeRecipe)
    return load(OPS[w.op], recipe, compile_source(recipe.source, recipe.flags).digest, knobs.values)


def reader(streamed: Sequence[str], fp: Fingerprint) -> Callable[[dict[str, Any]], float]:
    """Return a function that reads these operands once on all cores by the fingerprint's probe; it returns seconds."""
    library, out = probe.load().library, (ctypes.c_double * 1)()

    def read(operands: dict[str, Any]) -> float:
        total = 0.0
        for name in streamed:
            size = operands[name].numel() * operands[name].element_size()
            library.autosel_probe_read(
                ctypes.c_void_p(operands[name].data_ptr()),
                *(ctypes.c_int64(v) for v in (size, size, int(fp.identity["cpus"]))),
                ctypes.c_double(0.0),
                out,
                ctypes.c_int64(1),
            )
            total += size / out[0]
        return total

    return read


def _seconds(call: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high
