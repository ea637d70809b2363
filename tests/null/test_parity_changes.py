"""Test that each change of one argument between two calls, in full or in part, makes the previous result wrong."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from autosel.ops import OPS
from autosel.ops.contract import Inputs, Mismatch, Op
from autosel.ops.stored import Stored, argument_of, leaves
from autosel.parity.changes import Changes, changed_alone
from autosel.parity.check import ordinary
from autosel.testing.mutants.mutant import exact
from autosel.testing.mutants.trial import plain_workload
from autosel.values import Workload

by_op = pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)


def changes_of(op: Op, w: Workload) -> tuple[list[tuple[str, Inputs, Inputs]], Workload]:
    """Return each change in words, with the inputs before and after it."""
    case = ordinary(op.cases(w))
    inputs, found = case.make(5), []
    for what, after in Changes(op, case.workload, inputs, 5).all():
        found.append((what, inputs, after))
        inputs = after
    return found, case.workload


def apart(one: Inputs, other: Inputs) -> list[str]:
    """Return the leaves and numbers that two inputs do not share."""
    before, after = leaves(one), leaves(other)
    numbers = [n for n, v in one.items() if isinstance(v, (int, float)) and v != other[n]]
    return [*numbers, *(n for n in before if not torch.equal(raw(before[n]), raw(after[n])))]


def raw(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@by_op
def test_every_change_decides_the_result(op: Op) -> None:
    found, w = changes_of(op, plain_workload(op, "bf16", 1))
    assert found
    for what, before, after in found:
        stale = exact(op, w, dict(before))
        assert isinstance(op.verify(after, stale), Mismatch) or what.endswith("as before") or what.startswith("step"), (
            what
        )


@by_op
def test_one_argument_changes_at_a_time(op: Op) -> None:
    found, _ = changes_of(op, plain_workload(op, "bf16", 1))
    for what, before, after in found:
        changed = {argument_of(leaf) for leaf in apart(before, after)}
        assert len(changed) == 1 or "sequences" in what or what.startswith("step"), (what, changed)


@by_op
def test_each_half_of_each_large_float_operand_changes_and_its_sum_stays_at_an_exchange(op: Op) -> None:
    found, _ = changes_of(op, plain_workload(op, "bf16", 1))
    told = {what for what, _, _ in found}
    for what, before, after in found:
        leaf, _, rest = what.partition(" in its ")
        if not rest or "raised" in leaf:
            continue
        value, now = leaves(before)[leaf].flatten(), leaves(after)[leaf].flatten()
        places = (value != now).nonzero().flatten().tolist()
        assert len(places) == 2 and places[1] == places[0] + 1
        assert torch.equal(value.sort().values, now.sort().values)
        assert (places[0] >= (len(value) + 1) // 2) == (rest == "second half")
        assert places[0] > 0 and places[1] < len(value) - 1
    for name, value in leaves(found[0][1]).items():
        contents = name in op.domains and op.domains[name].kind == "content"
        halves = {f"{name} in its {half} half" for half in ("second", "first")} & told
        if contents and value.numel() >= 64:  # half of a cache may be masked for every sequence
            assert len(halves) == 2 or (op.name == "paged_attn" and halves), (name, told)


@by_op
def test_every_argument_that_is_read_changes_alone(op: Op) -> None:
    found, _ = changes_of(op, plain_workload(op, "bf16", 1))
    changed = {argument_of(leaf) for what, before, after in found if not re.search("sequences|step", what)
               for leaf in apart(before, after)}  # fmt: skip
    assert set(changed_alone(op)) <= changed


def test_codes_and_scales_change_too() -> None:
    op = OPS["linear"]
    w = plain_workload(op, "bf16", 1)
    found, _ = changes_of(op, op.workload("bf16", dict(w.dims), weight="int8-row"))
    assert isinstance(found[0][1]["w"], Stored)
    told = [what for what, _, _ in found]
    assert {"w.codes in its second half", "w.codes in its first half", "w.scales in its first half"} <= set(told)


def test_pages_change_places_only_where_a_sequence_uses_them() -> None:
    op = OPS["paged_attn"]
    found, _ = changes_of(op, plain_workload(op, "bf16", 1))
    ((before, after),) = [(b, a) for what, b, a in found if what == "block_table alone"]
    different = before["block_table"] != after["block_table"]
    used = op.used(before, "block_table")
    assert used is not None and different.sum() == 2 and used[different].all()


def test_a_part_that_decides_nothing_in_one_draw_is_changed_in_another() -> None:
    """Queries of a sequence with one key decide nothing: all attention goes to that key."""
    op = OPS["paged_attn"]
    case = ordinary(op.cases(plain_workload(op, "bf16", 2611)))
    inputs = case.make(5)
    short = {**inputs, "lengths": torch.ones_like(inputs["lengths"])}
    alone = Changes(op, case.workload, short, 5)
    told = [what for what, _ in alone.all()]
    assert not [what for what in told if what.startswith("q in its")]
    assert ("q", "second") in alone.undecided and ("q", "first") in alone.undecided
    full = {**inputs, "lengths": torch.full_like(inputs["lengths"], inputs["max_len"])}
    other = Changes(op, case.workload, full, 5)
    assert next(what for what, _ in other.of([("q", "second")])).startswith("q")
