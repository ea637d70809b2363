"""Define known models by name. Every figure is from the publisher's config.json, which is named next to it."""

from __future__ import annotations

from collections.abc import Mapping

from autosel.models.shape import LayerType, ModelShape, Rope


def _all_full(layers: int) -> tuple[LayerType, ...]:
    one: tuple[LayerType, ...] = ("full",)
    return one * layers


def _llama(name: str, layers: int, d: int, heads: tuple[int, int], i: int, *, factor: float, tied: bool) -> ModelShape:
    """meta-llama/Llama-3.x: 8 KV heads, vocabulary 128256, rope theta 500000 stretched from 8192 to 131072 tokens.

    `heads` = (query heads, head dimension).
    """
    hq, head = heads
    return ModelShape(
        name=name,
        family="llama",
        layers=layers,
        d=d,
        Hq=hq,
        Hkv=8,
        D=head,
        I=i,
        V=128256,
        dtype="bf16",
        activation="silu",
        rope=Rope(
            theta=500000.0,
            rotary_dim=head,
            kind="llama3",
            factor=factor,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_context=8192,
        ),
        layer_types=_all_full(layers),
        rms_eps=1e-5,
        tied=tied,
        max_context=131072,
    )


def _qwen3(name: str, layers: int, d: int, hq: int, i: int, *, tied: bool) -> ModelShape:
    """Qwen/Qwen3-*: heads of 128 regardless of hidden size / heads, 8 KV heads, normalised queries and keys."""
    return ModelShape(
        name=name,
        family="qwen3",
        layers=layers,
        d=d,
        Hq=hq,
        Hkv=8,
        D=128,
        I=i,
        V=151936,
        dtype="bf16",
        activation="silu",
        rope=Rope(theta=1e6, rotary_dim=128),
        layer_types=_all_full(layers),
        rms_eps=1e-6,
        tied=tied,
        max_context=40960,
        qk_norm=True,
    )


def every_sixth_full(layers: int, pattern: int = 6) -> tuple[LayerType, ...]:
    """Gemma 3: five sliding layers, then a full one (`sliding_window_pattern`)."""
    return tuple("full" if (i + 1) % pattern == 0 else "sliding" for i in range(layers))


def _gemma3(
    name: str, layers: int, d: int, heads: tuple[int, int], i: int, *, v: int, window: int, factor: float, context: int
) -> ModelShape:
    """google/gemma-3-*: heads of 256, norms around each part of a block, their weights stored minus one.

    `heads` = (query heads, KV heads).
    """
    hq, hkv = heads
    return ModelShape(
        name=name,
        family="gemma3",
        layers=layers,
        d=d,
        Hq=hq,
        Hkv=hkv,
        D=256,
        I=i,
        V=v,
        dtype="bf16",
        activation="gelu_tanh",
        rope=Rope(theta=1e6, rotary_dim=256, kind="linear" if factor != 1.0 else "default", factor=factor),
        rope_local=Rope(theta=10000.0, rotary_dim=256),
        layer_types=every_sixth_full(layers),
        window=window,
        rms_eps=1e-6,
        tied=True,
        max_context=context,
        norm_offset=1.0,
        qk_norm=True,
        sandwich=True,
        attn_scale=256**-0.5,  # query_pre_attn_scalar
        embedding_scale=d**0.5,
    )


_MISTRAL_7B = ModelShape(  # mistralai/Mistral-7B-v0.3: no sliding window (v0.1 had one of 4096)
    name="mistral-7b",
    family="mistral",
    layers=32,
    d=4096,
    Hq=32,
    Hkv=8,
    D=128,
    I=14336,
    V=32768,
    dtype="bf16",
    activation="silu",
    rope=Rope(theta=1e6, rotary_dim=128),
    layer_types=_all_full(32),
    rms_eps=1e-5,
    tied=False,
    max_context=32768,
)

_SMOLLM2_135M = ModelShape(  # HuggingFaceTB/SmolLM2-135M
    name="smollm2-135m",
    family="llama",
    layers=30,
    d=576,
    Hq=9,
    Hkv=3,
    D=64,
    I=1536,
    V=49152,
    dtype="bf16",
    activation="silu",
    rope=Rope(theta=100000.0, rotary_dim=64),
    layer_types=_all_full(30),
    rms_eps=1e-5,
    tied=True,
    max_context=8192,
)

PRESETS: Mapping[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _llama("llama-1b", 16, 2048, (32, 64), 8192, factor=32.0, tied=True),  # Llama-3.2-1B
        _llama("llama-3b", 28, 3072, (24, 128), 8192, factor=32.0, tied=True),  # Llama-3.2-3B
        _llama("llama-8b", 32, 4096, (32, 128), 14336, factor=8.0, tied=False),  # Llama-3.1-8B
        _llama("llama-70b", 80, 8192, (64, 128), 28672, factor=8.0, tied=False),  # Llama-3.1-70B
        _qwen3("qwen3-0.6b", 28, 1024, 16, 3072, tied=True),
        _qwen3("qwen3-1.7b", 28, 2048, 16, 6144, tied=True),
        _qwen3("qwen3-4b", 36, 2560, 32, 9728, tied=True),
        _qwen3("qwen3-8b", 36, 4096, 32, 12288, tied=False),
        _gemma3("gemma3-270m", 18, 640, (4, 1), 2048, v=262144, window=512, factor=1.0, context=32768),
        _gemma3("gemma3-1b", 26, 1152, (4, 1), 6912, v=262144, window=512, factor=1.0, context=32768),
        _gemma3("gemma3-4b", 34, 2560, (8, 4), 10240, v=262208, window=1024, factor=8.0, context=131072),
        _MISTRAL_7B,
        _SMOLLM2_135M,
    )
}
