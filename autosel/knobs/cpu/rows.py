"""Knobs of the row ops (rmsnorm, add_rmsnorm, rope, swiglu, geglu): only how many threads a call is worth."""

from __future__ import annotations

from autosel.knobs.cpu.facts import CpuFacts, worthwhile_threads
from autosel.values import DTYPE_BYTES, Knob, Knobs, Workload


def rmsnorm(w: Workload, f: CpuFacts) -> Knobs:
    """threads: all once M*d elements, at about one L2 line a nanosecond, outlast two fork-joins; at most M."""
    bytes_read = 2 * w["M"] * w["d"] * DTYPE_BYTES[w.dtype]
    serial_s = bytes_read / max(f.read_1, 32e9)
    threads = min(w["M"], worthwhile_threads(f, serial_s))
    return Knobs(
        settings=(
            Knob(
                name="threads",
                value=threads,
                formula="min(M, cpus if serial_s * (1 - 1/cpus) > 2 * fork_join_s else 1)",
                inputs={"M": w["M"], "serial_s": serial_s, "cpus": f.cpus, "fork_join_s": f.fork_join_s},
            ),
        )
    )
