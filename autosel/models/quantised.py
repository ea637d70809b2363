"""Read `quantization_config` of a config.json: how the matrices of a checkpoint's layers are stored.

Supported: compressed-tensors' `pack-quantized` (W4A16 and W8A16), `float-quantized` and `naive-quantized` (e4m3), `fp8`
(e4m3), GPTQ, and AWQ's `gemm`, all Linear layers but the output head. Activations keep the dtype. Codes in groups of
neighbours, or with a scale per row, are a weight format, which kernels read. Others are dequantised when they are
loaded. Everything else is refused by the name of the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from autosel.errors import BadConfig
from autosel.formats import PLAIN, WEIGHT_FORMATS
from autosel.models.fields import Fields, read_document, shown

HEADS = ("lm_head", "re:.*lm_head", "re:.*lm_head.*")
OTHERS = "name the unquantised checkpoint, or one in compressed-tensors' W4A16, W8A16 or fp8, GPTQ or AWQ"
FLOATS = ("float-quantized", "naive-quantized")  # e4m3 in compressed-tensors: with quantised activations, and without
BLOCK = 128  # rows and columns that share a scale of fp8
LARGEST_GROUP = 1 << 20
NO_MATRICES = ("norm", "layernorm", "embed_tokens", "mlp.gate")  # of a layer's linear ones; the last is a router

Method = Literal["compressed-tensors", "fp8", "gptq", "awq"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How the matrices of every layer are stored; embedding and output head are plain."""

    method: Method
    bits: int
    group: int  # neighbours along K that share a scale; 0: a row
    rows: int = 1  # that share scales; 0: all
    floats: bool = False  # codes are e4m3
    zeros: bool = False  # groups have zero points of their own
    ordered: bool = False  # groups are not of neighbours: columns were quantised in another order
    less_one: bool = False  # zero points are stored minus 1 (GPTQ, version 1)
    partial: bool = False  # some layers are left out, and keep the dtype

    @property
    def format(self) -> str:
        """Return the weight format whose codes these are; plain if the weights are dequantised."""
        name = f"u{self.codes}" if self.zeros else self.codes
        return name if not (self.ordered or self.partial) and name in WEIGHT_FORMATS else PLAIN

    @property
    def codes(self) -> str:
        kind = "fp8_e4m3" if self.floats else f"int{self.bits}"
        return f"{kind}-g{self.group}" if self.group else f"{kind}-row"

    def note(self, name: str, format: str, dtype: str) -> str:
        """Describe the stored form, and what the weights are read as."""
        read = "read as they are" if PLAIN != format == self.format else f"dequantised to {dtype} when loaded"
        why = [" with zero points"] * self.zeros + [" in activation order"] * self.ordered
        why += [" in some layers"] * self.partial
        read += ", activations keep the dtype" if self.floats else ""
        stored = self.format if self.format != PLAIN else f"{self.codes}{''.join(why)}"
        return f"weights: {stored} ({self.method}) in {name}, {read}"


def scheme_of(folder: Path) -> Scheme | None:
    """Return how a checkpoint folder's layers are stored; None if they are no codes. Raises BadConfig."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    data = read_document(path)
    inside = data.get("text_config")
    found = (inside.get("quantization_config") if isinstance(inside, dict) else None) or data.get("quantization_config")
    return read_scheme(Fields(path=path, data=data, defaults={}), found)


def read_scheme(fields: Fields, found: Any) -> Scheme | None:
    """Return how matrices are stored by a quantization_config; None without one. Raises BadConfig."""
    if not found:
        return None
    method = found.get("quant_method", "") if isinstance(found, dict) else ""
    readers = {"compressed-tensors": _compressed, "fp8": _fp8, "gptq": _gptq, "awq": _awq}
    if not isinstance(method, str) or method not in readers:
        raise BadConfig(
            f"{fields.path}: quantization_config {method!s:.40}".rstrip(),
            why="its codes are read by no kernel here, and dequantised it would be another workload",
            todo=OTHERS,
        )
    return readers[method](fields.inside("quantization_config", found))


# --- GPTQ and AWQ ----------------------------------------------------------------------------------------------------


def _gptq(found: Fields) -> Scheme:
    version = found.data.get("checkpoint_format") or found.data.get("format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        _refuse(found, "checkpoint_format" if "checkpoint_format" in found.data else "format", "gptq and gptq_v2")
    bits = found.size("bits", 8)
    if bits not in (4, 8):
        _refuse(found, "bits", "4 and 8")
    if found.data.get("pack_dtype", "int32") != "int32":
        _refuse(found, "pack_dtype", "int32")
    if found.data.get("dynamic"):
        _refuse(found, "dynamic", "one scheme for every layer")
    if found.flag("lm_head", default=False):
        _refuse(found, "lm_head", "a plain output head")
    return Scheme(
        method="gptq",
        bits=bits,
        group=_group(found, "group_size"),
        zeros=not found.flag("sym", default=True),
        ordered=found.flag("desc_act", default=False),
        less_one=version == "gptq",
    )


def _awq(found: Fields) -> Scheme:
    bits, group = ("w_bit" if "w_bit" in found.data else "bits"), "q_group_size"
    if found.size(bits, 8) != 4:
        _refuse(found, bits, "4")
    version = found.data.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        _refuse(found, "version", "gemm")
    size = _group(found, group if group in found.data else "group_size")
    left_out = found.data.get("modules_to_not_convert") or []
    if not isinstance(left_out, list):
        _refuse(found, "modules_to_not_convert", "a list of names")
    return Scheme(
        method="awq",
        bits=4,
        group=size,
        zeros=found.flag("zero_point", default=True),
        partial=any(name not in HEADS for name in left_out),
    )


def _fp8(found: Fields) -> Scheme:
    if found.data.get("fmt", "e4m3") != "e4m3":
        _refuse(found, "fmt", "e4m3")
    size = found.data.get("weight_block_size")
    if size not in (None, [BLOCK, BLOCK]):
        _refuse(found, "weight_block_size", f"{[BLOCK, BLOCK]}, or one scale per matrix")
    named = "ignored_layers" if "ignored_layers" in found.data else "modules_to_not_convert"
    left_out = found.data.get(named) or []
    if not isinstance(left_out, list) or not all(isinstance(name, str) for name in left_out):
        _refuse(found, named, "a list of names")
    return Scheme(
        method="fp8",
        bits=8,
        group=BLOCK if size else 0,
        rows=BLOCK if size else 0,
        floats=True,
        partial=any(name not in HEADS and not name.endswith(NO_MATRICES) for name in left_out),
    )


def _group(found: Fields, name: str) -> int:
    """Return the group's size; 0 for -1, which means a row."""
    return 0 if found.data.get(name) == -1 else found.size(name, LARGEST_GROUP)


