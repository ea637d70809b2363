"""Test the engines' attention on stand-ins: steps of other releases run the engine's own kernel, with a message."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from autosel.integrations import engine_ops

D, H = 16, 2


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the calls of `paged`, which serves every call here."""
    found: list[dict[str, Any]] = []

    def paged(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, max_len: int, **named: Any) -> bool:
        found.append({"q": q.shape, "k": k.shape, "v": v.shape, "max_len": max_len, **named})
        named["out"].fill_(7.0)
        return True

    monkeypatch.setattr(engine_ops, "paged", paged)
    return found


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **held: Any) -> None:
    for end in [i for i, c in enumerate(name) if c == "."]:
        monkeypatch.setitem(sys.modules, name[:end], sys.modules.get(name[:end]) or ModuleType(name[:end]))
    module = ModuleType(name)
    vars(module).update(held)
    monkeypatch.setitem(sys.modules, name, module)


def imported(name: str) -> Iterator[Any]:
    sys.modules.pop(name, None)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


# --- vLLM -------------------------------------------------------------------------------------------------------------


class TritonImpl:
    def __init__(self) -> None:
        self.num_heads, self.head_size, self.scale, self.logits_soft_cap = H, D, 0.25, 0.0
        self.attn_type, self.kv_cache_dtype, self.chunk_lookback = "decoder", "auto", -1
        self.alibi_slopes, self.sinks, self.sliding_window = None, None, (-1, -1)

    def forward(
        self, layer: Any, query: Tensor, key: Any, value: Any, cache: Any, m: Any, output: Tensor, *_: Any
    ) -> Any:
        return output.fill_(1.0)


@dataclass
class Metadata:
    max_query_len: int = 1
    num_actual_tokens: int = 3
    max_seq_len: int = 40
    seq_lens: Tensor = torch.full((3,), 40)  # noqa: RUF009
    block_table: Tensor = torch.zeros(3, 3, dtype=torch.int32)  # noqa: RUF009
    mm_prefix_range: Any = None
    rswa_prefix_lens: Any = None


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    stand_in(monkeypatch, "vllm.envs", VLLM_BATCH_INVARIANT=False)
    sys.modules["vllm"].envs = sys.modules["vllm.envs"]  # type: ignore[attr-defined]
    stand_in(monkeypatch, "vllm.config", get_current_vllm_config_or_none=lambda: None)
    stand_in(monkeypatch, "vllm.v1.attention.backend", AttentionType=SimpleNamespace(DECODER="decoder"))
    triton = "vllm.v1.attention.backends.triton_attn"
    stand_in(monkeypatch, triton, TritonAttentionBackend=object, TritonAttentionImpl=TritonImpl)
    yield from imported("autosel.integrations.vllm_attention")


def vllm_step(vllm: Any, m: Any, cache: Tensor) -> float:
    output = torch.zeros(3, H, D)
    vllm.AutoselAttentionImpl().forward(None, torch.randn(3, H, D), None, None, cache, m, output)
    return float(output.flatten()[0])


CACHE = torch.zeros(4, H, 16, 2 * D)


def test_a_decode_step_of_the_vllm_it_was_written_for_is_served(vllm: Any, asked: list[dict[str, Any]]) -> None:
    assert vllm_step(vllm, None, torch.empty(0)) == 1.0, "a profile run must not log"
    assert vllm_step(vllm, Metadata(), CACHE) == 7.0
    assert vllm_step(vllm, Metadata(max_query_len=5), CACHE) == 1.0
    (given,) = asked
    assert given["k"] == given["v"] == (4, 16, H, D) and given["q"] == (3, H, 1, D) and given["window"] == 0


