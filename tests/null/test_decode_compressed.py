"""A checkpoint of compressed-tensors is read as codes, equal to what its own formula says, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from autosel import models
from autosel.errors import BadConfig
from autosel.values import DTypeName
from tests import steps
from tests.null.checkpoints import UP, assert_read_as_codes, assert_rounded_once, damage, edit_config, loaded


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


def write(folder: Path, bits: int, group: int, zeros: str = "") -> tuple[Path, dict[str, Tensor]]:
    """Write a small model with random codes; return its folder and every exact matrix in float64.

    With `zeros` it has random zero points: "packed" along the outputs like codes, or "int8", as in older files.
    """
    steps.write_model(folder, "llama")
    tensors, exact = load_file(folder / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(bits + group)

    def drawn(*shape: int) -> Tensor:
        return torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), shape, generator=generator)

    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        n, k = tensors.pop(name).shape
        codes, groups = drawn(n, k), -(-k // group) if group else 1
        scales = torch.rand(n, groups, generator=generator).add(0.1).mul(0.01).bfloat16()
        points = drawn(n, groups) if zeros else torch.zeros(n, groups)
        tensors |= {f"{name}_packed": packed(codes, bits), f"{name}_scale": scales}
        tensors[f"{name}_shape"] = torch.tensor([n, k])
        if zeros:
            stored = packed(points.T, bits).T.contiguous() if zeros == "packed" else points.to(torch.int8)
            tensors[f"{name}_zero_point"] = stored
        scale, point = (t.double().repeat_interleave(group or k, 1)[:, :k] for t in (scales, points))
        exact[name] = scale * (codes - point)
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, quantization_config=scheme(bits, group, symmetric=not zeros))
    return folder, exact


@pytest.mark.parametrize(
    ("name", "zeros"),
    [
        ("int4-row", ""), ("int4-g32", ""), ("int4-g64", ""), ("int4-g128", ""), ("int8-g128", ""), ("int8-row", ""),
        ("uint4-g32", "packed"), ("uint4-g32", "int8"), ("uint4-g64", "packed"), ("uint4-g128", "packed"),
        ("uint4-row", "packed"), ("uint8-g128", "packed"), ("uint8-g128", "int8"), ("uint8-row", "int8"),
    ],
)  # fmt: skip
def test_layers_are_read_as_codes_and_tables_are_plain(tmp_path: Path, name: str, zeros: str) -> None:
    bits, group = int(name.partition("-")[0][-1]), int(name.partition("-g")[2] or 0)
    folder, exact = write(tmp_path / "m", bits, group, zeros)
    shape = models.load(folder)
    assert (shape.weight, shape.table, shape.stored) == (name, "plain", name)
    dtypes: tuple[DTypeName, ...] = ("bf16", "fp32")
    for dtype in dtypes:
        found = loaded(folder, dtype)
        assert_read_as_codes(found, exact)
        assert found.note == f"weights: {name} (compressed-tensors) in m, read as they are"
    if name.endswith("row"):
        return  # with scales in fp32
    damage(folder, f"{UP}.weight_scale", lambda t: t.fill_(2.0**-30))
    with pytest.raises(BadConfig, match=r"not exact in float16. Use --dtype bf16, or --format plain"):
        loaded(folder, "fp16")


@pytest.mark.parametrize(
    ("bits", "group", "zeros", "weight", "told"),
    [
        (4, 16, "", "", "int4-g16"),
        (8, 32, "packed", "", "int8-g32 with zero points"),
        (8, 64, "int8", "", "int8-g64 with zero points"),
        (4, 32, "", "plain", "int4-g32"),
    ],
)
def test_other_codes_are_dequantised_exactly_and_rounded_once(
    tmp_path: Path, bits: int, group: int, zeros: str, weight: str, told: str
) -> None:
    folder, exact = write(tmp_path / "m", bits, group, zeros)
    assert weight or (models.load(folder).weight, models.load(folder).stored) == ("plain", "plain")
    dtypes: tuple[DTypeName, ...] = ("bf16", "fp32")
    for dtype in dtypes:
        found = loaded(folder, dtype, weight)
        assert_rounded_once(found, exact)
        assert found.note == f"weights: {told} (compressed-tensors) in m, dequantised to {dtype} when loaded"
        assert models.weights_note(str(folder), found.shape, dtype) == found.note


def test_columns_in_activation_order_are_dequantised(tmp_path: Path) -> None:
    folder, exact = write(tmp_path / "m", 4, 32)
    tensors = load_file(folder / "model.safetensors")
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    for name, matrix in exact.items():
        groups = torch.arange(matrix.shape[1]) // 32
        if len(groups) == 64:
            codes = matrix / tensors[f"{name}_scale"].double()[:, groups]
            groups = groups[order]
            exact[name] = codes.round() * tensors[f"{name}_scale"].double()[:, groups]
        tensors[f"{name}_g_idx"] = groups.int()
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, quantization_config=scheme(4, 32, actorder="group"))
    assert_rounded_once(loaded(folder, "fp32"), exact)
    damage(folder, f"{UP}.weight_g_idx", lambda t: t.fill_(2))
    with pytest.raises(BadConfig, match="names the group 2 of 2"):
        loaded(folder, "bf16")


def test_a_scheme_without_codes_and_codes_without_a_scheme_are_refused(tmp_path: Path) -> None:
    folder = steps.write_model(tmp_path / "m", "llama")
    edit_config(folder, quantization_config=scheme(4, 32))
    with pytest.raises(BadConfig, match=r"has no tensor that ends in .weight_packed, and its config.json compressed"):
        loaded(folder, "bf16")
    folder, _ = write(tmp_path / "n", 4, 32)
    edit_config(folder, quantization_config=None)
    with pytest.raises(BadConfig, match="no quantization_config"):
        loaded(folder, "bf16")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"quant_method": "bitsandbytes"}, "quantization_config bitsandbytes"),
        ({"format": "int-quantized"}, "format = 'int-quantized'"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({"ignore": ["model.layers.0.mlp.up_proj"]}, "ignore"),
        ({"config_groups": {}}, "config_groups"),
        (scheme(4, 32, symmetric="no"), "symmetric"),
        (scheme(4, -1), "group_size = -1"),
        (scheme(3, 32), "num_bits = 3"),
        (scheme(4, 32, strategy="tensor"), "strategy"),
        (scheme(4, 32, actorder="most"), "actorder"),
        (scheme(4, 32, type="float"), "type"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_another_scheme_is_refused_by_field(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    folder = steps.write_model(tmp_path / "m", "llama")
    edit_config(folder, quantization_config=scheme(4, 32) | changes)
    with pytest.raises(BadConfig, match=told):
        models.load(folder)


@pytest.mark.parametrize(
    ("part", "change", "told"),
    [
        ("scale", lambda t: None, "_scale is missing"),
        ("scale", lambda t: t[:, :-1].contiguous(), "_scale has"),
        ("scale", lambda t: t[:0].clone(), "_scale is empty"),
        ("scale", lambda t: t.fill_(float("inf")), "_scale is not finite"),
        ("scale", lambda t: t.int(), "_scale is I32"),
        ("packed", lambda t: t[:-1].contiguous(), " is .*, config.json says"),
        ("packed", lambda t: t.float(), "_packed is F32"),
        ("zero_point", lambda t: None, "_zero_point is missing"),
        ("zero_point", lambda t: t[:-1].contiguous(), "_zero_point is I8"),
        ("zero_point", lambda t: t.fill_(8), "_zero_point has the zero point 8 of codes of 4 bits"),
        ("zero_point", lambda t: t.float(), "_zero_point is F32"),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_tensor(tmp_path: Path, part: str, change: Any, told: str) -> None:
    folder, _ = write(tmp_path / "m", 4, 32, "int8")
    damage(folder, f"{UP}.weight_{part}", change)
    with pytest.raises(BadConfig, match=f"{UP}.weight{told}"):
        loaded(folder, "bf16")
