"""Capacity: weights, key-value bytes per token, and at each context the largest batch and a limit of its speed.

    ceiling  batch / max(bytes of a step / read rate, FLOPs of a step / arithmetic rate)        tokens per second

A step's bytes are the weights once, and each sequence's keys and values in reach. A user sees where the batch collapses
before measuring it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from autosel.certify.sweep import doubled
from autosel.decode.run import LARGEST, Plan

SHORTEST = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The largest batch at one context; `batch` is 0 if not even one sequence fits."""

    context: int
    kv_bytes: int  # of one sequence
    batch: int
    need_bytes: int  # of that batch; of one sequence if none fits
    ceiling_tokens_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Capacity of one device for one model. `memory_bytes` is free now, without other processes' memory."""

    model: str
    device: str
    dtype: str
    memory_bytes: int
    weights_bytes: int
    kv_bytes_per_token: int
    read_bytes_per_s: float | None
    packs: bool  # its steps may read lossless packed weights, so more tokens than the ceiling
    fits: tuple[Fit, ...]


def largest_batch(need: Callable[[int], int], memory_bytes: int) -> int:
    """Return the largest batch whose need fits, 0 if none does. `need` must not fall as the batch grows."""
    if need(1) > memory_bytes:
        return 0
    low, high = 1, LARGEST["batch"]
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if need(middle) <= memory_bytes else (low, middle - 1)
    return low


def capacity(
    plan: Plan,
    need: Callable[[Plan], int],
    flops: Callable[[Plan], int],
    *,
    name: str,
    device: str,
    memory_bytes: int,
    read_bytes_per_s: float | None,
    peak_flops: float,
    packs: bool = False,
) -> Capacity:
    """Return the capacity for a plan's model. A rate of None or 0 was not measured.

    `need` returns the memory of a plan (decode.weights.memory_need), `flops` the FLOPs of one of its steps.
    """
    shape = plan.shape
    fits = []
    for context in doubled(SHORTEST, plan.model.max_context):

        def sized(batch: int, context: int = context) -> Plan:
            return dataclasses.replace(plan, batch=batch, seq=context, advance=False, speculate=0)

        batch = largest_batch(lambda b, sized=sized: need(sized(b)), memory_bytes)  # type: ignore[misc]
        moved = shape.weight_bytes_per_step(plan.dtype) + batch * shape.kv_bytes_read(context, plan.dtype)
        step_s = moved / read_bytes_per_s if read_bytes_per_s else 0.0
        if batch and step_s and peak_flops:
            step_s = max(step_s, flops(sized(batch)) / peak_flops)
        fits.append(
            Fit(
                context=context,
                kv_bytes=shape.kv_bytes_per_token(plan.dtype) * context,
                batch=batch,
                need_bytes=need(sized(max(1, batch))),
                ceiling_tokens_per_s=batch / step_s if batch and step_s else None,
            )
        )
    return Capacity(
        model=name,
        device=device,
        dtype=plan.dtype,
        memory_bytes=memory_bytes,
        weights_bytes=shape.weight_bytes(plan.dtype),
        kv_bytes_per_token=shape.kv_bytes_per_token(plan.dtype),
        read_bytes_per_s=read_bytes_per_s,
        packs=packs,
        fits=tuple(fits),
    )
