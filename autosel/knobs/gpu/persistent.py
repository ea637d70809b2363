"""Knobs of the whole-step kernel (kernels/cuda/step.cu): what is compiled in, and the ring that attention gets.

Whether a step should take it at all says step.py, by what a node of a graph and a flag in memory were measured to cost.
"""

from __future__ import annotations

from autosel.knobs.gpu import attention, gemv
from autosel.knobs.gpu.facts import VECTOR_BYTES, WARP, GpuFacts, power_of_two
from autosel.values import DTYPE_BYTES, Knob, Knobs, Workload

THREADS = 128
ROWS_MOST = 8  # of x: accumulators of all of them are in registers
LANES = (8, 16, 32)  # that share a key, 16 bytes each
HEAD_ROWS_MOST = 8
SLOT_BYTES = {False: 4 * 2 * WARP * VECTOR_BYTES, True: 2 * 2 * WARP * VECTOR_BYTES}  # of a warp; fewer keys at 8 rows
SLOTS_MOST = 8


def fits(rows: int, head_dim: int, dtype: str) -> str:
    """Why no build of the kernel takes such a step, or ""."""
    if rows > ROWS_MOST:
        return f"batch {rows}: one launch multiplies at most {ROWS_MOST} rows"
    vector = VECTOR_BYTES // DTYPE_BYTES[dtype]
    if head_dim % vector:
        return f"heads of {head_dim} are not whole vectors of {VECTOR_BYTES} bytes"
    if head_dim > LANES[-1] * vector:
        return f"heads of {head_dim}: 32 lanes hold {LANES[-1] * vector} elements of {dtype}"
    return ""


def persistent(attn: Workload, projection: Workload, f: GpuFacts) -> Knobs:
    """rows, head_rows, lanes, unroll, rows_per_warp, split_k, slots, for the step that has this attention.

    `projection`: the smallest of its products, which decides how warps share a row.
    """
    b = DTYPE_BYTES[attn.dtype]
    cache, group = attention.cache_of(attn), attn["Hq"] // attn["Hkv"]
    ctas = 3 if group < 4 else 2  # step.cu's launch bounds
    need = f.in_flight / f.sms
    unroll = max(2, min(8, power_of_two(need / (ctas * THREADS * VECTOR_BYTES))))
    head_rows = min(HEAD_ROWS_MOST, power_of_two(group))
    wanted = next(lanes for lanes in LANES if lanes * VECTOR_BYTES // b >= attn["D"])
    slot = THREADS // WARP * SLOT_BYTES[head_rows == HEAD_ROWS_MOST]
    slots = max(2, min(SLOTS_MOST, f.smem_per_sm // ctas // slot, 1 + power_of_two(need / (ctas * slot))))
    p = gemv.projection(projection)
    return Knobs(
        settings=(
            Knob(name="rows", value=power_of_two(attn["B"]), formula="power of two >= B", inputs={"B": attn["B"]}),
            Knob(name="head_rows", value=head_rows, formula="power of two >= Hq / Hkv, at most 8", inputs={"g": group}),
            Knob(
                name="lanes", value=wanted, formula="8, 16 or 32: D * b <= 16 * lanes", inputs={"D": attn["D"], "b": b}
            ),
            Knob(
                name="unroll",
                value=unroll,
                formula="power of two >= X / S / (c * 128 * 16), 2 to 8",
                inputs={"X": f.in_flight, "S": f.sms, "c": ctas},
                reason="the weights a lane has under way while it waits for the task before",
            ),
            Knob(name="rows_per_warp", value=1, formula="1", inputs={}, reason="other CTAs share x through L2"),
            Knob(
                name="split_k",
                value=min(THREADS // WARP, gemv.split_k(p.outputs, unroll, f)),
                formula="power of two >= X / (512 * U * N), at most the 4 warps of a CTA",
                inputs={"X": f.in_flight, "U": unroll, "N": p.outputs},
            ),
            Knob(
                name="slots",
                value=slots,
                formula="1 + power of two >= X / S / (c * slot), at most smem / c / slot and 8",
                inputs={"slot": slot, "c": ctas, "smem": f.smem_per_sm, "token_bytes": cache.token_bytes},
            ),
        )
    )
