"""Mutants that keep state: an op's eager composition with a fault that shows only over several calls.

A worker loads `autosel.testing.mutants.habitual:OP__FAULT`. Faults `by_KEY` and `without_ARGUMENT` are stale caches: a
call with a known key computes with the first operands of that key. `by_KEY` uses part of each operand as the key,
`without_ARGUMENT` all operands except one. `once_N` is wrong only in the N-th call, `from_N` in that and all later
calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autosel.ops import OPS, eager
from autosel.ops.compare import bits
from autosel.ops.contract import Op
from autosel.parity.changes import changed_alone

Key = Callable[[Tensor], Any]
TURNS = (2, 7, 50, 200, 500, 1000)  # N of `once_N`
LATE_TURNS = (3000, 10_000)


def _digest(x: Tensor) -> str:
    return hashlib.blake2b(x.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()


KEYS: dict[str, Key] = {
    "address": lambda x: (x.data_ptr(), x.stride()),
    "shape": lambda x: None,
    "first_element": lambda x: bits(x.flatten()[:1]).tolist(),
    "prefix": lambda x: _digest(x.flatten()[: -(-x.numel() // 2)]),
    "suffix": lambda x: _digest(x.flatten()[x.numel() // 2 :]),
    "row_prefixes": lambda x: _digest(x[..., : -(-x.shape[-1] // 2)] if x.dim() else x),
    "row_suffixes": lambda x: _digest(x[..., x.shape[-1] // 2 :] if x.dim() else x),
    "checksum": lambda x: int(bits(x).sum()),
    "last_element": lambda x: bits(x.flatten()[-1:]).tolist(),
    "sample": lambda x: bits(x.flatten()[:: max(1, x.numel() // 16)]).tolist(),
}
FAULTS = (
    *(f"by_{key}" for key in KEYS),
    "first_scalars",
    "last_operands",
    "kept_last_row",
    *(f"once_{n}" for n in TURNS),
    "from_7",
    "from_500",
)


def faults(op: Op, *, late: bool = False) -> Sequence[str]:
    """Return the faults that an op can have. `late`: also faults after thousands of calls."""
    found = [*FAULTS, *(f"without_{name}" for name in changed_alone(op))]
    found += [f"once_{n}" for n in LATE_TURNS if late]
    return found if any(a.kind == "float" for a in op.args) else [f for f in found if f != "first_scalars"]


def __getattr__(name: str) -> Callable[..., Any]:
    op, _, fault = name.partition("__")
    if op not in OPS or not fault:
        raise AttributeError(name)
    return Habitual(OPS[op], fault).__call__


class Habitual:
    """An op's eager composition with a fault, and the state that the fault keeps."""

    def __init__(self, op: Op, fault: str) -> None:
        self.op, self.right = op, getattr(eager, op.name)
        kind, _, what = fault.partition("_")
        self.key = KEYS[what] if kind == "by" else _digest
        self.kind = kind if kind in ("by", "without", "once", "from") else fault
        self.left_out = what if kind == "without" else ""
        self.turn = int(what) if kind in ("once", "from") else 0
        self.known: dict[Any, list[Any]] = {}
        self.scalars: list[Any] = []
        self.rows: dict[Any, Tensor] = {}
        self.calls = 0

    def __call__(self, *values: Any) -> Any:
        self.calls += 1
        count = len(self.op.args)
        arguments, outputs = list(values[:count]), values[count:]
        change = {"by": self._by, "without": self._by, "first_scalars": self._first_scalars}
        change["last_operands"] = self._last_operands
        if self.kind in change:
            arguments = change[self.kind](arguments)
        found = self.right(*arguments, *outputs)
        if self.kind == "kept_last_row":
            self._keep(found if isinstance(found, tuple) else (found,))
        if (self.kind == "once" and self.calls == self.turn) or (self.kind == "from" and self.calls >= self.turn):
            self._spoil(found if isinstance(found, tuple) else (found,))
        return found

    def _reads(self, arguments: Sequence[Any]) -> list[int]:
        """Return the positions of tensors that are only read."""
        return [i for i, a in enumerate(self.op.args) if a.role != "inout" and isinstance(arguments[i], Tensor)]

    def _by(self, arguments: list[Any]) -> list[Any]:
        """Replace the arguments by the first ones with the same key. Of an argument left out, the key has the shape."""
        reads = self._reads(arguments)
        names = [a.name for a in self.op.args]
        keyed = [i for i in reads if names[i] != self.left_out and arguments[i].numel()]
        key = repr(
            [
                (tuple(a.shape), self.key(a) if i in keyed else None)
                if isinstance(a, Tensor)
                else (a if names[i] != self.left_out else None)
                for i, a in enumerate(arguments)
            ]
        )
        taken = [*reads, *(i for i, name in enumerate(names) if name == self.left_out and i not in reads)]
        kept = self.known.setdefault(key, [_copied(arguments[i]) for i in taken])
        for i, value in zip(taken, kept, strict=True):
            arguments[i] = value
        return arguments

    def _first_scalars(self, arguments: list[Any]) -> list[Any]:
        places = [i for i, a in enumerate(self.op.args) if a.kind == "float"]
        self.scalars = self.scalars or [arguments[i] for i in places]
        for i, value in zip(places, self.scalars, strict=True):
            arguments[i] = value
        return arguments

    def _last_operands(self, arguments: list[Any]) -> list[Any]:
        """Replace the last tensor by the one of the previous call with the same shapes."""
        reads = self._reads(arguments)
        key = repr([tuple(a.shape) if isinstance(a, Tensor) else a for a in arguments])
        before = self.known.get(key)
        self.known[key] = [arguments[i].clone() for i in reads]
        if before is not None:
            arguments[reads[-1]] = before[-1]
        return arguments

    def _keep(self, results: Sequence[Tensor]) -> None:
        """Replace the last row of each result by the row of the first call of its shape, like an uncleared buffer."""
        for index, y in enumerate(results):
            flat = y if y.dim() < 2 else y[-1]
            kept = self.rows.setdefault((index, y.shape), flat.clone())
            flat.copy_(kept)

    @staticmethod
    def _spoil(results: Sequence[Tensor]) -> None:
        y = results[-1]
        place = (0,) * y.dim() if y.dim() else ()
        if y.numel():
            y[place] = y[place] * 1.5 + 1 if y.is_floating_point() else y[place] + 1


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
