"""Test autosel.patch on tiny, random transformers models, one of each known family."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autosel
from autosel import dispatch, extras, ops
from autosel.errors import UsageError
from autosel.integrations.transformers.cache import make_room
from autosel.integrations.transformers.masks import look
from autosel.integrations.transformers.proof import PROVEN_ON
from autosel.testing.serving import serve
from autosel.values import Workload

transformers = pytest.importorskip("transformers", reason="needs the `hf` extra")

D, HQ, HKV, HEAD, I, V, LAYERS = 64, 4, 2, 16, 96, 128, 2
SIZES: dict[str, Any] = {
    "hidden_size": D,
    "num_attention_heads": HQ,
    "num_key_value_heads": HKV,
    "head_dim": HEAD,
    "intermediate_size": I,
    "vocab_size": V,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def mistral() -> Any:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=8))


def qwen3() -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES))


def gemma3() -> Any:
    kinds = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(**SIZES, sliding_window=8, layer_types=kinds, query_pre_attn_scalar=16)
    return transformers.Gemma3ForCausalLM(config)


FAMILIES: list[Callable[[], Any]] = [llama, mistral, qwen3, gemma3]
NORMS = {"llama": 2 * LAYERS + 1, "mistral": 2 * LAYERS + 1, "qwen3": 4 * LAYERS + 1, "gemma3": 6 * LAYERS + 1}


def made(family: Callable[[], Any]) -> Any:
    torch.manual_seed(7)
    model = family().eval()
    for parameter in model.parameters():  # norm weights other than one, and distinct logits
        parameter.data.normal_(0.0, 0.3)
    return model


def served_workloads() -> list[tuple[Workload, str]]:
    """Return the workloads of a decode step, with one row and two, that autosel's C++ kernels support."""
    find = ops.find
    chosen: list[tuple[Workload, str]] = []
    for m in (1, 2):
        for n, k in ((HQ * HEAD, D), (HKV * HEAD, D), (I, D), (D, I), (V, D)):
            chosen.append((find("linear").workload("fp32", {"M": m, "N": n, "K": k}), "cpp:gemv"))
        chosen.append((find("swiglu").workload("fp32", {"M": m, "I": I}), "cpp:swiglu"))
        for offset in (0.0, 1.0):
            for rows, d in ((m, D), (m * HQ, HEAD), (m * HKV, HEAD)):
                w = find("rmsnorm").workload("fp32", {"M": rows, "d": d}, offset=offset)
                chosen.append((w, "cpp:rmsnorm"))
        heads = {"Hq": HQ, "Hkv": HKV, "D": HEAD}
        chosen.append((find("rope").workload("fp32", {"M": m, **heads, "R": HEAD}), "cpp:rope"))
        for length in (16, 32):
            w = find("attn").workload("fp32", {"B": m, **heads, "S": 1, "L": length})
            chosen.append((w, "cpp:attn_decode"))
    return chosen


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return serve(tmp_path_factory.mktemp("served"), served_workloads())


@pytest.fixture
def board(home: Path) -> Iterator[dispatch.Board]:
    with dispatch.use(home) as board:
        yield board


def tokens(model: Any, rows: int = 1, padded: bool = False, **options: Any) -> list[list[int]]:
    ids = torch.randint(2, V, (rows, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :4] = 0
        ids[1, :4] = 0
    out = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, **options)
    found: list[list[int]] = out.tolist()
    return found


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.arange(2, 12)[None]).logits
    return found


def natively(board: dispatch.Board) -> dict[str, int]:
    """Return the number of calls that a C++ kernel served, by op."""
    found: dict[str, int] = {}
    for use in board.uses():
        if use.candidate.startswith("cpp:"):
            found[use.op] = found.get(use.op, 0) + use.calls
    return found


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_everything_is_replaced_and_greedy_tokens_are_the_same(
    family: Callable[[], Any], board: dispatch.Board, capsys: pytest.CaptureFixture[str]
) -> None:
    model = made(family)
    ways: list[dict[str, Any]] = [{}, {"rows": 2}, {"rows": 2, "padded": True}]
    ways.append({"rows": 2, "padded": True, "cache_implementation": "static", "disable_compile": True})
    before = [tokens(model, **way) for way in ways]
    patched = autosel.patch(model)
    said = capsys.readouterr().out
    assert f"attention {LAYERS}/{LAYERS}, RMSNorm {NORMS[family.__name__]}/{NORMS[family.__name__]}" in said
    assert patched.replaced == patched.found and not patched.left
    assert patched.replaced["MLP"] == patched.replaced["rotary"] == LAYERS
    assert patched.replaced["linear"] == 7 * LAYERS + 1
    for way, expected in zip(ways, before, strict=True):
        assert tokens(model, **way) == expected, way
    calls = natively(board)
    gated = {"swiglu"} if family is not gemma3 else set()
    assert set(calls) >= {"linear", "attn", "rmsnorm", "rope"} | gated, "no decision was used"
    autosel.unpatch(model)
    assert tokens(model) == before[0]
    assert natively(board) == calls, "decisions are still used"


