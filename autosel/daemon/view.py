"""Keep this device's decisions in memory. Answers to lookups are prepared once, and returned as bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from statistics import median
from typing import Any

from autosel.ledger.conditions import other_mode
from autosel.ledger.describe import contended, decision_json, served_state
from autosel.ledger.faults import plain
from autosel.ledger.store import Served
from autosel.values import COUNT_DIMS, LENGTH_DIMS, Decision, Verdict, count_bucket, length_bucket, to_json

MOST_ANSWERS = 4096
ALIASES = {"gemv": "linear", "gemm": "linear"}
_DIM = re.compile(r"([A-Za-z_]+)([0-9]{1,13})")


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Hold the decisions. `stale` gives the reason, by decision, why the baseline runs instead; `mode` is that of a
    process with default settings."""

    epoch: int = 0
    hw_id: str = ""  # the CPU's
    others: Mapping[str, str] = field(default_factory=dict)  # of other devices of this machine: name by hw_id
    mode: str = ""
    served: tuple[Served, ...] = ()
    stale: Mapping[str, str] = field(default_factory=dict)
    _answers: dict[tuple[str, str, str], bytes] = field(default_factory=dict)

    @property
    def here(self) -> list[Decision]:
        return [s.decision for s in self.served if s.decision.hw_id == self.hw_id or s.decision.hw_id in self.others]

    def device(self, decision: Decision) -> str:
        """Return the device of this machine that a decision is for."""
        return self.others.get(decision.hw_id, "cpu")

    @property
    def off(self) -> list[Decision]:
        """Return the decisions whose baseline runs, because something has changed since their race."""
        return [d for d in self.here if str(d.id) in self.stale]

    @property
    def renewed(self) -> list[Decision]:
        """Return the decisions that serve after a new proof, and wait for a race."""
        return [d for d in self.here if d.stale and str(d.id) not in self.stale]

    def lookup(self, op: str, workload: str, device: str = "") -> bytes:
        """Return the JSON of the decision for a workload (its key), or of all decisions of the op if it is empty; on
        one device, or on any, the CPU's first."""
        found = self._answers.get((op, workload, device))
        if found is None:
            rows = [d for d in self.of_op(op) if device in ("", self.device(d))]
            rows.sort(key=lambda d: d.hw_id != self.hw_id)
            made = self._at(op, workload, rows) if workload else [self.document(d) for d in rows]
            found = json.dumps(plain(to_json(made)), separators=(",", ":")).encode()
            if len(self._answers) >= MOST_ANSWERS:
                self._answers.clear()
            self._answers[op, workload, device] = found
        return found

    def of_op(self, op: str) -> list[Decision]:
        name = ALIASES.get(op, op)
        rows = [d for d in self.here if d.op == name]
        if op in ALIASES:
            rows = [d for d in rows if (d.workload["M"] == 1) == (op == "gemv")]
        return rows

    def _at(self, op: str, workload: str, rows: Sequence[Decision]) -> dict[str, Any]:
        bucket, length = bucket_of(workload)
        for d in rows:
            low, high = d.length_range or (0, length)
            if d.bucket == bucket and low <= length <= high and (d.mode == self.mode or not self.mode):
                return self.document(d)
        modes = {d.mode for d in rows if d.bucket == bucket} - {self.mode}
        why = other_mode(modes, self.mode) if modes and self.mode else f"no decision for {bucket}"
        return {"op": op, "workload": workload, "state": "baseline", "reason": why[:300]}

    def document(self, decision: Decision) -> dict[str, Any]:
        """Return the document of `best OP --json`: for a stale decision the baseline, with the reason."""
        made = {**decision_json(decision), "device": self.device(decision), "epoch": self.epoch}
        why = self.stale.get(str(decision.id))
        if not why:
            return made
        baseline = decision.baseline
        instead = {"backend": baseline.backend, "candidate": baseline.candidate, "knobs": dict(baseline.knobs)}
        gone = dict.fromkeys(("speedup", "next_best", "time_interval_us", "roofline"))
        stale = {"state": "baseline", "time_us": made["baseline_us"], "reason": why, "stale": why}
        return made | instead | gone | stale

    def states(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for d in self.here:
            state = "baseline" if str(d.id) in self.stale else served_state(d)
            found[state] = found.get(state, 0) + 1
        return found

    def won(self, d: Decision) -> Verdict | None:
        """Return the verdict by which another arm than the baseline serves; None if the baseline serves."""
        serves = str(d.id) not in self.stale and d.arm.digest != d.baseline.digest
        return d.standing if serves and d.standing is not None and d.standing.outcome == "promote" else None

    def contended(self) -> dict[str, int]:
        """By op: how many of the decisions behind its speedup were timed beside other work."""
        return {op: sum(bool(contended(d)) for d, _ in of) for op, of in self._effects().items()}

    def speedups(self) -> dict[str, float]:
        """Return, by op, the median speedup over the baseline of the decisions in which another arm serves."""
        return {op: median(v.effect.median for _, v in of if v.effect) for op, of in self._effects().items()}

    def read_rates(self) -> dict[str, float]:
        """Return, by op, the lowest read rate of memory in the races behind its speedup."""
        rates = {op: [v.read_bytes_per_s for _, v in of if v.read_bytes_per_s] for op, of in self._effects().items()}
        return {op: min(of) for op, of in rates.items() if of}

    def measured(self) -> dict[str, float]:
        """Return, by op, the Unix time of the oldest decision behind its speedup."""
        return {
            op: min(datetime.fromisoformat(d.created_at).timestamp() for d, _ in of)
            for op, of in self._effects().items()
        }

    def _effects(self) -> dict[str, list[tuple[Decision, Verdict]]]:
        """Return, by op, the decisions in which another arm serves, with the verdicts that measured it."""
        by_op: dict[str, list[tuple[Decision, Verdict]]] = {}
        for d in self.here:
            if (v := self.won(d)) is not None and v.effect is not None:
                by_op.setdefault(d.op, []).append((d, v))
        return by_op


def bucket_of(key: str) -> tuple[str, int]:
    """Return the bucket and the context length (0 if none) of a workload's key: `Workload.bucket` as text."""
    op, _, rest = key.partition("/")
    dims, slash, tail = rest.partition("/")
    made, length = [], 0
    for part in dims.split("."):
        match = _DIM.fullmatch(part)
        if match is None or int(match[2]) < 1:
            return key, 0
        name, size = match[1], int(match[2])
        low, high = size, size
        if name in COUNT_DIMS:
            low, high = count_bucket(size)
        elif name in LENGTH_DIMS:
            (low, high), length = length_bucket(size), size
        made.append(f"{name}{low}" if low == high else f"{name}{low}-{high}")
    return f"{op}/{'.'.join(made)}{slash}{tail}", length
