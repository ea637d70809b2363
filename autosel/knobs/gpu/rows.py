"""Compute knobs of ops that treat each row separately. Their launch costs more than their data, so first: is a launch
worth it?

At M = 1 a standalone row op takes its overhead (2-3 us) for some nanoseconds of data. `fuse` gives the number of rows
up to which the neighbouring kernel should do it.
"""

from __future__ import annotations

import math

from autosel.knobs.gpu.facts import VECTOR_BYTES, WARP, GpuFacts
from autosel.values import DTYPE_BYTES, Knob, Knobs, Workload

THREADS_MOST = 1024


def rmsnorm(w: Workload, f: GpuFacts) -> Knobs:
    """Return fuse, fuse_below, threads, grid: one CTA per row, the row kept in registers, 8 values per thread.

    As a prologue every consumer CTA reads the row again from L2: c S d 2 M bytes. That is cheaper than a node and a
    latency while M < (n_t + lambda) beta2 / (c S d 2), c = 1. d = 4096: H200 18, RTX 5070 Ti 7.
    """
    d, b = w["d"], DTYPE_BYTES[w.dtype]
    below = fuse_below(d, b, f)
    threads = min(THREADS_MOST, WARP * math.ceil(d * b / VECTOR_BYTES / WARP))
    return Knobs(
        settings=(
            _fuse(w["M"], below, {"d": d, "b": b, "n_t": f.node_s, **f.inputs()}),
            Knob(name="threads", value=threads, formula="d * b / 16 in whole warps", inputs={"d": d, "b": b}),
            Knob(name="grid", value=w["M"], formula="M", inputs={"M": w["M"]}),
        )
    )


def fuse_below(d: int, b: int, f: GpuFacts) -> float:
    return (f.node_s + f.latency_s) * f.l2 / (f.sms * d * b)


def _fuse(rows: int, below: float, inputs: dict[str, float]) -> Knob:
    return Knob(
        name="fuse",
        value=rows < below,
        formula="M < (n_t + lambda) * beta2 / (S * d * b)",
        inputs={"M": rows, "below": below, **inputs},
        reason="in the consumer's prologue" if rows < below else "its own kernel: re-reading the rows would cost more",
    )


def rope(w: Workload, f: GpuFacts) -> Knobs:
    """Return fuse, threads, grid: a warp per head; fused with the QK-norm and KV write wherever the chain has them."""
    heads = w["Hq"] + w["Hkv"]
    warps = min(8, heads)
    return Knobs(
        settings=(
            Knob(
                name="fuse",
                value=True,
                formula="always",
                inputs={"overhead_s": f.overhead_s},
                reason="each head is touched once: alone it costs a whole overhead",
            ),
            Knob(name="threads", value=WARP * warps, formula="32 * min(8, Hq + Hkv)", inputs={"heads": heads}),
            Knob(
                name="grid",
                value=math.ceil(w["M"] * heads / warps),
                formula="ceil(M * (Hq + Hkv) / warps)",
                inputs={"M": w["M"], "heads": heads, "warps": warps},
            ),
        )
    )


def gated(w: Workload, f: GpuFacts) -> Knobs:
    """Return fuse, threads, grid of swiglu and geglu: one 16-byte vector per thread.

    As the epilogue of gate_up, whose rows are interleaved so that a warp holds both, it is free and saves a node and 4
    M I b bytes. As the prologue of down it is not free: every CTA reads 2 I b bytes again (H200, I = 14336: 0.8 us).
    """
    m, width, b = w["M"], w["I"], DTYPE_BYTES[w.dtype]
    vectors = math.ceil(m * width * b / VECTOR_BYTES)
    return Knobs(
        settings=(
            Knob(
                name="fuse",
                value=True,
                formula="epilogue of gate_up: 0 against 2 * I * b / rho as the prologue of down",
                inputs={"I": width, "b": b, "rho": f.rho, "prologue_s": prologue_s(width, b, f)},
            ),
            Knob(name="threads", value=256, formula="256", inputs={}),
            Knob(
                name="grid", value=math.ceil(vectors / 256), formula="ceil(M*I*b/16/256)", inputs={"M": m, "I": width}
            ),
        )
    )


def prologue_s(width: int, b: int, f: GpuFacts) -> float:
    """Return the time that each CTA of the next product needs to read gate and up again."""
    return 2 * width * b / f.rho


def kv_append(w: Workload, f: GpuFacts) -> Knobs:
    """Return fuse, threads, grid: a warp per token and KV head; written by RoPE's kernel if there is one."""
    tokens = w["B"] * w["S"] * w["Hkv"]
    return Knobs(
        settings=(
            Knob(name="fuse", value=True, formula="always", inputs={"overhead_s": f.overhead_s}, reason="with RoPE"),
            Knob(name="threads", value=256, formula="8 warps", inputs={}),
            Knob(name="grid", value=math.ceil(tokens / 8), formula="ceil(B * S * Hkv / 8)", inputs={"tokens": tokens}),
        )
    )
