"""The runtime guard: it checks promoted kernels while they serve, and replaces them by the baseline on any doubt.

rate        which calls are checked: the first 32 of a bucket, then a random few
spot        a few elements of a result, recomputed natively
call        one checked call: both arms on the same inputs
judge       correctness of a result: float64 on sampled rows, the baseline on all of it
replay      the cause of a fault
detector    slowdown compared with the baseline
watch       one served arm, from its first call to its demotion
held        arms that may not serve because of a fault
"""

from __future__ import annotations

from autosel.guard.held import Held
from autosel.guard.rate import NEVER, Policy
from autosel.guard.spot import Allowance
from autosel.guard.watch import Subject, Watch

__all__ = ["NEVER", "Allowance", "Held", "Policy", "Subject", "Watch"]
