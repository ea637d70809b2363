"""Extract the inputs of GPU formulas from a fingerprint, once, and define the three laws behind every formula.

1. Little: `read * latency` bytes must be in flight to reach the read rate (`in_flight`).
2. Enough SMs: one SM draws at most `rho` bytes a second, so at least `sms_needed` of them must read.
3. Time: `overhead + max(DRAM bytes / read, L2 bytes / l2, FLOP / matrix rate)`; the overhead is a graph node, and one
   latency each to ramp up and to drain.

Symbols of the formulas: S SMs, beta read rate, beta2 L2 rate, rho the rate of one SM from L2 when fewer than all SMs
read (measured; beta2 / S if unknown), lambda loaded latency, f clock under load, pi matrix rate, n_t cost of a graph
node, c CTAs per SM, b bytes per weight. KiB are binary; rates are SI.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autosel.errors import BadConfig
from autosel.values import Fingerprint, Knobs, Workload

WARP = 32
VECTOR_BYTES = 16  # one load instruction of a lane: LDG.128
ISSUE_LANES = 128  # lane-instructions that an SM issues per clock: four schedulers, a warp each


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """Hold the inputs of GPU formulas. Counts, bytes, and rates in SI units."""

    cc: tuple[int, int]
    sms: int
    l2_bytes: int
    regs_per_sm: int
    smem_per_sm: int
    smem_per_cta: int
    threads_per_sm: int
    ctas_per_sm: int
    read: float  # beta: bytes/s from DRAM
    l2: float  # beta2: bytes/s from L2
    rho: float  # maximum bytes/s of one SM
    latency_s: float  # lambda, loaded
    clock_hz: float  # f, under load
    bf16_flops: float  # pi, dense, fp32 accumulation
    fp8_flops: float
    node_s: float  # n_t: one node of a graph
    flag_s: float  # t_flag: a barrier of all SMs by a counter in memory
    # how much cheaper one dependence is inside a persistent kernel than between two PDL nodes
    persistent_saving_s: float

    @property
    def in_flight(self) -> float:
        """Return X: bytes in flight that reach the read rate (Little)."""
        return self.read * self.latency_s

    @property
    def sms_needed(self) -> float:
        """Return S_min: the fewest SMs that saturate DRAM."""
        return self.read / self.rho

    @property
    def overhead_s(self) -> float:
        """Return a: the cost of any kernel in addition to its work."""
        return self.node_s + 2 * self.latency_s

    def matrix_flops(self, dtype: str) -> float:
        """Return pi of a dtype; fp32 has no exact matrix path and runs on the FMA pipes."""
        if dtype == "fp32":
            lanes = 64 if self.cc == (8, 0) else 128  # CUDA C++ Programming Guide, arithmetic throughput
            return 2 * lanes * self.sms * self.clock_hz
        return self.fp8_flops if dtype == "fp8_e4m3" else self.bf16_flops

    def weights_per_clock(self, weight_bytes: int) -> float:
        """Return w: weights that arrive per SM and clock at the full read rate."""
        return self.read / (weight_bytes * self.sms * self.clock_hz)

    def occupancy(self, *, threads: int, regs: int, smem: int) -> int:
        """Return c: CTAs of `threads` x `regs` registers and `smem` bytes that fit an SM; 0 if none fits."""
        by_smem = self.smem_per_sm // (smem + 1024) if smem else self.ctas_per_sm  # the driver keeps 1 KiB per CTA
        if smem > self.smem_per_cta:
            return 0
        return min(self.regs_per_sm // (regs * threads), by_smem, self.threads_per_sm // threads, self.ctas_per_sm)

    def inputs(self) -> dict[str, float]:
        """Return the rates that a formula's text names, to be stored with its value."""
        return {"S": self.sms, "beta": self.read, "beta2": self.l2, "lambda": self.latency_s}


Formula = Callable[[Workload, GpuFacts], Knobs]
Limits = Callable[[Workload, GpuFacts], str]  # why a kernel cannot run a workload, or ""


def facts(fp: Fingerprint) -> GpuFacts:
    """Return the facts of a GPU fingerprint, real or from fingerprints/. Raises BadConfig if it is not a GPU's, or
    lacks a rate."""
    if "cc" not in fp.identity:
        raise BadConfig(f"{fp.name} is not a GPU", why=f"its kind is {fp.kind}")
    try:
        return _facts(fp.identity, {name: rate.value for name, rate in fp.rates.items()})
    except KeyError as error:
        todo = "take a fingerprint on the device again"
        raise BadConfig(f"{fp.name}: the fingerprint lacks {error.args[0]}", why=fp.source, todo=todo) from error


def _facts(identity: Mapping[str, object], rate: Mapping[str, float]) -> GpuFacts:
    def count(name: str) -> int:
        return int(str(identity[name]))

    major, _, minor = str(identity["cc"]).partition(".")
    return GpuFacts(
        cc=(int(major), int(minor or 0)),
        sms=count("sm_count"),
        l2_bytes=count("l2_bytes"),
        regs_per_sm=count("regs_per_sm"),
        smem_per_sm=count("smem_per_sm_bytes"),
        smem_per_cta=count("smem_per_cta_bytes"),
        threads_per_sm=count("threads_per_sm"),
        ctas_per_sm=count("ctas_per_sm"),
        read=rate["read_bytes_per_s"],
        l2=rate["l2_bytes_per_s"],
        rho=rate.get("sm_bytes_per_s", rate["l2_bytes_per_s"] / count("sm_count")),
        latency_s=rate["dram_latency_s"],
        clock_hz=rate["sm_clock_hz"],
        bf16_flops=rate["bf16_matrix_flops"],
        fp8_flops=rate.get("fp8_matrix_flops", rate["bf16_matrix_flops"]),  # cc 8.0 converts fp8 to bf16 first
        node_s=rate["graph_node_s"],
        flag_s=rate["flag_barrier_s"],
        persistent_saving_s=rate["persistent_saving_s"],
    )


def power_of_two(n: float) -> int:
    """Return the smallest power of two that is at least n (and 1)."""
    power = 1
    while power < n:
        power *= 2
    return power
