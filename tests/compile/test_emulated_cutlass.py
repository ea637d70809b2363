"""Test the CuTe product on emulated threads: every hostile case of the op, on rows of whole vectors and ragged rows.

By default it runs one build and dtype, which change each day; --every-target runs all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch

from autosel.native import cutlass
from autosel.ops import OPS
from autosel.ops.contract import Case
from autosel.ops.linear import projection_cases
from autosel.values import DTypeName, Workload
from tests import drawn
from tests.compile.cuda_kernels import failure, faults
from tests.compile.cutlass_asked import builds
from tests.compile.emulate import emulated, one_dtype, overlapped

pytestmark = pytest.mark.skipif(bool(cutlass.why_not()), reason=cutlass.why_not())

Tile = tuple[int, int, int]
SIDES = ("ROWS", "COLUMNS", "STAGES")

OP = OPS["linear"]
PLANS = ((1, 0), (3, 1), (2, 0), (64, 0))  # split_k, pdl
DTYPES: tuple[DTypeName, ...] = ("bf16", "fp16")
SHAPES: tuple[tuple[dict[str, int], dict[str, Any]], ...] = (
    ({"M": 17, "N": 256, "K": 512}, {}),
    ({"M": 5, "N": 64, "K": 256}, {"bias": True, "residual": True}),
)


class WholeVectors:
    """A workload whose variations round N and K to whole vectors of eight elements."""

    def __init__(self, w: Workload) -> None:
        self.workload, self.dtype, self.weight_format = w, w.dtype, w.weight_format

    def __getitem__(self, dim: str) -> int:
        return self.workload[dim]

    def at(self, **sizes: int) -> Workload:
        return self.workload.at(**{d: -(-s // 8) * 8 if d in "NK" else s for d, s in sizes.items()})


@cache
def choices() -> list[tuple[DTypeName, Tile]]:
    """Return rows, columns and stages of all tiles that the formula gives: one or several column tiles, two warps
    across, the smallest and largest number of stages. bf16 and fp16 alternate."""
    asked = {(b.knobs["rows"], b.knobs["columns"], b.knobs["stages"]) for b in builds() if b.source == "gemm_sm80"}
    return list(zip(itertools.cycle(DTYPES), sorted(asked), strict=False))


in_turns = pytest.mark.in_turns(choices, label=lambda c: f"{c[0]} " + ",".join(map(str, c[1])))


def macros(dtype: str, build: Tile) -> list[str]:
    return [one_dtype(dtype), *(f"AUTOSEL_{name}={value}" for name, value in zip(SIDES, build, strict=True))]


def product(dtype: str, build: Tile, entry: str = "gemm_sm80") -> Any:
    return emulated("cutlass/gemm_sm80", entry, *macros(dtype, build))


def cases(dtype: DTypeName, days: int = 1) -> Iterator[Case]:
    """Yield the cases of a product, or their share for today."""
    for dims, traits in SHAPES:
        w = OP.workload(dtype, dims, **traits)
        whole = projection_cases(OP, WholeVectors(w), weights=("w",), width="K")  # type: ignore[arg-type]
        yield from drawn.share([*whole, *(OP.cases(w) if dims["M"] == 5 else ())], days=days)


def grid_case(dtype: DTypeName, rows: int, columns: int, depth: int) -> Case:
    w = OP.workload(dtype, {"M": rows, "N": columns, "K": depth}, residual=True)
    return Case(name="grid", workload=w, make=lambda seed: OP.inputs(w, seed), covers="the order of tiles")


def check_logits(entry: Any, head: Any, dtype: DTypeName, *plan: int) -> None:
    """Check that logits are the bits of the projection."""
    inputs = OP.inputs(OP.workload(dtype, {"M": 3, "N": 200, "K": 136}), 4)
    one, other = (torch.full((3, 200), float("nan"), dtype=inputs["x"].dtype) for _ in range(2))
    entry(inputs["x"], inputs["w"], None, None, one, *plan)
    head(inputs["x"], inputs["w"], 0, other, *plan)
    assert torch.equal(one, other)
    with pytest.raises(ValueError, match="logits, not tokens"):
        head(inputs["x"], inputs["w"], 1, other, *plan)


@in_turns
def test_the_product_meets_its_contract_in_every_case(choice: tuple[DTypeName, Tile]) -> None:
    """Run a third of the cases a day."""
    dtype, build = choice
    battery = zip(cases(dtype, days=3), itertools.cycle(PLANS), strict=False)
    assert faults(battery, partial(failure, product(dtype, build))) == []


@in_turns
def test_more_tiles_than_a_group_and_more_columns_than_a_tile_are_each_computed_once(
    choice: tuple[DTypeName, Tile],
) -> None:
    """Run nine or more tiles of w, the last one ragged, and several of x; each output is computed by one CTA."""
    dtype, build = choice
    made = grid_case(dtype, build[1] + 3, 9 * build[0] + 40, 72)
    for plan in PLANS[:2]:
        assert failure(product(dtype, build), made, plan) is None


@in_turns
def test_logits_are_the_bits_of_the_projection(choice: tuple[DTypeName, Tile]) -> None:
    dtype, build = choice
    check_logits(product(dtype, build), product(dtype, build, "lm_head_sm80"), dtype, 2, 0)


@in_turns
def test_oversized_operands_are_refused_before_the_launch(choice: tuple[DTypeName, Tile]) -> None:
    dtype, build = choice
    entry, kind = product(dtype, build), {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    x, w, y = (torch.zeros(shape, dtype=kind) for shape in ((4, 64), (32, 64), (4, 32)))
    entry(x, w, None, None, y, 1, 0)
    for wrong, words in (
        ((x, w[:, :56], None, None, y, 1, 0), "w is 32 x 56"),
        ((x, w, None, None, y[:3], 1, 0), "y is 3 x 32"),
        ((x, w, w[0], None, y, 1, 0), "bias has 64"),
        ((x, w, None, x, y, 1, 0), "residual is 4 x 64"),
        ((x, w, None, None, y, 0, 0), "split_k is 0"),
        ((x, w, None, None, y, 65, 0), "split_k is 65"),
        ((x.float(), w.float(), None, None, y.float(), 1, 0), "dtype must be"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            entry(*wrong)


@in_turns
def test_products_in_a_chain_may_start_before_the_ones_they_read(choice: tuple[DTypeName, Tile]) -> None:
    """Run split products, which share one workspace, and unaligned rows; the last writes what the first reads."""
    dtype, build = choice
    entry = product(dtype, build)
    for width, split in ((192, 3), (50, 1)):
        inputs = OP.inputs(OP.workload(dtype, {"M": 5, "N": width, "K": width}), 7)
        alone, chained = (
            [inputs["x"].clone(), *(torch.full_like(inputs["x"], torch.nan) for _ in range(2))] for _ in "ab"
        )
        for i in range(3):
            entry(alone[i], inputs["w"], None, None, alone[(i + 1) % 3], split, 0)
        with overlapped("cutlass/gemm_sm80", *macros(dtype, build)):
            for i in range(3):
                entry(chained[i], inputs["w"], None, None, chained[(i + 1) % 3], split, 1)
        assert all(torch.equal(one, other) for one, other in zip(alone, chained, strict=True))
