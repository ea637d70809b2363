"""Test that each op declares values of every dimension of its contract, and that its array has every pair of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from autosel.errors import IncompleteContract
from autosel.formats import CACHE_FORMATS, PLAIN, WEIGHT_FORMATS
from autosel.models.presets import PRESETS
from autosel.ops import OPS, registered
from autosel.ops.array import Array
from autosel.ops.contract import Mismatch, Op
from autosel.ops.domains import ABSENT, dimensions, undeclared
from autosel.ops.rmsnorm import RmsNorm
from autosel.values import Workload
from tests import drawn
from tests.null.test_ops_contract import SHAPES

by_op = pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)


def workload(op: Op, dtype: Any = "bf16") -> Workload:
    dims, traits = SHAPES[op.name]
    return op.workload(dtype, dims, **traits)


# --- declarations -----------------------------------------------------------------------------------------------------


@by_op
def test_every_dimension_trait_and_argument_has_a_domain(op: Op) -> None:
    assert undeclared(op) == []
    assert len(dimensions(op)) >= len(op.args) + len(op.dim_names)


@pytest.mark.parametrize("name", dimensions(RmsNorm()))
def test_an_op_with_a_gap_cannot_be_registered(name: str) -> None:
    class Gapped(RmsNorm):
        domains = {key: domain for key, domain in RmsNorm.domains.items() if key != name}

    with pytest.raises(IncompleteContract, match=f"rmsnorm declares no domain for {name}"):
        registered(Gapped())


def test_a_domain_of_one_value_is_a_gap() -> None:
    from autosel.ops.domains import scalar

    class Fixed(RmsNorm):
        domains = {**RmsNorm.domains, "eps": scalar(1e-6)}

    assert undeclared(Fixed()) == ["eps"]


@by_op
def test_scalars_have_the_default_and_two_more_values(op: Op) -> None:
    for name, domain in op.domains.items():
        if domain.kind == "scalar" and not domain.follows:
            levels = domain.levels("bf16", Random(1))
            assert len(levels) >= 3, name
            default = next((a.default for a in op.args if a.name == name), None)
            assert default is None or levels[0].value == default, name


@pytest.mark.parametrize("op", [op for op in OPS.values() if "eps" in op.domains], ids=lambda op: op.name)
def test_the_models_epsilons_are_among_the_values(op: Op) -> None:
    values = {level.value for level in op.domains["eps"].levels("bf16", Random(1))}
    assert {shape.rms_eps for shape in PRESETS.values()} <= values


def test_the_models_scales_are_among_the_values() -> None:
    op = OPS["attn"]
    levels = {level.name: level for level in op.domains["scale"].levels("bf16", Random(1))}
    given = {shape.attn_scale for shape in PRESETS.values() if shape.attn_scale}
    for scale in given:
        inputs = op.inputs(op.workload("bf16", {"B": 1, "Hq": 2, "Hkv": 1, "S": 1, "D": 64, "L": 8}), 1)
        levels[f"{scale:.3g}"].edit(inputs, None)  # type: ignore[misc,arg-type]
        assert inputs["scale"] == scale


# --- the array --------------------------------------------------------------------------------------------------------


@by_op
def test_the_array_holds_every_pair_that_has_a_contracted_result(op: Op) -> None:
    array = Array(op, workload(op), drawn.seed, traits=True)
    admits = array._admits(lambda _: True)
    covered = {(a, row[a], b, row[b]) for row in array.rows for a, b in combinations(range(len(row)), 2)}
    sizes = [len(f.levels) for f in array.factors]
    missing = {
        (a, i, b, j)
        for a, b in combinations(range(len(sizes)), 2)
        for i in range(sizes[a])
        for j in range(sizes[b])
        if (a, i, b, j) not in covered
    }
    for a, i, b, j in sorted(missing):  # each excluded alone: no completion was given up
        row: list[int | None] = [None] * len(sizes)
        row[a], row[b] = i, j
        assert not admits(row), (array.factors[a].levels[i].name, array.factors[b].levels[j].name)
    assert all(admits(row) for row in array.rows)


@by_op
def test_every_value_of_every_domain_occurs_in_the_first_rows(op: Op) -> None:
    array = Array(op, workload(op), drawn.seed)
    cases = array.rows[:40]
    for at, factor in enumerate(array.factors):
        seen = {row[at] for row in cases}
        possible = {row[at] for row in array.rows}
        assert seen == possible, factor.name


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        pytest.param(op, dtype, id=f"{op.name}-{dtype}")
        for at, op in enumerate(OPS.values())
        for dtype in drawn.share(["bf16", "fp16", "fp32"], days=3, shift=at)
    ],
)
def test_cases_match_their_names_are_small_and_repeatable(op: Op, dtype: Any) -> None:
    w = workload(op, dtype)
    array, again = (Array(op, w, 7, traits=True) for _ in range(2))
    cases = array.cases(lambda _: True)
    assert [c.name for c in cases] == [c.name for c in again.cases(lambda _: True)]
    assert len({c.name for c in cases}) == len(cases)
    assert len({c.workload.traits for c in cases}) > 1 or not op.trait_defaults
    for case in Random(drawn.seed).sample(cases, 12):
        inputs = case.make(3)
        assert op.workload_of(inputs) == case.workload, case.covers
        assert list(inputs) == [a.name for a in op.args], case.covers
        # attention of 26 sequences with 11 heads of 256, in fp32 with room for 64 more tokens: 38 MiB
        assert sum(v.nbytes for v in inputs.values() if isinstance(v, Tensor)) < 64 << 20, case.covers


@by_op
def test_fixed_sizes_do_not_vary(op: Op) -> None:
    w = workload(op)
    small = Array(op, w, 5, sizes=False).cases(lambda _: True)
    assert small
    assert {case.workload for case in small} == {w}


@pytest.mark.parametrize("op", drawn.share(list(OPS.values()), days=4), ids=lambda op: op.name)
def test_every_pair_that_a_candidate_accepts_is_covered(op: Op) -> None:
    formats = in_formats(op)
    for w in (workload(op), *([drawn.todays(formats)] if formats else [])):
        covers_every_level_of_what_is_accepted(op, w)


def in_formats(op: Op) -> list[Workload]:
    """Return the workload in each format that its operands may have."""
    found = (("weight", WEIGHT_FORMATS), ("cache", CACHE_FORMATS))
    named = [(trait, name) for trait, formats in found if trait in op.trait_defaults for name in formats]
    return [replace(workload(op), traits=((trait, name),)) for trait, name in named if name != PLAIN]


def covers_every_level_of_what_is_accepted(op: Op, w: Workload) -> None:
    array = Array(op, w, 5)
    stored = not (w.weight_format.plain and w.cache_format.plain)
    count = op.dim_names[0]
    every = array.cases(lambda _: True)
    assert {case.workload.traits for case in every} == {w.traits}
    accepted = sorted({case.workload[count] for case in every})[:2]
    cases = array.cases(lambda at: at[count] in accepted)
    assert {case.workload[count] for case in cases} == set(accepted)
    told = " ".join(case.covers for case in cases)
    for factor in array.factors:
        parts = "." in factor.name  # codes and scales, because an operand in a format has no other contents
        if factor.domain.kind in ("content", "scalar") and factor.levels[0] is not ABSENT and parts == stored:
            missing = [level.name for level in factor.levels[1:] if f"{factor.name} {level.name}" not in told]
            assert not missing, factor.name


def test_a_value_of_a_scalar_changes_the_result() -> None:
    """Refuse the answer for another value of each scalar, in nearly every case that has the scalar."""
    for op in OPS.values():
        for name, domain in op.domains.items():
            if domain.kind != "scalar" or domain.follows or op.name == "sample":
                continue
            w, noticed, asked = workload(op, "fp32"), 0, 0
            for level in domain.levels("fp32", Random(1))[1:]:
                levels = {f.name: f.levels[0] for f in Array(op, w, 1).factors} | {name: level}
                inputs = Array(op, w, 1).case(levels).make(1)
                other = {**inputs, name: domain.levels("fp32", Random(1))[0].value}
                asked += inputs[name] != other[name]
                noticed += isinstance(op.verify(inputs, [y.float() for y in op.reference(other)]), Mismatch)
            assert noticed == asked >= 2 or (name == "scale" and noticed >= 3), (op.name, name, noticed, asked)


def test_other_settings_of_sampling_give_other_tokens() -> None:
    op = OPS["sample"]
    w = op.workload("fp32", {"B": 33, "V": 301, "L": 12})
    array = Array(op, w, 1, sizes=False)
    for factor in array.factors:
        if factor.domain.kind != "scalar":
            continue
        plain = op.reference(array.case({f.name: f.levels[0] for f in array.factors}).make(1))[0]
        changed = 0
        for level in factor.levels[1:]:
            levels = {f.name: f.levels[0] for f in array.factors} | {factor.name: level}
            changed += not torch.equal(op.reference(array.case(levels).make(1))[0], plain)
        assert changed >= 3, factor.name
