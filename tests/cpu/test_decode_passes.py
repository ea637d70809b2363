"""Test that a prompt in parts of rows and positions gives the baseline's results of one pass, and its workloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autosel import models, ops
from autosel.decode import eager, generate
from autosel.decode.cache import Cache, make_cache
from autosel.decode.eager import Eager
from autosel.decode.generate import prefill
from autosel.decode.model import Decoder
from autosel.decode.run import Plan
from autosel.decode.step import Direct
from autosel.decode.weights import Weights, load_weights
from autosel.models import passes
from autosel.models.workloads import of_prompt, step, workloads
from tests.flows.test_decode_verdict import SIZES, folder
from tests.llama import write_config

ROWS, TOKENS = 5, 40
__all__ = ["folder"]  # the fixture


@pytest.fixture(scope="module")
def weights(folder: Path) -> Weights:
    return load_weights(Plan(model=models.load(folder), dtype="fp32"))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Limit passes to two rows and parts to seven tokens; return the number of tokens of each feed-forward part."""
    monkeypatch.setattr(passes, "PASS", 2 * TOKENS)
    for module in (eager, generate):
        monkeypatch.setattr(module, "CHUNK", 7)
    tokens, honest = [], dict(eager.ACTIVATION)

    def counted(gate: Tensor) -> Tensor:
        tokens.append(gate.shape[:-1].numel())
        return honest["silu"](gate)

    monkeypatch.setattr(eager, "ACTIVATION", {"silu": counted})
    return tokens


def empty(weights: Weights) -> Cache:
    return make_cache(weights.shape, weights.dtype, rows=ROWS, room=TOKENS)


def drawn() -> Tensor:
    return torch.randint(128, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def test_the_baselines_prompts_in_parts_are_those_of_one_pass(weights: Weights, small: list[int]) -> None:
    caches = [empty(weights), empty(weights)]
    in_parts = Eager(weights).prefill(drawn(), caches[0])
    assert len(small) > ROWS and max(small) <= 7
    with pytest.MonkeyPatch.context() as whole:
        whole.setattr(eager, "CHUNK", 1 << 20)
        torch.testing.assert_close(in_parts, Eager(weights).logits(drawn(), caches[1], 0))
    assert small[-1] == ROWS * TOKENS
    for mine, other in zip((*caches[0].k, *caches[0].v), (*caches[1].k, *caches[1].v), strict=True):
        torch.testing.assert_close(mine[:, :, :TOKENS], other[:, :, :TOKENS])


# --- workloads of a prompt -------------------------------------------------------------------------------------------


class Asking(Direct):
    """Run the ops, and keep the workload of each call."""

    asked: set[str]

    def __call__(self, op: str, site: str, *operands: Any) -> Any:
        arguments = [self.weights[o] if isinstance(o, str) else o for o in operands]
        inputs = dict(zip((a.name for a in ops.find(op).args), arguments, strict=True))
        self.asked.add(ops.find(op).workload_of(inputs).key)
        return super().__call__(op, site, *operands)


FAMILIES = {
    "llama": {},
    "qwen": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16},
    "gemma": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 11,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
        "hidden_activation": "gelu_pytorch_tanh",
    },
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("rows", "tokens"), [(1, 5), (1, 40), (5, 24), (3, 1)])
@torch.inference_mode()
def test_the_workloads_listed_for_a_prompt_are_the_called_ones(
    family: str, rows: int, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "PASS", 48)
    for module in (passes, generate):
        monkeypatch.setattr(module, "CHUNK", 16)
    Asking.asked = set()
    monkeypatch.setattr(generate, "Direct", Asking)
    shape = models.load(write_config(tmp_path, **(SIZES | FAMILIES[family])))
    weights = load_weights(Plan(model=shape, dtype="fp32"))
    cache = make_cache(shape, weights.dtype, rows=rows, room=tokens, page=0)
    prefill(Decoder(weights), cache, drawn()[:1, :tokens].expand(rows, tokens).tolist())
    listed = {w.key for w in of_prompt(shape, tokens, batch=rows)}
    assert {key for key in Asking.asked if not key.startswith("lm_head")} == listed
    assert any(w.startswith("prefill_attn") for w in listed)
    assert any(w.startswith("attn") for w in listed) == (tokens > 16)
    tuned = {n.workload.key for n in step(shape, batch=rows, context=tokens, prompt=tokens)}
    assert tuned == listed | {w.key for w in workloads(shape, batch=rows, context=tokens)}
