"""The conditions of a measured figure, and which of them differ between two figures."""

from __future__ import annotations

from collections.abc import Mapping

from autosel.certify.certificate import Certificate
from autosel.certify.physics import TOLERANCE
from autosel.certify.suite import Suite

Stated = Mapping[str, str | float]  # by name; a float is a rate in bytes per second
ALWAYS = ("device", "mode", "read rate", "other work")  # shown even if they are equal


def of_certificate(made: Certificate) -> Stated:
    """Return what the speed of a run depends on, besides the kernels that served it."""
    return {
        "device": f"{made.device} {made.hw_id[:12]}",
        "mode": made.mode,
        "read rate": made.read_median_bytes_per_s,
        "other work": "yes" if made.contended else "no",
        "timed by": made.timed_by,
        **({} if made.baseline else {"baseline": "none"}),
        "prompt": made.prompt.tokens_sha256[:12] if made.prompt else "none",
        **{name: str(value) for name, value in made.environment.items()},
    }


def of_suite(found: Suite) -> Stated:
    return {"device": f"{found.device} {found.hw_id[:12]}", "software": found.env_id[:12]}


def differing(one: Stated, other: Stated) -> tuple[str, ...]:
    """Return the names of the conditions that differ. Rates are equal within the error of a read probe."""
    names = dict.fromkeys((*one, *other))
    return tuple(name for name in names if not _equal(one.get(name, "unknown"), other.get(name, "unknown")))


def _equal(one: str | float, other: str | float) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return max(one, other) <= TOLERANCE * min(one, other)
