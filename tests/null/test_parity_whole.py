"""Test the smallest error of one element that is found in a large result, as docs/method.md states it."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from autosel.ops import OPS
from autosel.ops.contract import Mismatch
from autosel.parity import whole
from autosel.parity.truth import Truth, run_baseline
from autosel.values import Workload
from tests import drawn

LINEAR = OPS["linear"].workload("bf16", {"M": 2, "N": 2048, "K": 4096})
SMALLEST = 2.0**-7  # of the element's size plus the root mean square
CACHED = {"B": 2, "Hq": 8, "Hkv": 4, "S": 1, "D": 64, "L": 256}
SHAPES = {
    "linear": LINEAR,
    "norm_qkv": OPS["norm_qkv"].workload("bf16", {"M": 1, "N": 1536, "d": 512}),
    "gate_up": OPS["gate_up"].workload("bf16", {"M": 1, "I": 1536, "d": 512}),
    "lm_head": OPS["lm_head"].workload("bf16", {"M": 1, "V": 5000, "d": 128}),
    "attn": OPS["attn"].workload("bf16", CACHED),
    "paged_attn": OPS["paged_attn"].workload("bf16", {**CACHED, "page": 16}),
    "prefill_attn": OPS["prefill_attn"].workload("bf16", {"B": 1, "Hq": 4, "Hkv": 2, "S": 96, "D": 64}),
}  # fmt: skip


@cache
def scene(w: Workload) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Return inputs, the exact result and the baseline's."""
    op = OPS[w.op]
    inputs = op.inputs(w, drawn.seed % 1000)
    base = run_baseline(op, inputs)
    assert base is not None
    return inputs, op.reference(inputs)[0], base[0]


def refused(w: Workload, got: Tensor) -> bool:
    """Return True if an element of those that differ most is outside its bound."""
    inputs, _, base = scene(w)
    rows = whole.worst(OPS[w.op], w, inputs, got, base)
    if rows is None:
        return False
    return isinstance(Truth(OPS[w.op], rows.inputs, averages=False).judge(rows.pick([got])), Mismatch)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_smallest_documented_error_is_found_in_any_element(sign: int) -> None:
    _, exact, _ = scene(LINEAR)
    scale, rng = exact.square().mean().sqrt(), Random(drawn.seed)
    for _ in range(20):
        got, at = exact.to(torch.bfloat16), (rng.randrange(2), rng.randrange(2048))
        wrong = exact[at] + sign * 1.25 * SMALLEST * (exact[at].abs() + scale)  # a quarter more: it is rounded
        got[at] = wrong.to(torch.bfloat16)
        assert refused(LINEAR, got), at


def test_a_dropped_row_of_more_than_a_hundredth_of_the_root_mean_square_is_found() -> None:
    _, exact, _ = scene(LINEAR)
    scale, rng = exact.square().mean().sqrt(), Random(drawn.seed)
    found, rows = 0, [n for n in range(2048) if (exact[:, n].abs() > scale / 100).all()]
    for n in rng.sample(rows, 20):
        got = exact.to(torch.bfloat16)
        got[:, n] = 0.0
        found += refused(LINEAR, got)
    assert found == 20


@pytest.mark.parametrize("op", SHAPES)
def test_one_wrong_element_of_any_large_result_is_found(op: str) -> None:
    w = SHAPES[op]
    _, exact, base = scene(w)
    got = exact.to(torch.bfloat16)
    assert not refused(w, got)
    assert not refused(w, base)
    at = tuple(Random(drawn.seed).randrange(n) for n in got.shape)
    got[at] += 0.5 * exact.square().mean().sqrt() + 0.1 * exact[at].abs()
    assert refused(w, got), at


def test_nan_in_one_element_is_found() -> None:
    got = scene(LINEAR)[1].to(torch.bfloat16)
    got[1, 77] = torch.nan
    assert refused(LINEAR, got)
