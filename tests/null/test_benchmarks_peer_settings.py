"""Test the peers' published rules on worked cases, and where the harness applies them to autosel's kernels."""

from __future__ import annotations

import pytest
import torch

from autosel.candidates import registry
from autosel.candidates.base import Candidate
from autosel.candidates.load import load
from autosel.candidates.registry import find
from autosel.fingerprint import known
from autosel.knobs.gpu.facts import facts
from autosel.ops import OPS
from autosel.ops.contract import Match
from autosel.values import Accepted, Fingerprint, Workload
from benchmarks import bench_regret
from benchmarks.bench_regret import cells, peers_summary, taken
from benchmarks.cublaslt import by_cublaslt
from benchmarks.gpu import bench
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


def test_a_tile_of_tritons_tutorial_is_tried_where_a_tile_is_chosen() -> None:
    w = OPS["linear"].workload("bf16", {"M": 64, "N": 4096, "K": 4096})
    closed = taken(find("linear", "triton:gemm"), w, H200)
    (peer,) = of_peers(w, H200, closed).values()
    assert {name: peer[name] for name in ("tile_rows", "stages", "split_k")} == {
        "tile_rows": 128, "stages": 3, "split_k": 1,
    }  # fmt: skip


def test_every_attention_cell_on_a_gpu_has_its_peers_and_no_cell_on_a_cpu() -> None:
    for c in cells("cuda"):
        if c.workload.op in ("attn", "paged_attn"):
            closed = taken(find(c.workload.op, c.kernels[0]), c.workload, H200)
            assert of_peers(c.workload, H200, closed), c.name
    cpu = Fingerprint(kind="cpu", name="a CPU", identity={}, environment={}, rates={})
    assert of_peers(attn(1, 512), cpu, {"chunk": 3, "tile": 128}) == {}


def test_every_product_on_a_gpu_meets_cublaslt_and_every_tile_tritons_tutorial() -> None:
    for c in (c for c in cells("cuda") if c.kind != "route"):
        met = set(by_cublaslt(c.workload, H200))
        assert bool(met) == (c.workload.op in ("linear", "lm_head")), c.name
        if c.kind == "gemm" and not c.kernels[0].endswith("sm80"):  # the tutorial does not name its tile sizes
            closed = taken(find(c.workload.op, c.kernels[0]), c.workload, H200)
            assert set(of_peers(c.workload, H200, closed)) == {"triton's tutorial"}, c.name


def test_a_peer_is_compared_in_the_cells_where_it_has_a_rule() -> None:
    found = [
        {"kind": "decode", "regret": 0.0, "peers": {"vllm": 0.21}},
        {"kind": "decode", "regret": 0.1, "peers": {"vllm": 0.0}},
        {"kind": "decode", "regret": 9.9},
    ]
    count, theirs, ours = peers_summary(found)["vllm"]
    assert count == 2
    assert theirs == pytest.approx(0.1)
    assert ours == pytest.approx(0.0488, abs=1e-3)


# --- cuBLASLt ---------------------------------------------------------------------------------------------------------

PRODUCT = OPS["linear"].workload("bf16", {"M": 64, "N": 4096, "K": 4096})


@pytest.fixture
def preferred(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the preferences that PyTorch was given, in order; the first is its default."""
    told = ["default"]

    def prefer(library: str | None = None) -> str:
        if library is not None:
            told.append(library)
        return told[-1]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", prefer)
    return told


def test_a_product_of_cublaslt_is_cublaslts_and_the_next_one_is_not(
    preferred: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    op, met = OPS["linear"], []
    w = PRODUCT.at(M=2, N=8, K=16)
    (arm,) = by_cublaslt(w, H200).values()
    call = load(op, arm.recipe, arm.digest, arm.knobs)
    inputs = op.inputs(w, 1)
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *a, **k: (met.append(preferred[-1]), mm(*a, **k))[1])
    (y,) = op.allocate(w)
    assert call(*op.arguments(inputs), y) is y
    assert isinstance(op.verify(inputs, [y]), Match)
    assert met == ["cublaslt"]
    assert preferred == ["default", "cublaslt", "default"]


def test_the_former_preference_comes_back_from_a_product_that_fails(preferred: list[str]) -> None:
    (arm,) = by_cublaslt(PRODUCT, H200).values()
    call = load(OPS["linear"], arm.recipe, arm.digest, arm.knobs)
    with pytest.raises(RuntimeError):
        call(torch.zeros(1, 3), torch.zeros(2, 4), None, None, None)
    assert preferred[-1] == "default"


def test_regret_distinguishes_pytorchs_own_product_from_cublaslts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autosel.candidates.triton.base.find_spec", lambda name: name)
    cell = next(c for c in cells("cuda") if c.name.startswith("gemm triton:gemm") and c.workload["M"] == 64)
    arms, _ = bench_regret._arms(cell, H200)
    targets = {name: arms[f"as {name}"][0].recipe.target for name in ("pytorch", "cublaslt")}
    assert targets == {"pytorch": "autosel.ops.eager:linear", "cublaslt": "benchmarks.cublaslt:linear"}


def test_the_bench_times_cublaslt_in_addition_to_the_baseline_only_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_the_baseline(w: Workload, fp: Fingerprint, effort: str) -> list[tuple[Candidate, Accepted]]:
        return [(registry.baseline(w.op), Accepted())]

    monkeypatch.setattr(registry, "eligible", only_the_baseline)
    assert list(bench._arms(PRODUCT, H200, "quick")[0]) == ["torch:linear", "torch:linear@cublaslt"]
    assert list(bench._arms(attn(1, 512), H200, "quick")[0]) == ["torch:sdpa"]
    cpu = Fingerprint(kind="cpu", name="a CPU", identity={}, environment={}, rates={})
    assert list(bench._arms(PRODUCT, cpu, "quick")[0]) == ["torch:linear"]
