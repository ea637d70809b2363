"""Compute knobs of the row ops (rmsnorm, add_rmsnorm, rope, swiglu, geglu, sample): only the number of threads.

At M = 1 the operands lie in the caller's L1 and L2: a call takes bytes over the L2 rate, or exponentials over theirs.
"""

from __future__ import annotations

from autosel.knobs.cpu.facts import CpuFacts
from autosel.values import DTYPE_BYTES, Knob, Knobs, Scalar, Workload

FORMULA = "min(shares, cpus if serial_s > 8 * fork_join_s else 1)"

# Cost of an element's activation, product and store in exponentials (at the exp rate), division and polynomial
# included. Best of 60 windows, one Zen 4 core, bf16: swiglu I=14336 5.4 us, geglu I=6912 3.1 us (tanh), 4.9 us (erf),
# at 5.6 G/s: 2.1, 2.5 and 4.0. One Zen 5 core, medians: 3.5, 2.15 and 3.2 us at 12 G/s: 2.9, 3.7 and 5.6, because its
# exponentials are twice as fast and its divisions are not. Between the two:
SWIGLU_EXPS, GEGLU_TANH_EXPS, GEGLU_ERF_EXPS = 2.5, 3.1, 4.8
# Cost of an element of a norm in FLOPs (at the FMA rate): widening, square, sum, widening again, scaling, rounding. One
# Zen 4 core, bf16, M=64 d=4096, quiet: 57.7 us on one thread, 33.0 on two, at 116 GFLOP/s.
NORM_FLOPS = 25
# Minimum duration of a call in fork-joins. A fork-join is cheap only while the workers spin (rest.h): waking a sleeping
# one costs a hundred of them, so a call that could gain only a few uses one thread. Measured, two Zen 4 cores,
# fork-join 0.43 us: swiglu I=14336 7.0 us on one, 5.4 on both; without a measurement a fork-join counts as 2 us, thus
# 16.
WORTH_JOINS = 8
SHARE_ELEMENTS = 2048  # of a gated unit: with less per thread, its share ends before the others have woken


def rmsnorm(w: Workload, f: CpuFacts) -> Knobs:
    """threads: by rows; x is read twice (the second time from L1), y written, and every element widened twice."""
    serial_s = max(_resident_s(2 * w["M"] * w["d"], w, f), NORM_FLOPS * w["M"] * w["d"] / f.flops_1)
    return _threads(f, serial_s=serial_s, shares=w["M"], dims={"M": w["M"], "d": w["d"]})


def add_rmsnorm(w: Workload, f: CpuFacts) -> Knobs:
    """threads: by rows; x and residual read, y and new residual written, and at least a norm's arithmetic."""
    serial_s = max(_resident_s(4 * w["M"] * w["d"], w, f), NORM_FLOPS * w["M"] * w["d"] / f.flops_1)
    return _threads(f, serial_s=serial_s, shares=w["M"], dims={"M": w["M"], "d": w["d"]})


def rope(w: Workload, f: CpuFacts) -> Knobs:
    """threads: by tokens; q and k read and written, and a sine and cosine (about six exponentials) a pair and token."""
    heads = w["Hq"] + w["Hkv"]
    serial_s = _resident_s(2 * w["M"] * heads * w["D"], w, f) + 6 * w["M"] * w["R"] / 2 / f.exp_per_s_1
    return _threads(f, serial_s=serial_s, shares=w["M"], dims={"M": w["M"], "heads": heads, "D": w["D"]})


def swiglu(w: Workload, f: CpuFacts) -> Knobs:
    """threads: by runs of elements, so that one long row is shared; bound by the exponential."""
    return _gated(w, f, SWIGLU_EXPS)


def geglu(w: Workload, f: CpuFacts) -> Knobs:
    """threads: as swiglu; erf costs a second division and a longer polynomial."""
    return _gated(w, f, GEGLU_TANH_EXPS if w.trait("tanh", 0) else GEGLU_ERF_EXPS)


def sample(w: Workload, f: CpuFacts) -> Knobs:
    """threads: by rows of logits; each is read, kept as fp32 and exponentiated about twice."""
    serial_s = w["B"] * w["V"] * (8 / l2_rate(f) + 2 / f.exp_per_s_1)
    return _threads(f, serial_s=serial_s, shares=w["B"], dims={"B": w["B"], "V": w["V"]})


def l2_rate(f: CpuFacts) -> float:
    """Return the bytes/s that one core streams through its private caches; four times its memory rate, at least 32
    GB/s.

    A vector load and store per cycle would be more; short rows get one L2 line in about a nanosecond.
    """
    return max(4 * f.read_1, 32e9)


def _gated(w: Workload, f: CpuFacts, exps: float) -> Knobs:
    elements = w["M"] * w["I"]
    serial_s = max(_resident_s(3 * elements, w, f), exps * elements / f.exp_per_s_1)
    return _threads(f, serial_s=serial_s, shares=max(1, elements // SHARE_ELEMENTS), dims={"M": w["M"], "I": w["I"]})


def _resident_s(elements: int, w: Workload, f: CpuFacts) -> float:
    return elements * DTYPE_BYTES[w.dtype] / l2_rate(f)


def _threads(f: CpuFacts, *, serial_s: float, shares: int, dims: dict[str, Scalar]) -> Knobs:
    inputs = {
        **dims,
        "shares": shares,
        "serial_s": serial_s,
        "cpus": f.cpus,
        "fork_join_s": f.fork_join_s,
    }
    value = min(shares, f.cpus) if serial_s > WORTH_JOINS * f.fork_join_s else 1
    return Knobs(settings=(Knob(name="threads", value=value, formula=FORMULA, inputs=inputs),))
