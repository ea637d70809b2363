"""The correct results for one set of inputs, computed in this process after the first candidate has answered.

Results are kept: candidates proven one after the other get the same cases, and each float64 reference is computed once.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from torch import Tensor

from autosel.ops.contract import Case, Expected, Inputs, Match, Mismatch, Op
from autosel.ops.stored import Stored, leaves

KEPT_BYTES = 256 << 20
KEPT_BASELINES = 12  # the three inputs of four workloads

Baseline = Callable[..., Any] | None


class Truth:
    """Inputs with their expected results, which the first judgement computes.

    These are the reference with its bound and, for `averages`, the baseline's result.
    """

    def __init__(self, op: Op, inputs: Inputs, *, averages: bool = True) -> None:
        self.op, self.inputs, self.averages = op, inputs, averages
        self.size_bytes = sum(tensor.nbytes for tensor in leaves(inputs).values())
        self._known: tuple[Expected, Sequence[Tensor] | None] | None = None
        self._lock = threading.Lock()

    def judge(self, got: Sequence[Tensor]) -> Match | Mismatch:
        """Compare `got` with the expected results. A baseline that is wrong itself is ignored."""
        with self._lock:
            if self._known is None:
                expected = Expected(self.op, self.inputs)
                base: Sequence[Tensor] | None = run_baseline(self.op, self.inputs) if self.averages else None
                if base is not None and not expected.own and isinstance(expected.judge(base), Mismatch):
                    base = None
                self._known = expected, base
        expected, base = self._known
        return expected.judge(got, base)


class Truths:
    """Truths of cases by name; drops the least recently used ones beyond KEPT_BYTES of inputs."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str, int], Truth] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()
        self._baselines: OrderedDict[tuple[str, int], Sequence[Tensor] | None] = OrderedDict()

    def baseline(self, op: Op, inputs: Inputs, key: tuple[str, int]) -> Sequence[Tensor] | None:
        """Return the eager result on large inputs. It is kept under `key` for the next candidates with these inputs."""
        with self._lock:
            if key not in self._baselines:
                self._baselines[key] = run_baseline(op, inputs)
                while len(self._baselines) > KEPT_BASELINES:
                    self._baselines.popitem(last=False)
            return self._baselines[key]

    def of(self, op: Op, case: Case, seed: int) -> Truth:
        key = (case.name, case.workload.key, seed)
        with self._lock:
            found = self._kept.get(key)
        if found is None:
            found = Truth(op, case.make(seed), averages=case.averages)
        with self._lock:
            self._keep(key, found)
        return found

    def _keep(self, key: tuple[str, str, int], truth: Truth) -> None:
        before = self._kept.pop(key, None)  # this truth, or one that another thread has made meanwhile
        self._kept[key] = truth
        self._kept_bytes += truth.size_bytes - (before.size_bytes if before else 0)
        while self._kept_bytes > KEPT_BYTES:
            _, gone = self._kept.popitem(last=False)
            self._kept_bytes -= gone.size_bytes


def run_baseline(op: Op, inputs: Inputs) -> tuple[Tensor, ...] | None:
    """Run the eager composition on copies of its inout operands; return its outputs, or None if the op has none."""
    module = "autosel.ops.eager_stored" if any(isinstance(v, Stored) for v in inputs.values()) else "autosel.ops.eager"
    baseline: Baseline = getattr(import_module(module), op.name, None)
    if baseline is None:
        return None
    inout = {a.name for a in op.args if a.role == "inout"}
    own = {n: v.clone() if n in inout and isinstance(v, Tensor) else v for n, v in inputs.items()}
    found = baseline(*op.arguments(own))
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)
