"""Probe flashinfer-bench, or FlashInfer, with its own parser of the dataset: a row is found if its solution is."""

import json
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any


def main(question: Mapping[str, Any]) -> dict[str, Any]:
    folder = Path(question["folder"])
    try:
        known, engine = parsed(folder)
    except ImportError as error:
        return {"absent": str(error)}
    rows = []
    for row in question["rows"]:
        here = row["value"] in known
        rows.append({"here": here, "there": here, "why": "" if here else known.get("", "it is not read"), "same": True})
    return {"version": version(engine), "device": question["device"], "rows": rows, "setting": ""}


def parsed(folder: Path) -> tuple[dict[str, str], str]:
    """Return the names of the solutions read; under "" the reason if there are none."""
    try:
        from flashinfer_bench.data import TraceSet
    except ImportError:
        from flashinfer.trace_apply.config import load_config

        try:
            return {name: "" for _, name in load_config(folder).solutions}, "flashinfer-python"
        except Exception as error:  # any error of its parser is the answer
            return {"": f"{type(error).__name__}: {error}".splitlines()[0][:200]}, "flashinfer-python"
    try:
        found = TraceSet.from_path(str(folder))
        return {s.name: "" for solutions in found.solutions.values() for s in solutions}, "flashinfer-bench"
    except Exception as error:
        return {"": f"{type(error).__name__}: {error}".splitlines()[0][:200]}, "flashinfer-bench"


if __name__ == "__main__":
    stdout, sys.stdout = sys.stdout, sys.stderr
    reply = main(json.load(sys.stdin))
    stdout.write(json.dumps(reply) + "\n")
