"""Test that mutants with state are refused by the checks that make many calls."""

from __future__ import annotations

import pytest

from autosel.ops import OPS
from autosel.testing.mutants.calls import killers
from autosel.testing.mutants.habitual import faults

pytestmark = pytest.mark.usefixtures("preforked")

SOME = ("by_shape", "by_row_prefixes", "by_suffix", "by_checksum", "kept_last_row", "once_7", "once_1000", "from_500")


@pytest.mark.parametrize("op", ["rmsnorm", "kv_append", "linear"])
def test_caches_kept_state_and_faults_in_one_call_of_a_thousand_are_killed(op: str) -> None:
    some = (*SOME, *[f for f in faults(OPS[op]) if f.startswith("without_")][-2:])
    found = killers(OPS[op], 26, some=some)
    assert list(found) == list(some)
    assert not [fault for fault, check in found.items() if not check]
