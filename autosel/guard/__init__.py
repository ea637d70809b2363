"""The runtime guard: what was proven and promoted is checked again while it serves, and gives way on any doubt.

rate       which calls are checked: the first 32 of a bucket, then a random few
spot       a few elements of a result recomputed natively
call       one checked call: both arms on the same inputs
judge      is the result right? float64 on sampled rows, the baseline on all of it
replay     whose fault was it?
detector   has it become slower than the baseline?
watch      the life of one served arm, from its first call to its demotion
held       what may not serve, since a fault was seen
"""

from __future__ import annotations

from autosel.guard.held import Held
from autosel.guard.rate import NEVER, Policy
from autosel.guard.spot import Allowance
from autosel.guard.watch import Subject, Watch

__all__ = ["NEVER", "Allowance", "Held", "Policy", "Subject", "Watch"]
