"""Build a kernel's call: the op's arguments, or the parts of operands in a format that it names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autosel.candidates.base import Candidate
from autosel.formats import PLAIN
from autosel.ops.contract import Inputs, Op
from autosel.ops.stored import leaves
from autosel.values import Workload


def passed(op: Op, inputs: Inputs, operands: Sequence[str] = ()) -> list[Any]:
    """Return the values of `operands` in order, or of the op's arguments if a kernel names none."""
    known = {**inputs, **leaves(inputs)}
    return [known[name] for name in operands or [a.name for a in op.args]]


def traits_of(candidate: Candidate) -> dict[str, str]:
    """Return the traits of a workload in the format that a kernel reads; none for plain operands."""
    found = (("weight", candidate.formats), ("cache", candidate.cache_formats))
    return {trait: min(formats) for trait, formats in found if PLAIN not in formats}


def kind_of(candidate: Candidate) -> str:
    """Return `linear`, or `linear fp8_e4m3-row`: the op with the format that a kernel reads."""
    return " ".join([candidate.op, *traits_of(candidate).values()])


def for_kernel(candidate: Candidate, w: Workload) -> Workload:
    """Return the workload in the format that a kernel reads."""
    return replace(w, traits=(*w.traits, *traits_of(candidate).items()))
