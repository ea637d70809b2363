"""Test that modules are recognised by their results: norms, subclasses of linear layers, rotary tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosel
from autosel import dispatch
from tests.flows.test_integrations_transformers import LAYERS, NORMS, D, llama, made, tokens

transformers = pytest.importorskip("transformers", reason="needs the `hf` extra")
EPS = 1e-6


@pytest.fixture(autouse=True)
def board(tmp_path: Path) -> Iterator[dispatch.Board]:
    with dispatch.use(tmp_path) as board:
        yield board


def with_norm(norm: nn.Module) -> Any:
    """Return a model with another last norm."""
    model = made(llama)
    model.model.norm = norm.eval()
    return model


def outcome(model: Any) -> tuple[int, list[str]]:
    """Patch the model. Return the number of replaced norms, and the reasons for the others."""
    patched = autosel.patch(model)
    return patched.replaced["RMSNorm"], [x.reason for x in patched.left if x.kind == "RMSNorm"]


def root(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class Bare(nn.Module):
    """A norm without a weight, an attribute or a name that identifies it."""

    def forward(self, x: Tensor) -> Tensor:
        return x * root(x, 1e-5)


class BareNorm(Bare):
    pass


class Scale(nn.Module):
    """A norm whose name does not contain it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.some_epsilon = nn.Parameter(torch.rand(D)), 1e-3

    def forward(self, x: Tensor) -> Tensor:
        return x * root(x, self.some_epsilon) * (1 + self.weight)


class IgnoringNorm(Scale):
    """A norm with a weight of ones that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight.data.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * root(x, self.some_epsilon)


@pytest.mark.parametrize("kind", [BareNorm, Scale, IgnoringNorm])
def test_a_norm_is_found_by_its_results(kind: Any, board: dispatch.Board) -> None:
    norm = kind()
    model = with_norm(norm)
    before, x = tokens(model), torch.randn(2, 3, D) * 0.01
    with torch.inference_mode():
        expected = norm(x)
        assert outcome(model) == (NORMS["llama"], [])
        asked = sum(u.calls for u in board.uses() if u.op == "rmsnorm")
        torch.testing.assert_close(norm(x), expected)
        assert sum(u.calls for u in board.uses() if u.op == "rmsnorm") == asked + 1
    assert tokens(model) == before


def test_a_weight_that_a_norm_ignores_stays_ignored() -> None:
    norm = IgnoringNorm()
    model = with_norm(norm)
    outcome(model)
    norm.weight.data.fill_(7.0)
    x = torch.randn(2, D)
    with torch.inference_mode():
        torch.testing.assert_close(norm(x), x * root(x, 1e-3))


def test_an_epsilon_is_read_at_each_call() -> None:
    norm = Scale()
    model = with_norm(norm)
    outcome(model)
    norm.some_epsilon = 10.0
    x = torch.randn(2, D)
    with torch.inference_mode():
        torch.testing.assert_close(norm(x), x * root(x, 10.0) * (1 + norm.weight))


def test_unsupported_norms_are_listed_with_a_reason_and_other_modules_are_not_listed() -> None:
    class CentredNorm(Scale):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(-1, keepdim=True))

    class TwiceNorm(Scale):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), x

    class Shift(Scale):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.weight

    count = NORMS["llama"] - 1
    assert outcome(with_norm(CentredNorm())) == (
        count,
        ["CentredNorm does not compute an RMSNorm by weight or 1 + weight"],
    )
    assert outcome(with_norm(nn.LayerNorm(D)))[1] == ["LayerNorm has other tensors than one vector of floats"]
    assert outcome(with_norm(Shift())) == (count, [])
    model = made(llama)
    model.unused = TwiceNorm()
    assert outcome(model)[1] == ["TwiceNorm returns something else than one tensor of its input's shape"]


class Gated(Scale):
    """A norm that gates the normalised value, like Qwen3-Next's."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        y = (x.float() * root(x.float(), self.some_epsilon)).to(x.dtype) * self.weight
        return (y * nn.functional.silu(gate.float())).to(x.dtype)


