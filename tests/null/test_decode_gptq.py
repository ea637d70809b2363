"""Test that checkpoints of GPTQ and AWQ are read by their documented layout: as codes, dequantised, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from autosel import models
from autosel.errors import BadConfig
from autosel.ops.codes import CODES
from autosel.ops.weight import Weight
from autosel.values import DTypeName
from tests import steps
from tests.null.checkpoints import UP, assert_read_as_codes, assert_rounded_once, damage, edit_config, loaded

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "lm_head": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AWQ: nibble i of a word is output 8 j + ORDER[i]
SIGNED = 1 << 32


def words(codes: Tensor, bits: int, place: Callable[[int], int] = int) -> Tensor:
    """Pack codes [R, C] along C into int32: code i of a word has the bits from place(i) * bits on."""
    per = 32 // bits
    made = torch.zeros(codes.shape[0], codes.shape[1] // per, dtype=torch.int64)
    for i in range(codes.shape[1]):
        made[:, i // per] |= codes[:, i].long() << bits * place(i % per)
    return torch.where(made >= SIGNED // 2, made - SIGNED, made).int()


def write(folder: Path, config: dict[str, Any]) -> tuple[Path, dict[str, Tensor]]:
    """Write a small model with random codes and scales; return its folder and every exact matrix in float64.

    Zero points are random, or half of the range in a symmetric scheme. In activation order, columns are permuted among
    the groups.
    """
    steps.write_model(folder, "llama")
    tensors, exact = load_file(folder / "model.safetensors"), {}
    bits, size, awq = config["bits"], config["group_size"], config["quant_method"] == "awq"
    half = config["sym"] if "sym" in config else not config["zero_point"]
    generator, most = torch.Generator().manual_seed(bits), (1 << bits) - 1
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        (n, k), base = tensors.pop(name).shape, name.removesuffix("weight")
        group = k if size == -1 else size
        codes = torch.randint(0, most + 1, (n, k), generator=generator)
        zeros = torch.randint(1, most, (k // group, n), generator=generator)
        zeros = torch.full_like(zeros, 1 << bits - 1) if half else zeros
        scales = torch.rand(k // group, n, generator=generator).add(0.1).mul(0.01).half()
        groups = torch.arange(k) // group
        groups = groups[torch.randperm(k, generator=generator)] if config.get("desc_act") else groups
        less = 1 if config.get("checkpoint_format", "gptq") == "gptq" and not awq else 0
        if awq:
            tensors[base + "qweight"] = words(codes.T, bits, ORDER.index)
            tensors[base + "qzeros"] = words(zeros, bits, ORDER.index)
        else:
            tensors[base + "qweight"] = words(codes, bits).T.contiguous()
            tensors[base + "qzeros"] = words(zeros - less, bits)
            tensors[base + "g_idx"] = groups.int()
            tensors[base + "bias"] = torch.zeros(n, dtype=torch.float16)
        tensors[base + "scales"] = scales
        exact[name] = scales.double().T[:, groups] * (codes - zeros.T[:, groups])
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, torch_dtype="float16", quantization_config=config)
    return folder, exact


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (GPTQ, "int4-g32"),
        (GPTQ | {"checkpoint_format": "gptq_v2"}, "int4-g32"),
        (GPTQ | {"bits": 8, "group_size": -1}, "int8-row"),
        (GPTQ | {"group_size": -1}, "int4-row"),
        (AWQ | {"zero_point": False, "version": "GEMM"}, "int4-g32"),
        (AWQ, "uint4-g32"),
        (GPTQ | {"sym": False}, "uint4-g32"),
        (GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}, "uint4-g32"),
        (AWQ | {"group_size": -1}, "uint4-row"),
        (GPTQ | {"sym": False, "group_size": -1}, "uint4-row"),
        (GPTQ | {"sym": False, "group_size": -1, "bits": 8}, "uint8-row"),
    ],
)
def test_codes_in_groups_of_neighbours_are_read_as_they_are(tmp_path: Path, config: dict[str, Any], name: str) -> None:
    folder, exact = write(tmp_path / "m", config)
    shape, told = models.load(folder), f"weights: {name} ({config['quant_method']}) in m"
    assert (shape.weight, shape.table, shape.stored, shape.dtype) == (name, "plain", name, "fp16")
    dtypes: tuple[DTypeName, ...] = ("fp16", "fp32")
    for dtype in dtypes:
        found = loaded(folder, dtype)
        assert_read_as_codes(found, exact)
        assert found.note == f"{told}, read as they are"
    if not name.endswith("row"):  # with scales in fp32
        with pytest.raises(BadConfig, match=r"is not exact in bfloat16. Use --dtype fp16, or --format plain"):
            loaded(folder, "bf16")
    plain = loaded(folder, "bf16", "plain")
    assert_rounded_once(plain, exact)
    assert plain.note == f"{told}, dequantised to bf16 when loaded"


@pytest.mark.parametrize("value", [0, 15])
def test_zero_points_at_the_ends_of_the_range_are_read(tmp_path: Path, value: int) -> None:
    folder, _ = write(tmp_path / "m", AWQ)
    damage(folder, f"{UP}.qzeros", lambda t: t.fill_(-1 if value else 0))
    found = loaded(folder, "fp16").layers[1].up
    assert isinstance(found, Weight) and (found.scales[:, 1::2] == value).all()
    assert torch.equal(found.exact().sign(), (CODES["uint4"].numbers(found.codes)[:, :64] - value).sign())


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (AWQ | {"group_size": 16}, "int4-g16 with zero points (awq)"),
        (AWQ | {"modules_to_not_convert": ["visual"]}, "int4-g32 with zero points in some layers (awq)"),
        (GPTQ | {"desc_act": True}, "int4-g32 in activation order (gptq)"),
        (GPTQ | {"sym": False, "desc_act": True}, "int4-g32 with zero points in activation order (gptq)"),
        (GPTQ | {"sym": False, "bits": 8, "group_size": 16}, "int8-g16 with zero points (gptq)"),
    ],
)
def test_other_codes_are_dequantised_exactly_and_rounded_once(
    tmp_path: Path, config: dict[str, Any], told: str
) -> None:
    folder, exact = write(tmp_path / "m", config)
    assert (models.load(folder).weight, models.load(folder).stored) == ("plain", "plain")
    dtypes: tuple[DTypeName, ...] = ("bf16", "fp32")
    for dtype in dtypes:
        found = loaded(folder, dtype)
        assert_rounded_once(found, exact)
        assert found.note == f"weights: {told} in m, dequantised to {dtype} when loaded"


def entry(row: int, value: int) -> Callable[[Tensor], Tensor]:
    def edit(t: Tensor) -> Tensor:
        t.view(-1)[row] = value
        return t

    return edit


@pytest.mark.parametrize(
    ("name", "edit", "told"),
    [
        ("scales", lambda t: None, "scales is missing"),
        ("qzeros", lambda t: None, "qzeros is missing"),
        ("scales", lambda t: t[:-1].contiguous(), r"scales is F16 \[1, 96\], F16 \[2, 96\] is expected"),
        ("scales", lambda t: t.fill_(float("inf")), "scales is not finite"),
        ("scales", lambda t: t.int(), "scales is I32; supported"),
        ("qweight", lambda t: t[:, :-1].contiguous(), r"weight is \[95, 64\], config.json says \[96, 64\]"),
        ("qweight", lambda t: t.float(), "qweight is F32"),
        ("qzeros", entry(0, 0x77777779), "qzeros has the zero point 10; 8 is expected. --format plain"),
        ("qzeros", entry(0, 0x777777F7), "qzeros has the zero point 0, stored as 15"),
        ("g_idx", entry(0, 1), "g_idx puts columns into other groups. --format plain"),
        ("g_idx", entry(0, 2), "g_idx names the group 2 of 2"),
        ("bias", lambda t: t.fill_(0.5), "unexpected tensor model.layers.1.mlp.up_proj.bias"),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_tensor_and_value(
    tmp_path: Path, name: str, edit: Callable[[Tensor], Tensor | None], told: str
) -> None:
    folder, _ = write(tmp_path / "m", GPTQ)
    damage(folder, f"{UP}.{name}", edit)
    with pytest.raises(BadConfig, match=told):
        loaded(folder, "fp16")


def test_a_layer_that_is_left_out_is_read_where_weights_are_dequantised(tmp_path: Path) -> None:
    """Dequantise all layers if the config names one that keeps the dtype; without its name it is refused."""
    folder, exact = write(tmp_path / "m", AWQ | {"modules_to_not_convert": [UP, "lm_head"]})
    tensors = load_file(folder / "model.safetensors")
    for part in ("qweight", "qzeros", "scales"):
        del tensors[f"{UP}.{part}"]
    tensors[f"{UP}.weight"] = exact[f"{UP}.weight"].half()
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(loaded(folder, "fp16").layers[1].up, tensors[f"{UP}.weight"])
    edit_config(folder, quantization_config=AWQ | {"modules_to_not_convert": ["lm_head"]})
    with pytest.raises(BadConfig, match=r"up_proj.weight is no code, unlike other layers. --format plain dequantises"):
        loaded(folder, "fp16")
    assert torch.equal(loaded(folder, "fp16", "plain").layers[1].up, tensors[f"{UP}.weight"])


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (GPTQ | {"bits": 3}, "quantization_config.bits = 3"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        (GPTQ | {"format": "gptq_p"}, "quantization_config.format = 'gptq_p'"),
        (GPTQ | {"dynamic": {"-:.*": {}}}, "dynamic"),
        (GPTQ | {"lm_head": True}, "lm_head = True"),
        (GPTQ | {"group_size": 0}, "group_size = 0"),
        (GPTQ | {"sym": 1}, "sym = 1"),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype"),
        (AWQ | {"version": "gemv"}, "version = 'gemv'"),
        (AWQ | {"w_bit": 3}, "w_bit = 3"),
        (AWQ | {"q_group_size": "g"}, "q_group_size = 'g'"),
        (AWQ | {"zero_point": None, "version": 4}, "version = 4"),
        (AWQ | {"modules_to_not_convert": "visual"}, "modules_to_not_convert"),
        ({"quant_method": "hqq"}, "quantization_config hqq"),
        ({"quant_method": 4}, "quantization_config 4"),
        ("gptq", "quantization_config"),
    ],
)
def test_another_scheme_is_refused_by_field(tmp_path: Path, config: Any, told: str) -> None:
    folder = steps.write_model(tmp_path / "m", "llama")
    edit_config(folder, quantization_config=config)
    with pytest.raises(BadConfig, match=told):
        models.load(folder)
