"""Test proofs on operands that are mirrored to another device, as on a GPU; here that device is this CPU too."""

from __future__ import annotations

import pytest

from autosel import fingerprint
from autosel.candidates.registry import find
from autosel.ops import OPS
from autosel.parity.check import Terms, check_all
from autosel.tuning.prove import proof_of
from autosel.tuning.shortlist import way_of
from autosel.values import Failed, Passed, Workload
from tests.cpu.planting import proof

pytestmark = pytest.mark.usefixtures("preforked")

MIRRORED = Terms(device="cpu:0")  # any device except `cpu` gets separate operands

KV_APPEND = OPS["kv_append"].workload("bf16", {"B": 2, "Hkv": 2, "S": 1, "D": 64})
ATTN = OPS["attn"].workload("bf16", {"B": 1, "Hq": 4, "Hkv": 2, "S": 1, "D": 64, "L": 300})


@pytest.mark.parametrize("w", [KV_APPEND, ATTN], ids=lambda w: w.op)
def test_correct_candidates_pass_on_mirrored_operands(w: Workload) -> None:
    """Test an op that writes its outputs, and an op that writes into its arguments."""
    fp = fingerprint.take("cpu")
    way = way_of(find(w.op, f"torch:{'sdpa' if w.op == 'attn' else w.op}"), w, fp)
    (found,) = check_all([proof_of(way, w)], fp=fp, terms=MIRRORED)
    assert isinstance(found, Passed), found


@pytest.mark.parametrize(
    ("function", "check"),
    [
        ("writes_past_the_end", "guards"),
        ("changes_its_weight", "inputs"),
        ("leaves_the_tail", "unwritten"),
    ],
)
def test_bytes_left_on_the_other_device_are_seen(function: str, check: str) -> None:
    (found,) = check_all([proof(function)], terms=MIRRORED)
    assert isinstance(found, Failed)
    assert found.check == check