def test_an_unpatched_model_gives_the_original_bits() -> None:
    model = made(llama)
    before, implementation = logits(model), model.config._attn_implementation
    autosel.patch(model)
    assert model.config._attn_implementation == implementation, "the saved files do not mention autosel"
    autosel.unpatch(model)
    assert torch.equal(logits(model), before)
    assert model.config._attn_implementation == implementation
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_another_model_of_the_class_is_not_changed() -> None:
    one, other = made(llama), made(llama)
    before = logits(other)
    autosel.patch(one)
    assert torch.equal(logits(other), before)


def test_patching_twice_and_unpatching_nothing_are_errors() -> None:
    model = made(llama)
    with pytest.raises(UsageError, match="is not patched"):
        autosel.unpatch(model)
    autosel.patch(model)
    with pytest.raises(UsageError, match="patched already"):
        autosel.patch(model)
    autosel.unpatch(model)
    autosel.patch(model)


def test_a_copy_of_a_patched_model_runs_on_its_own_weights() -> None:
    model = made(llama)
    autosel.patch(model)
    before = logits(model)
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        parameter.data.mul_(0.5)
    assert not torch.allclose(logits(twin), before)
    autosel.unpatch(twin)
    expected = logits(twin)
    autosel.patch(twin)
    torch.testing.assert_close(logits(twin), expected)
    assert torch.equal(logits(model), before)


def test_calls_with_gradients_run_the_models_code() -> None:
    def gradient(model: Any) -> torch.Tensor:
        model.zero_grad()
        model(torch.arange(2, 12)[None]).logits.square().sum().backward()
        found: torch.Tensor = model.model.layers[0].mlp.gate_proj.weight.grad.clone()
        return found

    model = made(llama)
    before = gradient(model)
    autosel.patch(model)
    torch.testing.assert_close(gradient(model), before)


def test_a_module_that_computes_something_else_is_not_replaced() -> None:
    class ScaledRMSNorm(nn.Module):
        def __init__(self, other: Any) -> None:
            super().__init__()
            self.weight, self.variance_epsilon = other.weight, other.variance_epsilon

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)

    class DoublingMLP(type(made(llama).model.layers[0].mlp)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = made(llama)
    model.model.norm = ScaledRMSNorm(model.model.norm)
    model.model.layers[0].mlp.__class__ = DoublingMLP
    before = tokens(model)
    patched = autosel.patch(model)
    assert {(x.module, x.kind) for x in patched.left} == {("model.norm", "RMSNorm"), ("model.layers.0.mlp", "MLP")}
    assert patched.found["RMSNorm"] == patched.replaced["RMSNorm"] + 1
    assert "does not compute an RMSNorm" in str(patched)
    assert "something else than down" in str(patched)
    assert tokens(model) == before


def test_modules_replaced_by_other_code_are_kept() -> None:
    model = made(llama)
    theirs = model.model.norm.forward
    model.model.norm.forward = theirs
    patched = autosel.patch(model)
    assert [x.module for x in patched.left] == ["model.norm"]
    autosel.unpatch(model)
    assert model.model.norm.__dict__["forward"] == theirs


def test_a_decorator_of_transformers_still_wraps_the_replaced_rotation(
    board: dispatch.Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.utils.deprecation import deprecate_kwarg

    model = made(llama)
    kind = type(model.model.layers[0].self_attn)
    twice = deprecate_kwarg("older_mask", "99.0.0", new_name="old_mask")
    once = deprecate_kwarg("old_mask", "99.0.0", new_name="attention_mask")
    monkeypatch.setattr(kind, "forward", twice(once(kind.forward)))
    states = torch.randn(1, 1, D)
    with torch.inference_mode():
        tables = model.model.rotary_emb(states, torch.tensor([[5]]))
        expected = model.model.layers[0].self_attn(states, position_embeddings=tables, attention_mask=None)[0]
        patched = autosel.patch(model)
        assert patched.replaced["rotary"] == patched.found["rotary"] == LAYERS
        tables = model.model.rotary_emb(states, torch.tensor([[5]]))
        with pytest.warns(FutureWarning, match="`older_mask` is deprecated .* Use `old_mask`"):
            got = model.model.layers[0].self_attn(states, position_embeddings=tables, older_mask=None)[0]
    torch.testing.assert_close(got, expected)
    assert natively(board)["rope"] == 1
    autosel.unpatch(model)


def test_a_rotation_inside_an_unknown_decorator_is_left_and_the_decorator_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = made(llama)
    kind, original = type(model.model.layers[0].self_attn), type(model.model.layers[0].self_attn).forward

    @functools.wraps(original)
    def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
        output, *rest = original(self, *args, **kwargs)
        return 2 * output, *rest

    monkeypatch.setattr(kind, "forward", doubled)
    before = logits(model)
    patched = autosel.patch(model)
    assert patched.replaced["rotary"] == 0 and patched.found["rotary"] == LAYERS
    assert f"is wrapped by a decorator of {__name__}, not of transformers" in str(patched)
    torch.testing.assert_close(logits(model), before)


def test_an_unknown_model_is_refused_with_the_versions_and_left_as_it_was() -> None:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16)).eval()
    model.lm_head.forward = model.lm_head.forward  # the only module of a known kind belongs to other code
    before = logits(model)
    with pytest.raises(UsageError, match="nothing in GPT2LMHeadModel can be replaced") as caught:
        autosel.patch(model)
    assert f"transformers {transformers.__version__}" in caught.value.why
    assert torch.equal(logits(model), before)
    with pytest.raises(UsageError, match=r"not a transformers\.PreTrainedModel"):
        autosel.patch(nn.Linear(2, 2))