@pytest.mark.parametrize("other", ["metadata", "cache"])
def test_another_vllms_decode_step_runs_its_own_kernel_with_one_message(
    other: str, vllm: Any, asked: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    full = vars(Metadata())
    less = SimpleNamespace(**{n: v for n, v in full.items() if n not in ("rswa_prefix_lens", "max_seq_len")})
    m, cache = (less, CACHE) if other == "metadata" else (Metadata(), torch.zeros(2, 4, 16, H, D))
    assert [vllm_step(vllm, m, cache) for _ in range(2)] == [1.0, 1.0]
    (said,) = [r.getMessage() for r in caplog.records if "own attention" in r.getMessage()]
    assert ("has no max_seq_len, rswa_prefix_lens" if other == "metadata" else "its cache is [2, 4, 16, 2, 16]") in said
    assert not asked


# --- SGLang -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    layer_id: int = 0
    tp_q_head_num: int = H
    tp_k_head_num: int = H
    qk_head_dim: int = D
    v_head_dim: int = D
    k_scale: Any = None
    v_scale: Any = None
    scaling: float = 0.25
    is_cross_attention: bool = False
    attn_type: str = "decoder"
    xai_temperature_len: int = -1
    logit_cap: float = 0.0
    logit_capping_method: str = "tanh"
    sliding_window_size: int = -1


class Pool:
    page_size, kv_cache_layout, dtype, store_dtype = 16, "nhd", torch.float32, torch.float32

    def __init__(self, *shape: int) -> None:
        self.keys, self.saved = torch.zeros(shape), 0

    def get_key_buffer(self, layer: int) -> Tensor:
        return self.keys

    get_value_buffer = get_key_buffer

    def set_kv_buffer(self, *_: Any) -> None:
        self.saved += 1


class Own:
    """SGLang's backend."""

    def __init__(self, pool: Pool) -> None:
        self.token_to_kv_pool = pool
        self.req_to_token_pool = SimpleNamespace(req_to_token=torch.arange(4 * 64, dtype=torch.int32).view(4, 64))

    def init_forward_metadata(self, batch: Any) -> None: ...

    def forward_decode(self, q: Tensor, k: Any, v: Any, layer: Any, batch: Any, save: bool, **_: Any) -> Tensor:
        if save:
            self.token_to_kv_pool.set_kv_buffer()
        return torch.ones(len(q), H * D)


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    stand_in(monkeypatch, "sglang.srt.layers.radix_attention", AttentionType=SimpleNamespace(DECODER="decoder"))
    location = SimpleNamespace(for_batch=lambda batch: None)
    stand_in(monkeypatch, "sglang.srt.mem_cache.memory_pool", KVWriteLoc=location, MHATokenToKVPool=Pool)
    yield from imported("autosel.integrations.sglang_attention")


def batch(**changes: Any) -> Any:
    given = {"spec_info": None, "encoder_lens": None, "forward_mode": SimpleNamespace(is_decode=lambda: True)}
    lengths = {"seq_lens": torch.tensor([20, 33]), "seq_lens_cpu": torch.tensor([20, 33])}
    return SimpleNamespace(**given | lengths | {"req_pool_indices": torch.tensor([2, 1])} | changes)


def sglang_step(sglang: Any, pool: Pool, there: Any, layer: Any) -> float:
    backend = type("Backend", (sglang.DecodeSteps, Own), {})(pool)
    backend.init_forward_metadata(there)
    made = backend.forward_decode(torch.randn(2, H * D), torch.randn(2, H, D), torch.randn(2, H, D), layer, there)
    assert pool.saved == 1, "each token's key and value are stored once, for all layers"
    return float(made.flatten()[0])


def test_a_decode_step_of_the_sglang_it_was_written_for_is_served(sglang: Any, asked: list[dict[str, Any]]) -> None:
    assert sglang_step(sglang, Pool(96, H, D), batch(), Layer()) == 7.0
    (given,) = asked
    assert given["k"] == (6, 16, H, D) and given["q"] == (2, H, 1, D) and given["max_len"] == 33


@pytest.mark.parametrize("other", ["batch", "layer", "rank", "layout", "pages"])
def test_another_sglangs_decode_step_runs_its_own_kernel_with_one_message(
    other: str, sglang: Any, asked: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    there, layer = batch(), Layer()
    shape = {"rank": (6, 16, H, D), "pages": (97, H, D)}.get(other, (96, H, D))
    if other == "batch":
        del there.req_pool_indices, there.seq_lens_cpu
    if other == "layer":
        layer = SimpleNamespace(**{n: v for n, v in vars(layer).items() if n != "logit_capping_method"})
    for _ in range(2):
        pool = Pool(*shape)
        if other == "layout":
            pool.keys = torch.zeros(H, 96, D).transpose(0, 1)
        assert sglang_step(sglang, pool, there, layer) == 1.0
    (said,) = [r.getMessage() for r in caplog.records if "own attention" in r.getMessage()]
    told = {"batch": "req_pool_indices", "layer": "logit_capping_method"}
    assert told.get(other, "its cache is") in said and not asked


def test_an_unsupported_layer_is_not_mistaken_for_another_release(
    sglang: Any, asked: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    assert sglang_step(sglang, Pool(96, H, D), batch(), replace(Layer(), is_cross_attention=True)) == 1.0
    assert sglang_step(sglang, Pool(96, H, D), batch(), Layer()) == 7.0 and not caplog.records
