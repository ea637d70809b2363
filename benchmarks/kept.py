"""Where a benchmark of whole steps keeps what it found: a file for each instruction set, whose kernels are others."""

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
    """`results/cpu/step-avx2.json`"""
    return RESULTS / f"{name}-{facts(fp).isa}.json"


def device_of(fp: Fingerprint) -> str:
    """`AMD EPYC, AVX2`"""
    return f"{fp.name}, {ISA_WORDS[facts(fp).isa]}"
