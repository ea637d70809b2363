"""Race a candidate that reads weights in a format, with a real worker."""

from __future__ import annotations

import pytest

from autosel import fingerprint
from autosel.models.workloads import Named
from autosel.pipeline import try_candidate
from autosel.values import Passed
from tests.cpu.test_ops_weight import PARTS, Planter, W
from tests.cpu.test_race_bench_plants import Quiet

pytestmark = pytest.mark.usefixtures("preforked")


def test_a_candidate_for_a_format_is_raced_against_the_baseline() -> None:
    named = Named(workload=W, label="linear", calls_per_step=1)
    (tried,) = try_candidate(Planter("by_parts", PARTS), [named], fingerprint.take("cpu"), Quiet(), seed=3)
    assert isinstance(tried.parity, Passed), tried.reason
    assert tried.verdict is not None
    raced = {"torch:linear", "user:by_parts"} <= set(tried.verdict.timings)
    assert raced or tried.verdict.outcome == "undecided", tried.verdict.reason  # next to other tests no sample is clean
