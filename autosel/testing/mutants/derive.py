"""Derive the mutants of an op from its contract: arguments, dimensions, outputs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, zip_longest
from random import Random
from typing import Any

import torch
from torch import Tensor

from autosel.ops.contract import Arg, Op
from autosel.ops.stored import Stored, argument_of, leaves
from autosel.testing.mutants import edits
from autosel.testing.mutants.mutant import Edit, Mutant, Operands, Results, same
from autosel.values import DTypeName


@dataclass(slots=True)
class Reach:
    """The ranges of one tensor over the inputs of a battery: its shapes, dtype, longest axes and magnitudes."""

    dtype: torch.dtype
    axes: list[int]
    least: float = math.inf  # smallest magnitude above zero
    largest: float = 0.0
    negative: bool = False
    shapes: Counter[torch.Size] = field(default_factory=Counter)

    def see(self, x: Tensor) -> None:
        self.shapes[x.shape] += 1
        # A scale per row has one axis, a scale per group two.
        self.axes = [max(a, b) for a, b in zip_longest(self.axes, x.shape, fillvalue=1)]
        wide = x.double()
        finite = wide[wide.isfinite()]
        if finite.numel():
            size = finite.abs()
            self.largest = max(self.largest, float(size.max()))
            self.least = min([self.least, *size[size > 0].sort().values[:1].tolist()])
            self.negative |= bool((finite < 0).any())


def reach_of(inputs: Iterable[Operands]) -> dict[str, Reach]:
    found: dict[str, Reach] = {}
    for some in inputs:
        for name, x in leaves(some).items():
            found.setdefault(name, Reach(dtype=x.dtype, axes=list(x.shape))).see(x)
    return found


def derive(op: Op, dtype: DTypeName, reach: Mapping[str, Reach], results: Sequence[Results]) -> list[Mutant]:
    """Return every mutant of the op. `results`: results of calls with inputs that `reach` describes."""
    special = {n: {level.special for level in domain.levels(dtype, Random(1))} for n, domain in op.domains.items()}
    found = [
        *(m for name, seen in reach.items() for m in _of_operand(name, seen, special.get(name, {"nan"}))),
        *_exchanged(op, reach),
        *(m for arg in op.args if arg.kind in ("int", "float") for m in _of_scalar(op, arg, dtype)),
        *(m for i, name in enumerate(op.output_names) for m in _of_result(i, name, [r[i] for r in results])),
    ]
    names = [m.name for m in found]
    assert len(set(names)) == len(names)
    return found


# --- operands ---------------------------------------------------------------------------------------------------------


def _of_operand(name: str, seen: Reach, special: Set[str]) -> Iterator[Mutant]:
    """Yield mutants of one operand. `special`: "nan" and "inf" if the contract admits them in the operand."""
    floats = seen.dtype.is_floating_point
    families = [
        edits.of_floats(seen.dtype, least=seen.least, largest=seen.largest, negative=seen.negative)
        if floats
        else edits.of_integers(seen.largest)
    ]
    families[0] = {what: e for what, e in families[0].items() if edits.SPECIAL.get(what, "") in {"", *special}}
    if "." not in name:
        families.append(edits.of_layouts(len(seen.axes)))
        families.append(edits.of_rows() if floats and len(seen.axes) > 1 else {})
    for family in families:
        for what, edit in family.items():
            yield Mutant(name=f"{name} {what}", subject=argument_of(name), before=_on(name, edit))
    for axis, longest in enumerate(seen.axes):
        for what, edit in edits.along(axis, longest).items() if longest > 1 else ():
            where = f"{name}[{', '.join(':' if i == axis else '' for i in range(len(seen.axes)))}]"
            yield Mutant(name=f"{where} {what}", subject=argument_of(name), before=_on(name, edit))


def _on(leaf: str, edit: Edit) -> Any:
    argument, _, part = leaf.partition(".")

    def before(inputs: Operands) -> Operands | None:
        value = inputs.get(argument)
        if bool(part) != isinstance(value, Stored) or not isinstance(value, Tensor | Stored):
            return None
        was = value.parts().get(part) if isinstance(value, Stored) else value
        now = None if was is None else edit(was)
        if was is None or now is None or same(was, now):
            return None
        changed = replace(value, **{part: now}) if isinstance(value, Stored) else now  # type: ignore[arg-type]
        return {**inputs, argument: changed}

    return before


def _exchanged(op: Op, reach: Mapping[str, Reach]) -> Iterator[Mutant]:
    """Yield mutants that read one operand instead of another of the same dtype and, in most cases, shape."""
    tensors = [a.name for a in op.args if a.name in reach]
    for one, other in combinations(tensors, 2):
        alike = (reach[one].shapes & reach[other].shapes).total()
        if reach[one].dtype != reach[other].dtype or alike < reach[one].shapes.total() / 2:
            continue
        for taken, instead in ((one, other), (other, one)):
            yield Mutant(name=f"{instead} read for {taken}", subject=taken, before=_read_for(taken, instead))


def _read_for(taken: str, instead: str) -> Any:
    def before(inputs: Operands) -> Operands | None:
        was, now = inputs.get(taken), inputs.get(instead)
        if not isinstance(was, Tensor) or not isinstance(now, Tensor) or was.shape != now.shape or same(was, now):
            return None
        return {**inputs, taken: now}

    return before


# --- scalars ----------------------------------------------------------------------------------------------------------


def _of_scalar(op: Op, arg: Arg, dtype: DTypeName) -> Iterator[Mutant]:
    domain = op.domains.get(arg.name)
    levels = [] if domain is None or domain.follows else [v.value for v in domain.levels(dtype, Random(1))]
    number = int if arg.kind == "int" else float
    constants = dict.fromkeys(number(v) for v in (arg.default, *levels) if v is not None)
    changes: dict[str, Callable[[Any], Any]] = {f"taken for {v:g}": partial(_constant, v) for v in constants}
    if arg.kind == "int":
        changes |= {"off by +1": lambda x: x + 1, "off by -1": lambda x: max(0, x - 1)}
    else:
        for name, to in edits.NARROW.items():
            changes[f"narrowed to {name}"] = partial(_narrowed, to)
        changes |= {"doubled": lambda x: 2 * x, "halved": lambda x: x / 2}
    for what, change in changes.items():
        yield Mutant(name=f"{arg.name} {what}", subject=arg.name, before=_on_scalar(arg.name, change))


def _constant(value: float, _: Any) -> float:
    return value


def _narrowed(to: torch.dtype, x: float) -> float:
    return float(torch.tensor(x).to(to))


def _on_scalar(name: str, change: Any) -> Any:
    def before(inputs: Operands) -> Operands | None:
        now = change(inputs[name])
        return None if now == inputs[name] else {**inputs, name: now}

    return before


# --- results ----------------------------------------------------------------------------------------------------------


def _of_result(index: int, name: str, seen: Sequence[Tensor]) -> Iterator[Mutant]:
    for dtype in dict.fromkeys(y.dtype for y in seen):
        of = [y for y in seen if y.dtype == dtype]
        label = f"result {name}" if dtype.is_floating_point else f"result {name} (tokens)"
        for what, edit in edits.of_results(dtype).items():
            yield Mutant(name=f"{label} {what}", subject=name, after=_of_output(index, dtype, edit))
        for axis in range(of[0].dim()):
            longest = max(y.shape[axis] for y in of)
            for what, edit in edits.along(axis, longest).items() if longest > 1 else ():
                where = f"{label}[{', '.join(':' if i == axis else '' for i in range(of[0].dim()))}]"
                yield Mutant(name=f"{where} {what}", subject=name, after=_of_output(index, dtype, edit))


def _of_output(index: int, dtype: torch.dtype, edit: Edit) -> Any:
    def after(results: Results) -> Results | None:
        was = results[index]
        now = edit(was) if was.dtype == dtype else None
        if now is None or same(was, now):
            return None
        return (*results[:index], now, *results[index + 1 :])

    return after
