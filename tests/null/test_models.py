"""Test presets, config.json in both spellings, every refusal, and the workloads of a step."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosel import models
from autosel.errors import BadConfig, UnknownName, UsageError
from autosel.formats import CACHE_FORMATS, WEIGHT_FORMATS
from autosel.models.workloads import ALIASES, ASKED_OPS, STEP_OPS, context_lengths, step
from autosel.values import Workload, length_bucket

# Parameter counts as the publishers state them (safetensors index, or the model card; Gemma 3 4B: its text part).
PUBLISHED_PARAMETERS = {
    "llama-1b": 1_235_814_400,
    "llama-3b": 3_212_749_824,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "smollm2-135m": 134_515_008,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_263_168,
    "mistral-7b": 7_248_023_552,
}

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
GEMMA_1B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}
# The published file of google/gemma-3-4b-it states only what differs from its class.
GEMMA_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
}
QWEN_4B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MISTRAL_7B: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32768,
}
PUBLISHED = {
    "llama-8b": LLAMA_8B,
    "gemma3-1b": GEMMA_1B,
    "gemma3-4b": GEMMA_4B,
    "qwen3-4b": QWEN_4B,
    "mistral-7b": MISTRAL_7B,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "checkpoint"
    made.mkdir()
    return made


def write(folder: Path, config: Any) -> Path:
    path = folder / "config.json"
    path.write_bytes(config if isinstance(config, bytes) else json.dumps(config).encode())
    return path


def renamed(shape: models.ModelShape, name: str) -> models.ModelShape:
    return dataclasses.replace(shape, name=name)


# --- presets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", models.PRESETS)
def test_a_preset_has_exactly_the_published_number_of_parameters(name: str) -> None:
    assert models.load(name).parameters == PUBLISHED_PARAMETERS[name]


def test_bytes_of_a_step_agree_with_the_published_roofline_table() -> None:
    # research: W + K in GB at 8192 tokens, bf16
    for name, weights, cache in (("llama-8b", 15.01, 1.07), ("llama-1b", 2.47, 0.27), ("qwen3-1.7b", 3.44, 0.94)):
        shape = models.load(name)
        assert shape.weight_bytes_per_step() / 1e9 == pytest.approx(weights, abs=0.005)
        assert shape.kv_bytes_read(8192) / 1e9 == pytest.approx(cache, abs=0.005)
    gemma = models.load("gemma3-1b")
    assert gemma.weight_bytes_per_step() / 1e9 == pytest.approx(2.00, abs=0.005)
    assert gemma.kv_bytes_read(1024) / 1e9 == pytest.approx(0.02, abs=0.005)
    assert gemma.kv_bytes_read(8192) / 1e9 == pytest.approx(0.04, abs=0.006)
    assert (gemma.full_layers, gemma.sliding_layers) == (4, 22)


def test_weights_and_cache_shrink_with_the_dtype() -> None:
    shape = models.load("llama-8b")
    assert shape.weight_bytes("fp32") == 2 * shape.weight_bytes() == 4 * shape.parameters
    assert shape.kv_bytes_per_token("fp8_e4m3") * 2 == shape.kv_bytes_per_token() == 131072


def test_llama3_rope_stretches_long_waves_keeps_short_ones_and_is_monotonic() -> None:
    rope = models.load("llama-8b").rope
    stretched = rope.inverse_frequencies()
    plain = models.Rope(theta=rope.theta, rotary_dim=128).inverse_frequencies()
    assert stretched[0] == plain[0] == 1.0
    assert stretched[-1] == pytest.approx(plain[-1] / 8)
    assert all(a > b for a, b in itertools.pairwise(stretched))
    blended = [i for i in range(64) if plain[i] / 8 < stretched[i] * (1 - 1e-12) and stretched[i] < plain[i]]
    # between 8192/4 and 8192/1 positions a turn
    assert all(2048 < 2 * math.pi / plain[i] < 8192 for i in blended)
    assert blended


def test_a_linear_rope_divides_every_frequency() -> None:
    rope = models.load("gemma3-4b").rope
    plain = models.Rope(theta=rope.theta, rotary_dim=256).inverse_frequencies()
    assert rope.inverse_frequencies() == tuple(f / 8 for f in plain)


def test_a_rope_that_rescales_attention_is_refused_when_decoded_not_when_tuned(folder: Path) -> None:
    write(folder, {**QWEN_4B, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    shape = models.load(folder)
    assert models.workloads(shape) == models.workloads(models.load("qwen3-4b"))
    with pytest.raises(BadConfig, match="yarn"):
        shape.rope.inverse_frequencies()


# --- config.json -----------------------------------------------------------------------------------------------------


def respelled(old: dict[str, Any]) -> dict[str, Any]:
    """Spell fields as transformers 5 does: dtype, rope_parameters (by layer type for Gemma 3), layer_types."""
    new = {k: respelled(v) if k == "text_config" else v for k, v in old.items()}
    if "torch_dtype" in new:
        new["dtype"] = new.pop("torch_dtype")
    gemma = str(new.get("model_type")).startswith("gemma3")
    if new.get("text_config"):
        return new
    scaling = new.pop("rope_scaling", None) or {"rope_type": "default"}
    full = {**scaling, "rope_theta": new.pop("rope_theta", 1e6)}
    new["rope_parameters"] = full
    if gemma:
        local = {"rope_type": "default", "rope_theta": new.pop("rope_local_base_freq", 10000)}
        new["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
        new["_sliding_window_pattern"] = new.pop("sliding_window_pattern", 6)
        layers = new["num_hidden_layers"]
        new["layer_types"] = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(layers)]
    return new


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("spelling", [dict, respelled])
def test_a_published_config_is_the_preset_in_either_spelling(folder: Path, name: str, spelling: Any) -> None:
    write(folder, spelling(PUBLISHED[name]))
    assert renamed(models.load(folder), name) == models.load(name)


def test_a_checkpoint_is_named_after_its_folder_and_a_hub_snapshot_after_its_model(tmp_path: Path) -> None:
    plain = tmp_path / "my-llama"
    hub = tmp_path / "models--meta-llama--Llama-3.1-8B" / "snapshots" / "abc123"
    for made in (plain, hub):
        made.mkdir(parents=True)
        write(made, LLAMA_8B)
    assert models.load(plain).name == "my-llama"
    assert models.load(hub).name == "Llama-3.1-8B"
    assert models.load(str(hub / "config.json")).name == "Llama-3.1-8B"


def test_head_dim_falls_back_to_hidden_size_over_heads(folder: Path) -> None:
    write(folder, {**LLAMA_8B, "head_dim": None})
    assert models.load(folder).D == 128
    write(folder, {**LLAMA_8B, "head_dim": 64})
    assert models.load(folder).D == 64


def test_kv_heads_of_a_first_generation_llama_are_its_query_heads(folder: Path) -> None:
    config = {k: v for k, v in LLAMA_8B.items() if k not in ("num_key_value_heads", "rope_scaling", "rope_theta")}
    write(folder, config)
    shape = models.load(folder)
    assert shape.Hkv == 32
    assert shape.rope == models.Rope(theta=10000.0, rotary_dim=128)


def test_mistral_slides_by_its_class_default_unless_null_forbids_it(folder: Path) -> None:
    write(folder, {**MISTRAL_7B, "sliding_window": 4096})
    assert (models.load(folder).window, models.load(folder).sliding_layers) == (4096, 32)
    write(folder, {k: v for k, v in MISTRAL_7B.items() if k != "sliding_window"})
    assert models.load(folder).window == 4096
    write(folder, MISTRAL_7B)
    assert models.load(folder).window == 0


def test_qwen_slides_above_max_window_layers(folder: Path) -> None:
    write(folder, {**QWEN_4B, "use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 30})
    shape = models.load(folder)
    assert shape.layer_types == ("full",) * 30 + ("sliding",) * 6
    assert shape.window == 1024


def test_dtype_defaults_to_bf16_and_is_otherwise_obeyed(folder: Path) -> None:
    without = {k: v for k, v in LLAMA_8B.items() if k != "torch_dtype"}
    for given_dtype, expected in (({}, "bf16"), ({"dtype": None}, "bf16"), ({"dtype": "float32"}, "fp32")):
        write(folder, {**without, **given_dtype})
        assert models.load(folder).dtype == expected


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "quantised": ({"quantization_config": {"quant_method": "hqq", "bits": 4}}, "quantization_config hqq"),
    "mixture of experts": ({"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128}, "mixture-of-experts"),
    "mixtral": ({"architectures": ["MixtralForCausalLM"]}, "mixture-of-experts"),
    "experts under a dense name": ({"num_local_experts": 8}, "num_local_experts = 8"),
    "another architecture": ({"architectures": ["BertModel"]}, "BertModel is not supported"),
    "architectures no list": ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'"),
    "no architecture": ({"architectures": None, "model_type": None}, "names no architectures and no model_type"),
    "missing size": ({"hidden_size": None}, "hidden_size"),
    "missing vocabulary": ({"vocab_size": None}, "vocab_size"),
    "size as text": ({"hidden_size": "4096"}, "hidden_size = '4096'"),
    "size as float": ({"hidden_size": 4096.5}, "hidden_size = 4096.5"),
    "size as true": ({"num_hidden_layers": True}, "num_hidden_layers = True"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
    "negative": ({"intermediate_size": -1}, "intermediate_size = -1"),
    "absurd": ({"hidden_size": 10**12}, "hidden_size = 1000000000000"),
    "absurd together": (
        {"num_hidden_layers": 1024, "hidden_size": 1 << 17, "intermediate_size": 1 << 20},
        "parameters",
    ),
    "heads do not divide": ({"num_key_value_heads": 5}, "num_key_value_heads = 5"),
    "heads do not divide d": ({"num_attention_heads": 24, "num_key_value_heads": 8}, "num_attention_heads = 24"),
    "odd head": ({"head_dim": 127}, "head_dim = 127"),
    "bias": ({"attention_bias": True}, "attention_bias = True"),
    "bias of another type": ({"attention_bias": "yes"}, "attention_bias = 'yes'"),
    "unknown activation": ({"hidden_act": "relu"}, "hidden_act = 'relu'"),
    "unknown dtype": ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype = 'float8_e4m3fn'"),
    "two dtypes": ({"dtype": "float16"}, "torch_dtype = 'bfloat16' says another"),
    "dtype a number": ({"torch_dtype": 16}, "torch_dtype = 16"),
    "eps zero": ({"rms_norm_eps": 0.0}, "rms_norm_eps = 0.0"),
    "eps huge": ({"rms_norm_eps": 1e300}, "rms_norm_eps = 1e"),
    "theta negative": ({"rope_theta": -1.0}, "rope_theta = -1.0"),
    "rope no object": ({"rope_scaling": [8]}, "rope_scaling = [8]"),
    "rope of unknown type": ({"rope_scaling": {"rope_type": "spiral"}}, "rope_type = 'spiral'"),
    "old rope of unknown type": ({"rope_scaling": {"type": ["a"]}}, "type = ['a']"),
    "llama3 rope without factor": ({"rope_scaling": {"rope_type": "llama3"}}, "factor"),
    "partial rope odd": ({"partial_rotary_factor": 0.01}, "partial_rotary_factor = 0.01"),
    "layer types short": ({"layer_types": ["full_attention"]}, "it has 1 entries"),
    "layer types unknown": ({"layer_types": ["linear_attention"] * 32}, "layer_types"),
    "layer types odd": ({"layer_types": [["full_attention"]] * 32}, "layer_types"),
    "sliding without window": ({"layer_types": ["sliding_attention"] * 32}, "sliding_window"),
    "rope by layer, one missing": ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "sliding_attention"),
    "text_config no object": ({"text_config": 3}, "text_config is 3"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_config_that_cannot_be_right_is_refused_by_file_field_and_value(folder: Path, what: str) -> None:
    change, message = REFUSED[what]
    path = write(folder, {**LLAMA_8B, **change})
    with pytest.raises(BadConfig) as caught:
        models.load(folder)
    assert message in str(caught.value)
    assert str(path) in caught.value.what
    assert caught.value.why
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"[]", b"null", b'{"a": 1, "a": 2}', b'{"hidden_size": NaN}', b"{" + b'"a":{' * 90000, b"\x00",
        b'"' * 3, b"\xff\xfe\x00{",
    ],
    ids=["empty", "cut", "list", "null", "twice", "nan", "deep", "nul", "quotes", "no text"],
)  # fmt: skip
def test_an_invalid_json_object_is_refused_with_the_file_named(folder: Path, text: bytes) -> None:
    path = write(folder, text)
    with pytest.raises(BadConfig, match=r"not JSON|an object") as caught:
        models.load(folder)
    assert str(path) in str(caught.value)


def test_a_weights_file_given_as_a_config_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    with path.open("wb") as file:
        file.truncate(1 << 33)  # sparse: takes no disk
    with pytest.raises(BadConfig, match="8589934592 bytes"):
        models.load(path)


def test_a_wrong_name_suggests_the_right_one() -> None:
    with pytest.raises(UnknownName, match="did you mean llama-8b"):
        models.load("llama8b")


def test_a_hub_name_is_refused_because_models_are_not_downloaded() -> None:
    with pytest.raises(BadConfig, match=r"hf download meta-llama/Llama-3\.1-8B"):
        models.load("meta-llama/Llama-3.1-8B")


def test_a_missing_path_and_a_folder_without_config_are_reported(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="no such checkpoint"):
        models.load(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadConfig, match=r"has no config.json\nit holds tokenizer.json"):
        models.load(tmp_path)


@pytest.mark.parametrize("name", ["x/" * 5000, "~nobody_of_that_name/model", "\0", "/proc/1/root/model", ""])
def test_a_path_no_system_would_open_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        models.load(name)


def test_a_preset_name_selects_the_preset_and_a_path_selects_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llama-8b").mkdir()
    write(tmp_path / "llama-8b", {**LLAMA_8B, "rms_norm_eps": 1e-6})
    monkeypatch.chdir(tmp_path)
    assert models.load("llama-8b").rms_eps == 1e-5
    assert models.load("./llama-8b").rms_eps == 1e-6


@pytest.mark.parametrize("name", ["llama-8b", "Llama-8B"])
def test_a_checkpoint_with_the_name_of_a_preset_of_other_sizes_is_refused(tmp_path: Path, name: str) -> None:
    """Refuse it, because a certificate names its model: two layers with that name would pass for the known model."""
    (tmp_path / name).mkdir()
    write(tmp_path / name, {**LLAMA_8B, "num_hidden_layers": 2})
    for path in (tmp_path / name, tmp_path / name / "config.json"):
        with pytest.raises(BadConfig, match="has the name of the preset llama-8b") as refused:
            models.load(path)
        assert "layers is 2; the preset's is 32" in refused.value.why


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted({*LLAMA_8B, *GEMMA_1B, *GEMMA_4B, "layer_types", "rope_parameters", "dtype", "quantization_config"})


@given(
    base=st.sampled_from([LLAMA_8B, GEMMA_1B, GEMMA_4B, QWEN_4B, MISTRAL_7B]),
    changes=st.dictionaries(st.sampled_from(FIELDS), json_values, min_size=1, max_size=3),
)
def test_any_value_of_any_field_gives_a_shape_or_a_refusal(
    tmp_path_factory: pytest.TempPathFactory, base: dict[str, Any], changes: dict[str, Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.json"
    path.write_text(json.dumps({**base, **changes}))
    try:
        shape = models.load(path)
    except BadConfig:
        return
    assert models.step(shape)
    assert shape.weight_bytes() > 0


# --- workloads -------------------------------------------------------------------------------------------------------


def keys(name: str, **options: Any) -> list[str]:
    return [w.key for w in models.workloads(models.load(name), **options)]


def test_llama_8b_lists_the_step_and_its_parts_in_order() -> None:
    assert keys("llama-8b") == [
        "rmsnorm/M1.d4096/bf16",
        "norm_qkv/M1.d4096.N6144/bf16",
        "linear/M1.N6144.K4096/bf16",
        "rope/M1.Hq32.Hkv8.D128.R128/bf16",
        "kv_append/B1.Hkv8.S1.D128/bf16",
        *(f"attn/B1.Hq32.Hkv8.S1.D128.L{n}/bf16" for n in (128, 256, 512, 1024, 2048, 4096, 8192)),
        "linear/M1.N4096.K4096/bf16",
        "linear/M1.N4096.K4096/bf16.residual=True",
        "add_rmsnorm/M1.d4096/bf16",
        "gate_up/M1.d4096.I14336/bf16",
        "linear/M1.N14336.K4096/bf16",
        "swiglu/M1.I14336/bf16",
        "linear/M1.N4096.K14336/bf16",
        "linear/M1.N4096.K14336/bf16.residual=True",
        "lm_head/M1.V128256.d4096/bf16",
        "sample/B1.V128256.L8192/bf16",
    ]


def test_gemma_brings_its_traits() -> None:
    found = keys("gemma3-1b", context=2048)
    for key in (
        "rmsnorm/M1.d1152/bf16.offset=1.0",
        "rmsnorm/M4.d256/bf16.offset=1.0",
        "rmsnorm/M1.d256/bf16.offset=1.0",
        "norm_qkv/M1.d1152.N1536/bf16.offset=1.0",
        "add_rmsnorm/M1.d1152/bf16.offset=1.0.sandwich=1",
        "gate_up/M1.d1152.I6912/bf16.offset=1.0.activation=2",
        "geglu/M1.I6912/bf16.tanh=1",
    ):
        assert key in found
    assert not any("residual" in key or key.startswith("swiglu") for key in found)


def test_a_window_is_listed_only_where_it_cuts() -> None:
    step = models.step(models.load("gemma3-1b"), context=2048, ops=["attn"])
    listed = [(n.workload["L"], n.workload.trait("window", 0), n.calls_per_step) for n in step]
    assert listed == [
        (128, 0, 26),
        (256, 0, 26),
        (512, 0, 26),
        (1024, 0, 4),
        (2048, 0, 4),
        (1024, 512, 22),
        (2048, 512, 22),
    ]


def test_an_all_sliding_model_lists_no_full_attention_beyond_its_window(folder: Path) -> None:
    write(folder, {**MISTRAL_7B, "sliding_window": 4096})
    attn = models.workloads(models.load(folder), context=8192, ops=["attn"])
    assert [w.trait("window", 0) for w in attn] == [0, 0, 0, 0, 0, 0, 4096]


@given(context=st.integers(1, 1 << 20))
def test_every_context_up_to_the_requested_one_is_in_a_listed_bucket(context: int) -> None:
    lengths = context_lengths(context)
    covered = {length_bucket(n) for n in lengths}
    for used in {128, 129, 200, context // 2, context - 1, context}:
        if 128 <= used <= context:
            assert length_bucket(used) in covered
    assert lengths[-1] == context
    assert list(lengths) == sorted(set(lengths))


def test_a_short_context_is_listed_alone() -> None:
    assert context_lengths(100) == (100,)
    assert context_lengths(128) == (128,)
    assert context_lengths(129) == (128, 129)


def test_a_batch_has_ragged_lengths_and_the_names_of_one_sequence() -> None:
    step = models.step(models.load("llama-8b"), batch=4)
    assert all(n.workload.trait("ragged", False) for n in step if n.workload.op == "attn")
    assert {n.label for n in step if n.workload.op == "linear"} == {
        "linear qkv", "linear o", "linear o+res", "linear gate", "linear down", "linear down+res",
    }  # fmt: skip
    assert all(n.workload["M"] == 4 for n in step if n.workload.op == "lm_head")


def test_ops_are_filtered_by_name_and_alias() -> None:
    llama = models.load("llama-1b")
    assert {w.op for w in models.workloads(llama, ops=["gemv", "rope"])} == {"linear", "rope"}
    assert {w.op for w in models.workloads(llama, batch=2, ops=["gemm"])} == {"linear"}
    assert [w["page"] for w in models.workloads(llama, context=256, ops=["paged_attn"])] == [16, 16]
    assert [w["S"] for w in models.workloads(llama, context=300, ops=["prefill_attn"])] == [128, 300]
    with pytest.raises(UnknownName, match="did you mean attn"):
        models.workloads(llama, ops=["atn"])
    with pytest.raises(UsageError, match="use gemm"):
        models.workloads(llama, batch=2, ops=["gemv"])


def test_a_prompt_adds_its_passes_and_what_gemm_means_there() -> None:
    llama = models.load("llama-1b")
    gemms = step(llama, ops=["gemm"], prompt=2500)
    assert {n.workload["M"] for n in gemms} == {2048, 452} and all(n.label.startswith("prompt linear") for n in gemms)
    assert {n.workload["M"] for n in step(llama, ops=["gemv", "gemm"], prompt=300)} == {1, 300}
    assert [n.workload.shape_text for n in step(llama, ops=["kv_append"], prompt=2500)] == [
        "B1 Hkv8 S1 D64", "B1 Hkv8 S2048 D64", "B1 Hkv8 S452 D64"
    ]  # fmt: skip
    later = [n for n in step(llama, prompt=2500) if n.label == "prompt attn"]
    assert [n.workload.shape_text for n in later] == ["B1 Hq32 Hkv8 S2048 D64", "B1 Hq32 Hkv8 S452 D64 L2500"]
    with pytest.raises(UsageError, match="use gemv, or another --batch or --prompt"):
        step(llama, ops=["gemm"])
    with pytest.raises(UsageError, match="prompt -1"):
        step(llama, prompt=-1)


@pytest.mark.parametrize("bad", [{"batch": 0}, {"batch": True}, {"context": 0}, {"context": 1 << 40}, {"context": 1.5}])
def test_sizes_out_of_range_are_usage_errors(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        models.workloads(models.load("llama-1b"), **bad)


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_no_workload_is_listed_twice_and_each_has_a_label(name: str) -> None:
    shape = models.load(name)
    for batch in (1, 3):
        formats = [{}, *({"weight": w} for w in WEIGHT_FORMATS), *({"cache": c} for c in CACHE_FORMATS)]
        found = set()
        for format_ in formats:
            keys = [n.workload.key for n in models.step(shape, batch=batch, ops=(*STEP_OPS, *ASKED_OPS), **format_)]
            assert len(keys) == len(set(keys))
            found |= set(keys)
        assert set(models.labels(shape, batch=batch)) == found


def test_a_format_is_in_the_key_of_each_op_that_has_it_and_of_no_other() -> None:
    shape = models.load("llama-1b")
    listed = models.step(shape, weight="fp8_e4m3-row", cache="fp8_e4m3-head")
    for w in (named.workload for named in listed):
        assert w.weight_format.plain == (w.op not in ("linear", "norm_qkv", "gate_up", "lm_head")), w.key
        assert w.cache_format.plain == (w.op != "attn"), w.key
    with pytest.raises(UnknownName, match="did you mean fp8_e4m3-row"):
        models.step(shape, weight="fp8_e4m3")


def test_an_op_that_became_a_format_is_found_by_its_old_name() -> None:
    found = [w.key for w in models.workloads(models.load("llama-1b"), context=128, ops=("gemv_fp8", "attn_decode_fp8"))]
    assert {key.split("/")[0] for key in found} == {"linear", "attn"}
    assert all(key.endswith(("weight=fp8_e4m3-row", "cache=fp8_e4m3-head")) for key in found)


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_linear_weights_of_either_chain_are_those_of_the_layers(name: str) -> None:
    shape = models.load(name)
    step = models.step(shape)
    for chain in ("fused", "split"):
        streamed = sum(weight_elements(n.workload) * n.calls_per_step for n in step if n.chain in (chain, "both"))
        norms = shape.layers * (shape.d * (4 if shape.sandwich else 2) + 2 * shape.D * shape.qk_norm) + shape.d
        embedding = 0 if shape.tied else shape.V * shape.d
        assert streamed == shape.parameters - norms - embedding


def weight_elements(w: Workload) -> int:
    if w.op == "linear":
        return w["N"] * w["K"]
    if w.op == "norm_qkv":
        return w["N"] * w["d"]
    if w.op == "gate_up":
        return 2 * w["I"] * w["d"]
    return w["V"] * w["d"] if w.op == "lm_head" else 0


def test_workloads_have_the_requested_dtype() -> None:
    assert {w.dtype for w in models.workloads(models.load("llama-1b"), dtype="fp32")} == {"fp32"}


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
@pytest.mark.parametrize("batch", [1, 4])
def test_workloads_are_spelled_as_the_ops_spell_them(name: str, batch: int) -> None:
    ops = pytest.importorskip("autosel.ops").OPS
    assert {*STEP_OPS, *ASKED_OPS} <= set(ops)
    assert not set(ALIASES) & set(ops)
    for w in models.workloads(models.load(name), batch=batch, ops=(*STEP_OPS, *ASKED_OPS)):
        assert ops[w.op].workload(w.dtype, dict(w.dims), **dict(w.traits)) == w
        assert tuple(n for n, _ in w.dims) == ops[w.op].dim_names
