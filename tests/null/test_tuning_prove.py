"""Test failed proofs in a tune: the candidate is dropped, the baseline stays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from autosel.ops import OPS
from autosel.tuning import prove
from autosel.tuning.job import TuneEvents
from autosel.values import Failed
from tests.quiet import Quiet

W = OPS["linear"].workload("bf16", {"M": 1, "N": 64, "K": 33})
FAILED = Failed(check="outside_reads", case="ragged", evidence={"shape": "M1 N9 K33"}, reason="reads on")


def way(name: str) -> Any:
    return SimpleNamespace(candidate=SimpleNamespace(name=name), arm=name)


@pytest.mark.parametrize(
    ("name", "stage", "left"), [("torch:linear", "baseline", ["cpp:gemv"]), ("cpp:gemv", "parity", [])]
)
def test_a_baseline_that_fails_its_proof_is_reported_as_such_and_stays(name: str, stage: str, left: list[str]) -> None:
    tally, racing = TuneEvents(Quiet()), ["cpp:gemv"]
    ways = {n: way(n) for n in ("torch:linear", "cpp:gemv")}
    job = SimpleNamespace(
        workload=W, baseline=ways["torch:linear"], parities=[], drop=lambda way: racing.remove(way.candidate.name)
    )
    prove._take(cast(Any, SimpleNamespace(tally=tally)), cast(Any, job), ways[name], FAILED)
    assert [(r.candidate, r.stage, r.reason) for r in tally.rejections] == [
        (name, stage, "outside_reads (ragged at M1 N9 K33): reads on")
    ]
    assert racing == left and job.parities == [(name, FAILED)]
