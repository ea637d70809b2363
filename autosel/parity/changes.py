"""Change part of one operand, or one argument alone, between two calls at the same addresses.

A candidate that caches results by part of its operands, or by all but one, then returns a stale result.

    for what, inputs in Changes(op, workload, inputs, seed).all(): ...

Each change builds on the previous one and is decisive: the results before it are wrong after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, islice
from random import Random

import torch
from torch import Tensor

from autosel.ops.compare import bits
from autosel.ops.contract import DTYPE, Inputs, Mismatch, Op
from autosel.ops.draw import Draw
from autosel.ops.stored import Stored, argument_of, leaves, mapped
from autosel.values import Workload

Change = tuple[str, Inputs]

MANY_ELEMENTS, PLACES = 16, 5  # fewest elements of an operand that is changed in part; places tried
HALVES = ("second", "first")
Part = tuple[str, str]  # an operand's leaf, and a half


class Changes:
    """The successive changes of one set of inputs."""

    def __init__(self, op: Op, w: Workload, inputs: Inputs, seed: int) -> None:
        self.op, self.w, self.inputs, self.draw = op, w, inputs, Draw(seed, w.dtype)
        self.undecided: list[Part] = []  # parts of operands of which no change that was tried is decisive

    def all(self) -> Iterator[Change]:
        """Yield each decisive change: its description and the inputs after it.

        Contents and scalars are restored before the next argument changes; entries of index operands stay changed. The
        next steps of a decode come last.
        """
        for arg in self.op.args:
            for leaf in [leaf for leaf in leaves(self.inputs) if argument_of(leaf) == arg.name]:
                yield from self._and_back(arg.name, self._in_halves(leaf))
            if self._is(arg.name, "scalar") or self._is_small(arg.name):
                yield from self._and_back(arg.name, self._first(f"{arg.name} alone", self._alone(arg.name)))
            elif self._is(arg.name, "index"):
                yield from self._first(f"{arg.name} alone", self._alone(arg.name))
        yield from self._first("entries of two sequences exchanged", self._sequences(late=True))
        yield from self._first("entries of the first sequences exchanged", self._sequences(late=False))
        for number, inputs in enumerate(self.op.steps(self.inputs), 1):
            yield f"step {number}", inputs

    def of(self, parts: Sequence[Part]) -> Iterator[Change]:
        """Yield the decisive changes of these parts only."""
        for leaf, half in parts:
            yield from self._and_back(argument_of(leaf), self._in_half(leaf, half))

    def _and_back(self, name: str, changes: Iterator[Change]) -> Iterator[Change]:
        before = self.inputs
        yield from changes
        if self.inputs is not before:
            self.inputs = before
            yield f"{name} as before", before

    def _first(self, what: str, found: Iterable[Inputs]) -> Iterator[Change]:
        """Yield the first of these inputs that make the current results wrong."""
        stale = self._results()
        for inputs in found:
            if isinstance(self.op.verify(inputs, stale), Mismatch):
                self.inputs = inputs
                yield what, inputs
                return

    def _results(self) -> tuple[Tensor, ...]:
        """Return the results of the current inputs, rounded as a candidate rounds them."""
        dtypes = [torch.int64 if s.dtype == "int64" else DTYPE[s.dtype] for s in self.op.outputs(self.w)]
        return tuple(y.to(dtype) for y, dtype in zip(self.op.reference(self.inputs), dtypes, strict=True))

    def _is(self, name: str, kind: str) -> bool:
        domain = self.op.domains.get(name)
        there = domain is not None and domain.kind == kind and not domain.follows
        return there and self.inputs[name] is not None

    def _is_small(self, name: str) -> bool:
        value = self.inputs[name]
        return self._is(name, "content") and isinstance(value, Tensor) and value.numel() < MANY_ELEMENTS

    # --- a part -------------------------------------------------------------------------------------------------------

    def _in_halves(self, leaf: str) -> Iterator[Change]:
        """Exchange two neighbours in each half of an operand and of its rows.

        The sums, the ends and the other half do not change. If the exchange is not decisive (for logits, only the
        largest matters), raise one element above all others, then exchange it with its neighbour.
        """
        value = leaves(self.inputs)[leaf]
        if not (value.is_floating_point() or "." in leaf) or not value.is_contiguous():
            return
        for half in HALVES if value.numel() >= MANY_ELEMENTS else ():
            yield from self._in_half(leaf, half)

    def _in_half(self, leaf: str, half: str) -> Iterator[Change]:
        exchanged = list(self._first(f"{leaf} in its {half} half", self._exchanged(leaf, half)))
        raised: list[Change] = []
        if not exchanged and "." not in leaf and self._is(leaf, "content"):  # other kinds have a limited range
            raised = list(self._first(f"{leaf} raised in its {half} half", self._raised(leaf, half)))
            yield from raised
            exchanged = list(self._first(f"{leaf} in its {half} half", self._exchanged(leaf, half)))
        yield from exchanged
        if not raised and not exchanged:
            self.undecided.append((leaf, half))

    def _exchanged(self, leaf: str, half: str) -> Iterator[Inputs]:
        value = leaves(self.inputs)[leaf]
        inside = _inside(value, half)
        if not len(inside):
            return
        largest = inside[_numbers(value)[inside].argmax()]
        for at in (int(largest), *_spread(inside)):
            yield self._with(leaf, at, bits(value.view(-1))[at : at + 2].flip(0))

    def _raised(self, leaf: str, half: str) -> Iterator[Inputs]:
        value = leaves(self.inputs)[leaf]
        above = 2.0 * float(_numbers(value).abs().max()) + 8.0
        for at in _spread(_inside(value, half)):
            yield self._with(leaf, at, bits(torch.tensor([above], dtype=value.dtype)))

    def _with(self, leaf: str, at: int, now: Tensor) -> Inputs:
        """Return the inputs with the bits of a leaf replaced by `now` from element `at` on."""
        argument, _, part = leaf.partition(".")
        changed, stored = leaves(self.inputs)[leaf].clone(), self.inputs[argument]
        bits(changed.view(-1))[at : at + len(now)] = now
        made = replace(stored, **{part: changed}) if isinstance(stored, Stored) else changed  # type: ignore[arg-type]
        return {**self.inputs, argument: made}

    # --- one argument -------------------------------------------------------------------------------------------------

    def _alone(self, name: str) -> Iterator[Inputs]:
        """Yield inputs with other values of one argument: a scalar, a setting, a few numbers or an index operand."""
        value, index = self.inputs[name], self._is(name, "index")
        if index and value.dim() == 1:  # a smaller length or position stays within the cache
            yield {**self.inputs, name: torch.where(value > 1, value - 1, value)}
        elif index and (used := self.op.used(self.inputs, name)) is not None:
            yield from self._two_entries(name, used)
        else:
            yield from self._levels(name)

    def _levels(self, name: str) -> Iterator[Inputs]:
        """Yield other values of the argument's domain, without 0, for which some operands have no result."""
        for level in self.op.domains[name].levels(self.w.dtype, Random(0)):
            if level.value:
                yield {**self.inputs, name: level.value}
            elif level.value is None and level.edit is not None and not (level.special or level.zeros):
                edited = {n: mapped(v, torch.clone) for n, v in self.inputs.items()}
                level.edit(edited, self.draw)
                yield {**self.inputs, name: edited[name]}

    def _two_entries(self, name: str, used: Tensor) -> Iterator[Inputs]:
        """Exchange two entries that are used."""
        places = used.nonzero().tolist()
        for one, other in islice(combinations(places, 2), PLACES):
            changed = self.inputs[name].clone()
            changed[tuple(one)], changed[tuple(other)] = self.inputs[name][tuple(other)], self.inputs[name][tuple(one)]
            yield {**self.inputs, name: changed}

    def _sequences(self, *, late: bool) -> Iterator[Inputs]:
        """Exchange the entries of two neighbouring sequences in all index operands, from the last or first pair on."""
        names = [n for n, v in self.inputs.items() if isinstance(v, Tensor) and self._is(n, "index")]
        count = min((len(self.inputs[n]) for n in names), default=0)
        pairs = range(count - 2, -1, -1) if late else range(count - 1)
        for at in pairs[:PLACES]:
            order = torch.arange(count)
            order[at : at + 2] = order[at : at + 2].flip(0)
            yield {**self.inputs, **{n: self.inputs[n][order] for n in names}}


