"""Check that a patched model computes unchanged attention: served if the op describes the call, else by its own
code."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import autosel
from autosel import dispatch
from autosel.integrations.transformers.attention import _attend
from autosel.integrations.transformers.proof import PROVEN_ON
from tests.flows.test_integrations_transformers import FAMILIES, HEAD, HKV, HQ, SIZES, llama, logits, made, tokens

transformers = pytest.importorskip("transformers", reason="needs the `hf` extra")
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402

DEPTH = 4


def gpt_oss() -> Any:
    """Return a model with sinks: a score per head that is part of each softmax and has no value."""
    sizes = {**SIZES, "num_hidden_layers": DEPTH, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    kinds = ["sliding_attention", "full_attention"] * (DEPTH // 2)
    config = transformers.GptOssConfig(
        **sizes, layer_types=kinds, experts_implementation="eager"
    )  # this implementation supports float64
    return transformers.GptOssForCausalLM(config)


def gemma2() -> Any:
    """Return a model with capped scores."""
    sizes = {**SIZES, "num_hidden_layers": DEPTH, "sliding_window": 8, "query_pre_attn_scalar": 16}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, attn_logit_softcapping=2.0))


@pytest.fixture
def board(tmp_path: Path) -> Iterator[dispatch.Board]:
    """Serve and count PyTorch's baseline of each op, without decisions."""
    with dispatch.use(tmp_path) as board:
        yield board


def asked(board: dispatch.Board) -> dict[str, int]:
    found: dict[str, int] = {}
    for use in board.uses():
        found[use.op] = found.get(use.op, 0) + use.calls
    return found


def distance(model: Any, exact: torch.Tensor) -> torch.Tensor:
    """Return the RMS distance of the model's logits to float64's."""
    return (logits(model).double() - exact).square().mean().sqrt()


WAYS: list[dict[str, Any]] = [{}, {"rows": 2}, {"rows": 2, "padded": True}]


@pytest.mark.parametrize("family", [*FAMILIES, gpt_oss, gemma2], ids=lambda f: f.__name__)
def test_a_model_loaded_with_eager_attention_computes_the_same(
    family: Callable[[], Any], board: dispatch.Board
) -> None:
    model = made(family)
    model.set_attn_implementation("eager")
    before = [tokens(model, **way) for way in WAYS]
    exact = logits(copy.deepcopy(model).double())
    own = distance(model, exact)
    patched = autosel.patch(model)
    assert model.config._attn_implementation == "eager"
    assert distance(model, exact) <= 2 * own  # parity's rule for an RMS error relative to the baseline's
    assert [tokens(model, **way) for way in WAYS] == before
    served = family is not gpt_oss
    assert patched.replaced["attention"] == (patched.found["attention"] if served else 0)
    assert ("attn" in asked(board)) == served
    if family is llama:
        assert "prefill_attn" in asked(board), "a prompt's mask must be recognised as causal"
    if family is gpt_oss:  # sinks
        assert patched.found["attention"] == DEPTH
        assert "GptOssAttention computes something else than attention" in str(patched)
        assert patched.replaced["linear"] == 4 * DEPTH + 1, "other modules must be served"


def test_an_argument_that_the_op_does_not_have_sends_the_call_to_the_models_own(board: dispatch.Board) -> None:
    """Use sinks of zero weight, which pass the proof; a later weight is an argument of each call."""
    model = made(gpt_oss)
    sinks = [layer.self_attn.sinks for layer in model.model.layers]
    weights = [sink.clone() for sink in sinks]
    for sink in sinks:
        sink.data.fill_(-1e30)
    patched = autosel.patch(model)
    assert patched.replaced["attention"] == DEPTH
    for sink, weight in zip(sinks, weights, strict=True):
        sink.data.copy_(weight)
    got = logits(model)
    assert "prefill_attn" not in asked(board)
    autosel.unpatch(model)
    torch.testing.assert_close(got, logits(model))


def test_attention_registered_by_other_code_is_not_replaced(board: dispatch.Board) -> None:
    def doubled(*args: Any, **kwargs: Any) -> Any:
        output, weights = sdpa_attention_forward(*args, **kwargs)
        return 2 * output, weights

    transformers.AttentionInterface.register("doubled", doubled)
    try:
        model = made(llama)
        model.set_attn_implementation("doubled")
        before = logits(model)
        autosel.patch(model)
        torch.testing.assert_close(logits(model), before)
        assert "prefill_attn" not in asked(board)
    finally:
        del transformers.AttentionInterface._global_mapping["doubled"]


