"""Checkpoints in e4m3 are read as codes, equal to what their own formula says, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from autosel import models
from autosel.errors import BadConfig
from tests import steps
from tests.null.checkpoints import UP, assert_read_as_codes, assert_rounded_once, damage, edit_config, loaded

KINDS = ("tensor", "channel", "block")


def compressed(strategy: str, format: str = "float-quantized", **changes: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy}
    weights |= {"block_structure": [128, 128]} if strategy == "block" else {}
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    one = {"targets": ["Linear"], "weights": weights | changes, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": one},
        "ignore": ["lm_head"],
    }


def fp8(strategy: str, **changes: Any) -> dict[str, Any]:
    size = [128, 128] if strategy == "block" else None
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": size} | changes


def write(folder: Path, strategy: str, config: dict[str, Any], scale: str) -> tuple[Path, dict[str, Tensor]]:
    """Write a small model with random codes, subnormals included; return its folder and every exact matrix."""
    steps.write_model(folder, "llama")
    tensors, exact = load_file(folder / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(1)
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        n, k = tensors[name].shape
        codes = torch.randint(0, 0x7F, (n, k), generator=generator, dtype=torch.uint8)
        codes |= torch.randint(0, 2, (n, k), generator=generator, dtype=torch.uint8) << 7
        shape = {"tensor": (1,), "channel": (n, 1), "block": (-(-n // 128), -(-k // 128))}[strategy]
        scales = torch.rand(shape, generator=generator).add(0.1).mul(1e-3)
        tensors[name] = codes.view(torch.float8_e4m3fn)
        tensors[name.removesuffix(".weight") + scale] = scales
        each = scales.double()
        if strategy == "block":
            each = each.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        exact[name] = tensors[name].double() * each
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, quantization_config=config)
    return folder, exact


@pytest.mark.parametrize("strategy", KINDS)
@pytest.mark.parametrize(("method", "scale"), [(compressed, ".weight_scale"), (fp8, ".weight_scale_inv")])
def test_layers_are_read_as_codes(tmp_path: Path, method: Any, scale: str, strategy: str) -> None:
    if method is fp8 and strategy == "channel":
        pytest.skip("fp8 has no scales of rows")
    folder, exact = write(tmp_path / "m", strategy, method(strategy), scale)
    name = "fp8_e4m3-g128" if strategy == "block" else "fp8_e4m3-row"
    shape = models.load(folder)
    assert (shape.weight, shape.table) == (name, "plain")
    found = loaded(folder, "bf16")
    assert_read_as_codes(found, exact)
    assert found.note.startswith(f"weights: {name} (") and found.note.endswith("activations keep the dtype")


@pytest.mark.parametrize("strategy", KINDS)
def test_plain_dequantises_and_rounds_once(tmp_path: Path, strategy: str) -> None:
    folder, exact = write(tmp_path / "m", strategy, compressed(strategy), ".weight_scale")
    assert_rounded_once(loaded(folder, "fp32", "plain"), exact)


def test_a_model_with_plain_layers_is_dequantised(tmp_path: Path) -> None:
    folder = steps.write_model(tmp_path / "m", "llama")
    for left_out, weight in (("model.layers.0.input_layernorm", "fp8_e4m3-row"), (UP, "plain")):
        edit_config(folder, quantization_config=fp8("tensor", modules_to_not_convert=["lm_head", left_out]))
        assert models.load(folder).weight == weight


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (fp8("tensor", fmt="e5m2"), "fmt = 'e5m2'"),
        (fp8("block", weight_block_size=[64, 64]), "weight_block_size"),
        (fp8("tensor", ignored_layers="lm_head"), "ignored_layers"),
        (compressed("group"), "strategy = 'group'"),
        (compressed("channel", num_bits=4), "num_bits = 4"),
        (compressed("channel", type="int"), "type = 'int'"),
        (compressed("channel", "naive-quantized", type="int"), "type = 'int'"),
        (compressed("block", block_structure=[64, 64]), "block_structure"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_another_scheme_is_refused_by_field(tmp_path: Path, config: dict[str, Any], told: str) -> None:
    folder = steps.write_model(tmp_path / "m", "llama")
    edit_config(folder, quantization_config=config)
    with pytest.raises(BadConfig, match=told):
        models.load(folder)


def with_nan(codes: Tensor) -> Tensor:
    codes.view(torch.uint8)[0, 0] = 0x7F
    return codes


@pytest.mark.parametrize(
    ("part", "change", "told"),
    [
        ("_scale", lambda t: None, "_scale is missing"),
        ("_scale", lambda t: t[:-1].contiguous(), "_scale has"),
        ("_scale", lambda t: t.fill_(float("nan")), "_scale is not finite"),
        ("_scale", lambda t: t.to(torch.int32), "_scale is I32"),
        ("", lambda t: t[:-1].contiguous(), " is .*, config.json says"),
        ("", with_nan, " contains NaN"),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_tensor(tmp_path: Path, part: str, change: Any, told: str) -> None:
    folder, _ = write(tmp_path / "m", "channel", compressed("channel"), ".weight_scale")
    damage(folder, f"{UP}.weight{part}", change)
    with pytest.raises(BadConfig, match=f"{UP}.weight{told}"):
        loaded(folder, "bf16")


def test_a_checkpoint_that_contradicts_its_config_is_refused(tmp_path: Path) -> None:
    folder = steps.write_model(tmp_path / "m", "llama")
    edit_config(folder, quantization_config=fp8("tensor"))
    with pytest.raises(BadConfig, match="no tensor in F8_E4M3"):
        loaded(folder, "bf16")
