"""Predict the whole decode step: graph or stream, persistent kernel or not, the gain of L2 persistence, the floor."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autosel.knobs.gpu.facts import GpuFacts
from autosel.values import Knob, Knobs


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """One decode step, counted."""

    kernels: int
    bytes_read: float
    flops: float
    dtype: str = "bf16"
    host_s: float = 0.0  # sampling, detokenising, scheduling: the host's work per step
    host_launch_s: float = 0.0  # the host's time to launch one kernel


def step(cost: StepCost, f: GpuFacts) -> Knobs:
    """graph, persistent (against dependent launches; persistent.py asks again), pdl_ring_bytes, l2_persist, host_depth.

    H200, llama-8b (192 kernels, 3.7 ms): a graph saves 0.23 ms; a persistent kernel would save 1.8 %, so graph and PDL.
    RTX 5070 Ti: 0.12 of 19.5 ms, so a graph is optional: the queue hides it.
    """
    total = floor_s(cost, f)
    by_graph, by_persistent = graph_saving_s(cost, f), cost.kernels * f.persistent_saving_s
    by_l2 = l2_persistence_s(f)
    return Knobs(
        settings=(
            Knob(
                name="graph",
                value=by_graph > 0.02 * total,
                formula="n * max(0, t_cpu - T / n) + n * (t_stream - n_t) > 2 % of T",
                inputs={"n": cost.kernels, "t_stream": f.stream_s, "n_t": f.node_s, "T": total, "saving_s": by_graph},
            ),
            Knob(
                name="persistent",
                value=by_persistent > 0.05 * total,
                formula="n * saving > 5 % of T",
                inputs={"n": cost.kernels, "saving": f.persistent_saving_s, "T": total},
            ),
            Knob(
                name="pdl_ring_bytes",
                value=round(pdl_ring_bytes(f)),
                formula="beta * (n_t + lambda) / S",
                inputs={"n_t": f.node_s, **f.inputs()},
                reason="weights an SM prefetches while it waits for its activations",
            ),
            Knob(
                name="l2_persist",
                value=by_l2 > 0.02 * total,
                formula="3/4 * L2 * (1 / beta - 1 / beta2) > 2 % of T",
                inputs={"L2": f.l2_bytes, **f.inputs(), "saving_s": by_l2},
            ),
            Knob(
                name="host_depth",
                value=1 + math.ceil(cost.host_s / total),
                formula="1 + ceil(t_host / T)",
                inputs={"t_host": cost.host_s, "T": total},
            ),
        )
    )


def floor_s(cost: StepCost, f: GpuFacts) -> float:
    """Return max(bytes / beta, FLOP / pi): the step at the attainable rates, before any overhead."""
    return max(cost.bytes_read / f.read, cost.flops / f.matrix_flops(cost.dtype))


def graph_saving_s(cost: StepCost, f: GpuFacts) -> float:
    starved = max(0.0, cost.host_launch_s - floor_s(cost, f) / cost.kernels)
    return cost.kernels * (starved + f.stream_s - f.node_s)


def pdl_ring_bytes(f: GpuFacts) -> float:
    """Return the bytes per SM: H200 67 KB, RTX 5070 Ti 19 KB."""
    return f.read * (f.node_s + f.latency_s) / f.sms


def l2_persistence_s(f: GpuFacts) -> float:
    """Return the time saved if three quarters of L2, the largest set-aside, are read from there instead of DRAM. H200 5
    us, RTX 5080 40 us."""
    return 0.75 * f.l2_bytes * (1 / f.read - 1 / f.l2)
