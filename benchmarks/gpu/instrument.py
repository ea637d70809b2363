"""Times of candidates at one workload, by the race's own instrument: operands cold, arms visited in turn.

On a GPU a sample is the replay of a graph of calls over rotating copies of the operands; on a CPU it is calls in a row.
Nothing is judged here.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from random import Random
from time import perf_counter
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
Times = dict[str, list[float]]  # arm -> microseconds a call, a round each


class Timer:
    """Arms at workloads on one device, in this process."""

    def __init__(self, fp: Fingerprint, device: str) -> None:
        import torch

        torch.set_grad_enabled(False)
        if fp.kind == "cpu":
            torch.set_num_threads(int(fp.identity["cpus"]))
        self.fp, self.bench = fp, Bench(device)
        self.llc_bytes = last_level_bytes(fp)

    def seat(self, w: Workload, arms: Mapping[str, Entrant], seed: int = 1) -> None:
        """Give every arm its operands, and warm all of them up. An arm named "base" sets the length of a sample."""
        self.workload, self.op, self.arms = w, find(w.op), dict(arms)
        self.inputs = self.op.inputs(w, seed)
        for entrant in arms.values():
            if entrant.loaded_name not in self.bench.arms:
                self.bench.load(entrant)
        names = {arm: entrant.loaded_name for arm, entrant in arms.items()}
        self.bench.prepare(w, self.inputs, names, self._copies())
        warm = self.bench.warm(WARM_NS)
        self.plan = plan(min(warm.values()))

    def _copies(self) -> int:
        """As a race has them: three last-level caches pass before a copy comes round again."""
        import torch

        roles = {a.name: a.role for a in self.op.args}
        tensors = [v for n, v in self.inputs.items() if roles[n] != "resident" and isinstance(v, torch.Tensor)]
        rotated = sum(t.numel() * t.element_size() for t in tensors)
        return min(MAX_COPIES, 1 + 3 * self.llc_bytes // rotated) if rotated else 1

    def wrong(self, arm: str) -> str:
        """Why what the arm's last call gave is not right, or "": sampled rows against the float64 reference."""
        rows = self.op.rows(self.workload, self.inputs, CHECKED_ROWS, 1)
        got = [t.cpu() for t in self.bench.outputs(arm)]
        found = self.op.verify(rows.inputs, rows.pick(got))
        return f"{found.check}: {found.reason}" if isinstance(found, Mismatch) else ""

    def rounds(
        self, arms: Sequence[str], *, seconds: float, rng: Random, samples: int = 1, least: int = LEAST_ROUNDS
    ) -> Times:
        """Visit the arms in shuffled order until the time is up: each round's median, disturbed rounds left out."""
        times: Times = {arm: [] for arm in arms}
        end, tries = perf_counter() + seconds, 0
        while (perf_counter() < end or len(times[arms[0]]) < least) and tries < 100 * least:
            tries += 1
            order = list(arms)
            rng.shuffle(order)
            taken, disturbed = self.bench.pair(order, self.plan.calls, samples, self.plan.wakes)
            if not disturbed or tries > 10 * least:
                for arm, ns in taken.items():
                    times[arm].append(statistics.median(ns) / 1e3)
        return times

    def read_bytes_per_s(self) -> float:
        """The read rate right now."""
        return self.bench.read_bytes_per_s()

    def close(self) -> None:
        self.bench.release()


def spread(times: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles, in microseconds."""
    low, middle, high = statistics.quantiles(times, n=4)
    return {"us": round(middle, 3), "lo_us": round(low, 3), "hi_us": round(high, 3), "best_us": round(min(times), 3)}
