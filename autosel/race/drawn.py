"""Which calls of a sample are looked at afterwards, and into which outputs each call writes.

A sample's calls write into a few sets of outputs in a random order, and the outputs of calls that were drawn are not
written again: a call cannot tell from its arguments that it will be looked at. What is drawn is decided, and outputs
are poisoned and copied, while no clock runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

SLOTS = 4  # sets of outputs: one more than calls that are kept, so that there is always a choice
KEPT = 3  # calls of a sample that are kept, its last one among them
ALONE = 0.5  # chance that outputs of a kept call are written by no other call of the sample
ROOM_BYTES = 4 << 20  # outputs larger than this have one set, and of a sample the last call is kept
FAULT_FREE = 3.0  # -ln 0.05: with 95 % confidence the rate of faults is below this over the calls without one


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """`slots`: the outputs of each call, by number; `kept`: those that hold the kept calls' results, the last last."""

    slots: Sequence[int]
    kept: Sequence[int]


def slots_for(output_bytes: int) -> int:
    return SLOTS if 0 < output_bytes <= ROOM_BYTES else 1


def kept_of(calls: int, slots: int) -> int:
    """How many calls of a sample are kept."""
    return min(calls, KEPT) if slots > 1 else 1


def draw(calls: int, slots: int, rng: Random) -> Drawn:
    """Draw the kept calls of a sample, the last one among them, and outputs for each call.

    By coin, outputs of a kept call are written by it alone, so that one that leaves its work out shows; or by calls
    before it too, so that new outputs tell nothing.
    """
    count = kept_of(calls, slots)
    positions = [*sorted(rng.sample(range(calls - 1), count - 1)), calls - 1]
    kept = rng.sample(range(slots), count)
    alone = {slot for slot in kept if slots > 1 and rng.random() < ALONE}
    free, order = set(range(slots)), list[int]()
    for position, slot in zip(positions, kept, strict=True):
        order += rng.choices(sorted(free - alone), k=position - len(order))
        order.append(slot)
        free -= {slot}
    return Drawn(slots=order, kept=kept)


def most_faults(checked: int) -> float:
    """The rate of faulty calls that `checked` calls without a fault rule out with 95 % confidence."""
    return FAULT_FREE / checked if checked else 1.0
