"""Build Hugging Face model classes on autosel's weights: the same tensors, without copies or downloads.

The benchmarks compare the eager baseline and autosel's step with these. They use transformers' default attention
(SDPA) and its default cache (DynamicCache).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autosel.decode.cache import Cache
from autosel.decode.weights import Weights
from autosel.formats import PLAIN
from autosel.models.shape import ModelShape
from autosel.ops.codes import CODES
from autosel.ops.contract import DTYPE
from autosel.ops.weight import Weight

TORCHAO_FORMATS = ("int4-g128", "int4-g64", "int4-g32")  # torchao has products of them on a CPU


def model_of(weights: Weights) -> Any:
    """Return a model of the weights' family in eval mode, with autosel's tensors as its parameters.

    Codes become torchao's tensors. Then a tied head is a parameter with the embedding's codes, since a look-up needs
    plain rows.
    """
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    tied = weights.shape.tied and weights.shape.weight == PLAIN
    config = config_of(weights.shape, tied=tied)
    config.dtype = weights.torch_dtype
    with no_init_weights(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    missing, unknown = model.load_state_dict(state(weights, tied=tied), strict=False, assign=True)
    left = [name for name in missing if name != "lm_head.weight"]
    assert not left and not unknown, (left, unknown)
    if tied:
        model.tie_weights()
    _materialise_buffers(model)
    return model.eval()


def loaded_model(folder: str, dtype: str) -> Any:
    """Return the model that transformers loads from a checkpoint in codes."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE[dtype]).eval()


def filled_cache(model: Any, cache: Cache, count: int) -> Any:
    """Return a DynamicCache with copies of the first `count` tokens of an autosel cache."""
    from transformers import DynamicCache

    made = DynamicCache(config=model.config)
    for i, (k, v) in enumerate(zip(cache.k, cache.v, strict=True)):
        made.update(k[:, :, :count].clone(), v[:, :, :count].clone(), i)
    return made


def rewinding(cache: Any) -> Callable[[], None]:
    """Return a function that restores the cache's present state: a step makes new tensors and keeps the old ones."""
    held = [dict(vars(layer)) for layer in cache.layers]

    def rewind() -> None:
        for layer, before in zip(cache.layers, held, strict=True):
            vars(layer).update(before)

    return rewind


def config_of(s: ModelShape, *, tied: bool) -> Any:
    import transformers as t

    common: dict[str, Any] = {
        "hidden_size": s.d,
        "intermediate_size": s.I,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.Hq,
        "num_key_value_heads": s.Hkv,
        "head_dim": s.D,
        "vocab_size": s.V,
        "max_position_embeddings": s.max_context,
        "rms_norm_eps": s.rms_eps,
        "tie_word_embeddings": tied,
    }
    rope = {"rope_type": "default", "rope_theta": s.rope.theta}
    if s.rope.kind == "llama3":
        rope |= {
            "rope_type": "llama3",
            "factor": s.rope.factor,
            "low_freq_factor": s.rope.low_freq_factor,
            "high_freq_factor": s.rope.high_freq_factor,
            "original_max_position_embeddings": s.rope.original_context,
        }
    if s.family == "llama":
        return t.LlamaConfig(**common, rope_parameters=rope)
    if s.family == "qwen3":
        return t.Qwen3Config(**common, rope_parameters=rope)
    if s.family == "mistral":
        return t.MistralConfig(**common, rope_parameters=rope, sliding_window=s.window or None)
    assert s.family == "gemma3" and s.rope_local is not None
    if s.rope.kind == "linear":
        rope |= {"rope_type": "linear", "factor": s.rope.factor}
    types = ["sliding_attention" if kind == "sliding" else "full_attention" for kind in s.layer_types]
    return t.Gemma3TextConfig(
        **common,
        rope_parameters={
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": s.rope_local.theta},
        },
        sliding_window=s.window,
        layer_types=types,
        query_pre_attn_scalar=round(s.attn_scale**-2) if s.attn_scale else s.D,
    )


def state(weights: Weights, *, tied: bool) -> Mapping[str, Tensor]:
    """Return autosel's tensors by Hugging Face's names."""
    s = weights.shape
    sizes = (s.Hq * s.D, s.Hkv * s.D, s.Hkv * s.D)
    table = weights.embedding
    plain = table if isinstance(table, Tensor) else table.dequantised(weights.torch_dtype)
    found: dict[str, Any] = {"model.embed_tokens.weight": plain, "model.norm.weight": weights.norm}
    found |= {} if tied else {"lm_head.weight": weights.head}
    for i, layer in enumerate(weights.layers):
        q, k, v = layer.qkv.split(sizes)
        after = "pre_feedforward_layernorm" if s.sandwich else "post_attention_layernorm"
        named = {
            "input_layernorm": layer.attn_norm,
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.q_norm": layer.q_norm,
            "self_attn.k_norm": layer.k_norm,
            "self_attn.o_proj": layer.o,
            after: layer.mlp_norm,
            "mlp.gate_proj": layer.gate,
            "mlp.up_proj": layer.up,
            "mlp.down_proj": layer.down,
        }
        if s.sandwich:
            named |= {
                "post_attention_layernorm": layer.attn_post_norm,
                "post_feedforward_layernorm": layer.mlp_post_norm,
            }
        found |= {f"model.layers.{i}.{name}.weight": t for name, t in named.items() if t is not None}
    return {name: _torchao(t) if isinstance(t, Weight) else t for name, t in found.items()}


def _torchao(w: Weight) -> Tensor:
    """Return codes as torchao's tensor for a CPU, whose product is PyTorch's `_weight_int4pack_mm_for_cpu`."""
    from torchao.prototype.quantization.int4.int4_opaque_tensor import Int4OpaqueTensor
    from torchao.quantization.utils import pack_tinygemm_scales_and_zeros

    codes = (CODES[w.format.code].numbers(w.codes)[:, : w.shape[1]] + 8).int().contiguous()
    packed = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales = pack_tinygemm_scales_and_zeros(w.scales, torch.zeros_like(w.scales), w.scales.dtype)
    made: Tensor = Int4OpaqueTensor(packed, scales, [1, w.format.group], w.shape)
    return made


def _materialise_buffers(model: Any) -> None:
    """Recompute the buffers left on meta: rope's frequencies and Gemma's embedding scale are not parameters."""
    for name, module in model.named_modules():
        if any(b.is_meta for b in module.buffers(recurse=False)):
            fresh = type(module)(*_made_of(name, module, model.config))
            for key, value in fresh.named_buffers(recurse=False):
                module.register_buffer(key, value, persistent=False)


def _made_of(name: str, module: Any, config: Any) -> tuple[Any, ...]:
    if name.endswith("rotary_emb"):
        return (config,)
    assert name.endswith("embed_tokens"), f"{name} has an unknown buffer"
    return (2, 2, None, module.scalar_embed_scale)
