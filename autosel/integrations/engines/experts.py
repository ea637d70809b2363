"""Read the experts of a mixture-of-experts checkpoint from its config.json, to name fused-MoE files.

autosel has no op for experts yet and tunes none; engines' files for their kernel can still be derived or pinned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autosel import files
from autosel.errors import BadConfig
from autosel.values import DTypeName, parse_json

MOST_BYTES = 4 << 20
MOST = 1 << 20
COUNT = ("num_experts", "num_local_experts", "n_routed_experts")
INNER = ("moe_intermediate_size", "intermediate_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Describe the experts: `chosen` of `count` per token; each is [2 inner, hidden] and [hidden, inner]. `block`:
    fp8's scales."""

    name: str
    count: int
    chosen: int
    hidden: int
    inner: int
    dtype: DTypeName
    block: tuple[int, int] | None


def read(model: str) -> Experts | None:
    """Return None for a preset, and for a checkpoint without experts. Raises BadConfig for experts with a missing
    size."""
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        return None
    try:
        data = parse_json(files.read(path, MOST_BYTES), what=str(path))
    except (OSError, ValueError) as error:
        raise BadConfig(f"{path} cannot be read", why=str(error)) from error
    if not isinstance(data, dict) or not any(data.get(n) for n in COUNT):
        return None
    return Experts(
        name=str(data.get("_name_or_path") or path.parent.name or "model"),
        count=_size(path, data, COUNT),
        chosen=_size(path, data, ("num_experts_per_tok",)),
        hidden=_size(path, data, ("hidden_size",)),
        inner=_size(path, data, INNER),
        dtype="fp8_e4m3" if _quantised(data) else "bf16",
        block=_block(path, data),
    )


def _size(path: Path, data: Mapping[str, Any], names: tuple[str, ...]) -> int:
    for name in names:
        value = data.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
                raise BadConfig(f"{path}: {name} is {value!r:.40}", why=f"a whole number from 1 to {MOST} is expected")
            return value
    raise BadConfig(f"{path} has experts and no {' or '.join(names)}", why="a fused-MoE file is named after it")


def _quantised(data: Mapping[str, Any]) -> bool:
    found = data.get("quantization_config")
    return isinstance(found, dict) and found.get("quant_method") == "fp8"


def _block(path: Path, data: Mapping[str, Any]) -> tuple[int, int] | None:
    found = data.get("quantization_config")
    if not isinstance(found, dict):
        return None
    if found.get("quant_method") != "fp8":
        raise BadConfig(
            f"{path}: quant_method {found.get('quant_method')!r:.40}", why="fused-MoE files are made for bf16 and fp8"
        )
    size = found.get("weight_block_size")
    if size is None:
        return None
    if not isinstance(size, list) or len(size) != 2 or not all(isinstance(n, int) and 1 <= n <= MOST for n in size):
        raise BadConfig(f"{path}: weight_block_size is {size!r:.40}", why="two whole numbers are expected")
    return size[0], size[1]
