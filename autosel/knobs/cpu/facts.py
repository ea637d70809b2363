"""The figures CPU formulas read, taken out of a fingerprint once; conservative fallbacks where a rate is missing."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autosel.native.isa import ISA_FLAGS, ISA_NEEDS, Isa, best_isa
from autosel.values import Fingerprint, Workload

__all__ = [
    "ISA_FLAGS",
    "ISA_NEEDS",
    "CpuFacts",
    "Isa",
    "bandwidth_threads",
    "best_isa",
    "facts",
    "multiply_rate",
    "paired",
    "worthwhile_threads",
]


FORK_JOIN_S = 2e-6  # of a spinning team: 0.3 us per transfer of a cache line, a few of them, and a margin


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuFacts:
    """Hold the inputs of CPU formulas. Rates in SI units; `read_bytes_per_s[t-1]` is the rate of t threads."""

    isa: Isa
    cpus: int  # that this process may use: affinity and quota applied, one a physical core
    l1d_bytes: int
    l2_bytes: int
    l3_bytes: int
    l3_domains: int
    read_1: float  # bytes/s of one thread
    read_all: float  # bytes/s of all cpus
    read_l3_domain: float  # bytes/s one L3 domain can pull
    flops_1: float  # fp32 FMA FLOP/s of one core
    dot_flops_1: float  # bf16 dot FLOP/s of one core (= flops_1 without the instruction)
    exp_per_s_1: float
    dram_latency_s: float
    fork_join_s: float  # one empty parallel region of all cpus
    amx: bool = False  # tiles multiply bf16
    contended: bool = False  # other work disturbed the rates, so their ratios are unreliable


def facts(fp: Fingerprint) -> CpuFacts:
    """Return the facts of a CPU fingerprint; a missing rate gets a documented conservative default."""
    identity, cpus = fp.identity, fp.cpus

    def rate(name: str, default: float) -> float:
        return fp.rates[name].value if name in fp.rates else default

    flops_1 = rate("fma_flops@1", 32e9)  # 2 FLOP x 8 lanes x 1 port x 2 GHz: the slowest AVX2 core in use
    read_1 = rate("read_bytes_per_s@1", 8e9)
    read_all = rate(f"read_bytes_per_s@{cpus}", read_1 * min(cpus, 4))
    domains = int(identity.get("l3_domains", 1))
    fork_join_s = rate(f"fork_join_s@{cpus}", FORK_JOIN_S)
    if fp.contended:  # the measured time includes waits for a busy core
        fork_join_s = min(fork_join_s, FORK_JOIN_S)
    return CpuFacts(
        isa=best_isa(tuple(identity["isa"])),
        cpus=cpus,
        l1d_bytes=int(identity["l1d_bytes"]),
        l2_bytes=int(identity["l2_bytes"]),
        l3_bytes=int(identity["l3_bytes"]),
        l3_domains=domains,
        read_1=read_1,
        read_all=read_all,
        read_l3_domain=rate("read_l3_domain_bytes_per_s", read_all / domains),
        flops_1=flops_1,
        dot_flops_1=rate("bf16_dot_flops@1", flops_1),
        exp_per_s_1=rate("exp_per_s@1", flops_1 / 20),
        dram_latency_s=rate("dram_latency_s", 120e-9),
        fork_join_s=fork_join_s,
        amx="amx_bf16" in identity["isa"],
        contended=fp.contended,
    )


def bandwidth_threads(f: CpuFacts) -> int:
    """Return the minimum number of threads that saturates the node's memory: min(cpus, max(n_L3 * ceil(b_L3 / b_1),
    ceil(b / b_1))).

    Threads are spread over L3 domains first (research/knobs.md section 4; McCalpin 2025-02). All threads are used if
    the rates were disturbed or contradict each other: one thread too many costs a little fork-join, one too few half
    the bandwidth.
    """
    if f.contended or f.read_all < f.read_1:
        return f.cpus
    by_domain = f.l3_domains * math.ceil(f.read_l3_domain / f.read_1)
    return max(1, min(f.cpus, max(by_domain, math.ceil(f.read_all / f.read_1 - 0.05))))


def paired(w: Workload, f: CpuFacts) -> bool:
    """Return True if the CPU multiplies pairs of bf16."""
    return w.dtype == "bf16" and f.isa == "avx512bf16"


def multiply_rate(w: Workload, f: CpuFacts) -> float:
    """Return the FLOP/s of one core: of the bf16 dot if there is one, else of fp32 FMA after widening."""
    return f.dot_flops_1 if paired(w, f) else f.flops_1


def worthwhile_threads(f: CpuFacts, serial_s: float) -> int:
    """Return the number of threads for a job of `serial_s` on one core: all of them once the saved time exceeds the
    fork-join."""
    saved = serial_s * (1 - 1 / f.cpus)
    return f.cpus if f.cpus > 1 and saved > 2 * f.fork_join_s else 1
