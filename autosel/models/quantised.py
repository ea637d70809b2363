"""Read `quantization_config` of a config.json: how the matrices of a checkpoint's layers are stored.

Supported: compressed-tensors' `pack-quantized` (W4A16 and W8A16), GPTQ, and AWQ's `gemm`, all Linear layers but the
output head. Codes in groups of neighbours are a weight format, which kernels read: with a zero point of half of the
range, or in groups of 4 bits with any zero points. Others are dequantised when they are loaded. Everything else is
refused by the name of the field.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from autosel import files
from autosel.errors import BadConfig
from autosel.formats import PLAIN, WEIGHT_FORMATS
from autosel.models.fields import Fields, shown
from autosel.values import parse_json

FILE_LIMIT_BYTES = 4 << 20
HEADS = ("lm_head", "re:.*lm_head", "re:.*lm_head.*")
OTHERS = "name the unquantised checkpoint, or one in compressed-tensors' pack-quantized W4A16 or W8A16, GPTQ or AWQ"
LARGEST_GROUP = 1 << 20

Method = Literal["compressed-tensors", "gptq", "awq"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How the matrices of every layer are stored; embedding and output head are plain."""

    method: Method
    bits: int
    group: int  # neighbours along K that share a scale; 0: a row
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
        return f"int{self.bits}-g{self.group}" if self.group else f"int{self.bits}-row"

    def note(self, name: str, format: str, dtype: str) -> str:
        """Describe the stored form, and what the weights are read as."""
        read = "read as they are" if PLAIN != format == self.format else f"dequantised to {dtype} when loaded"
        why = [" with zero points"] * self.zeros + [" in activation order"] * self.ordered
        why += [" in some layers"] * self.partial
        stored = self.format if self.format != PLAIN else f"{self.codes}{''.join(why)}"
        return f"weights: {stored} ({self.method}) in {name}, {read}"


def weight_format(fields: Fields, found: Any) -> str:
    """Return the format of the matrices of every layer; embedding and output head are plain. Raises BadConfig."""
    scheme = read_scheme(fields, found)
    return scheme.format if scheme else PLAIN


def scheme_of(folder: Path) -> Scheme | None:
    """Return how a checkpoint folder's layers are stored; None if not as codes. Raises BadConfig."""
    path = folder / "config.json"
    try:
        data = parse_json(files.read_named(path, FILE_LIMIT_BYTES), what=str(path))
    except ValueError as error:
        raise BadConfig(f"{path} is not JSON", why=str(error), todo="fetch the file again") from error
    data = data if isinstance(data, dict) else {}
    inside = data.get("text_config")
    found = (inside.get("quantization_config") if isinstance(inside, dict) else None) or data.get("quantization_config")
    return read_scheme(Fields(path=path, data=data, defaults={}), found)


def read_scheme(fields: Fields, found: Any) -> Scheme | None:
    """Return how matrices are stored by a quantization_config; None without one. Raises BadConfig."""
    if not found:
        return None
    method = found.get("quant_method", "") if isinstance(found, dict) else ""
    readers = {"compressed-tensors": _compressed, "gptq": _gptq, "awq": _awq}
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


def _group(found: Fields, name: str) -> int:
    """Return the group's size; 0 for -1, which means a row."""
    return 0 if found.data.get(name) == -1 else found.size(name, LARGEST_GROUP)


def _refuse(found: Fields, name: str, supported: str) -> NoReturn:
    found.refuse(name, f"supported: {supported}. {OTHERS}")
    raise AssertionError


# --- compressed-tensors ----------------------------------------------------------------------------------------------


def _compressed(found: Fields) -> Scheme:
    if found.data.get("format") != "pack-quantized":
        found.refuse("format", f"pack-quantized is supported. {OTHERS}")
    if found.data.get("kv_cache_scheme"):
        found.refuse("kv_cache_scheme", "keys and values are stored in the dtype")
    ignored = found.data.get("ignore", [])
    if not isinstance(ignored, list) or not all(name in HEADS for name in ignored):
        found.refuse("ignore", "only lm_head may keep its dtype: all layers are read in one format")
    groups = found.data.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1 or not isinstance(group := next(iter(groups.values())), dict):
        found.refuse("config_groups", "one group is expected")
    return _of_group(found.inside(f"{found.where}config_groups.{next(iter(groups))}", group))  # type: ignore[arg-type]


def _of_group(group: Fields) -> Scheme:
    if group.data.get("targets") != ["Linear"]:
        group.refuse("targets", '["Linear"] is expected')
    if group.data.get("input_activations") or group.data.get("output_activations"):
        group.refuse("input_activations", "activations keep the dtype: W4A16 and W8A16 are supported")
    weights = group.data.get("weights")
    if not isinstance(weights, dict):
        group.refuse("weights", "an object is expected")
    how = group.inside(f"{group.where}weights", weights)  # type: ignore[arg-type]
    for name, value in {"type": "int", "dynamic": False}.items():
        if how.data.get(name, value) != value:
            how.refuse(name, f"{shown(value)} is supported")
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
