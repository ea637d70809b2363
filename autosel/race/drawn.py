"""Draw the calls of a sample that are checked afterwards, and the outputs that each call writes.

A sample's calls write into a few sets of outputs in a random order, and outputs of drawn calls are not written again: a
call cannot tell from its arguments that it will be checked. Drawing, poisoning and copying happen while no clock runs.
"""

from __future__ import annotations

from random import Random

from autosel.devices.device import Drawn

SLOTS = 4  # sets of outputs: one more than kept calls, so that there is always a choice
KEPT = 3  # kept calls of a sample, including its last
ALONE = 0.5  # chance that no other call of the sample writes the outputs of a kept call
ROOM_BYTES = 4 << 20  # larger outputs have one set, and only a sample's last call is kept
FAULT_FREE = 3.0  # -ln 0.05: upper 95 % limit of the fault rate over calls without a fault


def slots_for(output_bytes: int) -> int:
    return SLOTS if 0 < output_bytes <= ROOM_BYTES else 1


def kept_of(calls: int, slots: int) -> int:
    return min(calls, KEPT) if slots > 1 else 1


def draw(calls: int, slots: int, rng: Random) -> Drawn:
    """Draw the kept calls of a sample, including the last, and outputs for each call.

    By coin, either no other call writes the outputs of a kept call, so that a call that does no work is noticed; or
    earlier calls also write them, so that new outputs reveal nothing.
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
    """Return the rate of faulty calls that `checked` calls without a fault rule out with 95 % confidence."""
    return FAULT_FREE / checked if checked else 1.0
