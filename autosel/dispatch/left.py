"""Count calls that an engine runs itself before a decision is looked up, or in spite of one: no workload describes the
tensors, a kernel raised, a CUDA graph is being captured."""

from __future__ import annotations

from dataclasses import dataclass, field

from autosel.values import Workload

MOST_LEFT = 1024  # different ones in a process


@dataclass(slots=True, kw_only=True, eq=False)
class Left:
    """Take the place of a bound callable that never serves. The engine counts each call in `elsewhere[0]`."""

    what: Workload | str  # the op alone where no workload describes the call
    reason: str
    hw_id: str
    elsewhere: list[int] = field(default_factory=lambda: [0])

    def beyond_baseline(self, length: int | None = None) -> bool:
        return False
