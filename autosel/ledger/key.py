"""What a decision is filed under: device, mode, bucket, and the context lengths it serves."""

from __future__ import annotations

import re

from autosel.values import Workload

LengthRange = tuple[int, int] | None


def serving_key(hw_id: str, mode: str, bucket: str, length_range: LengthRange = None) -> str:
    lengths = f"/{length_range[0]}-{length_range[1]}" if length_range else ""
    return f"{hw_id}/{mode}/{bucket}{lengths}"


def budget_key(hw_id: str, workload: Workload) -> str:
    """The key of a lifetime error budget: library versions, builds and modes are left out, so that an upgrade buys no
    new attempts."""
    return f"{hw_id}/{workload.bucket}"


def overlap(a: LengthRange, b: LengthRange) -> bool:
    """Do two rows of one bucket serve a common length? None serves them all."""
    return a is None or b is None or (a[0] <= b[1] and b[0] <= a[1])


def current_mode(kind: str = "eager") -> str:
    """How this process runs ops: `eager.t2.highest`: threads and torch's numeric flags change what is fastest, and what
    is right. Affinity and quota belong to the device's identity."""
    import torch

    from autosel.ops.precision import matmul_precision

    parts = [kind, f"t{torch.get_num_threads()}", matmul_precision()]
    if torch.are_deterministic_algorithms_enabled():
        parts.append("deterministic")
    return ".".join(parts)


def matters(mode: str, kind: str, bucket: str = "") -> str:
    """What of a mode counts for tensors of this bucket on a device of this kind. The host's threads change nothing of
    what a GPU runs: engines set them to one in their workers, `tune` does not. Nor does the precision of fp32 products
    change those of shorter formats, which lose nothing by it."""
    if kind == "cpu":
        return mode
    exact = _dtype_of(bucket) in ("bf16", "fp16", "fp8_e4m3")
    return ".".join(p for p in mode.split(".") if not (_THREADS.fullmatch(p) or (exact and _PRECISION.fullmatch(p))))


_THREADS = re.compile(r"t\d+")
_PRECISION = re.compile(r"highest|high|medium|cuda_\w+-mkldnn_\w+")  # ops/precision.py


def _dtype_of(bucket: str) -> str:
    """`bf16` of `attn/B1.Hq32.Hkv8.S1.D128.L8192/bf16.window=16`; "" of what is no bucket."""
    parts = bucket.split("/")
    return parts[2].partition(".")[0] if len(parts) == 3 else ""
