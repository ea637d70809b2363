"""Test that baselines create every tensor on the device of their operands."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from autosel.errors import BadArguments
from autosel.ops import OPS, eager
from autosel.ops.contract import Match
from autosel.values import Scalar
from tests.null.test_ops_contract import SHAPES

HEADS = {"B": 2, "Hq": 4, "Hkv": 2, "S": 1, "D": 64, "L": 40}
WORKLOADS: tuple[tuple[str, str, dict[str, int], dict[str, Scalar]], ...] = (
    *((op, op, dims, traits) for op, (dims, traits) in SHAPES.items()),
    ("attn", "attn", {**HEADS, "S": 3}, {"softcap": 30.0}),
    ("attn", "attn_packed", HEADS, {"ragged": True}),
    ("paged_attn", "paged_attn", {**HEADS, "page": 16}, {}),
    ("prefill_attn", "prefill_attn", {"B": 1, "Hq": 4, "Hkv": 2, "S": 24, "D": 64}, {"window": 8}),
    ("kv_append", "kv_append", {"B": 2, "Hkv": 2, "S": 3, "D": 64}, {}),
    ("add_rmsnorm", "add_rmsnorm", {"M": 2, "d": 64}, {"sandwich": 2}),
    ("rope", "rope", {"M": 2, "Hq": 4, "Hkv": 2, "D": 64, "R": 64}, {}),
)


@pytest.mark.parametrize(
    ("op", "function", "dims", "traits"), WORKLOADS, ids=lambda x: x if isinstance(x, str) else " ".join(map(str, x))
)
@pytest.mark.parametrize("prealloc", [True, False])
def test_a_baseline_stays_on_the_device_of_its_operands(
    op: str, function: str, dims: dict[str, int], traits: dict[str, Scalar], prealloc: bool
) -> None:
    """Check this with another default device: tensors created without a device would be there."""
    contract = OPS[op]
    w = contract.workload("bf16", dims, **traits)
    arguments = contract.arguments(contract.inputs(w, 1))
    outputs = contract.allocate(w) if prealloc else tuple(None for _ in contract.allocate(w))
    call: Callable[..., object] = getattr(eager, function)
    with torch.device("meta"):
        made = call(*arguments, *outputs)
    for result in made if isinstance(made, tuple) else (made,):
        assert isinstance(result, torch.Tensor)
        assert result.device.type == "cpu"


@pytest.mark.parametrize("page", [0, 16])
def test_writes_in_place_stay_on_the_device_of_the_cache(page: int) -> None:
    """Check the indices of writes too: an index on another device would make every check of the guard fail."""
    op = OPS["kv_append"]
    w = op.workload("bf16", {"B": 2, "Hkv": 2, "S": 3, "D": 64}, page=page)
    inputs = op.inputs(w, 1)
    cache = inputs["k_cache"].clone()
    with torch.device("meta"):
        written = op.written(w, inputs)
        assert written is not None
        eager.kv_append(*op.arguments(inputs))
        held = written.pick((inputs["k_cache"], inputs["v_cache"]))
        written.restore()
    assert all(t.device.type == "cpu" for t in (*held, *written.inputs.values()) if t is not None)
    assert isinstance(op.verify(written.inputs, held), Match)
    assert torch.equal(inputs["k_cache"], cache)


@pytest.mark.parametrize(("op", "dims", "stray"), [("linear", {"M": 2, "N": 8, "K": 16}, "w"), ("attn", HEADS, "v")])
def test_operands_on_two_devices_are_refused_by_name(op: str, dims: dict[str, int], stray: str) -> None:
    """Refuse them before a kernel gets an address in another memory."""
    inputs = OPS[op].inputs(OPS[op].workload("bf16", dims), 1)
    inputs[stray] = inputs[stray].to("meta")
    with pytest.raises(BadArguments, match=rf"{stray} is on meta, (x|q) on cpu"):
        OPS[op].workload_of(inputs)


DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def drawn(dtype: torch.dtype, queries: int = 1, group: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw q [2,2*group,queries,64], k and v [2,2,24,64], with large scores and values beyond the 20th key."""
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 2 * g, n, 64, generator=draw).to(dtype) for g, n in ((group, queries), (1, 24), (1, 24)))
    k[:, :, 20:] *= 2000.0
    v[:, :, 20:] = 800.0
    return q, k, v


@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_positions_stay_hidden_for_any_scores(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test this because on Hopper PyTorch uses cuDNN's attention, with a boolean mask as a bias of -65504."""
    q, k, v = drawn(dtype)
    mask = (torch.arange(24) < 20)[None, None, None]
    before = torch.backends.cuda.cudnn_sdp_enabled()

    def as_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, *_: object) -> torch.Tensor:
        if mask.dtype == torch.bool and torch.backends.cuda.cudnn_sdp_enabled():
            mask = torch.where(mask, 0.0, -65504.0)
        wide = mask if mask.dtype == torch.bool else mask.float()
        return F.scaled_dot_product_attention(q.float() * 100, k.float(), v.float(), attn_mask=wide)

    monkeypatch.setattr(eager, "_sdpa", as_cudnn)
    plain = F.scaled_dot_product_attention(q.float() * 100, k.float()[:, :, :20], v.float()[:, :, :20])
    assert float(as_cudnn(q, k, v, mask).max()) == 800.0
    torch.testing.assert_close(eager._on_gpu(q, k, v, mask, False, 0.0), plain)
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("rows", [1, 2])
def test_heads_that_share_keys_never_fall_back_to_products_of_matrices(
    dtype: torch.dtype, queries: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If PyTorch has no kernel for a group with a mask, the baseline expands the group, with the same result."""
    q, k, v = drawn(dtype, queries, group=4)
    mask = (torch.arange(24) < torch.arange(18, 18 + queries)[:, None]).expand(rows, 1, queries, 24)
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    asked: list[bool] = []

    def multiplies(*_: object) -> bool:
        asked.append(torch.backends.cuda.cudnn_sdp_enabled())
        return True

    def no_groups(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, *_: object) -> torch.Tensor:
        assert q.shape[1] == k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    monkeypatch.setattr(eager, "_multiplies_matrices", multiplies)
    monkeypatch.setattr(eager, "_sdpa", no_groups)
    got = eager._on_gpu(q, k, v, mask, False, 0.0)
    torch.testing.assert_close(got, wanted)
    assert asked == [dtype != torch.float16], "the query must consider the kernels that are then enabled"


def test_a_group_that_flash_takes_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = drawn(torch.bfloat16, 3, group=4)
    monkeypatch.delattr(eager, "_multiplies_matrices")  # unknown: checking would need a call
    wanted = F.scaled_dot_product_attention(q, k[:, :, :3], v[:, :, :3], is_causal=True, enable_gqa=True)
    torch.testing.assert_close(eager._on_gpu(q, k[:, :, :3], v[:, :, :3], None, True, 0.0), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_capped_query_that_sees_nothing_leaves_its_neighbours_alone(dtype: torch.dtype) -> None:
    """A CPU with AMX multiplies tiles of 32 columns: NaN in a row of 47 reached the end of the row before."""
    q, k, v = torch.rand(1, 6, 16, 64), torch.rand(1, 2, 47, 64), torch.rand(1, 2, 47, 64)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    got = eager.attn(q, k, v, torch.tensor([15]), 47, 0.125, 0, 30.0)
    assert not got[:, :, 0].any()
    assert got.isfinite().all()
    torch.testing.assert_close(got[:, :, 1], v[:, :, 0].repeat_interleave(3, 1))