def _refuse(found: Fields, name: str, supported: str) -> NoReturn:
    found.refuse(name, f"supported: {supported}. {OTHERS}")


# --- compressed-tensors ----------------------------------------------------------------------------------------------


def _compressed(found: Fields) -> Scheme:
    floats = found.data.get("format") in FLOATS
    if not floats and found.data.get("format") != "pack-quantized":
        found.refuse("format", f"{', '.join(('pack-quantized', *FLOATS))} are supported. {OTHERS}")
    if found.data.get("kv_cache_scheme"):
        found.refuse("kv_cache_scheme", "keys and values are stored in the dtype")
    ignored = found.data.get("ignore", [])
    if not isinstance(ignored, list) or not all(name in HEADS for name in ignored):
        found.refuse("ignore", "only lm_head may keep its dtype: all layers are read in one format")
    groups = found.data.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1 or not isinstance(group := next(iter(groups.values())), dict):
        found.refuse("config_groups", "one group is expected")
    inside = found.inside(f"{found.where}config_groups.{next(iter(groups))}", group)
    return _of_floats(inside) if floats else _of_group(inside)


def _of_floats(group: Fields) -> Scheme:
    how = _weights_of(group, {"type": "float", "num_bits": 8, "symmetric": True, "dynamic": False})
    group_size, rows = how.choice("strategy", {"tensor": (0, 0), "channel": (0, 1), "block": (BLOCK, BLOCK)})
    if group_size and how.data.get("block_structure") not in ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"):
        how.refuse("block_structure", f"{[BLOCK, BLOCK]} is supported")
    return Scheme(method="compressed-tensors", bits=8, group=group_size, rows=rows, floats=True)


def _of_group(group: Fields) -> Scheme:
    if group.data.get("input_activations") or group.data.get("output_activations"):
        group.refuse("input_activations", "activations keep the dtype: W4A16 and W8A16 are supported")
    how = _weights_of(group, {"type": "int", "dynamic": False})
    strategy, order = how.data.get("strategy"), how.data.get("actorder")
    if strategy not in ("group", "channel"):
        how.refuse("strategy", "group and channel are supported")
    if order not in (None, "weight", "static", "group", "dynamic"):
        how.refuse("actorder", "group, weight, static and dynamic are known")
    bits = how.size("num_bits", 8)
    if bits not in (4, 8):
        how.refuse("num_bits", "4 and 8 are supported")
    return Scheme(
        method="compressed-tensors",
        bits=bits,
        group=0 if strategy == "channel" else how.size("group_size", LARGEST_GROUP),
        zeros=not how.flag("symmetric", default=True),
        ordered=order in ("group", "dynamic"),
    )


def _weights_of(group: Fields, expected: Mapping[str, Any]) -> Fields:
    """Return the description of a group's weights, for all Linear layers and with these values."""
    if group.data.get("targets") != ["Linear"]:
        group.refuse("targets", '["Linear"] is expected')
    weights = group.data.get("weights")
    if not isinstance(weights, dict):
        group.refuse("weights", "an object is expected")
    how = group.inside(f"{group.where}weights", weights)
    for name, value in expected.items():
        if how.data.get(name, value) != value:
            how.refuse(name, f"{shown(value)} is supported")
    return how
