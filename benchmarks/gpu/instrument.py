"""Time candidates at one workload with the race's own instrument: operands cold, arms visited in turn.

On a GPU a sample is one replay of a graph of calls over rotating copies of the operands; on a CPU it is a series of
calls. This module makes no decisions.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from time import perf_counter, process_time
from typing import Any

from autosel.ops import find
from autosel.ops.contract import Mismatch
from autosel.race.bench import Bench
from autosel.race.contest import CHECKED_ROWS, MAX_COPIES, Entrant
from autosel.race.plan import plan
from autosel.tuning.contend import last_level_bytes
from autosel.values import Fingerprint, Workload

WARM_NS = 100_000_000
LEAST_ROUNDS = 9
MOST_OTHERS = 0.05  # of one core; readings during more load by other processes are discarded
Times = dict[str, list[float]]  # arm -> microseconds a call, one entry a round


class Timer:
    """Times arms at workloads on one device, in this process."""

    def __init__(self, fp: Fingerprint, device: str) -> None:
        self.fp, self.bench = fp, Bench(device)
        self.llc_bytes = last_level_bytes(fp)
        self._looked = at_work()
        self.workload: Workload | None = None
        self.inputs: dict[str, Any] = {}
        self._found: tuple[bool, int] | None = None  # PyTorch's settings before operands were seated

    def seat(self, w: Workload, arms: Mapping[str, Entrant], lead: str = "", copies: int = 0) -> None:
        """Give every arm its operands at new addresses, and warm up all arms, or only `lead`.

        The arms that are warmed up set the length of a sample. The same workload again keeps its contents. `copies` is
        the number of operand copies; 0 means as in a race. Until `close`, PyTorch keeps no gradients and, on a CPU,
        uses all cores.
        """
        self._take_pytorch()
        if self.workload != w:
            self.workload, self.op = w, find(w.op)
            self.inputs = self.op.inputs(w, 1)
        self.arms = dict(arms)
        for entrant in arms.values():
            if entrant.loaded_name not in self.bench.arms:
                self.bench.load(entrant)
        names = {arm: entrant.loaded_name for arm, entrant in arms.items()}
        self.bench.prepare(w, self.inputs, names, copies or self._copies())
        seated = self.bench.seats
        self.bench.seats = {lead: seated[lead]} if lead else seated
        warm = self.bench.warm(WARM_NS)
        self.bench.seats = seated
        self.plan = plan(min(warm.values()))

    def _copies(self) -> int:
        """Return the number of copies in a race: three last-level caches are read before one is reused."""
        import torch

        roles = {a.name: a.role for a in self.op.args}
        tensors = [v for n, v in self.inputs.items() if roles[n] != "resident" and isinstance(v, torch.Tensor)]
        rotated = sum(t.numel() * t.element_size() for t in tensors)
        return min(MAX_COPIES, 1 + 3 * self.llc_bytes // rotated) if rotated else 1

    def renew(self, seed: int) -> None:
        """Write new contents into the resident operands, at the same addresses, and poison the outputs.

        Operands that hold indices stay, since the check assumes a cache written at the same places.
        """
        assert self.workload is not None  # seated
        fresh = self.op.refresh(self.workload, self.inputs, seed)
        names = [a.name for a in self.op.args if a.role == "resident"]
        new = {n: fresh[n] for n in names if hasattr(fresh[n], "dim") and fresh[n].is_floating_point()}
        self.inputs = {**self.inputs, **new}
        self.bench.refresh(new)
        for seat in self.bench.seats.values():
            seat.poison()

    def wrong(self, arm: str) -> str:
        """Return the error in the arm's last result, or "": sampled rows against the float64 reference."""
        assert self.workload is not None  # seated
        rows = self.op.rows(self.workload, self.inputs, CHECKED_ROWS, 1)
        got = [t.cpu() for t in self.bench.outputs(arm)]
        found = self.op.verify(rows.inputs, rows.pick(got))
        return f"{found.check}: {found.reason}" if isinstance(found, Mismatch) else ""

    def rounds(self, arms: Sequence[str], *, seconds: float, rng: Random) -> Times:
        """Visit the arms in shuffled order until the time is up; return the medians of undisturbed rounds."""
        times: Times = {arm: [] for arm in arms}
        end, tries = perf_counter() + seconds, 0
        while (perf_counter() < end or len(times[arms[0]]) < LEAST_ROUNDS) and tries < 100 * LEAST_ROUNDS:
            tries += 1
            taken = self.visit(rng.sample(list(arms), len(arms)), even_disturbed=tries > 10 * LEAST_ROUNDS)
            for arm, us in (taken or {}).items():
                times[arm].append(us)
        return times

    def visit(self, order: Sequence[str], samples: int = 1, *, even_disturbed: bool = False) -> dict[str, float] | None:
        """Return the median of each arm's samples in microseconds a call; None if the visit was disturbed."""
        taken, disturbed = self.bench.pair(order, self.plan.calls, samples, self.plan.wakes)
        if disturbed and not even_disturbed:
            return None
        return {arm: statistics.median(ns) / 1e3 for arm, ns in taken.items()}

    def now(self) -> float:
        return perf_counter()

    def quiet(self) -> bool:
        """Return True if other processes took less than MOST_OTHERS of a core since the last call, or on a GPU."""
        before, self._looked = self._looked, at_work()
        return self.fp.kind != "cpu" or others_share(before, self._looked) <= MOST_OTHERS

    def read_bytes_per_s(self) -> float:
        return self.bench.read_bytes_per_s()

    def close(self) -> None:
        self.bench.release()
        self.workload, self.inputs = None, {}
        self._give_pytorch_back()

    def _take_pytorch(self) -> None:
        import torch

        self._found = self._found or (torch.is_grad_enabled(), torch.get_num_threads())
        torch.set_grad_enabled(False)
        if self.fp.kind == "cpu":
            torch.set_num_threads(int(self.fp.identity["cpus"]))

    def _give_pytorch_back(self) -> None:
        import torch

        if self._found:
            torch.set_grad_enabled(self._found[0])
            torch.set_num_threads(self._found[1])
            self._found = None


def at_work() -> tuple[float, float, float]:
    """Return seconds: of the clock, of all busy cores (steal included), and of this process."""
    fields = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    busy = sum(fields) - fields[3] - fields[4]  # all but idle and iowait
    return perf_counter(), busy / os.sysconf("SC_CLK_TCK"), process_time()


def others_share(before: tuple[float, float, float], after: tuple[float, float, float]) -> float:
    """Return the cores used by other processes. Two 10 ms ticks are subtracted: the kernel's counter is that coarse."""
    clock, busy, own = (b - a for a, b in zip(before, after, strict=True))
    return max(0.0, busy - own - 2 / os.sysconf("SC_CLK_TCK")) / clock


def spread(times: Sequence[float]) -> dict[str, Any]:
    """Return median and quartiles in microseconds."""
    low, middle, high = statistics.quantiles(times, n=4)
    return {"us": round(middle, 3), "lo_us": round(low, 3), "hi_us": round(high, 3), "best_us": round(min(times), 3)}
