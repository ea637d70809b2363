"""Store the results of whole-step benchmarks, one file for each instruction set, since kernels depend on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autosel.fingerprint.describe import ISA_WORDS
from autosel.json_rows import in_rows
from autosel.knobs.cpu.facts import facts
from autosel.values import Fingerprint

RESULTS = Path(__file__).parent / "results" / "cpu"


def keep(path: Path, found: Any) -> None:
    """Write JSON, one row a line; make its folder first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(in_rows(found) + "\n")


def file_of(name: str, fp: Fingerprint) -> Path:
    """Return the path of a result file, such as `results/cpu/step-avx2.json`."""
    return RESULTS / f"{name}-{facts(fp).isa}.json"


def device_of(fp: Fingerprint) -> str:
    """Return the name of a device with its instruction set, such as `AMD EPYC, AVX2`."""
    return f"{fp.name}, {ISA_WORDS[facts(fp).isa]}"
