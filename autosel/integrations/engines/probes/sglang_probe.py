"""SGLang: its own lookups of tiles for each row's sizes, its own parser of the configuration file.

Its plug-ins are loaded first, as in each of its processes. Nothing is served, and no GPU is needed: what the lookup
answers on the device the rows are for is asked under that device's name.
"""

import json
import os
import sys
from collections.abc import Mapping
from importlib.metadata import version
from inspect import unwrap
from pathlib import Path
from typing import Any

NOWHERE = "none that SGLang knows"


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
        "gemm": Gemm(fp8_kernel, folder, wanted),
        "moe": Moe(fused_moe_triton_config, folder, wanted),
        "flag": Flag(folder),
    }
    rows = [heard(asked[row["ask"]["kind"]], row, device, wanted) for row in question["rows"]]
    missing = {row["ask"]["kind"] for row, said in zip(question["rows"], rows, strict=True) if not said["here"]}
    settings = [asked[kind].setting for kind in ("gemm", "moe") if kind in missing]
    return {"version": version("sglang"), "device": device or NOWHERE, "rows": rows, "setting": "\n".join(settings)}


def heard(kind: Any, row: Mapping[str, Any], device: str, wanted: str) -> dict[str, Any]:
    there = kind.there(row)
    here = kind.here(row) if device or isinstance(kind, Flag) else False
    if here:
        why = ""
    elif not there:
        why = f"SGLang does not take {row['file']} for these sizes"
    elif device != wanted:
        why = f"the device is {device or NOWHERE}, the files are for {wanted}"
    else:
        why = kind.elsewhere
    same = row["source"] != "default" or kind.default(row["ask"]) in (None, row["value"])
    return {"here": here, "there": there, "why": why, "same": same}


class Gemm:
    elsewhere = "SGLang looks for products in its own package alone"

    def __init__(self, module: Any, folder: Path, wanted: str) -> None:
        self.module, self.folder, self.wanted = module, folder, wanted
        self.setting = f"export AUTOSEL_ENGINE_FILES={folder}   # autosel's plug-in, in SGLang's Python, hands it over"

    def here(self, row: Mapping[str, Any]) -> bool:
        ask = row["ask"]
        return taken(self.module.get_w8a8_block_fp8_configs(ask["n"], ask["k"], *ask["block"]), row)

    def there(self, row: Mapping[str, Any]) -> bool:
        """The function itself, as if its package lay in our folder, on the device that is wanted."""
        ask, module = row["ask"], self.module
        kept = module.__file__, module.get_device_name
        module.__file__, module.get_device_name = str(self.folder / "gemm" / "x"), lambda: self.wanted
        try:
            return taken(unwrap(module.get_w8a8_block_fp8_configs)(ask["n"], ask["k"], *ask["block"]), row)
        finally:
            module.__file__, module.get_device_name = kept

    def default(self, _ask: Mapping[str, Any]) -> Any:
        """Written inside the function that launches the kernel, which a machine without a GPU cannot call."""
        return None


class Moe:
    elsewhere = "SGLANG_MOE_CONFIG_DIR does not name their folder"

    def __init__(self, module: Any, folder: Path, wanted: str) -> None:
        self.module, self.folder, self.wanted = module, folder, wanted
        self.setting = f"export SGLANG_MOE_CONFIG_DIR={folder / 'moe'}"

    def here(self, row: Mapping[str, Any]) -> bool:
        ask = row["ask"]
        with serving(self.module):
            found = unwrap(self.module.get_moe_configs)(ask["e"], ask["n"], ask["dtype"], *(ask["block"] or (0, 0)))
        return taken(found, row)

    def there(self, row: Mapping[str, Any]) -> bool:
        module, name = self.module, "SGLANG_MOE_CONFIG_DIR"
        kept, before = module.get_device_name, os.environ.get(name)
        module.get_device_name = lambda: self.wanted
        os.environ[name] = str(self.folder / "moe")
        try:
            return self.here(row)
        except FileNotFoundError:
            return False
        finally:
            module.get_device_name = kept
            os.environ.pop(name)
            if before is not None:
                os.environ[name] = before

    def default(self, ask: Mapping[str, Any]) -> Any:
        """None for experts in plain fp8, whose defaults follow the shared memory of the device at hand."""
        if ask["dtype"] and not ask["block"]:
            return None
        with serving(self.module):
            found = self.module.get_default_config(
                ask["m"], ask["e"], ask["n"], ask["k"], ask["top"], ask["dtype"], False, ask["block"]
            )
        return dict(found)


class serving:  # noqa: N801
    """Its lookups ask the server's settings for deterministic inference; with no server there is none."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __enter__(self) -> None:
        class Plain:
            enable_deterministic_inference = False
            deterministic: Any

        Plain.deterministic = Plain
        self.kept, self.module.get_exec = self.module.get_exec, lambda: Plain

    def __exit__(self, *error: object) -> None:
        self.module.get_exec = self.kept


class Flag:
    elsewhere = setting = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def here(self, row: Mapping[str, Any]) -> bool:
        return self.there(row)

    def there(self, row: Mapping[str, Any]) -> bool:
        """As `launch_server --config` reads it; a backend must be one that SGLang has registered."""
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

        if not row["value"]:
            return all(line.startswith("#") for line in (self.folder / row["file"]).read_text().splitlines())
        words = ConfigArgumentMerger().merge_config_with_args(["--config", str(self.folder / row["file"])])
        return words[:2] == [f"--{row['key']}", row["value"]] and row["value"] in ATTENTION_BACKENDS

    def default(self, _ask: Mapping[str, Any]) -> Any:
        return None


def taken(configs: Any, row: Mapping[str, Any]) -> bool:
    """As the engine takes the row of the nearest count."""
    m = row["ask"]["m"]
    return bool(configs) and configs[min(configs, key=lambda rows: abs(rows - m))] == row["value"]


if __name__ == "__main__":
    stdout, sys.stdout = sys.stdout, sys.stderr  # engines print as they are imported
    reply = main(json.load(sys.stdin))
    stdout.write(json.dumps(reply) + "\n")
