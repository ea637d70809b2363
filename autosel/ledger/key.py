"""Build the key of a decision: device, mode, bucket, and the context lengths that it serves."""

from __future__ import annotations

import re

from autosel import devices
from autosel.values import Workload

LengthRange = tuple[int, int] | None
LIFETIME_BUDGET = 0.01  # maximum total false-promotion probability of all attempts at one key (design section 7)


def serving_key(hw_id: str, mode: str, bucket: str, length_range: LengthRange = None) -> str:
    lengths = f"/{length_range[0]}-{length_range[1]}" if length_range else ""
    return f"{hw_id}/{mode}/{bucket}{lengths}"


def budget_key(hw_id: str, workload: Workload) -> str:
    """Return the key of a lifetime error budget, without library versions, builds and modes, so that an upgrade allows
    no new attempts."""
    return f"{hw_id}/{workload.bucket}"


def overlap(a: LengthRange, b: LengthRange) -> bool:
    """Return True if two rows of one bucket serve a common length. None serves all lengths."""
    return a is None or b is None or (a[0] <= b[1] and b[0] <= a[1])


def current_mode(kind: str = "eager") -> str:
    """Return the mode of this process, such as `eager.t2.highest`: threads and torch's numeric flags change speed and
    correctness. The quota belongs to the device's identity; which cores the process is bound to, to neither."""
    import torch

    from autosel.ops.precision import matmul_precision

    parts = [kind, f"t{torch.get_num_threads()}", matmul_precision()]
    if torch.are_deterministic_algorithms_enabled():
        parts.append("deterministic")
    return ".".join(parts)


def matters(mode: str, kind: str, bucket: str = "") -> str:
    """Return the part of a mode that matters for tensors of this bucket on a device of this kind. A GPU does not depend
    on the host's threads, which engines set to one in their workers while `tune` does not. The precision of fp32
    products does not affect shorter formats."""
    if devices.on_host(kind):
        return mode
    exact = _dtype_of(bucket) in ("bf16", "fp16", "fp8_e4m3")
    return ".".join(p for p in mode.split(".") if not (_THREADS.fullmatch(p) or (exact and _PRECISION.fullmatch(p))))


def at_threads(mode: str, threads: int) -> str:
    """Return the mode with another number of threads; 0 leaves it as it is."""
    return ".".join(f"t{threads}" if threads and _THREADS.fullmatch(part) else part for part in mode.split("."))


def threads_of(mode: str) -> int:
    """Return 2 of `eager.t2.highest`; 0 if the mode names no number of threads."""
    named = next((part for part in mode.split(".") if _THREADS.fullmatch(part)), "t0")
    return int(named[1:])


_THREADS = re.compile(r"t\d+")
_PRECISION = re.compile(r"highest|high|medium|cuda_\w+-mkldnn_\w+")  # ops/precision.py


def _dtype_of(bucket: str) -> str:
    """Return `bf16` of `attn/B1.Hq32.Hkv8.S1.D128.L8192/bf16.window=16`; "" for text that is not a bucket."""
    parts = bucket.split("/")
    return parts[2].partition(".")[0] if len(parts) == 3 else ""
