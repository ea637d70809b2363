"""A checkpoint of compressed-tensors is read as codes, equal to what its own formula says, or refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from autosel import models
from autosel.decode.run import Plan
from autosel.decode.weights import Weights, load_weights
from autosel.errors import BadConfig
from autosel.ops.weight import Weight
from tests import steps


def scheme(bits: int, group: int, **changes: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False}
    weights |= {"strategy": "group", "group_size": group} if group else {"strategy": "channel", "group_size": None}
    one = {"targets": ["Linear"], "weights": weights | changes, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": one},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def packed(codes: Tensor, bits: int) -> Tensor:
    """Return int32 words with the first code in the lowest bits, each plus half the range, one by one."""
    n, k = codes.shape
    per = 32 // bits
    words = torch.zeros(n, -(-k // per), dtype=torch.int64)
    for i in range(k):
        words[:, i // per] |= (codes[:, i].long() + (1 << (bits - 1))) << (bits * (i % per))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def write(folder: Path, bits: int, group: int, **changes: Any) -> tuple[Path, dict[str, Tensor]]:
    """Write a small model with random codes; return its folder and every exact matrix in float64."""
    steps.write_model(folder, "llama")
    tensors, exact = load_file(folder / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(bits + group)
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        (n, k), base = tensors.pop(name).shape, name.removesuffix("weight")
        codes = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), (n, k), generator=generator)
        scales = torch.rand(n, -(-k // group) if group else 1, generator=generator).add(0.1).mul(0.01).bfloat16()
        tensors[base + "weight_packed"] = packed(codes, bits)
        tensors[base + "weight_scale"], tensors[base + "weight_shape"] = scales, torch.tensor([n, k])
        exact[name] = codes.double() * scales.double().repeat_interleave(group or k, 1)[:, :k]
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = scheme(bits, group) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder, exact


def loaded(folder: Path, **changes: Any) -> Weights:
    shape = models.load(folder)
    named = {k: changes.pop(k) for k in ("weight",) if k in changes}
    return load_weights(Plan(model=replace(shape, **named), weights=str(folder), **({"dtype": "bf16"} | changes)))


@pytest.mark.parametrize(
    ("bits", "group", "name"),
    [
        (4, 0, "int4-row"),
        (4, 32, "int4-g32"),
        (4, 64, "int4-g64"),
        (4, 128, "int4-g128"),
        (8, 128, "int8-g128"),
        (8, 0, "int8-row"),
    ],
)
def test_layers_are_read_as_codes_and_tables_are_plain(tmp_path: Path, bits: int, group: int, name: str) -> None:
    folder, exact = write(tmp_path / "m", bits, group)
    shape = models.load(folder)
    assert (shape.weight, shape.table, shape.stored) == (name, "plain", name)
    found = loaded(folder)
    assert isinstance(found.embedding, Tensor) and isinstance(found.head, Tensor)
    for i, layer in enumerate(found.layers):
        parts = {"mlp.up_proj": layer.up, "mlp.down_proj": layer.down, "self_attn.o_proj": layer.o}
        for theirs, matrix in parts.items():
            assert isinstance(matrix, Weight)
            assert torch.equal(matrix.exact(), exact[f"model.layers.{i}.{theirs}.weight"])
        stacked = torch.cat([exact[f"model.layers.{i}.self_attn.{p}_proj.weight"] for p in "qkv"])
        assert isinstance(layer.qkv, Weight) and torch.equal(layer.qkv.exact(), stacked)
    assert found.note == f"weights: {name} (compressed-tensors) in m, read as they are"
    assert sum(w.nbytes for w in found.named.values()) == found.bytes


def write_asymmetric(folder: Path, bits: int, group: int, old: bool = False) -> tuple[Path, dict[str, Tensor]]:
    """Write a model with random zero points, packed along the outputs like codes; `old` files have int8."""
    folder, exact = write(folder, bits, group)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name in exact:
        base, scales = name.removesuffix("weight"), tensors[name + "_scale"]
        zeros = torch.randint(-(1 << bits - 1), 1 << bits - 1, scales.shape, generator=generator)
        tensors[base + "weight_zero_point"] = zeros.to(torch.int8) if old else packed(zeros.T, bits).T.contiguous()
        shift = zeros.double() * scales.double()
        exact[name] -= shift.repeat_interleave(group or exact[name].shape[1], 1)[:, : exact[name].shape[1]]
    save_file(tensors, folder / "model.safetensors")
    rewrite(folder, config_groups=scheme(bits, group, symmetric=False)["config_groups"])
    return folder, exact


@pytest.mark.parametrize(
    ("name", "old"),
    [
        ("uint4-g32", False), ("uint4-g32", True), ("uint4-g64", False), ("uint4-g128", False), ("uint4-row", False),
        ("uint8-g128", False), ("uint8-g128", True), ("uint8-row", True),
    ],
)  # fmt: skip
def test_codes_with_zero_points_are_read_as_they_are(tmp_path: Path, name: str, old: bool) -> None:
    folder, exact = write_asymmetric(tmp_path / "m", int(name[4]), int(name.partition("-g")[2] or 0), old)
    assert (models.load(folder).weight, models.load(folder).stored) == (name, name)
    for dtype in ("bf16", "fp32"):
        found = loaded(folder, dtype=dtype)
        for i, layer in enumerate(found.layers):
            assert isinstance(layer.down, Weight) and isinstance(layer.qkv, Weight)
            assert torch.equal(layer.down.exact(), exact[f"model.layers.{i}.mlp.down_proj.weight"])
            stacked = torch.cat([exact[f"model.layers.{i}.self_attn.{p}_proj.weight"] for p in "qkv"])
            assert torch.equal(layer.qkv.exact(), stacked)
        assert found.note == f"weights: {name} (compressed-tensors) in m, read as they are"
    if name.endswith("row"):
        return  # with scales in fp32
    damage(folder, f"{UP}_scale", lambda t: t.fill_(2.0**-30))
    with pytest.raises(BadConfig, match=r"not exact in float16. Use --dtype bf16, or --format plain"):
        loaded(folder, dtype="fp16")


@pytest.mark.parametrize(
    ("part", "change", "told"),
    [
        ("zero_point", lambda t: None, "zero_point is missing"),
        ("zero_point", lambda t: t[:-1].contiguous(), "zero_point is I8"),
        ("zero_point", lambda t: t.fill_(8), "zero_point has the zero point 8 of codes of 4 bits"),
        ("zero_point", lambda t: t.float(), "zero_point is F32"),
    ],
)
def test_zero_points_that_do_not_fit_are_refused(tmp_path: Path, part: str, change: Any, told: str) -> None:
    folder, _ = write_asymmetric(tmp_path / "m", 4, 32, old=True)
    damage(folder, f"{UP}_{part}", change)
    with pytest.raises(BadConfig, match=told):
        loaded(folder)


@pytest.mark.parametrize(("bits", "group", "old"), [(8, 32, False), (8, 64, True)])
def test_other_codes_with_zero_points_are_dequantised_exactly_and_rounded_once(
    tmp_path: Path, bits: int, group: int, old: bool
) -> None:
    folder, exact = write_asymmetric(tmp_path / "m", bits, group, old)
    assert (models.load(folder).weight, models.load(folder).stored) == ("plain", "plain")
    for dtype, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        found = loaded(folder, dtype=dtype)
        assert torch.equal(found.layers[1].down, exact["model.layers.1.mlp.down_proj.weight"].to(kind))
    named = f"int{bits}-{f'g{group}' if group else 'row'}"
    assert found.note == f"weights: {named} with zero points (compressed-tensors) in m, dequantised to bf16 when loaded"
    assert models.weights_note(str(folder), found.shape, "bf16") == found.note


def test_columns_in_activation_order_are_dequantised(tmp_path: Path) -> None:
    folder, exact = write(tmp_path / "m", 4, 32)
    tensors = load_file(folder / "model.safetensors")
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    for name in [n for n in exact if exact[n].shape[1] == 64]:
        groups = (torch.arange(64) // 32)[order]
        codes = exact[name] / tensors[f"{name}_scale"].double().repeat_interleave(32, 1)
        exact[name] = codes.round() * tensors[f"{name}_scale"].double()[:, groups]
        tensors[f"{name}_g_idx"] = groups.int()
    for name in [n for n in exact if exact[n].shape[1] == 96]:
        tensors[f"{name}_g_idx"] = (torch.arange(96) // 32).int()
    save_file(tensors, folder / "model.safetensors")
    rewrite(folder, config_groups=scheme(4, 32, actorder="group")["config_groups"])
    found = loaded(folder, dtype="fp32")
    for part in ("gate", "up"):
        assert torch.equal(getattr(found.layers[0], part), exact[f"model.layers.0.mlp.{part}_proj.weight"].float())
    assert torch.equal(found.layers[0].down, exact["model.layers.0.mlp.down_proj.weight"].float())
    damage(folder, f"{UP}_g_idx", lambda t: t.fill_(2))
    with pytest.raises(BadConfig, match="names the group 2 of 2"):
        loaded(folder)


def test_groups_that_no_kernel_reads_are_dequantised(tmp_path: Path) -> None:
    folder, exact = write(tmp_path / "m", 4, 16)
    found = loaded(folder, dtype="fp32")
    assert torch.equal(found.layers[2].up, exact["model.layers.2.mlp.up_proj.weight"].float())


def rewrite(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


def test_a_scheme_without_codes_is_refused(tmp_path: Path) -> None:
    folder = steps.write_model(tmp_path / "m", "llama")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": scheme(4, 32)}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadConfig, match=r"has no tensor that ends in .weight_packed, and its config.json compressed"):
        loaded(folder)


def test_plain_dequantises_and_says_so(tmp_path: Path) -> None:
    folder, exact = write(tmp_path / "m", 4, 32)
    found = loaded(folder, weight="plain", dtype="fp32")
    assert torch.equal(found.layers[0].up, exact["model.layers.0.mlp.up_proj.weight"].float())
    assert found.note.endswith("dequantised to fp32 when loaded")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"quant_method": "bitsandbytes"}, "quantization_config bitsandbytes"),
        ({"format": "int-quantized"}, "format = 'int-quantized'"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({"ignore": ["model.layers.0.mlp.up_proj"]}, "ignore"),
        ({"config_groups": {}}, "config_groups"),
        ({"config_groups": scheme(4, 32, symmetric="no")["config_groups"]}, "symmetric"),
        ({"config_groups": scheme(4, -1)["config_groups"]}, "group_size = -1"),
        ({"config_groups": scheme(3, 32)["config_groups"]}, "num_bits = 3"),
        ({"config_groups": scheme(4, 32, strategy="tensor")["config_groups"]}, "strategy"),
        ({"config_groups": scheme(4, 32, actorder="most")["config_groups"]}, "actorder"),
        ({"config_groups": scheme(4, 32, type="float")["config_groups"]}, "type"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_another_scheme_is_refused_by_field(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    folder, _ = write(tmp_path / "m", 4, 32, **changes)
    with pytest.raises(BadConfig, match=told):
        models.load(folder)


def damage(folder: Path, name: str, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    made = change(tensors.pop(name))
    save_file(tensors | ({} if made is None else {name: made}), folder / "model.safetensors")


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        (f"{UP}_scale", lambda t: None, f"{UP}_scale is missing"),
        (f"{UP}_scale", lambda t: t[:, :-1].contiguous(), f"{UP}_scale has"),
        (f"{UP}_scale", lambda t: t[:0].clone(), f"{UP}_scale is empty"),
        (f"{UP}_scale", lambda t: t.fill_(float("inf")), f"{UP}_scale is not finite"),
        (f"{UP}_scale", lambda t: t.int(), f"{UP}_scale is I32"),
        (f"{UP}_packed", lambda t: t[:-1].contiguous(), "config.json says"),
        (f"{UP}_packed", lambda t: t.float(), f"{UP}_packed is F32"),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_tensor(tmp_path: Path, name: str, change: Any, told: str) -> None:
    folder, _ = write(tmp_path / "m", 4, 32)
    damage(folder, name, change)
    with pytest.raises(BadConfig, match=told):
        loaded(folder)


def test_packed_weights_without_a_scheme_are_refused(tmp_path: Path) -> None:
    folder, _ = write(tmp_path / "m", 4, 32)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadConfig, match="no quantization_config"):
        loaded(folder)


def test_a_scale_that_the_dtype_cannot_hold_is_refused(tmp_path: Path) -> None:
    folder, _ = write(tmp_path / "m", 4, 32)
    damage(folder, f"{UP}_scale", lambda t: t.fill_(2.0**-30))
    with pytest.raises(BadConfig, match="not exact in float16"):
        loaded(folder, dtype="fp16")
