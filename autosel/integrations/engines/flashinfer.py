"""Write FlashInfer's dataset (through flashinfer_bench) with a manifest, so that `doctor` can check that it is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autosel.integrations import flashinfer_bench
from autosel.integrations.engines import folder as folders
from autosel.integrations.engines.rows import EngineRow

VERSION = "0.1.2"  # of flashinfer-bench, which defines the schema


def export(decided: Sequence[flashinfer_bench.Decided], folder: Path) -> flashinfer_bench.Exported:
    """Export solutions, one per row: measured if the decision comes from a race, else by hand."""
    files, made = flashinfer_bench.documents(decided)
    rows = []
    for one in decided:
        d = one.decision
        if flashinfer_bench.unspeakable(d):
            continue
        name = flashinfer_bench.solution(d.workload, d.arm)["name"]
        raced = d.verdict is not None and one.parity is not None
        rows.append(
            EngineRow(
                file=f"solutions/{name}.json",
                key=d.workload.key,
                label=d.workload.key,
                value=name,
                source="measured" if raced else "default",
                reason=f"decision {d.id}: {d.arm.candidate}" + ("" if raced else ", by hand: no race behind it"),
                decision=d.id,
            )
        )
    device = next((one.device for one in decided if one.device), None)
    folders.write(folder, engine="flashinfer", engine_version=VERSION, fp=device, rows=rows, files=files)
    return made
