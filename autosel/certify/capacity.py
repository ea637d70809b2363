"""What fits: weights, key-value bytes a token, the largest batch at each context, and the most memory could deliver.

    ceiling  batch / max(bytes of a step / read rate, FLOPs of a step / arithmetic rate)        tokens per second

where a step's bytes are the weights once, and each sequence's keys and values in reach; so that a user sees where the
batch collapses before measuring it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from autosel.decode.run import LARGEST, Plan

SHORTEST = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """At one context. `batch` 0: not even one sequence fits."""

    context: int
    kv_bytes: int  # one sequence's
    batch: int
    need_bytes: int  # of that batch, or of one sequence where none fits
    ceiling_tokens_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """One model on one device. `memory_bytes`: what can be had now without driving anyone out."""

    model: str
    device: str
    dtype: str
    memory_bytes: int
    weights_bytes: int
    kv_bytes_per_token: int
    read_bytes_per_s: float | None
    packs: bool  # its steps may read weights packed without loss, so more tokens than `at most`
    fits: tuple[Fit, ...]


def contexts(longest: int) -> tuple[int, ...]:
    """128, 256, ... and the model's own limit."""
    found = []
    length = SHORTEST
    while length < longest:
        found.append(length)
        length *= 2
    return (*found, longest)


def largest_batch(need: Callable[[int], int], memory_bytes: int) -> int:
    """The largest batch whose need fits; 0 if none does. `need` never falls as the batch grows."""
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
    """`need` says what a plan takes (decode.weights.memory_need), `flops` what a step of it computes; a rate of None or
    0 was not measured."""
    shape = plan.shape
    fits = []
    for context in contexts(plan.model.max_context):

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
