"""Test all faults over several calls of the op whose result depends least on its inputs."""

from __future__ import annotations

import pytest

from autosel.ops import OPS
from autosel.testing.mutants.calls import killers

pytestmark = pytest.mark.usefixtures("preforked")


def test_every_cache_and_late_fault_of_sample_is_killed_although_one_logit_decides() -> None:
    found = killers(OPS["sample"], 26)
    assert {"by_prefix", "by_row_suffixes", "without_top_p", "without_uniform", "once_1000"} <= set(found)
    assert not [fault for fault, check in found.items() if not check]
