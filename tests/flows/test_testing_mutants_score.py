"""Test that the checks kill the mutants of an op's contract: a share of the mutants, a quarter of the ops each day."""

from __future__ import annotations

import pytest

from autosel.ops import OPS
from autosel.ops.contract import Op
from autosel.testing.mutants.equivalent import REASONS
from autosel.testing.mutants.score import score
from autosel.testing.mutants.trial import Trial
from tests import drawn

SEED = 26
SHARE = 0.12  # share of drawn mutants; tests/soak/test_mutants.py runs all
SHARE_OF_SLOW = 0.06  # of ops whose references take long
SLOW = {"attn", "paged_attn", "prefill_attn", "lm_head"}
POINTS = 100


@pytest.mark.parametrize("op", drawn.share(list(OPS.values()), days=14, shift=5), ids=lambda op: op.name)
def test_every_mutant_is_killed_or_is_a_right_kernel(op: Op) -> None:
    share = SHARE_OF_SLOW if op.name in SLOW else SHARE
    found = score(op, SEED, share=share, points=POINTS, calls=False)
    assert found.survived == []
    assert found.mutants >= 10
    assert len(found.equivalent) <= 1
    assert sum(found.killed.values()) + len(found.equivalent) == found.mutants


@pytest.mark.parametrize(("op", "name"), drawn.share(list(REASONS), days=6, shift=1))
def test_a_mutant_that_agrees_has_a_reason_only_if_it_exists(op: str, name: str) -> None:
    assert name in {m.name for m in Trial(OPS[op], "bf16", SEED).mutants}, f"{op} has no mutant {name!r}"
