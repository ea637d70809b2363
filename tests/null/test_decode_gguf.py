"""The weights of a GGUF file are those of the checkpoint that it was made from, or a refusal that names the tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from autosel import models
from autosel.decode import gguf as reading
from autosel.decode.dequantise import dequantise
from autosel.decode.run import Plan
from autosel.decode.weights import Weights, load_weights, refuse_unloadable
from autosel.errors import BadConfig
from autosel.models.gguf import read_gguf
from autosel.models.shape import ModelShape
from autosel.ops.weight import Weight
from autosel.values import from_json, to_json
from tests import steps
from tests.ggufs import FORMATS, Stored, gguf, size

FAMILIES = ("llama", "qwen3", "gemma3")
# llama.cpp's names, by Hugging Face's; Gemma's second norm of a block is the norm after attention.
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def theirs(name: str, family: str) -> str:
    """Return llama.cpp's name of a tensor."""
    names = NAMES | GEMMA_NAMES if family == "gemma3" else NAMES
    base = name.removesuffix(".weight")
    if base in names:
        return f"{names[base]}.weight"
    _, _, layer, part = base.split(".", 3)
    return f"blk.{layer}.{names[part]}.weight"


def converted(name: str, tensor: Tensor, shape: ModelShape) -> Tensor:
    """Return a tensor as llama.cpp's converter stores it."""
    if name.endswith("norm.weight"):
        return tensor + shape.norm_offset
    heads = {"q": shape.Hq, "k": shape.Hkv}.get(name.removesuffix("_proj.weight")[-1]) if "_proj" in name else None
    if shape.family == "llama" and heads and "self_attn" in name:
        return tensor.reshape(heads, 2, shape.D // 2, -1).swapaxes(1, 2).reshape(tensor.shape)
    return tensor


def metadata(shape: ModelShape) -> dict[str, Any]:
    found: dict[str, Any] = {
        "block_count": shape.layers,
        "context_length": shape.max_context,
        "embedding_length": shape.d,
        "feed_forward_length": shape.I,
        "attention.head_count": shape.Hq,
        "attention.head_count_kv": shape.Hkv,
        "attention.key_length": shape.D,
        "attention.value_length": shape.D,
        "attention.layer_norm_rms_epsilon": shape.rms_eps,
        "rope.freq_base": shape.rope.theta,
    }
    found |= {"attention.sliding_window": shape.window} if shape.window else {}
    return {"general.architecture": shape.family} | {f"{shape.family}.{key}": value for key, value in found.items()}


def f32(name: str, tensor: Tensor) -> Stored:
    return Stored(name, tuple(tensor.shape), "F32", tensor.contiguous().numpy().tobytes())


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a checkpoint."""
    return steps.write_model(tmp_path / request.param, request.param)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return steps.write_model(tmp_path / "llama", "llama")


def stored(folder: Path) -> dict[str, Stored]:
    """Return the checkpoint's tensors as a converter stores them, in F32, by llama.cpp's names."""
    shape = models.load(folder)
    tensors = load_file(folder / "model.safetensors")
    found = [f32(theirs(n, shape.family), converted(n, t.float(), shape)) for n, t in tensors.items()]
    return {t.name: t for t in found}


def file_of(folder: Path, tensors: Mapping[str, Stored] | None = None, **changes: Any) -> Path:
    path = folder.with_suffix(".gguf")
    entries = {k: v for k, v in (metadata(models.load(folder)) | changes).items() if v is not None}
    path.write_bytes(gguf(entries, list((stored(folder) if tensors is None else tensors).values())))
    return path


def loaded(path: Path, **changes: Any) -> Weights:
    return load_weights(Plan(model=models.load(path), weights=str(path), **({"dtype": "fp32"} | changes)))


# --- the same model --------------------------------------------------------------------------------------------------


def test_shape_and_weights_are_those_of_the_checkpoint(folder: Path) -> None:
    path = file_of(folder)
    shape, expected = models.load(path), models.load(folder)
    same = {"name": expected.name, "dtype": expected.dtype, "rms_eps": expected.rms_eps}
    gemma = {"attn_scale": expected.attn_scale} if expected.sandwich else {}  # the file has no such entry
    assert replace(shape, **same, **gemma) == expected
    assert shape.rms_eps == pytest.approx(expected.rms_eps, rel=1e-7)
    assert shape.dtype == "bf16"
    ours, by_folder = loaded(path), loaded(folder)
    assert ours.named.keys() == by_folder.named.keys()
    for name, tensor in by_folder.named.items():
        # A norm weight of Gemma was rounded when 1 was added to it.
        near = 2**-23 if "norm" in name and expected.norm_offset else 0.0
        assert torch.allclose(ours[name], tensor, rtol=0, atol=near), name


def test_weights_in_blocks_are_rounded_once_and_the_run_says_so(llama: Path) -> None:
    tensors, name = stored(llama), "blk.0.ffn_up.weight"
    shape = tensors[name].shape
    assert shape[1] % 32 == 0
    raw = torch.randint(
        256, (math.prod(shape) // 32, 20), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    raw[:, 1] &= 0xBF
    raw[:, 3] &= 0xBF
    tensors[name] = Stored(name, shape, "Q4_1", raw.numpy().tobytes())
    path = file_of(llama, tensors)
    weights = loaded(path, dtype="bf16")
    assert torch.equal(weights.layers[0].up, dequantise("Q4_1", raw).view(shape).bfloat16())
    assert weights.note == "weights: F32, Q4_1 in llama.gguf, dequantised to bf16 when loaded"
    assert weights.note == models.weights_note(str(path), weights.shape, "bf16")
    assert models.weights_note(str(llama), weights.shape, "bf16") == ""
    assert models.weights_of(str(path)) == str(path)


def in_blocks(name: str, folder: Path) -> dict[str, Stored]:
    """Return the tensors with every matrix in random blocks of one format."""
    generator, found = torch.Generator().manual_seed(1), stored(folder)
    for n, tensor in found.items():
        if len(tensor.shape) < 2:
            continue
        blocks = math.prod(tensor.shape) // 32
        raw = torch.randint(256, (blocks, size((32,), name)), dtype=torch.uint8, generator=generator)
        raw[:, 1::2][:, : 2 if name == "Q4_1" else 1] &= 0xBF  # finite scales
        found[n] = Stored(n, tensor.shape, name, raw.numpy().tobytes())
    return found


def assert_read_as_codes(ours: Weights, wide: Weights) -> None:
    """Compare with the same matrices, dequantised to fp32."""
    for name, exact in wide.named.items():
        found = ours[name]
        assert isinstance(found, Weight) == (exact.dim() == 2), name
        if isinstance(found, Weight):
            assert torch.equal(found.exact().float(), exact), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("block", "format_"), [("Q8_0", "q8_0"), ("Q4_0", "q4_0"), ("Q4_1", "q4_1")])
def test_a_file_in_one_format_is_read_as_codes(tmp_path: Path, family: str, block: str, format_: str) -> None:
    folder = steps.write_model(tmp_path / family, family)
    path = file_of(folder, in_blocks(block, folder))
    shape = models.load(path)
    assert shape.weight == format_
    ours = loaded(path, dtype="bf16")
    wide = load_weights(Plan(model=replace(shape, weight="plain"), weights=str(path), dtype="fp32"))
    assert_read_as_codes(ours, wide)
    assert ours.note == f"weights: {block}, F32 in {family}.gguf, read as they are"
    assert wide.note.endswith("dequantised to fp32 when loaded")


# --- a mix of formats ------------------------------------------------------------------------------------------------

WIDE = replace(
    models.load("llama-1b"), name="wide", layers=3, layer_types=("full",) * 3, d=256, Hq=4, Hkv=2, D=64, I=512, V=80,
    rope=replace(models.load("llama-1b").rope, kind="default", rotary_dim=64), tied=False, max_context=512,
)  # fmt: skip
HALVES = {"Q4_K": (0, 2), "Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2)}  # bytes of a block's fp16


def mixed(path: Path, blocks: Mapping[str, str], default: str) -> Path:
    """Write a model whose tensors are random blocks, in the format of the first entry that begins their name."""
    rows = {"attn_q": (256, 256), "attn_k": (128, 256), "attn_v": (128, 256), "attn_output": (256, 256),
            "ffn_gate": (512, 256), "ffn_up": (512, 256), "ffn_down": (256, 512)}  # fmt: skip
    shapes = {"token_embd": (80, 256), "output": (80, 256)}
    shapes |= {f"blk.{i}.{name}": size for i in range(WIDE.layers) for name, size in rows.items()}
    generator = torch.Generator().manual_seed(2)
    tensors = [f32("output_norm.weight", torch.ones(256))]
    tensors += [
        f32(f"blk.{i}.{n}.weight", torch.ones(256)) for i in range(WIDE.layers) for n in ("attn_norm", "ffn_norm")
    ]
    for name, shape in shapes.items():
        kind = next((block for start, block in blocks.items() if name.startswith(start)), default)
        _, weights, count = FORMATS[kind]
        raw = torch.randint(256, (math.prod(shape) // weights, count), dtype=torch.uint8, generator=generator)
        for at in HALVES.get(kind, ()):
            raw[:, at + 1] &= 0x9F  # below 2^-7
        tensors.append(Stored(f"{name}.weight", shape, kind, raw.numpy().tobytes()))
    path.write_bytes(gguf(metadata(WIDE), tensors))
    return path


MIXES: dict[str, tuple[dict[str, str], str, dict[str, str]]] = {  # blocks, and the formats of matrices
    "Q4_K_M": (
        {"output": "Q6_K", "blk.0.attn_v": "Q6_K", "blk.0.ffn_down": "Q6_K", "blk.2.ffn_down": "Q6_K"},
        "Q4_K",
        {"head": "q6_k", "embedding": "q4_k", "0.qkv": "q6_k-m", "1.qkv": "q4_k", "0.down": "q6_k", "1.down": "q4_k"},
    ),
    "Q4_0": ({"output": "Q6_K"}, "Q4_0", {"head": "q6_k", "embedding": "q4_0", "2.qkv": "q4_0", "1.up": "q4_0"}),
    "Q4_1 with Q8_0": ({"token_embd": "Q8_0"}, "Q4_1", {"head": "q4_1", "embedding": "q8_0", "0.o": "q4_1"}),
    "joined": ({"blk.1.attn_q": "Q4_0"}, "Q8_0", {"1.qkv": "q8_0", "0.qkv": "q8_0", "head": "q8_0"}),
    "Q6_K": ({}, "Q6_K", {"1.gate": "q6_k", "head": "q6_k"}),
}


@pytest.mark.parametrize("mix", MIXES)
def test_every_matrix_of_a_mix_is_read_in_a_format_that_holds_it_exactly(tmp_path: Path, mix: str) -> None:
    blocks, default, formats = MIXES[mix]
    path = mixed(tmp_path / "wide.gguf", blocks, default)
    shape = models.load(path)
    assert {name: shape.format_of(name).name for name in formats} == formats
    ours = loaded(path, dtype="bf16")
    wide = load_weights(Plan(model=models.stored_as(shape, "plain"), weights=str(path), dtype="fp32"))
    assert_read_as_codes(ours, wide)
    assert ours.note.endswith("read as they are") and wide.note.endswith("dequantised to fp32 when loaded")
    assert sum(w.nbytes for w in ours.named.values()) == ours.bytes == shape.weight_bytes("bf16")


def test_projections_that_no_format_holds_together_are_dequantised_and_the_note_says_so(tmp_path: Path) -> None:
    path = mixed(tmp_path / "wide.gguf", {"blk.1.attn_v": "Q4_1", "blk.2.ffn_up": "Q8_0"}, "Q6_K")
    shape, ours = models.load(path), loaded(path, dtype="bf16")
    assert dict(shape.others) == {"1.qkv": "plain", "2.gate": "plain", "2.up": "plain"}
    assert all(isinstance(ours[name], Tensor) for name in ("1.qkv", "2.up")) and isinstance(ours["1.o"], Weight)
    assert ours.note.endswith("read as they are, and in part dequantised to bf16")


def test_a_mix_is_in_the_models_json_and_changes_no_other(tmp_path: Path) -> None:
    shape = models.load(mixed(tmp_path / "wide.gguf", *MIXES["Q4_K_M"][:2]))
    assert from_json(ModelShape, to_json(shape)) == shape
    assert "others" not in to_json(models.load("llama-1b"))


def test_a_scale_that_is_not_finite_is_refused_by_tensor(llama: Path) -> None:
    tensors, name = in_blocks("Q8_0", llama), "blk.0.ffn_up.weight"
    raw = bytearray(tensors[name].data)
    raw[34 * 5 + 1] = 0x7C  # fp16 infinity
    raw[34 * 5] = 0
    tensors[name] = replace(tensors[name], data=bytes(raw))
    with pytest.raises(BadConfig, match=f"{name} has a scale that is not finite"):
        loaded(file_of(llama, tensors), dtype="bf16")


def test_large_tensors_are_read_a_part_at_a_time(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "CHUNK", 100)
    assert torch.equal(loaded(file_of(llama)).embedding, loaded(llama).embedding)


# --- ropes -----------------------------------------------------------------------------------------------------------


def divided(folder: Path, factor: float, *, bent: float = 1.0) -> Path:
    """Write a file with Llama 3.1's divisors."""
    shape = models.load(folder)
    rope = replace(
        shape.rope, kind="llama3", factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192
    )
    pairs = zip(shape.rope.inverse_frequencies(), rope.inverse_frequencies(), strict=True)
    divisors = torch.tensor([plain / scaled for plain, scaled in pairs])
    divisors[1] *= bent
    return file_of(folder, stored(folder) | {"x": f32("rope_freqs.weight", divisors)})


def test_the_divisors_of_llama_3_are_understood_and_others_refused(llama: Path) -> None:
    rope = models.load(divided(llama, 32.0)).rope
    assert (rope.kind, rope.factor, rope.original_context) == ("llama3", 32.0, 8192)
    assert loaded(divided(llama, 8.0)).shape.rope.factor == 8.0
    with pytest.raises(BadConfig, match=r"rope_freqs\.weight holds \d+ divisors of a rope, up to 8"):
        models.load(divided(llama, 8.0, bent=0.9))


def test_scaled_ropes_and_sliding_layers_are_those_of_the_metadata(tmp_path: Path) -> None:
    folder = steps.write_model(tmp_path / "gemma3", "gemma3")
    scaling = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    shape = models.load(file_of(folder, **scaling, **{"gemma3.rope.freq_base_swa": 5e3}))
    assert (shape.rope.kind, shape.rope.factor) == ("linear", 8.0)
    assert shape.rope_local is not None
    assert shape.rope_local.theta == 5e3
    pattern = [True, False] * shape.layers
    types = models.load(file_of(folder, **{"gemma3.attention.sliding_window_pattern": pattern[: shape.layers]}))
    assert types.layer_types == tuple("sliding" if p else "full" for p in pattern[: shape.layers])


# --- refused ---------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": ({"general.architecture": "gpt2"}, "general.architecture = 'gpt2' is not supported"),
    "no architecture": ({"general.architecture": None}, "general.architecture = None is not supported"),
    "a part": ({"split.count": 3}, "is one of 3 parts"),
    "old blocks": ({"general.quantization_version": 1}, "general.quantization_version = 1"),
    "no layers": ({"llama.block_count": None}, "llama.block_count is missing"),
    "layers in words": ({"llama.block_count": "two"}, "llama.block_count = 'two'"),
    "head counts of layers": ({"llama.attention.head_count_kv": [1, 2]}, r"llama.attention.head_count_kv = \[1, 2\]"),
    "other heads of values": ({"llama.attention.value_length": 128}, "llama.attention.value_length = 128"),
    "a part of the head turned": ({"llama.rope.dimension_count": 2}, "llama.rope.dimension_count = 2"),
    "another width": ({"llama.embedding_length": 32}, r"llama.embedding_length = 32\n.*token_embd.weight is"),
    "another vocabulary": ({"llama.vocab_size": 9}, "llama.vocab_size = 9"),
    "experts": ({"llama.expert_count": 8}, "llama.expert_count = 8"),
    "both ways": ({"llama.attention.causal": False}, "llama.attention.causal = False"),
    "a window": ({"llama.attention.sliding_window": 8}, "llama.attention.sliding_window = 8"),
    "an unknown rope": ({"llama.rope.scaling.type": "x"}, "llama.rope.scaling.type = 'x'"),
    "eps NaN": ({"llama.attention.layer_norm_rms_epsilon": math.nan}, "rms_epsilon = nan"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_model_is_refused_with_the_entry_and_its_value(llama: Path, name: str) -> None:
    changes, match = REFUSED[name]
    path = file_of(llama, **changes)
    with pytest.raises(BadConfig, match=match) as found:
        models.load(path)
    assert "llama.gguf" in str(found.value)


def unloadable(path: Path, match: str) -> None:
    with pytest.raises(BadConfig, match=match) as found:
        refuse_unloadable(Plan(model=models.load(path), weights=str(path)))
    assert "llama.gguf" in str(found.value)


def test_a_format_or_a_tensor_that_is_not_supported_is_named_before_memory_is_taken(llama: Path) -> None:
    tensors = stored(llama)
    q5 = Stored("output.weight", (2, 256), "Q5_K", bytes(size((2, 256), "Q5_K")))
    unloadable(file_of(llama, tensors | {"output.weight": q5}), r"output\.weight is in the format Q5_K\nsupported: F32")
    one = torch.zeros(1)
    for name in ("output.bias", "position_embd.weight", "token_embd_norm.weight", "blk.x.attn_q.weight"):
        unloadable(file_of(llama, tensors | {name: f32(name, one)}), f"unexpected tensor {name}")
    for name in ("blk.0.attn_q.bias", "blk.0.attn_sinks.weight", "blk.0.input_layernorm.weight", "blk.7.ffn_up.weight"):
        unloadable(file_of(llama, tensors | {name: f32(name, one)}), "unexpected tensor model.layers")
    lacking = {n: t for n, t in tensors.items() if n != "blk.1.ffn_down.weight"}
    unloadable(file_of(llama, lacking), r"lacks model\.layers\.1\.mlp\.down_proj\.weight\n.* its metadata requires")


def test_a_tensor_of_another_shape_is_refused(llama: Path) -> None:
    tensors = stored(llama) | {"output_norm.weight": f32("output_norm.weight", torch.zeros(3))}
    with pytest.raises(BadConfig, match=r"output_norm\.weight is \[3\], \[\d+\] is expected"):
        loaded(file_of(llama, tensors))


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_scale_that_is_no_number_is_refused(llama: Path, number: float) -> None:
    tensors, name = stored(llama), "blk.0.ffn_up.weight"
    raw = torch.ones(math.prod(tensors[name].shape) // 32, FORMATS["Q8_0"][2], dtype=torch.uint8)
    raw[3, :2] = torch.tensor([number], dtype=torch.float16).view(torch.uint8)
    path = file_of(llama, tensors | {name: Stored(name, tensors[name].shape, "Q8_0", raw.numpy().tobytes())})
    with pytest.raises(BadConfig, match=rf"blk\.0\.ffn_up\.weight has the weight {number} at 96\n.*block 3 of Q8_0"):
        loaded(path)


def test_a_weight_beyond_the_dtype_is_refused(llama: Path) -> None:
    tensors = stored(llama)
    norm = f32("output_norm.weight", torch.full(tensors["output_norm.weight"].shape, 1e6))
    path = file_of(llama, tensors | {norm.name: norm})
    assert float(loaded(path).norm[0]) == 1e6
    with pytest.raises(BadConfig, match=r"output_norm\.weight has the weight 1e\+06 at 0\nit is not finite in float16"):
        loaded(path, dtype="fp16")


def test_a_file_cut_after_it_was_opened_is_refused(llama: Path) -> None:
    path = file_of(llama)
    opened = reading.open_gguf(path)
    path.write_bytes(path.read_bytes()[: max(t.start for t in read_gguf(path).tensors.values())])
    last = max(opened.entries, key=lambda name: opened.entries[name].start)
    with pytest.raises(BadConfig, match="ended while it was read"):
        opened.read_into(last, torch.empty(opened.entries[last].shape))
