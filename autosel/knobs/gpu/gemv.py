"""Compute knobs for few rows of activations against many weights, on CUDA cores: linear at M <= M1, norm_qkv, gate_up
and lm_head, with plain weights or codes of fp8.

One warp per weight row, 16 bytes per lane and load. The kernel is as fast as its loads if enough bytes are in flight
(`unroll`, `split_k`) and if decoding and multiplying a weight needs fewer instructions than there is time for
(`cc_limit`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autosel.knobs.gpu.facts import ISSUE_LANES, VECTOR_BYTES, WARP, GpuFacts, power_of_two
from autosel.values import DTYPE_BYTES, Knob, Knobs, Workload

THREADS = 256
UNROLL_MOST = 4  # loads that a lane holds: 4 x 4 registers, twice for the double buffer; more spills the accumulators
ROWS_MOST = 4
M_MOST = 8  # accumulators: M x rows per lane

# Instructions of a lane per weight in addition to the M multiply-adds: unpack bf16 by shift or mask, fp8 by the packed
# conversion to half2, plus the share of loads and loop; fp32 needs no unpacking. Estimates, until machine code exists.
DECODE = {"bf16": 1.3, "fp16": 1.3, "fp8_e4m3": 1.8, "fp32": 0.3}
# The share of issue slots for these instructions. Estimate, to be fitted on five values of M per architecture.
ISSUE_EFFICIENCY = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """Hold y[M,N] = x[M,K] @ w[N,K]^T, for any op that contains it."""

    rows: int  # M
    outputs: int  # N
    depth: int  # K
    dtype: str  # of the weights

    @property
    def weight_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def bytes_read(self) -> int:
        return self.weight_bytes * self.outputs * self.depth


def projection(w: Workload) -> Projection:
    """Return the matrix product inside linear, norm_qkv, gate_up (gate and up rows interleaved) or lm_head."""
    outputs, depth = {
        "linear": ("N", "K"),
        "norm_qkv": ("N", "d"),
        "gate_up": ("I", "d"),
        "lm_head": ("V", "d"),
    }[w.op]
    dtype = "fp8_e4m3" if w.weight_format.code == "e4m3" else w.dtype
    both = 2 if w.op == "gate_up" else 1
    return Projection(rows=w["M"], outputs=both * w[outputs], depth=w[depth], dtype=dtype)


def gemv(w: Workload, f: GpuFacts) -> Knobs:
    """Return threads, ctas_per_sm, unroll, rows_per_warp, split_k, grid.

    Bytes in flight per SM: c * threads * 16 * U >= X / S; c grows before U exceeds the registers. A warp holds 512 U
    bytes, so N warps hold 512 U N; if that is less than X, K is split. The grid is persistent (c S CTAs) unless plain
    rows make four waves anyway. H200: 2 x 256 x U=4 = 32 KiB per SM; RTX 5070 Ti: 1 x 256 x U=2 = 8 KiB.
    """
    p = projection(w)
    need = f.in_flight / f.sms
    ctas = max(1, min(math.ceil(need / (THREADS * VECTOR_BYTES * UNROLL_MOST)), f.threads_per_sm // THREADS))
    unroll = min(UNROLL_MOST, power_of_two(need / (ctas * THREADS * VECTOR_BYTES)))
    rows = rows_per_warp(p, f)
    split = split_k(p.outputs, unroll, f)
    plain = math.ceil(p.outputs * split / (rows * (THREADS // WARP)))
    grid = plain if plain >= 4 * ctas * f.sms else min(plain, ctas * f.sms)
    told = {"X": f.in_flight, "S": f.sms}
    predicted = f"{efficiency(p, f):.0%} of the read rate predicted"
    return Knobs(
        settings=(
            Knob(name="threads", value=THREADS, formula="8 warps, one weight row each", inputs={}),
            Knob(
                name="ctas_per_sm",
                value=ctas,
                formula="ceil(X / S / (threads * 16 * 4)), at most threads_per_sm / threads",
                inputs={**told, "threads_per_sm": f.threads_per_sm},
            ),
            Knob(
                name="unroll",
                value=unroll,
                formula="power of two >= X / S / (c * threads * 16), at most 4",
                inputs={**told, "c": ctas, "threads": THREADS},
                reason=predicted,
            ),
            Knob(
                name="rows_per_warp",
                value=rows,
                formula="power of two >= 2 * min(M, 8) * w / 64, at most 4",
                inputs={"M": p.rows, "w": f.weights_per_clock(p.weight_bytes)},
                reason="shared memory gives 64 activations a clock; a row more a warp uses each of them once more",
            ),
            Knob(
                name="split_k",
                value=split,
                formula="power of two >= X / (512 * U * N), at most 8",
                inputs={"X": f.in_flight, "U": unroll, "N": p.outputs},
                reason="partial sums are added in fp32 in a fixed order" if split > 1 else "",
            ),
            Knob(
                name="grid",
                value=grid,
                formula="ceil(N * split / (rows * 8)), or c * S if that makes fewer than four waves",
                inputs={"N": p.outputs, "split": split, "rows": rows, "c": ctas, "S": f.sms},
            ),
        )
    )


def split_k(outputs: int, unroll: int, f: GpuFacts) -> int:
    """Return the warps that share a row, all in one CTA, which holds eight."""
    return min(THREADS // WARP, power_of_two(f.in_flight / (WARP * VECTOR_BYTES * unroll * outputs)))


def rows_per_warp(p: Projection, f: GpuFacts) -> int:
    """Choose by the rows of x that meet a weight at once: rows beyond the eighth need another pass over the weights."""
    together = min(p.rows, M_MOST)
    return min(ROWS_MOST, power_of_two(together / ISSUE_EFFICIENCY * f.weights_per_clock(p.weight_bytes) / 64))


def issue_budget(weight_bytes: int, f: GpuFacts) -> float:
    """Return I: instructions that a lane may spend per weight while weights arrive at the full read rate."""
    return ISSUE_LANES * f.sms * f.clock_hz * weight_bytes / f.read


def cc_limit(dtype: str, f: GpuFacts, rows: int = 2) -> int:
    """Return M1 = min(8, (min(I - delta, 64 R / w)) / 2): the most activation rows that CUDA cores serve at the full
    read rate.

    H200: bf16 6, fp8 2; RTX 5070 Ti: 8 and 8.
    """
    weight_bytes = DTYPE_BYTES[dtype]
    by_issue = issue_budget(weight_bytes, f) - DECODE[dtype]
    by_smem = 64 * rows / f.weights_per_clock(weight_bytes)
    return max(1, min(M_MOST, math.floor(ISSUE_EFFICIENCY * min(by_issue, by_smem))))


def time_s(p: Projection, f: GpuFacts) -> float:
    """Predict the time on CUDA cores: the slowest of loads, instructions and shared memory, plus the overhead.

    Each eight rows of x need one pass over the weights, which reads and decodes them again.
    """
    weights, passes = p.outputs * p.depth, math.ceil(p.rows / M_MOST)
    issued = p.rows / ISSUE_EFFICIENCY
    loads = passes * p.bytes_read / f.read
    instructions = weights * (passes * DECODE[p.dtype] + issued) / (ISSUE_LANES * f.sms * f.clock_hz)
    smem = weights * issued / (64 * rows_per_warp(p, f) * f.sms * f.clock_hz)
    return f.overhead_s + max(loads, instructions, smem)


def efficiency(p: Projection, f: GpuFacts) -> float:
    """Return the share of the read rate that remains after the overhead. Consequence on fast parts: fuse q/k/v, and
    gate/up."""
    return p.bytes_read / f.read / time_s(p, f)