def test_transformers_of_another_interface_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(llama)
    monkeypatch.setitem(sys.modules, "transformers.integrations.sdpa_attention", None)
    other = f"transformers {transformers.__version__} has another .* than transformers 5"
    with pytest.raises(UsageError, match=other) as caught:
        autosel.patch(model)
    assert extras.command("hf") in caught.value.todo
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match="needs the package transformers, of the extra hf") as caught:
        autosel.patch(model)
    assert caught.value.todo == f"install it:  {extras.command('hf')}"
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_mixed_dtypes_are_refused() -> None:
    model = made(llama)
    model.model.norm.to(torch.bfloat16)
    with pytest.raises(UsageError, match=r"torch\.bfloat16, torch\.float32"):
        autosel.patch(model)
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_patching_does_not_change_the_random_state() -> None:
    model = made(llama)
    torch.manual_seed(5)
    expected = torch.randn(3)
    torch.manual_seed(5)
    autosel.patch(model)
    assert torch.equal(torch.randn(3), expected)


def test_the_default_device_of_the_process_does_not_prevent_patching() -> None:
    model = made(llama)
    elsewhere = copy.deepcopy(model)
    replaced = autosel.patch(model).replaced
    with torch.device("meta"):
        found = autosel.patch(elsewhere)
    assert found.replaced == replaced and all(replaced.values()), found.left


def test_low_precision_logits_differ_only_by_roundings_of_the_dtype() -> None:
    """Check bf16, where single roundings differ, so the distance to float64 must not grow."""
    model = made(llama).to(torch.bfloat16)
    exact = logits(copy.deepcopy(model).double())
    own = (logits(model).double() - exact).square().mean().sqrt()
    autosel.patch(model)
    ours = (logits(model).double() - exact).square().mean().sqrt()
    assert ours <= 2 * own  # parity's rule for an RMS error relative to the baseline's


# --- another device ---------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_a_model_moved_off_the_device_it_was_proven_on_runs_its_own_code(tmp_path: Path) -> None:
    """Run its own code there, because the baseline would be slower, and masks are not read on other devices."""
    with dispatch.use(tmp_path) as board:
        model = made(llama)
        autosel.patch(model)
        model.to("meta")
        before = sum(use.calls for use in board.uses())
        ids = torch.zeros(2, 9, dtype=torch.long, device="meta")
        cache = model(ids, use_cache=True).past_key_values
        step = model(ids[:, :1], past_key_values=cache, use_cache=True)
        assert step.logits.shape == (2, 1, V) and len(cache.layers) == LAYERS
        assert sum(use.calls for use in board.uses()) == before


def test_a_mask_on_another_device_is_not_read() -> None:
    assert look(torch.ones(2, 1, 1, 10, dtype=torch.bool, device="meta"), llama()) is None


