"""Measure this CPU's rates with kernels/cpu/probes.cpp through ctypes, or with numpy without a compiler.

Every rate is the 90th percentile of many short windows (the 10th for a time): on a shared machine the undisturbed
windows show the hardware's capability, while an average depends on the neighbours. The spread, (p90 - p10) / median,
shows how disturbed the rest was. Neither torch nor tvm-ffi is imported, which takes two seconds instead of four.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from threading import Lock
from typing import Any

from autosel.devices.cpu import machine
from autosel.errors import BuildError
from autosel.native.compile import compile_source, find_artefact
from autosel.native.isa import ISA_FLAGS, best_isa
from autosel.values import Rate

SOURCE = "cpu/probes.cpp"
BUFFER_OVER_LLC = 4  # data is read again only after four last-level caches of other data
BUFFER_MIN = 128 << 20
MOST_WINDOWS = 4096
ROUNDS = 4
# Addresses by (index, bytes): mapped once in a process, whichever builds of the probes it loads.
_BUFFERS: dict[tuple[int, int], int] = {}
_COPIED = 1  # index of the buffer that only measure() uses
_MEASURES = Lock()  # it releases that buffer


@dataclass(slots=True)
class Probes:
    """Hold the loaded probes, and the buffers that all probes of the process share."""

    library: ctypes.CDLL
    identity: Mapping[str, Any]
    buffers: dict[tuple[int, int], int] = field(default_factory=lambda: _BUFFERS)
    read_windows: int = 0  # of the first buffer, by all calls

    @property
    def buffer_bytes(self) -> int:
        return buffer_bytes(self.identity)

    @property
    def window_bytes(self) -> int:
        """Return a quarter of the buffer, at most 32 MiB: about a millisecond."""
        return min(self.buffer_bytes // 4, 32 << 20)

    def buffer(self, index: int) -> ctypes.c_void_p:
        key = index, self.buffer_bytes
        if key not in self.buffers:
            cpus = ctypes.c_int64(self.identity["cpus"])
            at = self.library.autosel_probe_map(ctypes.c_int64(self.buffer_bytes), cpus)
            if not at:
                raise MemoryError(f"no {self.buffer_bytes >> 20} MiB for the bandwidth probe")
            self.buffers[key] = at
        return ctypes.c_void_p(self.buffers[key])

    def release(self, index: int) -> None:
        if at := self.buffers.pop((index, self.buffer_bytes), None):
            self.library.autosel_probe_unmap(ctypes.c_void_p(at), ctypes.c_int64(self.buffer_bytes))

    def windows(self, name: str, *arguments: ctypes.c_void_p | int, seconds: float) -> list[float]:
        """Return one figure per window, in the probe's unit; empty if this CPU lacks the instruction."""
        out = (ctypes.c_double * MOST_WINDOWS)()
        passed = [ctypes.c_int64(a) if isinstance(a, int) else a for a in arguments]
        function = getattr(self.library, f"autosel_probe_{name}")
        return out[: function(*passed, ctypes.c_double(seconds), out, ctypes.c_int64(MOST_WINDOWS))]

    def read(self, threads: int, seconds: float, place: tuple[int, int] | None = None) -> list[float]:
        """Read a buffer, or the end of the memory at `place` (address, bytes) if that is twice as large as a buffer.

        The buffer is read on from where the last call ended. Short probes that all began at the same place would find
        it in a cache, if no other data passes between them.
        """
        size, window, (address, held) = self.buffer_bytes, self.window_bytes, place or (0, 0)
        if held >= 2 * size:
            at = ctypes.c_void_p(address + (held - size) // 64 * 64)
            return self.windows("read", at, size, window, 0, threads, seconds=seconds)
        first = self.read_windows % (size // window) * window
        found = self.windows("read", self.buffer(0), size, window, first, threads, seconds=seconds)
        self.read_windows += len(found)
        return found


def buffer_bytes(identity: Mapping[str, Any]) -> int:
    """Return four times the last-level caches of the usable cores, at most an eighth of memory; a multiple of 2 MiB."""
    wanted = max(BUFFER_MIN, BUFFER_OVER_LLC * identity["l3_bytes"] * identity["l3_domains"])
    limit = max(BUFFER_MIN // 4, identity["memory_bytes"] // 8)
    return int(min(wanted, limit)) >> 21 << 21


@cache
def load(digest: str = "") -> Probes:
    """Load the probes for this CPU, compiled on first use, or by the digest of an earlier build.

    Raises BuildError without a compiler (or without that build).
    """
    identity = machine.identity()
    artefact = find_artefact(digest) if digest else compile_source(SOURCE, flags(identity))
    if artefact is None:
        raise BuildError(f"compiled probes {digest[:12]} are missing or damaged", todo="run fingerprint again")
    try:
        library = ctypes.CDLL(str(artefact.path))
    except OSError as error:
        raise BuildError("compiled probes do not load", why=str(error)) from error
    library.autosel_probe_map.restype = ctypes.c_void_p
    for name in ("read", "copy", "cache", "latency", "fma", "bf16_dot", "exp", "fork_join"):
        getattr(library, f"autosel_probe_{name}").restype = ctypes.c_int64
    return Probes(library=library, identity=identity)


def flags(identity: Mapping[str, Any]) -> tuple[str, ...]:
    # The probes use nothing of tvm-ffi: unless it is removed from the link, the loader would need it next to them.
    return ("-Wl,--as-needed", *ISA_FLAGS[best_isa(identity["isa"])])


# --- all rates -------------------------------------------------------------------------------------------------------


def thread_counts(cpus: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... and the number of all threads."""
    return tuple(sorted({1 << k for k in range(cpus.bit_length()) if 1 << k <= cpus} | {cpus}))


def measure(*, budget_s: float = 1.6) -> dict[str, Rate]:
    """Measure every rate of this CPU in about `budget_s`, after the compilation. Raises BuildError without a compiler.

    It measures in rounds: a neighbour's burst, or two threads on one CPU, spoils a part of each rate and none
    completely.
    """
    with _MEASURES:
        return _measured(load(), budget_s)


def _measured(probes: Probes, budget_s: float) -> dict[str, Rate]:
    cpus = int(probes.identity["cpus"])
    probes.read(cpus, 0.03)  # wake clocks and helpers
    figures: dict[str, list[float]] = {}
    for last in (False,) * (ROUNDS - 1) + (True,):
        for name, found in _round(probes, thread_counts(cpus), budget_s / ROUNDS):
            figures.setdefault(name, []).extend(found)
        if last:
            figures["dram_latency_s"] = _latency(probes, 0.08 * budget_s)
    probes.release(_COPIED)
    source = f"p{{}} of {{}} windows, {SOURCE} {best_isa(probes.identity['isa'])}"
    return {name: summary(found, unit_of(name), source) for name, found in figures.items() if found}


def _round(probes: Probes, counts: Sequence[int], budget_s: float) -> Iterator[tuple[str, list[float]]]:
    share = budget_s / len(counts)
    for threads in counts:
        yield f"read_bytes_per_s@{threads}", probes.read(threads, 0.32 * share)
        yield f"copy_bytes_per_s@{threads}", _copy(probes, threads, 0.18 * share)
        yield f"llc_bytes_per_s@{threads}", _last_level(probes, threads, 0.10 * share)
        if threads > 1:
            yield f"fork_join_s@{threads}", probes.windows("fork_join", threads, seconds=0.10 * share)
    yield "fma_flops@1", probes.windows("fma", seconds=0.03 * budget_s)
    yield "bf16_dot_flops@1", probes.windows("bf16_dot", seconds=0.03 * budget_s)
    yield "exp_per_s@1", probes.windows("exp", seconds=0.03 * budget_s)


def unit_of(name: str) -> str:
    """Return the SI unit that is part of a rate's name."""
    base = name.partition("@")[0]
    endings = (("_bytes_per_s", "B/s"), ("_flops", "FLOP/s"), ("_per_s", "1/s"), ("_s", "s"))
    return next(unit for ending, unit in endings if base.endswith(ending))


def summary(figures: Sequence[float], unit: str, source: str) -> Rate:
    """Return the edge of the best decile, by linear interpolation: p90 of rates, p10 of times (unit "s")."""
    if len(figures) < 2:
        return Rate(value=figures[0], unit=unit, spread=0.0, source=source.format(100, 1))
    cuts = statistics.quantiles(figures, n=10, method="inclusive")
    low, high = cuts[0], cuts[-1]
    value, percentile = (low, 10) if unit == "s" else (high, 90)
    spread = (high - low) / statistics.median(figures)
    return Rate(value=value, unit=unit, spread=round(spread, 4), source=source.format(percentile, len(figures)))


def _copy(probes: Probes, threads: int, seconds: float) -> list[float]:
    to, start = probes.buffer(_COPIED), probes.buffer(0)
    return probes.windows("copy", to, start, probes.buffer_bytes, probes.window_bytes, threads, seconds=seconds)


def _latency(probes: Probes, seconds: float) -> list[float]:
    size = min(probes.buffer_bytes, 256 << 20)  # building a longer cycle costs more than it gains
    return probes.windows("latency", probes.buffer(1), size, probes.buffer(0), probes.buffer_bytes, seconds=seconds)


def _last_level(probes: Probes, threads: int, seconds: float) -> list[float]:
    """Return a size over four private caches per thread, so never in them, if that fits the L3s of this many
    threads."""
    identity = probes.identity
    each = 4 * identity["l2_bytes"]
    if each * min(threads, identity["l3_cpus"]) > identity["l3_bytes"] // 2 or each * threads > probes.buffer_bytes:
        return []
    return probes.windows("cache", probes.buffer(0), each * threads, 2, threads, seconds=seconds)


# --- without a compiler ----------------------------------------------------------------------------------------------


def read_without_compiler(threads: int, seconds: float) -> float:
    """Return the bytes/s of the best window by numpy: a lower bound."""
    return max(_numpy_windows(_numpy_read, threads, seconds))


def measure_without_compiler(identity: Mapping[str, Any], *, budget_s: float = 0.8) -> dict[str, Rate]:
    """Measure read and copy rates by numpy: lower bounds, and named so. The other rates need native code."""
    counts = thread_counts(int(identity["cpus"]))
    rates: dict[str, Rate] = {}
    for threads in counts:
        seconds = budget_s / len(counts) / 2
        for name, work, label in (("read", _numpy_read, "numpy max"), ("copy", _numpy_copy, "numpy copyto")):
            source = f"p{{}} of {{}} windows, {label}, no compiler: a lower bound"
            figures = _numpy_windows(work, threads, seconds)
            rates[f"{name}_bytes_per_s@{threads}"] = summary(figures, "B/s", source)
    return rates


@cache
def _numpy_buffers() -> tuple[Any, Any]:
    import numpy as np

    count = buffer_bytes(machine.identity()) // 4
    return np.ones(count, dtype=np.int32), np.zeros(count, dtype=np.int32)


def _numpy_read(start: int, stop: int) -> int:
    _numpy_buffers()[0][start:stop].max()
    return 1


def _numpy_copy(start: int, stop: int) -> int:
    import numpy as np

    source, target = _numpy_buffers()
    np.copyto(target[start:stop], source[start:stop])
    return 2


def _numpy_windows(work: Callable[[int, int], int], threads: int, seconds: float) -> list[float]:
    """Return bytes/s per window; numpy releases the interpreter lock in both operations, so Python's threads run in
    parallel."""
    total = len(_numpy_buffers()[0])
    window = total // 4
    bounds = [window * i // threads for i in range(threads + 1)]
    found: list[float] = []
    end = time.perf_counter() + seconds
    with ThreadPoolExecutor(threads) as pool:
        while len(found) < 3 or time.perf_counter() < end:
            at = len(found) % 4 * window
            started = time.perf_counter()
            factor = max(pool.map(work, [at + b for b in bounds[:-1]], [at + b for b in bounds[1:]]))
            found.append(4 * window * factor / (time.perf_counter() - started))
    return found
