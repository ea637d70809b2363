"""Compute knobs of the whole-step kernel (kernels/cuda/step.cu), and predict whether it may win.

Both forms of a step read the same bytes, F = max(bytes / beta, FLOP / pi). They differ in the cost between two kernels,
or tasks, which the fingerprint measures: n_t a node of a graph, t_flag a barrier of all SMs by a counter in memory,
lambda the loaded latency, Delta the additional cost of a dependent launch (PDL) over such a barrier.

- A graph of n kernels: each starts when the one before has ended (n_t), ramps up (lambda) and drains (lambda):
  T = F + n (n_t + 2 lambda). A chain of dependent launches issues its weights before it waits, and so ramps up during
  the other's end: T = F + n (t_flag + Delta + lambda).
- One launch of m tasks: a task's weights are in flight before it waits, too, and it waits for a flag:
  T = F + n_t + m (t_flag + lambda).

Checked against published figures for Llama-3.2-1B, bf16, at a short context on an H200 (2.47 GB; about 100 kernels, or
tasks), with the estimates of fingerprints/h200.json: 757 us for one launch (760 seen), 790 us for a graph with
dependent launches (795 seen; msaroufim/megakernels-vs-cuda-graphs).
"""

from __future__ import annotations

from dataclasses import dataclass

from autosel.knobs.gpu import attention, gemv
from autosel.knobs.gpu.facts import VECTOR_BYTES, WARP, GpuFacts, power_of_two
from autosel.knobs.gpu.step import StepCost, floor_s
from autosel.values import DTYPE_BYTES, Knob, Knobs, Workload

# A smaller predicted gain is ignored: the rates behind it, and the races, are accurate to a few per cent.
LEAST_GAIN = 0.05
THREADS = 128
ROWS_MOST = 8  # rows of x: accumulators of all of them are in registers
LANES = (8, 16, 32)  # loads that share a key, 16 bytes each
HEAD_ROWS_MOST = 8
SLOT_BYTES = {False: 4 * 2 * WARP * VECTOR_BYTES, True: 2 * 2 * WARP * VECTOR_BYTES}  # keys per warp; fewer at 8 rows
SLOTS_MOST = 8


def fits(rows: int, head_dim: int, dtype: str) -> str:
    """Return why no build of the kernel supports such a step, or ""."""
    if rows > ROWS_MOST:
        return f"batch {rows}: one launch multiplies at most {ROWS_MOST} rows"
    vector = VECTOR_BYTES // DTYPE_BYTES[dtype]
    if head_dim % vector:
        return f"heads of {head_dim} are not whole vectors of {VECTOR_BYTES} bytes"
    if head_dim > LANES[-1] * vector:
        return f"heads of {head_dim}: 32 lanes hold {LANES[-1] * vector} elements of {dtype}"
    return ""


def crowded(attn: Workload, f: GpuFacts) -> str:
    """Return why an SM cannot hold even one CTA of the build, or "". Its CTAs wait for each other, so all must be
    resident."""
    head_rows = _head_rows(attn)
    ring = 2 * _slot_bytes(head_rows)  # the minimum
    joined = THREADS // WARP * head_rows * (LANES[-1] * VECTOR_BYTES // DTYPE_BYTES[attn.dtype] + 2) * 4
    need = max(ring, joined)
    if need > f.smem_per_cta:
        return f"a CTA needs {need} bytes of shared memory, and all must be resident; an SM gives one {f.smem_per_cta}"
    return ""


def _head_rows(attn: Workload) -> int:
    return min(HEAD_ROWS_MOST, power_of_two(attn["Hq"] // attn["Hkv"]))


def _slot_bytes(head_rows: int) -> int:
    """Return the bytes of a CTA's ring: one slot per warp."""
    return THREADS // WARP * SLOT_BYTES[head_rows == HEAD_ROWS_MOST]


def _ctas_per_sm(head_rows: int) -> int:
    """Return step.cu's launch bounds."""
    return 3 if head_rows < 4 else 2


def persistent(attn: Workload, projection: Workload, f: GpuFacts) -> Knobs:
    """Return rows, head_rows, lanes, unroll, rows_per_warp, split_k, slots, for the step with this attention.

    `projection`: the smallest of its products, which decides how warps share a row.
    """
    b = DTYPE_BYTES[attn.dtype]
    cache, group = attention.cache_of(attn), attn["Hq"] // attn["Hkv"]
    head_rows = _head_rows(attn)
    ctas = _ctas_per_sm(head_rows)
    need = f.in_flight / f.sms
    unroll = max(2, min(8, power_of_two(need / (ctas * THREADS * VECTOR_BYTES))))
    wanted = next(lanes for lanes in LANES if lanes * VECTOR_BYTES // b >= attn["D"])
    slot = _slot_bytes(head_rows)
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


def chunk(attn: Workload, slots: int, f: GpuFacts) -> int:
    """Return the keys of one KV head per CTA: decode attention's rule (attention.py), with this kernel's ring.

    H200, llama-8b at 8192: 264 CTAs for 8 KV heads.
    """
    c, head_rows = attention.cache_of(attn), _head_rows(attn)
    tile = max(1, _slot_bytes(head_rows) // c.token_bytes)
    ring = attention.KernelShape(tile=tile, stages=slots, ctas_per_sm=_ctas_per_sm(head_rows))
    return attention.chunk_tokens(c, ring, f, 1 if c.ragged else attention.split(c, ring, f))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predict the time of a step as a graph of its kernels and as one launch of its tasks."""

    graph_s: float
    launch_s: float

    @property
    def gain(self) -> float:
        """Return the share of the graph's time that one launch saves."""
        return 1 - self.launch_s / self.graph_s

    @property
    def wins(self) -> bool:
        return self.gain > LEAST_GAIN

    @property
    def text(self) -> str:
        times = f"{self.launch_s * 1e6:.0f} us against {self.graph_s * 1e6:.0f} us as a graph"
        return f"by this device's measured rates one launch takes {times}, {self.gain:.1%} less"


def predict(cost: StepCost, tasks: int, f: GpuFacts, *, dependent: bool = False) -> Prediction:
    """Compare `cost.kernels` nodes of a graph with `tasks` of one launch; `dependent`: the nodes are dependent
    launches."""
    floor = floor_s(cost, f)
    edge = f.flag_s + f.persistent_saving_s + f.latency_s if dependent else f.node_s + 2 * f.latency_s
    one = f.node_s + tasks * (f.flag_s + f.latency_s)
    return Prediction(graph_s=floor + cost.kernels * edge, launch_s=floor + one)
