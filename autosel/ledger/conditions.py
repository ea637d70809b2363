"""Describe for which other conditions something is decided: `tuned with 2 threads, running with 1`.

A decision holds for one device and one mode (threads and torch's numeric flags). If there is none for the present
conditions, but one for others, all parts use the same words: `best().explain()`, `best`, `explain`, `run`, and the
daemon.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from autosel.values import Fingerprint

Identity = Mapping[str, Any]
Identify = Callable[[str], Fingerprint | None]
DETERMINISTIC = "deterministic"
MOST_CHARACTERS = 240
# Spelled as in ledger.key; for a GPU, irrelevant parts are left out.
_MODE = re.compile(
    r"(?P<kind>[a-z]+)(?:\.t(?P<threads>\d+))?(?:\.(?P<precision>(?!deterministic)[\w-]+))?"
    r"(?P<deterministic>\.deterministic)?"
)
# If two identities differ, the first of these differences is reported: most others follow from it.
PARTS = {
    "name": "{}",
    "model": "{}",
    "cpus": "{} CPUs",
    "quota_cpus": "a quota of {} CPUs",
    "mig_profile": "the MIG profile {}",
    "isa": "the instruction set {}",
    "memory_bytes": "{} bytes of memory",
}


def other_conditions(
    decided: Iterable[tuple[str, str]], *, mode: str, device: Fingerprint, identify: Identify = lambda _: None
) -> str:
    """Return the difference between these conditions and the nearest ones with a decision, as (mode, hw_id); "" if
    there is no decision, or one for these conditions. `identify` returns the device of a hw_id, if it is known."""
    found = set(decided)
    modes = {m for m, hw_id in found if hw_id == device.hw_id}
    if modes:
        return "" if mode in modes else other_mode(modes, mode)
    return other_device({hw_id for _, hw_id in found}, device, identify) if found else ""


def told_in(reason: str) -> str:
    """Return the reason if `other_conditions` can have produced it, else "". Safe for text from other processes."""
    told = reason.startswith(("tuned with ", "tuned under ", "tuned on ")) and reason.isprintable()
    return reason if told and len(reason) <= MOST_CHARACTERS else ""


def other_mode(decided: Collection[str], here: str) -> str:
    """Describe the nearest of several modes."""
    return min((_between_modes(mode, here) for mode in sorted(decided)), key=lambda told: (told.count(" and "), told))


def _between_modes(decided: str, here: str) -> str:
    then, now = _MODE.fullmatch(decided), _MODE.fullmatch(here)
    alike = ("kind",) if then and now and then["threads"] and now["threads"] else ("kind", "threads")
    if then is None or now is None or any(then[part] != now[part] for part in alike):
        return f"tuned under {decided}, running under {here}"
    tuned, running = [], []
    if then["threads"] != now["threads"]:
        tuned.append(_counted(int(then["threads"]), "thread"))
        running.append(now["threads"])
    if then["precision"] != now["precision"]:
        tuned.append(f"matmul precision {then['precision'] or 'of any kind'}")
        running.append(now["precision"] or "any")
    if then[DETERMINISTIC] != now[DETERMINISTIC]:
        tuned.append("deterministic algorithms" if then[DETERMINISTIC] else "any algorithms")
        running.append("deterministic ones" if now[DETERMINISTIC] else "any")
    return f"tuned with {' and '.join(tuned)}, running with {' and '.join(running)}"


def other_device(decided: Collection[str], here: Fingerprint, identify: Identify) -> str:
    """Describe another device, if possible one of this kind whose identity is known."""
    known = [fp for fp in map(identify, sorted(decided)) if fp is not None]
    known.sort(key=lambda fp: (fp.kind != here.kind, fp.name != here.name))
    if not known:
        return f"tuned on another device ({min(decided)[:12]}), running on {here.name} ({here.hw_id[:12]})"
    return _between_devices(known[0], here)


def _between_devices(then: Fingerprint, now: Fingerprint) -> str:
    if then.name != now.name:
        return f"tuned on {then.name}, running on {now.name}"
    for part, words in PARTS.items():
        a, b = then.identity.get(part), now.identity.get(part)
        if a != b:
            return f"tuned with {_said(words, a)}, running with {_said(words, b)}"
    odd = sorted(k for k in {*then.identity, *now.identity} if then.identity.get(k) != now.identity.get(k))
    differ = ", ".join(f"{k} {then.identity.get(k)} instead of {now.identity.get(k)}" for k in odd[:3])
    return f"tuned on {then.name} with {differ}"


def _said(words: str, value: Any) -> str:
    if value is None:
        return words.format("no").replace("a quota of no", "no quota of")
    if isinstance(value, (list, tuple)):
        return words.format("+".join(map(str, value)))
    return words.format(value)[: -1 if value == 1 and words.endswith("s") else None]


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
