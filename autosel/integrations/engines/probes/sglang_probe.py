"""Probe SGLang with its own lookups of tiles for each row's sizes, and its own parser of the configuration file.

Its plug-ins are loaded first, as in each of its processes. Nothing is served, and no GPU is needed: the lookup gets the
name of the device that the rows are for.
"""

import json
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tiles import Experts, Flag, Products, heard, set_to  # next to this script, which any Python may run


def main(question: Mapping[str, Any]) -> dict[str, Any]:
    try:
        import sglang  # noqa: F401
    except ImportError as error:
        return {"absent": str(error)}
    from sglang.kernels.ops.gemm import fp8_kernel
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_config
    from sglang.srt.plugins import load_plugins

    load_plugins()
    device = fp8_kernel.get_device_name() or ""
    folder, wanted = Path(question["folder"]), question["device"]
    asked: dict[str, Any] = {
        "gemm": Products("SGLang", fp8_kernel, folder, wanted, "get_device_name"),
        "moe": SglangExperts(fused_moe_triton_config, folder, wanted),
        "flag": SglangFlag(folder),
    }
    return {"version": version("sglang"), **heard("SGLang", asked, question["rows"], device, wanted)}


class SglangExperts(Experts):
    variable, named, no_block = "SGLANG_MOE_CONFIG_DIR", "get_device_name", (0, 0)

    def here(self, row: Mapping[str, Any]) -> bool:
        with serving(self.module):
            return super().here(row)

    def there(self, row: Mapping[str, Any]) -> bool:
        try:
            return super().there(row)
        except FileNotFoundError:
            return False

    def default(self, ask: Mapping[str, Any], *_: Any) -> Any:
        """Return None for experts in plain fp8, whose defaults follow the shared memory of the present device."""
        if ask["dtype"] and not ask["block"]:
            return None
        with serving(self.module):
            return super().default(ask, False)


def serving(module: Any) -> AbstractContextManager[None]:
    """Provide the server settings for deterministic inference that its lookups read; without a server there are
    none."""

    class Plain:
        enable_deterministic_inference = False
        deterministic: Any

    Plain.deterministic = Plain
    return set_to(module, get_exec=lambda: Plain)


class SglangFlag(Flag):
    def there(self, row: Mapping[str, Any]) -> bool:
        """Read the file as `launch_server --config` does; a backend must be one that SGLang has registered."""
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

        if not row["value"]:
            return all(line.startswith("#") for line in (self.folder / row["file"]).read_text().splitlines())
        words = ConfigArgumentMerger().merge_config_with_args(["--config", str(self.folder / row["file"])])
        return words[:2] == [f"--{row['key']}", row["value"]] and row["value"] in ATTENTION_BACKENDS


if __name__ == "__main__":
    stdout, sys.stdout = sys.stdout, sys.stderr  # engines print while they are imported
    reply = main(json.load(sys.stdin))
    stdout.write(json.dumps(reply) + "\n")
