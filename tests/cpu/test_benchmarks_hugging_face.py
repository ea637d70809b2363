"""Test that the Hugging Face models in benchmarks compute the same as our eager baseline, on the same tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autosel import models
from autosel.decode.cache import make_cache
from autosel.decode.eager import Eager
from autosel.decode.run import Plan
from autosel.decode.weights import load_weights
from autosel.models.shape import ModelShape

pytest.importorskip("transformers", reason="needs the extra `hf`")
CONTEXT = 40


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "benchmarks"), *sys.path])
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small(name: str) -> ModelShape:
    """Return the preset with small sizes, and the features of its family unchanged."""
    shape = models.load(name)
    heads = {"Hq": 4, "Hkv": 2, "D": 32}
    rope = replace(shape.rope, rotary_dim=32)
    local = replace(shape.rope_local, rotary_dim=32) if shape.rope_local else None
    types = ("sliding", "full") if shape.window else ("full", "full")
    window = 24 if shape.window else 0
    return replace(
        shape,
        layers=2,
        d=64,
        I=96,
        V=211,
        **heads,
        rope=rope,
        rope_local=local,
        layer_types=types,
        window=window,
        embedding_scale=8.0 if shape.sandwich else 1.0,  # sqrt(d)
    )


@pytest.mark.parametrize("kind", ["filled_cache", "in_place_cache"])
@pytest.mark.parametrize("name", ["llama-1b", "qwen3-1.7b", "gemma3-1b"])
def test_the_eager_baseline_is_hugging_faces_model_on_the_same_tensors(name: str, kind: str) -> None:
    import hugging_face
    from hugging_face import model_of, rewinding

    weights = load_weights(Plan(model=small(name), dtype="fp32", seq=CONTEXT))
    cache = make_cache(weights.shape, "fp32", rows=1, room=CONTEXT)
    for tensor in (*cache.k, *cache.v):
        tensor.normal_(generator=torch.Generator().manual_seed(1))
    token = torch.tensor([[7]])
    with torch.inference_mode():
        theirs = model_of(weights)
        past = getattr(hugging_face, kind)(theirs, cache, CONTEXT - 1)
        rewind = rewinding(past)
        ours = Eager(weights).logits(token, cache, CONTEXT - 1)
        for _ in range(2):  # the second step starts from the same cache as the first
            expected = theirs(token, past_key_values=past, use_cache=True).logits[:, -1]
            rewind()
            torch.testing.assert_close(ours, expected, rtol=2e-4, atol=2e-4)
    embedding = theirs.model.embed_tokens.weight
    assert embedding.data_ptr() == weights.embedding.data_ptr()