def test_calls_that_request_attention_weights_run_the_models_code(board: dispatch.Board) -> None:
    model = made(llama)
    model.set_attn_implementation("eager")
    ids = torch.arange(2, 12)[None]
    with torch.inference_mode():
        before = model(ids, output_attentions=True).attentions
        autosel.patch(model)
        after = model(ids, output_attentions=True).attentions
    for was, now in zip(before, after, strict=True):
        torch.testing.assert_close(now, was)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_a_mask_that_its_owner_writes_into_is_read_again_each_step(kind: torch.dtype, board: dispatch.Board) -> None:
    model = made(llama)
    model.set_attn_implementation("sdpa" if kind == torch.bool else "eager")
    hides, shows = (False, True) if kind == torch.bool else (torch.finfo(kind).min, 0.0)
    ids = torch.arange(2, 12)[None]

    def steps() -> list[torch.Tensor]:
        found = []
        with torch.inference_mode():
            cache = model(ids[:, :-1], use_cache=True).past_key_values
            mask = torch.full((1, 1, 1, 10), shows, dtype=kind)
            for first in (0, 3, 5):
                mask[..., :first] = hides
                found.append(model(ids[:, -1:], attention_mask=mask, past_key_values=cache, use_cache=True).logits)
                cache.crop(-1)
        return found

    before = steps()
    autosel.patch(model)
    proofs = asked(board)["attn"]
    for got, wanted in zip(steps(), before, strict=True):
        torch.testing.assert_close(got, wanted)
    assert asked(board)["attn"] == proofs + 3 * model.config.num_hidden_layers


def test_calls_with_a_mask_of_other_values_run_the_models_code(board: dispatch.Board) -> None:
    model = made(llama)
    model.set_attn_implementation("eager")
    ids = torch.arange(2, 12)[None]
    fading = -torch.rand(1, 1, 10, 10, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        before = model(ids, attention_mask=fading).logits
        autosel.patch(model)
        torch.testing.assert_close(model(ids, attention_mask=fading).logits, before)
    assert "prefill_attn" not in asked(board)


SERVED: dict[str, dict[str, Any]] = {
    "one query": {},
    "a window that reaches all keys": {"sliding_window": 20},
    "arguments that no attention reads": {"position_ids": torch.tensor([[19]]), "use_cache": True},
}
NOT_SERVED: dict[str, dict[str, Any]] = {
    "a window that cuts": {"sliding_window": 19},
    "packed sequences": {"cu_seq_lens_q": torch.tensor([0, 1])},
    "sinks": {"s_aux": torch.zeros(HQ)},
    "dropout": {"dropout": 0.1},
    "an unknown argument": {"temperature": 0.5},
}


@pytest.mark.parametrize("named", [*SERVED, *NOT_SERVED])
def test_flash_attention_calls_with_arguments_that_no_op_has_run_the_models_code(
    named: str, board: dispatch.Board
) -> None:
    """Test FlashAttention's windows and packed sequences, which are arguments instead of a mask."""
    module = made(llama).model.layers[0].self_attn
    module.__dict__[PROVEN_ON] = torch.device("cpu")
    q, k, v = torch.randn(1, HQ, 1, HEAD), torch.randn(1, HKV, 20, HEAD), torch.randn(1, HKV, 20, HEAD)
    called: list[dict[str, Any]] = []

    def theirs(module: Any, q: Any, k: Any, v: Any, mask: Any, **given: Any) -> Any:
        called.append(given)
        return sdpa_attention_forward(module, q, k, v, mask, scaling=given["scaling"])

    given = {"scaling": HEAD**-0.5, **SERVED.get(named, {}), **NOT_SERVED.get(named, {})}
    with torch.inference_mode():
        got, _ = _attend(theirs, "flash", module, q, k, v, None, **given)
        wanted, _ = sdpa_attention_forward(module, q, k, v, None, scaling=HEAD**-0.5)
    torch.testing.assert_close(got, wanted)
    assert ("attn" in asked(board)) == (named in SERVED)
    assert called == ([] if named in SERVED else [given]), "the arguments must reach FlashAttention"


def test_compiled_the_operators_are_in_the_graph(board: dispatch.Board) -> None:
    model = made(llama)
    autosel.patch(model)
    called: set[str] = set()

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        called.update(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    expected = logits(model)
    torch.testing.assert_close(logits(torch.compile(model, fullgraph=True, backend=backend)), expected)
    assert {"autosel.prefill_attn", "autosel.linear", "autosel.rmsnorm", "autosel.swiglu"} <= called
