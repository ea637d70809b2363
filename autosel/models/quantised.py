"""Read `quantization_config` of a config.json: the weight format of a checkpoint that compressed-tensors wrote.

Supported: `pack-quantized` with symmetric integers of 4 or 8 bits, a scale per group or per row, all Linear layers but
the output head (W4A16 and W8A16). Everything else is refused by the name of the field.
"""

from __future__ import annotations

from typing import Any

from autosel.errors import BadConfig
from autosel.formats import PLAIN, WEIGHT_FORMATS
from autosel.models.fields import Fields, shown

HEADS = ("lm_head", "re:.*lm_head", "re:.*lm_head.*")
OTHERS = "name the unquantised checkpoint, or one in compressed-tensors' pack-quantized W4A16 or W8A16"


def weight_format(fields: Fields, found: Any) -> str:
    """Return the format of the matrices of every layer; embedding and output head are plain. Raises BadConfig."""
    if not found:
        return PLAIN
    method = found.get("quant_method", "") if isinstance(found, dict) else ""
    if method != "compressed-tensors":
        raise BadConfig(
            f"{fields.path}: quantization_config {method}".rstrip(),
            why="its codes are read by no kernel here, and dequantised it would be another workload",
            todo=OTHERS,
        )
    inside = fields.inside("quantization_config", found)
    if found.get("format") != "pack-quantized":
        inside.refuse("format", f"pack-quantized is supported. {OTHERS}")
    if found.get("kv_cache_scheme"):
        inside.refuse("kv_cache_scheme", "keys and values are stored in the dtype")
    ignored = found.get("ignore", [])
    if not isinstance(ignored, list) or not all(name in HEADS for name in ignored):
        inside.refuse("ignore", "only lm_head may keep its dtype: all layers are read in one format")
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1 or not isinstance(group := next(iter(groups.values())), dict):
        inside.refuse("config_groups", "one group is expected")
    return _of_group(fields.inside(f"quantization_config.config_groups.{next(iter(groups))}", group))


def _of_group(group: Fields) -> str:
    if group.data.get("targets") != ["Linear"]:
        group.refuse("targets", '["Linear"] is expected')
    if group.data.get("input_activations") or group.data.get("output_activations"):
        group.refuse("input_activations", "activations keep the dtype: W4A16 and W8A16 are supported")
    weights = group.data.get("weights")
    if not isinstance(weights, dict):
        group.refuse("weights", "an object is expected")
    how = group.inside(f"{group.where}weights", weights)  # type: ignore[arg-type]
    expected = {"type": "int", "symmetric": True, "dynamic": False}
    for name, value in expected.items():
        if how.data.get(name, value) != value:
            how.refuse(name, f"{shown(value)} is supported")
    if how.data.get("actorder") not in (None, "weight", "static"):
        how.refuse("actorder", "groups of neighbouring columns are supported")
    bits = how.size("num_bits", 8)
    name = f"int{bits}-row" if how.data.get("strategy") == "channel" else f"int{bits}-g{how.data.get('group_size')}"
    if how.data.get("strategy") not in ("group", "channel") or name not in WEIGHT_FORMATS:
        known = ", ".join(n for n in WEIGHT_FORMATS if n.startswith("int"))
        how.refuse("strategy", f"{name} is no known format: {known}")
    return name