class GatedFirst(Scale):
    """A norm that gates the input, like Mamba2's."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        x = hidden_states.float() * (1.0 if gate is None else torch.sigmoid(gate.float()))
        return self.weight * (x * root(x, self.some_epsilon)).to(hidden_states.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Gated, GatedFirst])
def test_a_gated_norm_is_served_with_its_gate(kind: Any, dtype: torch.dtype, board: dispatch.Board) -> None:
    norm, model = kind(), made(llama)
    model.gated = norm
    model.to(dtype)
    x, gate = torch.randn(2, 3, D, dtype=dtype), torch.randn(2, 3, D, dtype=dtype)
    with torch.inference_mode():
        expected = [norm(x, gate), norm(x, gate=gate)]
        assert outcome(model) == (NORMS["llama"] + 1, [])
        before = sum(u.calls for u in board.uses() if u.op == "rmsnorm")
        for was, got in zip(expected, (norm(x, gate), norm(x, gate=gate)), strict=True):
            torch.testing.assert_close(got, was)
        assert sum(u.calls for u in board.uses() if u.op == "rmsnorm") == before + 2
        if kind is GatedFirst:
            torch.testing.assert_close(norm(x), kind.forward(norm, x))
        torch.testing.assert_close(norm(x, gate[:1]), kind.forward(norm, x, gate[:1]))


# --- linear layers ----------------------------------------------------------------------------------------------------


class Spelled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class Routing(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x).topk(2)


class Adapted(nn.Linear):
    """A linear layer with an adapter, which adds zero while its factor is zero."""

    factor = None

    def __init__(self, *sizes: int, **more: Any) -> None:
        super().__init__(*sizes, **more)
        self.factor = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.factor


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Spelled, ""),
        (Routing, "Routing returns something else than its product"),
        (Adapted, "Adapted computes by factor too"),
    ],
)
def test_a_subclass_of_linear_is_replaced_if_it_computes_the_op(kind: Any, reason: str) -> None:
    model = made(llama)
    model.extra = kind(D, 32, bias=False).eval()
    x = torch.randn(2, D)
    with torch.inference_mode():
        expected = model.extra(x)
        patched = autosel.patch(model)
        torch.testing.assert_close(model.extra(x), expected)
    assert [x.reason for x in patched.left if x.kind == "linear"] == ([reason] if reason else [])
    assert patched.replaced["linear"] == 7 * LAYERS + 1 + (not reason)


def test_rows_that_are_not_contiguous_are_served(board: dispatch.Board) -> None:
    model = made(llama)
    autosel.patch(model)
    x = torch.randn(D, 5).t()
    before = sum(u.calls for u in board.uses() if u.op == "linear")
    with torch.inference_mode():
        torch.testing.assert_close(model.lm_head(x), nn.Linear.forward(model.lm_head, x))
    assert sum(u.calls for u in board.uses() if u.op == "linear") == before + 1


# --- rotary embeddings ------------------------------------------------------------------------------------------------


def test_tables_of_another_form_are_left_with_a_reason() -> None:
    model = made(llama)
    kind = type(model.model.rotary_emb)

    class RolledRotaryEmbedding(kind):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor, position_ids: Tensor) -> Any:
            cos, sin = super().forward(x, position_ids)
            return cos.roll(1, -1), sin

    model.model.rotary_emb.__class__ = RolledRotaryEmbedding
    before = tokens(model)
    patched = autosel.patch(model)
    assert patched.replaced["rotary"] == 0
    assert "RolledRotaryEmbedding returns something else than cos and sin, each for both halves" in str(patched)
    assert tokens(model) == before


def test_positions_of_several_axes_run_the_models_own_code(board: dispatch.Board) -> None:
    model = made(llama)
    with torch.inference_mode():
        autosel.patch(model)
        cos, _ = model.model.rotary_emb(torch.randn(1, 4, D), torch.zeros(3, 4, dtype=torch.long)[:, None])
    assert not hasattr(cos, "_autosel")


def test_missing_parts_of_a_class_are_named() -> None:
    model = made(llama)
    for layer in model.model.layers:
        del layer.self_attn.head_dim
    reasons = {x.reason for x in autosel.patch(model).left}
    assert reasons == {"LlamaAttention: LlamaAttention has no head_dim"}
