"""Test the peers' published rules on worked cases, and where the harness applies them to autosel's kernels."""

from __future__ import annotations

import pytest

from autosel.candidates.registry import find
from autosel.fingerprint import known
from autosel.knobs.gpu.facts import facts
from autosel.ops import OPS
from autosel.values import Fingerprint, Workload
from benchmarks.bench_regret import taken
from benchmarks.peer_settings import attention_splits, flash_attention_splits, of_peers, vllm_segments

H200, TI = known.load("h200"), known.load("rtx-5070-ti")


def attn(b: int, length: int, hkv: int = 8) -> Workload:
    return OPS["attn"].workload("bf16", {"B": b, "Hq": 32, "Hkv": hkv, "S": 1, "D": 128, "L": length})


@pytest.mark.parametrize(
    ("fp", "workload", "splits"),
    [(H200, attn(1, 8192), 15), (H200, attn(8, 1024), 2), (TI, attn(1, 8192), 8), (TI, attn(8, 1024), 1)],
)
def test_flash_attention_splits_as_in_the_worked_cases(fp: Fingerprint, workload: Workload, splits: int) -> None:
    """Worked by hand: 8 tiles fill 120 of 132 SMs with 15 splits, 112 with 14; 112 / 132 is below 85 % of a wave."""
    assert attention_splits(workload, facts(fp))["flash-attention"] == splits


def test_flash_attention_does_not_split_what_fills_the_device_or_cannot_be_split() -> None:
    assert flash_attention_splits(106, 132, 64) == 1
    assert flash_attention_splits(1, 132, 4) == 1
    assert flash_attention_splits(10, 132, 6) == 6
    assert flash_attention_splits(10, 60, 5) == 5


def test_vllm_counts_sequences_and_nothing_else() -> None:
    assert vllm_segments(1, 8) == vllm_segments(16, 8) == 16
    assert vllm_segments(17, 8) == 1


def test_peers_choose_the_split_and_leave_the_rest() -> None:
    w = attn(1, 8192)
    closed = taken(find("attn", "cuda:attn_decode"), w, H200)
    found = of_peers(w, H200, closed)
    assert set(found) == {"flash-attention", "vllm"}
    assert found["vllm"] == {**closed, "chunk": 512}
    assert found["flash-attention"]["chunk"] == 576  # 8192 / 15 in whole tiles of 64
