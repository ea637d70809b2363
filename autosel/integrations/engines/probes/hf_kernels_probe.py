"""Probe Hugging Face kernels: kernelize a module of each layer name with the exported mapping, and check the result."""

import json
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any


def main(question: Mapping[str, Any]) -> dict[str, Any]:
    try:
        import torch

        import kernels
    except ImportError as error:
        return {"absent": str(error)}
    folder = Path(question["folder"])
    found = json.loads((folder / "mapping.json").read_text())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = [heard(kernels, torch, folder, found, row, device) for row in question["rows"]]
    return {"version": version("kernels"), "device": device, "rows": rows, "setting": ""}


def heard(kernels: Any, torch: Any, folder: Path, found: Any, row: Mapping[str, Any], device: str) -> dict[str, Any]:
    ask = row["ask"]
    if row["value"] is None:
        absent = ask["layer"] not in found
        return {"here": absent, "there": absent, "why": "" if absent else "it is mapped", "same": True}
    why = ""
    try:
        wanted = found[ask["layer"]][ask["device"]]
        loaded = kernels.LocalLayerRepository(folder, layer_name=wanted).load()
        there = loaded.__name__ == row["value"]
    except Exception as error:  # any error of the package is the answer
        there, why = False, f"{type(error).__name__}: {error}".splitlines()[0][:200]
    if there and ask["device"] != device:
        return {
            "here": False,
            "there": True,
            "why": f"the device is {device}, they are for {ask['device']}",
            "same": True,
        }
    return {"here": there, "there": there, "why": why, "same": True}


if __name__ == "__main__":
    stdout, sys.stdout = sys.stdout, sys.stderr
    reply = main(json.load(sys.stdin))
    stdout.write(json.dumps(reply) + "\n")