def changed_alone(op: Op) -> list[str]:
    """Return the arguments that `Changes` changes alone: required ones that are read and that the workload does not
    fix.
    """
    found = []
    for arg in op.args:
        domain = op.domains.get(arg.name)
        open_ = domain is not None and not domain.follows and domain.kind != "trait"
        if open_ and arg.role != "inout" and arg.kind != "optional":
            found.append(arg.name)
    return found


def _inside(value: Tensor, half: str) -> Tensor:
    """Return the places of different neighbours in this half of the operand and of its row, without its ends."""
    size, width = value.numel(), value.shape[-1]
    middle, of_row = (size + 1) // 2, (width + 1) // 2
    places = torch.arange(1, size - 2)
    column = places % width
    if half == "second":
        inside = (places >= middle) & (column >= of_row) & (column < width - 1)
    else:
        inside = (places + 1 < middle) & (column + 1 < of_row)
    flat = bits(value.view(-1))
    return places[inside & (flat[1:-2] != flat[2:-1])]


def _numbers(value: Tensor) -> Tensor:
    return value.view(-1).double().nan_to_num(0.0)


def _spread(places: Tensor) -> list[int]:
    """Return at most PLACES of the places, evenly spread, last first."""
    found = places.flip(0)[:: max(1, -(-len(places) // PLACES))]
    return [int(at) for at in found]
