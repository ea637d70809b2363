"""Measure a GPU's rates with the kernels of kernels/cuda/probes.cu, compiled by NVRTC through cupy: about 3 s.

bench.py has the rules for every figure.

Status: compiled; not yet run on silicon.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autosel.devices.cuda import arithmetic, cost, nvml, rates
from autosel.devices.cuda.bench import ProbeBench
from autosel.values import Rate

LOOK_WINDOWS, LOOK_WINDOW_S = 2, 0.006  # blocks of each of two grids


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedRates:
    """Hold rates by name, and notes about oddities."""

    rates: Mapping[str, Rate]
    notes: tuple[str, ...]
    slowed: str  # why the device ran slower than possible at the end of any stage, or ""


def measure(ordinal: int, readings: nvml.Readings) -> ProbedRates:
    """Measure every rate of CUDA's device `ordinal`, which should have no other users. Needs cupy; the matrix rates
    need torch."""
    import cupy

    with cupy.cuda.Device(ordinal):
        bench = ProbeBench(cupy=cupy, identity=nvml.identity_of(readings))
        slowed: dict[str, None] = {}  # in the order in which they occurred
        stages = (
            ProbeBench.warm_up,
            ProbeBench.memory,
            ProbeBench.cache,
            ProbeBench.latency,
            cost.measure,
            arithmetic.measure,
        )
        for stage in stages:
            stage(bench)
            # Read while the device is still hot: a cause of throttling under load may be gone a second later.
            slowed |= dict.fromkeys(filter(None, [nvml.slowdown(readings.uuid)]))
        bench.release()
    figures = {name: rate.value for name, rate in bench.rates.items()}
    odd = rates.complaints(figures, bench.identity, nvml.peak_read_bytes_per_s(readings))
    return ProbedRates(rates=bench.rates, notes=(*bench.notes, *odd), slowed="; ".join(slowed))


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftLook:
    """Measure two rates shortly, to check whether the others still hold."""

    read_bytes_per_s: float
    graph_node_s: float


def looks(ordinal: int, count: int) -> list[DriftLook]:
    """Measure so many times in a row, some 30 ms each, with clocks warmed up first.

    Raises UsageError: no cupy, or no memory left.
    """
    nvml.counted()
    import cupy

    with cupy.cuda.Device(ordinal):
        bench = ProbeBench(cupy=cupy, identity=nvml.identity_of(nvml.read(ordinal)))
        bench.warm_up()
        chain = cost.graph_chain(bench)
        found = [_look(bench, chain) for _ in range(count)]
        bench.release()
    return found


def _look(bench: ProbeBench, chain: Callable[[int], None]) -> DriftLook:
    node = min(cost.each(bench, chain, *cost.CHAIN, windows=LOOK_WINDOWS))
    read = bench.best_read(windows=LOOK_WINDOWS, window_s=LOOK_WINDOW_S)
    return DriftLook(read_bytes_per_s=read, graph_node_s=node)


def reader(ordinal: int) -> Callable[[], float]:
    """Return the bytes/s of reading a gigabyte, the best of five windows: the upper limit of every kernel that reads
    memory.

    Holds that buffer for as long as it lives. Needs cupy.
    """
    import cupy

    with cupy.cuda.Device(ordinal):
        bench = ProbeBench(cupy=cupy, identity=nvml.identity_of(nvml.read(ordinal)))
        bench.warm_up()

    def rate() -> float:
        with cupy.cuda.Device(ordinal):
            return bench.best_read()

    return rate
