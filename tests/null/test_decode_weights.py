"""Test complete and broken checkpoint folders: they are read or refused, and never read in part."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autosel import models
from autosel.decode import weights as loading
from autosel.decode.prompt import prompts
from autosel.decode.run import Plan, PromptDigest
from autosel.decode.safetensors import open_folder, read_header
from autosel.decode.weights import Weights, load_weights
from autosel.devices.cpu import machine
from autosel.errors import AutoselError, BadConfig, UsageError

D, HEADS, KV, I, V = 8, 2, 1, 12, 11
CODE = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int8: "I8"}
QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": D,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": 4,
    "intermediate_size": I,
    "vocab_size": V,
    "max_position_embeddings": 256,
}


def tensors() -> dict[str, Tensor]:
    """Return the tensors of a Qwen3 of two layers, by Hugging Face's names."""
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    shapes["lm_head.weight"] = (V, D)
    for i in range(2):
        parts = {
            "input_layernorm": (D,),
            "post_attention_layernorm": (D,),
            "self_attn.q_proj": (HEADS * 4, D),
            "self_attn.k_proj": (KV * 4, D),
            "self_attn.v_proj": (KV * 4, D),
            "self_attn.q_norm": (4,),
            "self_attn.k_norm": (4,),
            "self_attn.o_proj": (D, HEADS * 4),
            "mlp.gate_proj": (I, D),
            "mlp.up_proj": (I, D),
            "mlp.down_proj": (D, I),
        }
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in parts.items()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def packed(found: dict[str, Tensor], change: Callable[[dict[str, Any]], None] = lambda header: None) -> bytes:
    """Return a safetensors file, written by the format's description."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in found.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": CODE[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def checkpoint(folder: Path, found: dict[str, Tensor] | None = None, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN | config))
    (folder / "model.safetensors").write_bytes(packed(tensors() if found is None else found))
    return folder


def loaded(folder: Path, **changes: Any) -> Weights:
    return load_weights(Plan(model=models.load(folder), weights=str(folder), **({"dtype": "fp32"} | changes)))


# --- complete --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_a_checkpoint_is_read_bit_for_bit_or_rounded_once(tmp_path: Path, stored: torch.dtype) -> None:
    found = {name: t.to(stored) for name, t in tensors().items()}
    weights = loaded(checkpoint(tmp_path, found), dtype="bf16")
    layer, at = weights.layers[1], "model.layers.1."
    parts = [found[f"{at}self_attn.{p}_proj.weight"] for p in "qkv"]
    assert torch.equal(layer.qkv, torch.cat(parts).bfloat16())
    assert torch.equal(layer.down, found[f"{at}mlp.down_proj.weight"].bfloat16())
    assert layer.q_norm is not None
    assert torch.equal(layer.q_norm, found[f"{at}self_attn.q_norm.weight"].bfloat16())
    assert torch.equal(weights.head, found["lm_head.weight"].bfloat16())
    assert weights.bytes == sum(t.numel() for t in found.values()) * 2


def test_large_tensors_are_converted_a_part_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autosel.decode.safetensors.CHUNK", 20)
    found = {name: t.half() for name, t in tensors().items()}
    assert torch.equal(loaded(checkpoint(tmp_path, found)).embedding, found["model.embed_tokens.weight"].float())


def test_shards_are_found_through_their_index(tmp_path: Path) -> None:
    found = tensors()
    names = sorted(found)
    checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    shards = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for file, held in shards.items():
        (tmp_path / file).write_bytes(packed({n: found[n] for n in held}))
    index = {"weight_map": {n: file for file, held in shards.items() for n in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(loaded(tmp_path).layers[0].o, found["model.layers.0.self_attn.o_proj.weight"])

    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(BadConfig, match=r"lacks model-2\.safetensors"):
        loaded(tmp_path)
    index["weight_map"][names[0]] = "../model-1.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadConfig, match="in the folder of its index"):
        loaded(tmp_path)


def test_a_tied_head_is_the_embedding_even_if_a_copy_is_stored(tmp_path: Path) -> None:
    weights = loaded(checkpoint(tmp_path, tie_word_embeddings=True))
    assert weights.head is weights.embedding


def test_fewer_layers_are_read_where_fewer_run(tmp_path: Path) -> None:
    weights = loaded(checkpoint(tmp_path), layers=1)
    assert len(weights.layers) == 1
    assert weights.shape.layers == 1


@pytest.mark.parametrize(("base", "top"), [("model.language_model.", ""), ("language_model.model.", "language_model.")])
def test_the_text_part_of_a_larger_model_is_found(tmp_path: Path, base: str, top: str) -> None:
    found = {
        name.replace("model.", base, 1) if name.startswith("model.") else top + name: t for name, t in tensors().items()
    }
    found["vision_tower.patch.weight"] = torch.zeros(3)
    assert loaded(checkpoint(tmp_path, found)).shape.layers == 2


def test_random_weights_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    shape = models.load(checkpoint(tmp_path))
    one, same, other = (load_weights(Plan(model=shape, dtype="fp32", seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(one.layers[1].gate, same.layers[1].gate)
    assert not torch.equal(one.layers[1].gate, other.layers[1].gate)
    assert not torch.equal(one.layers[1].gate, one.layers[1].up)


# --- broken ----------------------------------------------------------------------------------------------------------


def test_tensors_that_are_missing_superfluous_or_of_another_shape_are_named(tmp_path: Path) -> None:
    def refused(match: str, change: Callable[[dict[str, Tensor]], object], **config: Any) -> None:
        found = tensors()
        change(found)
        with pytest.raises(BadConfig, match=match):
            loaded(checkpoint(tmp_path, found, **config))

    refused("lacks lm_head.weight", lambda f: f.pop("lm_head.weight"))
    refused("lacks model.layers.1.mlp", lambda f: f.pop("model.layers.1.mlp.up_proj.weight"))
    refused("has no embed_tokens", lambda f: f.pop("model.embed_tokens.weight"))
    refused("q_proj.bias", lambda f: f.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(8)}))
    refused("layers.2", lambda f: f.update({"model.layers.2.input_layernorm.weight": torch.zeros(8)}))
    refused(r"\[9\], config.json says \[8\]", lambda f: f.update({"model.norm.weight": torch.zeros(9)}))
    refused("vocabulary is 11 .* 13 by config", lambda f: None, vocab_size=13)
    refused("is quantised", lambda f: f.update({"model.layers.0.mlp.up_proj.weight_scale": torch.zeros(1)}))
    refused("is I8", lambda f: f.update({"model.norm.weight": torch.zeros(8, dtype=torch.int8)}))
    refused("no tensors", lambda f: f.clear())


def test_other_formats_are_distinguished(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"has no model\.safetensors"):
        open_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(BadConfig, match="pickle"):
        open_folder(tmp_path)


def lying(change: Callable[[dict[str, Any]], object]) -> bytes:
    return packed({"a": torch.ones(2, 3), "b": torch.ones(4)}, change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "claims 0 bytes in a file of 0"),
        (b"\x10\0\0", "claims"),
        (struct.pack("<Q", 1 << 40) + b"{}", "claims"),
        (struct.pack("<Q", 2) + b"[]", "not an object"),
        (struct.pack("<Q", 7) + b'{"a":1}', "does not have exactly dtype"),
        (struct.pack("<Q", 14) + b'{"a":1,"a":2} ', "twice"),
        (struct.pack("<Q", 4) + b"\xff\xfe{}", "not a complete safetensors file"),
        (lying(lambda h: h["a"].update(shape=[2, 4])), "takes 32 bytes, its offsets span 24"),
        (lying(lambda h: h["a"].update(shape=[-2, -3])), "has shape"),
        (lying(lambda h: h["a"].update(shape=[True, 6])), "has shape"),
        (lying(lambda h: h["a"].update(dtype="F31")), "unknown dtype"),
        (lying(lambda h: h["b"].update(data_offsets=[8, 24])), "overlaps"),
        (lying(lambda h: h["b"].update(data_offsets=[32, 48])), "gap"),
        (lying(lambda h: h.pop("b")), "the tensors end at byte"),
        (lying(lambda h: None)[:-1], "the tensors end at byte"),
        (lying(lambda h: None) + b"x", "the tensors end at byte"),
    ],
)
def test_a_malformed_header_is_refused(tmp_path: Path, data: bytes, match: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(BadConfig, match=match):
        read_header(path)


@given(st.data())
def test_a_damaged_file_is_refused_without_a_crash(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = packed({"a": torch.ones(2, 3), "b": torch.ones(4)})
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    at = data.draw(st.integers(0, max(0, len(cut) - 1)))
    damaged = cut[:at] + data.draw(st.binary(max_size=4)) + cut[at + 1 :]
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(damaged)
    try:
        entries = read_header(path)
    except AutoselError:
        return
    assert all(e.start + e.size <= len(damaged) for e in entries.values())


def test_a_file_cut_short_after_it_was_opened_is_an_error(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    opened = open_folder(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-600])
    last, entry = max(opened.entries.items(), key=lambda item: item[1].start)
    with pytest.raises(BadConfig, match="truncated"):
        opened.read_into(last, torch.empty(entry.shape))


def test_a_model_that_does_not_fit_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(tmp_path)
    monkeypatch.setattr(machine, "free_memory", lambda: 1 << 20)
    monkeypatch.setattr(loading.PageArena, "__init__", lambda *_: pytest.fail("memory was taken"))
    with pytest.raises(UsageError, match="GiB are free"):
        loaded(folder)


# --- prompts ---------------------------------------------------------------------------------------------------------


def plan(tmp_path: Path, **changes: Any) -> Plan:
    return Plan(model=models.load(checkpoint(tmp_path / "model")), **({"dtype": "fp32"} | changes))


def test_a_prompt_is_drawn_or_read(tmp_path: Path) -> None:
    drawn = prompts(plan(tmp_path, batch=2, seq=6)).rows
    assert [len(row) for row in drawn] == [5, 5]
    assert drawn[0] != drawn[1]
    path = tmp_path / "prompt.json"
    path.write_text("[1, 2, 3, 4, 5]")
    assert prompts(plan(tmp_path, prompt=str(path), seq=4, batch=2)).rows == [[1, 2, 3], [1, 2, 3]]
    path.write_text("[[1, 2, 3], [4, 5, 6, 7]]")
    assert prompts(plan(tmp_path, prompt=str(path), seq=4, batch=3)).rows == [[1, 2, 3], [4, 5, 6], [1, 2, 3]]


def test_a_prompt_is_identified_by_sha256_of_its_tokens_and_its_file(tmp_path: Path) -> None:
    def digest(text: str, **changes: Any) -> PromptDigest | None:
        (tmp_path / "prompt.json").write_bytes(text.encode())
        return prompts(plan(tmp_path, **{"prompt": str(tmp_path / "prompt.json"), "seq": 4, **changes})).digest

    plain = digest("[1, 2, 3, 4]")
    assert plain is not None
    assert plain.tokens_sha256 == sha256(b"[[1,2,3]]").hexdigest()
    assert plain.file_sha256 == sha256(b"[1, 2, 3, 4]").hexdigest()
    spelt = digest("[1,\r\n2, 3, 4]")  # the same tokens in another file
    assert spelt is not None and spelt.tokens_sha256 == plain.tokens_sha256
    assert spelt.file_sha256 == sha256(b"[1,\r\n2, 3, 4]").hexdigest()
    tokens = {plain.tokens_sha256}
    for other in (digest("[1, 2, 4, 4]"), digest("[1, 2, 3, 4]", seq=5), digest("[1, 2, 3, 4]", batch=2)):
        assert other is not None and other.tokens_sha256 not in tokens
        tokens.add(other.tokens_sha256)


def test_a_drawn_prompt_has_no_file_and_one_that_is_not_run_no_digest(tmp_path: Path) -> None:
    drawn, again, other = (prompts(plan(tmp_path, seq=9, seed=seed)).digest for seed in (1, 1, 2))
    assert drawn is not None and drawn == again != other and drawn.file_sha256 == ""
    assert prompts(plan(tmp_path, seq=9, prompt="synthetic")).digest is None


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[1, 2]", "has 2 tokens; --seq 6 needs 5"),
        ("[1, 2, 3, 4, 11]", "token 11 is outside the vocabulary of 11"),
        ("[1, 2, 3, 4, -1]", "token -1"),
        ('["a"]', "no token ids"),
        ("[1.5]", "no token ids"),
        ("[[1], []]", "no token ids"),
        ("[1, 2", "not JSON"),
        ("[NaN]", "not JSON"),
        ("[[[[[1]]]]]", "not JSON"),
    ],
)
def test_a_prompt_that_no_run_can_use_is_refused(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "prompt.json"
    path.write_text(text)
    with pytest.raises(AutoselError, match=match):
        prompts(plan(tmp_path, prompt=str(path), seq=6))


def test_words_need_the_tokenizer_of_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("four words of prompt")
    with pytest.raises(UsageError, match="tokenizer"):
        prompts(plan(tmp_path, prompt=str(path), seq=4))
    with pytest.raises(BadConfig, match="cannot read"):
        prompts(plan(tmp_path, prompt=str(tmp_path / "nowhere.txt"), seq=4))


@pytest.mark.parametrize(
    "changes",
    [
        {"seq": 257},
        {"seq": 250, "iters": 10, "advance": True},
        {"iters": 0},
        {"batch": 0},
        {"seq": 1},
        {"layers": 3},
        {"warmup": -1},
        {"dtype": "fp8_e4m3"},
        {"batch": True},
    ],
)
def test_a_plan_that_cannot_be_run_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        plan(tmp_path, **changes)
