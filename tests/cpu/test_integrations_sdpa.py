"""Test decided kernels under PyTorch's scaled_dot_product_attention, between activate and deactivate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn import attention

import autosel
from autosel import dispatch, ops
from autosel.errors import UsageError
from autosel.testing.serving import serve

Q, K, V = torch.randn(1, 4, 1, 64), torch.randn(1, 2, 40, 64), torch.randn(1, 2, 40, 64)
PROMPT = torch.randn(1, 4, 7, 64), torch.randn(1, 4, 7, 64), torch.randn(1, 4, 7, 64)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    decode = ops.find("attn").workload_of(dict(zip(("q", "k", "v"), (Q, K, V), strict=True)))
    prompt = ops.find("prefill_attn").workload_of(dict(zip(("q", "k", "v"), PROMPT, strict=True)))
    return serve(tmp_path_factory.mktemp("sdpa"), [(decode, "cpp:attn_decode"), (prompt, "cpp:attn_prefill")])


@pytest.fixture
def served(home: Path) -> Iterator[dispatch.Board]:
    with dispatch.use(home) as board:
        autosel.activate()
        yield board
        autosel.deactivate()
    assert attention.current_flash_attention_impl() is None


def ours(board: dispatch.Board) -> int:
    return sum(u.calls for u in board.uses() if u.candidate.startswith("cpp:"))


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril() if causal else None
    return F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=mask, enable_gqa=True).float()


def test_decode_and_causal_prompts_are_served_by_the_decision(served: dispatch.Board) -> None:
    decoded = F.scaled_dot_product_attention(Q, K, V, enable_gqa=True)
    assert ours(served) == 1
    prompt = F.scaled_dot_product_attention(*PROMPT, is_causal=True)
    assert ours(served) == 2
    torch.testing.assert_close(decoded, expected(Q, K, V, False))
    torch.testing.assert_close(prompt, expected(*PROMPT, True))


def test_calls_that_no_op_describes_go_to_pytorch(served: dispatch.Board) -> None:
    q, k, v = PROMPT
    mask = torch.rand(7, 7) > 0.3
    mask[:, 0] = True
    shifted = Q.expand(1, 4, 1, 64).contiguous()
    cases = [
        ((q, k, v), {}),  # not causal
        ((q, k, v), {"attn_mask": mask}),
        ((shifted, K, V), {"is_causal": True, "enable_gqa": True}),  # aligned to the first key
        ((q.double(), k.double(), v.double()), {"is_causal": True}),
        ((torch.randn(1, 4, 9, 64), *(torch.randn(1, 4, 9, 64) for _ in "kv")), {"is_causal": True}),  # undecided
    ]
    seen = [F.scaled_dot_product_attention(*tensors, **how) for tensors, how in cases]
    assert ours(served) == 0
    missed = {(u.op, u.candidate): u.calls for u in served.uses() if u.calls}
    assert missed == {("prefill_attn", "engine:own"): 1}, "only a call that an op describes is a miss"
    autosel.deactivate()
    for (tensors, how), made in zip(cases, seen, strict=True):
        assert torch.equal(made, F.scaled_dot_product_attention(*tensors, **how))


def test_gradients_are_pytorchs_own(served: dispatch.Board) -> None:
    def gradient() -> torch.Tensor:
        q = PROMPT[0].clone().requires_grad_()
        F.scaled_dot_product_attention(q, *PROMPT[1:], is_causal=True).sum().backward()
        assert q.grad is not None
        return q.grad

    active = gradient()
    assert ours(served) == 0
    autosel.deactivate()
    assert torch.equal(active, gradient())


def test_activation_is_explicit_repeatable_and_reversible(home: Path) -> None:
    with dispatch.use(home) as board:
        F.scaled_dot_product_attention(Q, K, V, enable_gqa=True)
        assert ours(board) == 0
        autosel.activate()
        autosel.activate()
        F.scaled_dot_product_attention(Q, K, V, enable_gqa=True)
        assert ours(board) == 1
        autosel.deactivate()
        autosel.deactivate()
        F.scaled_dot_product_attention(Q, K, V, enable_gqa=True)
        assert ours(board) == 1


def test_another_implementation_is_not_displaced() -> None:
    class Handle:
        def remove(self) -> None:
            pass

    attention.register_flash_attention_impl("somebody's", register_fn=Handle)
    attention.activate_flash_attention_impl("somebody's")
    try:
        with pytest.raises(UsageError, match="somebody's is active"):
            autosel.activate()
        autosel.deactivate()
        assert attention.current_flash_attention_impl() == "somebody's"
    finally:
        attention.restore_flash_attention_impl()
