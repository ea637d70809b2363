"""Check that the ranks of a distributed job serve the same decisions, before the first call.

    autosel.agree()                # on every rank, after torch.distributed.init_process_group

Ranks that round differently can take different branches (sampling, routing) and then wait for each other. So the ranks
compare what they would serve: the snapshot's digest, the kind of device, the mode, versions, and settings that switch
serving off. Each rank raises the same error if they differ. If they agree, each rank serves this snapshot to its end; a
fault on one rank still demotes there.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from autosel import settings
from autosel.devices import HOST, current, device_at
from autosel.dispatch.board import Board
from autosel.errors import AutoselError, UsageError
from autosel.ledger.key import current_mode, matters
from autosel.values import canonical_json, from_json
from autosel.version import __version__

MOST_BYTES = 4096  # of one rank's standing


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Describe what one rank would serve. All fields but `host` must be equal."""

    host: str
    snapshot: str  # its digest; "" if there is none
    device: str  # hw_id
    mode: str  # the part that matters on that device
    autosel: str
    torch: str
    serves: str  # the settings mode, disable and lock


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Hold the standings of all ranks, in their order. `differences`: one line for each rank that differs from most."""

    standings: tuple[Standing, ...]
    differences: tuple[str, ...]


class Disagreement(AutoselError):
    """The ranks of a job would serve different kernels."""


def agree(board: Board, group: Any = None) -> Agreement:
    """Compare the ranks of a process group (default: all), and keep the snapshot if they agree.

    Raises Disagreement on every rank if they differ; UsageError without a process group.
    """
    found = compare(gathered(standing(board), group))
    if found.differences:
        raise Disagreement(
            "the ranks of this job would serve different kernels",
            why="\n".join(found.differences),
            todo="give every rank the same home, lock file and number of threads; `doctor --ranks` shows all of them",
        )
    board.hold()
    return found


def standing(board: Board) -> Standing:
    """Return what this rank would serve: on its current GPU if PyTorch can use one, else on its CPU."""
    device, _ = device_at(current())
    switches = f"{settings.get('mode')}{', disabled' if settings.get('disable') else ''}"
    return Standing(
        host=platform.node()[:200],
        snapshot=board.digest,
        device=device.hw_id,
        mode=matters(current_mode(), device.kind),
        autosel=__version__,
        torch=str(torch.__version__),
        serves=f"{switches}{', from a lock' if settings.get('lock') else ''}",
    )


def gathered(mine: Standing, group: Any = None) -> tuple[Standing, ...]:
    """Return the standings of all ranks. Raises UsageError without a process group."""
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        raise UsageError(
            "no process group: the ranks cannot be compared",
            todo="call torch.distributed.init_process_group first, on every rank",
        )
    text = canonical_json(mine)
    if len(text) > MOST_BYTES:
        raise UsageError(f"this rank's standing takes {len(text)} bytes", why=f"at most {MOST_BYTES} are exchanged")
    place = HOST if "gloo" in distributed.get_backend(group) else current()
    sent = torch.zeros(MOST_BYTES, dtype=torch.uint8)
    sent[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    sent = sent.to(place)
    received = [torch.empty_like(sent) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(received, sent, group=group)
    texts = [bytes(one.cpu().tolist()).rstrip(b"\0") for one in received]
    return tuple(from_json(Standing, json.loads(one)) for one in texts)


def compare(standings: Sequence[Standing]) -> Agreement:
    """Compare each rank with the standing that most ranks have; of equally many, with the lowest rank's."""
    names = [f.name for f in fields(Standing) if f.name != "host"]  # which is told, not compared
    alike = [{name: str(getattr(s, name)) for name in names} for s in standings]
    usual = max(alike, key=alike.count)
    lines = []
    for rank, (s, mine) in enumerate(zip(standings, alike, strict=True)):
        others = [f"{n} {short(mine[n])} instead of {short(usual[n])}" for n in names if mine[n] != usual[n]]
        if others:
            lines.append(f"rank {rank} on {s.host}: {'; '.join(others)}")
    return Agreement(standings=tuple(standings), differences=tuple(lines))


def short(value: str) -> str:
    """Return the first 12 digits of a digest; other values as they are."""
    return value[:12] if len(value) == 64 else value or "none"
