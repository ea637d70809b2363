"""The measuring instrument: runs inside a race worker, holds the arms and the operands, takes pairs on request.

It decides nothing. The parent flips the coins, supplies fresh operands, bounds the claimed times by its own clock and
judges. Cache temperature is set by operand: streamed operands (weights, KV) rotate over enough private copies that each
call finds them cold; resident operands are rewritten just before the samples and are warm.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random

# Bound before any candidate is loaded, so that patching `time` has no effect.
from time import perf_counter_ns as clock_ns
from typing import Any, Protocol

from torch import Tensor

from autosel import devices
from autosel.candidates.layouts import STORE
from autosel.candidates.load import load, reader_of
from autosel.devices.cpu.idle import wait_until_idle
from autosel.devices.device import Timed
from autosel.native import threads
from autosel.ops import eager_stored, find
from autosel.ops.contract import Op
from autosel.ops.stored import mapped
from autosel.ops.weight import Weight
from autosel.race.contest import Entrant
from autosel.race.deployed import SITUATIONS
from autosel.race.drawn import draw
from autosel.race.judge import CLONE
from autosel.race.session import BUSY
from autosel.race.waits import WaitWatch, read_rate, watch
from autosel.values import Prepared, Workload
from autosel.workers.pages import Reused

Copy = Callable[[Tensor], Tensor]


@dataclass(slots=True, kw_only=True)
class LoadedArm:
    """A candidate ready to be called; `runtime` names the runtime whose threads it leaves spinning."""

    call: Callable[..., Any]
    writes_out: bool
    runtime: str
    eager: bool = False  # PyTorch's own op, which keeps forms of weights that it reads (ops.eager_stored)


@dataclass(slots=True, kw_only=True)
class ArmSeat:
    """An arm at a workload: its calls, one for each copy of the streamed operands, and its own sets of outputs."""

    arm: LoadedArm
    timed: Timed
    outputs: tuple[tuple[Tensor, ...], ...]
    resident: Mapping[str, Tensor]
    prepared: Prepared | None  # cost of preparing one call's weights, if the arm has a layout

    def poison(self) -> None:
        """Poison the outputs, so that elements that a call does not write show."""
        for output in (tensor for one in self.outputs for tensor in one):
            output.fill_(math.nan if output.is_floating_point() else -1)

    def written(self, slot: int, result: Any) -> tuple[Tensor, ...]:
        """Return the results of a call that was given these outputs and returned this."""
        if self.arm.writes_out and self.outputs[0]:
            return self.outputs[slot]
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)


class Look(Protocol):
    """Receives the results of calls that were drawn."""

    rng: Random

    def wants(self, arm: str) -> bool: ...

    def take(self, arm: str, number: int, results: Sequence[tuple[Tensor, ...]]) -> None:
        """Take the results of the drawn calls of the visit's sample of this number, the last call's at the end."""


class Bench:
    """All arms loaded in this process, and the seats of the current workload."""

    def __init__(self, device: str = devices.HOST, *, owner: int = 0, realtime: bool = False) -> None:
        """Create the bench. `owner` is the process that asks: its work does not make the machine busy.

        With `realtime`, samples are repeated at real-time priority.
        """
        self.device = devices.named(device)
        self.device.use()
        self.reused = Reused()
        self.copied: Copy = self.reused.clone if self.device.on_host else self.device.streamed
        # Another device is timed by its own clock.
        self.watch: WaitWatch | None = watch(owner, realtime=realtime) if self.device.on_host else None
        self.arms: dict[str, LoadedArm] = {}
        self.seats: dict[str, ArmSeat] = {}
        self.runtime = ""  # the runtime whose threads ran last
        gc.freeze()  # imported objects live as long as the process: do not scan them at every release
        gc.disable()

    def load(self, entrant: Entrant) -> None:
        call = load(find(entrant.op), entrant.recipe, entrant.digest, entrant.knobs)
        pool = threads.use(wake=True)  # the race times a decode loop, in which no worker sleeps
        runtime = _runtime(entrant, shared=pool is not None and pool.openmp)
        self.arms[entrant.loaded_name] = LoadedArm(
            call=call, writes_out=entrant.writes_out, runtime=runtime, eager=entrant.candidate.startswith("torch:")
        )

    # --- seating ----------------------------------------------------------------------------------------------------

    def prepare(
        self, w: Workload, inputs: Mapping[str, Any], arms: Mapping[str, str], copies: int, slots: int = 1
    ) -> None:
        """Copy the operands privately and seat each arm: `arms` maps the race's arm name to a loaded one's; `slots` is
        the number of sets of outputs.

        The baseline's clone gets separate operands: placement is part of the luck that A/A sessions calibrate. An arm
        with a layout prepares each copy of its weights here, before anything is timed.
        """
        self.release()
        op = find(w.op)
        shared = _Operands(op, inputs, copies, self.device.resident, self.copied)
        for name, loaded in arms.items():
            own = shared
            if name == CLONE:
                own = _Operands(op, inputs, copies, self.device.resident, self.copied)
            self.seats[name] = self._seat(op, w, self.arms[loaded], own, slots)

    def _seat(self, op: Op, w: Workload, arm: LoadedArm, private: _Operands, slots: int) -> ArmSeat:
        outputs = tuple(
            tuple(t.to(self.device.torch_device) for t in op.allocate(w, fill=0.0) if t is not None)
            for _ in range(slots if self.device.on_host else 1)
        )
        passed = outputs if arm.writes_out else tuple((None,) * len(one) for one in outputs)
        calls = [op.arguments(operands) for operands in private.copies]
        reader = reader_of(arm.call)
        if arm.eager and (stored := [i for i, value in enumerate(calls[0]) if isinstance(value, Weight)]):
            arm.call(*calls[0], *passed[0])
            for i in stored:
                eager_stored.share_forms([call[i] for call in calls], self.copied)
        return ArmSeat(
            arm=arm,
            timed=self.device.timed(arm.call, calls, passed),
            outputs=outputs,
            resident=private.resident,
            prepared=reader.prepare_copies(calls) if reader is not None else None,
        )

    @property
    def prepared(self) -> dict[str, Prepared]:
        """Return the cost of preparing one call's weights by arm, for the arms that have a layout."""
        return {name: seat.prepared for name, seat in self.seats.items() if seat.prepared is not None}

    def release(self) -> None:
        self.seats.clear()
        gc.collect()
        STORE.sweep()
        eager_stored.sweep()
        self.reused.restart()

    # --- measuring --------------------------------------------------------------------------------------------------

    def warm(self, limit_ns: int) -> dict[str, float]:
        """Alternate the arms until their medians settle or the time is up; return nanoseconds per call by arm."""
        seen: dict[str, list[float]] = {name: [] for name in self.seats}
        start = clock_ns()
        while True:
            for name, seat in self.seats.items():
                self._hush(seat.arm)
                seen[name].append(seat.timed.sample(1))
            spent = clock_ns() - start
            rounds = len(next(iter(seen.values())))
            if spent > limit_ns or (rounds >= 10 and spent > limit_ns // 4):
                return {name: min(times[len(times) // 2 :]) for name, times in seen.items()}

    def refresh(self, resident: Mapping[str, Tensor]) -> None:
        """Write new contents into the resident operands, at the same addresses."""
        for seat in self.seats.values():
            for name, value in resident.items():
                seat.resident[name].copy_(value)

    def pair(
        self, order: Sequence[str], calls: int, samples: int, wake: bool = True, look: Look | None = None
    ) -> tuple[dict[str, list[float]], str]:
        """Visit each arm once in this order; return (nanoseconds per call by arm, why the pair must be dropped or "").

        `look` gets, after each sample and while no clock runs, the results of the calls that were drawn.

        With `wake`, an untimed call comes first, which wakes the arm's own threads and loads its code. Samples during
        which a thread waited for a core are repeated; if that happens too often, the pair is dropped as BUSY.
        """
        before = Disturbance.read()
        if self.watch is not None:
            self.watch.begin()
        times: dict[str, list[float]] = {}
        busy = ""
        for name in order:
            seat = self.seats[name]
            self._hush(seat.arm)
            if wake:
                seat.timed.sample(1)
            if busy:
                times[name] = [seat.timed.sample(1)]  # its output may be checked
                continue
            times[name] = self._visit(name, calls, samples, look)
            busy = "" if len(times[name]) == samples else BUSY
        return times, busy or before.since()

    def _visit(self, name: str, calls: int, samples: int, look: Look | None) -> list[float]:
        timed, taken = self.seats[name].timed, count()

        def sample() -> float:
            return timed.sample(calls) if look is None else self._looked_at(name, calls, next(taken) % samples, look)

        if self.watch is None:
            return [sample() for _ in range(samples)]
        settle = (lambda: timed.sample(1)) if calls > 1 else (lambda: None)  # a long call has few operands to warm
        return self.watch.samples(sample, samples, settle)

    def _looked_at(self, name: str, calls: int, number: int, look: Look) -> float:
        """Take one sample, some of whose calls are drawn; `number` counts the visit's samples."""
        seat = self.seats[name]
        if not look.wants(name):
            return seat.timed.sample(calls)
        drawn = draw(calls, len(seat.outputs), look.rng)
        seat.poison()
        taken = seat.timed.sample(calls, drawn)
        results = zip(drawn.kept[-len(seat.timed.kept) :], seat.timed.kept, strict=True)
        look.take(name, number, [seat.written(slot, result) for slot, result in results])
        return taken

    @property
    def again(self) -> int:
        return self.watch.again if self.watch is not None else 0

    @property
    def watched(self) -> bool:
        return self.watch is None or self.watch.waits.watched

    def surprise(self, name: str, calls: int, resident: Mapping[str, Tensor]) -> None:
        """Run a burst of calls on other contents; then, at the same addresses and without a pause, one call on new
        contents, into poisoned outputs.

        A kernel that does the work of a burst in only one of its calls, or that remembers earlier operands, is right in
        every timed burst, because there nothing changes from call to call.
        """
        seat = self.seats[name]
        self._hush(seat.arm)
        for operand, value in resident.items():
            seat.resident[operand].copy_(value.flip(0) if value.dim() == 1 else value.roll(1, -1))
        seat.timed.sample(calls)
        for operand, value in resident.items():
            seat.resident[operand].copy_(value)
        seat.poison()
        seat.timed.sample(1)

    def deployed(self, situation: str, order: Sequence[str]) -> dict[str, float]:
        """Time one call of each arm in this order and situation (`race.deployed`), in nanoseconds.

        An arm whose threads waited for a core each time is left out.
        """
        ahead = SITUATIONS[situation].ahead
        times: dict[str, float] = {}
        if self.watch is not None:
            self.watch.begin()
        for name in order:
            seat = self.seats[name]
            self._hush(seat.arm)
            taken = self._called(seat.timed, ahead)
            if taken is not None:
                times[name] = taken
        return times

    def _called(self, timed: Timed, ahead: Callable[[], Any]) -> float | None:
        def sample() -> float:
            ahead()
            return timed.sample(1)

        return sample() if self.watch is None else next(iter(self.watch.samples(sample, 1, lambda: None)), None)

    def _hush(self, arm: LoadedArm) -> None:
        """Let the threads of another runtime go to sleep before this arm is called."""
        if self.device.on_host and self.runtime not in ("", arm.runtime):
            wait_until_idle()
        self.runtime = arm.runtime

    def read_bytes_per_s(self) -> float:
        return read_rate(self.device.read_windows, self.watch)

    def outputs(self, name: str) -> tuple[Tensor, ...]:
        seat = self.seats[name]
        return seat.written(seat.timed.slot, seat.timed.result)


class _Operands:
    """Return private operands for one seat: resident ones once, streamed and inout ones in `copies` copies."""

    def __init__(self, op: Op, inputs: Mapping[str, Any], copies: int, resident: Copy, streamed: Copy) -> None:
        roles = {a.name: a.role for a in op.args}
        warm = {n: v for n, v in inputs.items() if isinstance(v, Tensor) and roles[n] == "resident"}
        self.resident = {n: resident(v) for n, v in warm.items()}
        self.copies: list[dict[str, Any]] = []
        for _ in range(copies):
            operands = {**inputs, **self.resident}
            for name, value in inputs.items():
                if roles[name] != "resident":
                    operands[name] = mapped(value, streamed)
            self.copies.append(operands)


def _runtime(entrant: Entrant, *, shared: bool) -> str:
    """Return the name of the runtime that the candidate runs on. `shared`: C++ kernels run on PyTorch's.

    A candidate of a third party may bring its own threads, which must not be charged to the next arm.
    """
    if entrant.recipe.kind == "native" and not shared:
        return "helpers"
    ours = entrant.recipe.kind == "native" or entrant.candidate.startswith(("torch:", "inductor:"))
    return "torch" if ours else entrant.candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """Return the cause that took the CPU away: cgroup throttling or steal. Such a pair is dropped whole, both arms."""

    throttled: int
    steal_ticks: int
    at_ns: int

    @staticmethod
    def read() -> Disturbance:
        return Disturbance(throttled=_throttled(), steal_ticks=_steal_ticks(), at_ns=clock_ns())

    def since(self) -> str:
        if _throttled() > self.throttled:
            return "the cgroup was throttled"
        lost_ns = (_steal_ticks() - self.steal_ticks) * 10_000_000
        if lost_ns > 20_000_000 and lost_ns > 0.1 * (clock_ns() - self.at_ns):
            return "the hypervisor took the CPU"
        return ""


def _throttled() -> int:
    for path in ("/sys/fs/cgroup/cpu.stat", "/sys/fs/cgroup/cpu/cpu.stat"):
        try:
            for line in Path(path).read_text().splitlines():
                if line.startswith("nr_throttled "):
                    return int(line.split()[1])
        except OSError:
            continue
    return 0


def _steal_ticks() -> int:
    try:
        return int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[8])
    except (OSError, IndexError, ValueError):
        return 0