def test_a_model_on_an_unsupported_device_is_refused_with_the_right_reason() -> None:
    with torch.device("meta"):
        hollow = llama()
    with pytest.raises(UsageError, match="proves every module on its device, which must be one CPU or one GPU"):
        autosel.patch(hollow)
    spread = llama()
    spread.lm_head.to("meta")
    with pytest.raises(UsageError, match="on cpu, meta"):
        autosel.patch(spread)
    assert not any("forward" in m.__dict__ for m in (*hollow.modules(), *spread.modules()))


def test_the_device_of_the_proof_is_stored_with_the_module_until_the_patch_ends() -> None:
    model = made(llama)
    autosel.patch(model)
    twin = copy.deepcopy(model)
    for one in (model, twin):
        assert one.model.layers[0].self_attn.__dict__[PROVEN_ON] == torch.device("cpu")
        autosel.unpatch(one)
        assert not any(PROVEN_ON in module.__dict__ for module in one.modules())


# --- the cache --------------------------------------------------------------------------------------------------------


def caches() -> tuple[Any, Any]:
    """Return the same three tokens in a plain cache, and in one that grows in place."""
    config = llama().config
    plain, roomy = transformers.DynamicCache(config=config), transformers.DynamicCache(config=config)
    make_room(roomy, 0)
    with torch.inference_mode():
        k, v = torch.randn(2, HKV, 3, HEAD), torch.randn(2, HKV, 3, HEAD)
        for cache in (plain, roomy):
            cache.update(k, v, 0)
    return plain, roomy


def both(plain: Any, roomy: Any, count: int = 1) -> None:
    with torch.inference_mode():
        k, v = torch.randn(2, HKV, count, HEAD), torch.randn(2, HKV, count, HEAD)
        wanted, got = plain.update(k, v, 0), roomy.update(k, v, 0)
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))
    assert plain.get_seq_length() == roomy.get_seq_length()


def test_a_patched_models_cache_grows_in_place_with_right_contents() -> None:
    plain, roomy = caches()
    both(plain, roomy)  # the first step copies, because there is no room yet
    where = roomy.layers[0].keys.data_ptr()
    for count in (1, 2, 1):
        both(plain, roomy, count)
        assert roomy.layers[0].keys.data_ptr() == where
    both(plain, roomy, 500)  # more than the room
    both(plain, roomy)
    assert isinstance(roomy.layers[0], type(plain.layers[0]))


def test_older_keys_stay_unchanged_after_changes_of_the_cache() -> None:
    plain, roomy = caches()
    for _ in range(3):
        both(plain, roomy)
    held = roomy.layers[0].keys
    before = held.clone()
    for cache in (plain, roomy):
        cache.crop(-2)
    both(plain, roomy)
    both(plain, roomy)
    assert torch.equal(held, before)
    twin = copy.deepcopy(roomy)
    both(copy.deepcopy(plain), twin)
    both(plain, roomy)
    for cache in (plain, roomy):
        cache.reorder_cache(torch.tensor([1, 0]))
    both(plain, roomy)
    for cache in (plain, roomy):
        cache.reset()
    both(plain, roomy, 2)
    both(plain, roomy)


def test_a_cache_may_be_filled_in_one_inference_mode_and_extended_in_another() -> None:
    plain, roomy = caches()
    both(plain, roomy)
    both(plain, roomy)
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            for _ in range(2):
                k = torch.randn(2, HKV, 1, HEAD)
                wanted, got = plain.update(k, k, 0), roomy.update(k, k, 0)
                assert torch.equal(wanted[0], got[0]) and torch.equal(wanted[1], got[1])
    k = torch.randn(2, HKV, 1, HEAD, requires_grad=True)
    fresh = transformers.DynamicCache(config=llama().config)
    make_room(fresh, 0)
    for _ in range(3):
        keys, _ = fresh.update(k, k, 0)
    keys.sum().backward()
    assert k.grad is not None and torch.equal(k.grad, torch.full_like(k, 3.0))


def test_patching_makes_room_in_the_cache_that_generate_makes() -> None:
    model = made(llama)
    autosel.patch(model)
    with torch.inference_mode():
        cache = model(torch.arange(2, 12)[None], use_cache=True).past_key_values
        where = set()
        for token in range(3, 9):
            model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            where.add(cache.layers[0].keys.data_ptr())
    assert len(where) <= 3  # the prompt's cache, a copy of it with room, and the same copy
    autosel.unpatch(model)
