"""Store a device's results in the checkout: benchmarks/results/<device>/ and the measured part of fingerprints/.

    <stage>.json              the record as the run wrote it, without local paths
    summary.md                the tables
    certificates.jsonl        from the decode stage
    sweep-*.svg               from the sweep stage, if matplotlib is installed
    gaps.json                 goal -> reason for a gap; written by hand, never overwritten

docs/generate.py makes the documentation's table of kernels and its page of goals from these files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autosel.errors import UsageError
from benchmarks.gpu.kept import RunFolder, StageResult
from benchmarks.gpu.stages import NAMES

ROOT = Path(__file__).resolve().parents[2]
OF_THIS_MACHINE = ("file", "audit", "traceback")  # keys whose values are local paths, or long


def keep(kept: RunFolder, root: Path = ROOT) -> list[str]:
    """Write the files and return their paths below `root`. Raises UsageError without results, or for a dry run."""
    records = {record.stage: record for record in kept.records(NAMES) if record.key}  # the others met no device
    if not records:
        raise UsageError("nothing to keep", why=f"{kept.folder} has no results", todo="run the stages first")
    device = next(iter(records.values())).device
    if device["kind"] == "cpu" and root == ROOT:
        raise UsageError("a dry run is not kept", why="its results are for this CPU, not for a GPU")
    folder = root / "benchmarks" / "results" / slug(device["name"])
    folder.mkdir(parents=True, exist_ok=True)
    written = [f"{name}.json" for name in records]
    for name, record in records.items():
        (folder / f"{name}.json").write_text(json.dumps(plain(asdict(record)), indent=1) + "\n")
    written += [name for name, text in texts(kept, records) if (folder / name).write_text(text)]
    written += pictures(folder, records)
    measured = fingerprint(root, records)
    shown = [str((folder / name).relative_to(root)) for name in written]
    return [*shown, *([str(measured.relative_to(root))] if measured else [])]


def slug(name: str) -> str:
    """`NVIDIA H200` -> `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def plain(value: Any) -> Any:
    """Return the value without keys that belong to this machine."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if k not in OF_THIS_MACHINE}
    return [plain(v) for v in value] if isinstance(value, list) else value


def texts(kept: RunFolder, records: Mapping[str, StageResult]) -> Iterator[tuple[str, str]]:
    summary = kept.folder / "summary.md"
    if summary.is_file():
        yield "summary.md", summary.read_text()
    runs = records["decode"].units.values() if "decode" in records else ()
    made = [run["certificate"] for run in runs if "certificate" in run]
    if made:
        yield "certificates.jsonl", "".join(json.dumps(one, sort_keys=True) + "\n" for one in made)


def pictures(folder: Path, records: Mapping[str, StageResult]) -> list[str]:
    """Draw the sweeps' curves; return the file names, none without matplotlib."""
    from autosel.certify.sweep import Sweep
    from autosel.errors import AutoselError
    from autosel.values import from_json

    written: list[str] = []
    for unit, found in (records["sweep"].units if "sweep" in records else {}).items():
        try:
            from autosel.certify.plots import svg
            from autosel.certify.sweep_plots import pictures as drawn

            for name, figure in drawn(from_json(Sweep, found["sweep"])).items():
                path = folder / f"sweep-{unit}-{name}.svg"
                path.write_text(svg(figure, for_page=False))
                written.append(path.name)
        except (AutoselError, KeyError):  # no matplotlib; or the sweep failed
            continue
    return written


def fingerprint(root: Path, records: Mapping[str, StageResult]) -> Path | None:
    """Fill in the measured part of the device's file, if it exists. Rates that the file does not list are ignored."""
    taken = records["fingerprint"].units.get("take", {}).get("fingerprint") if "fingerprint" in records else None
    files = sorted((root / "fingerprints").glob("*.json"))
    path = next((path for path in files if taken and json.loads(path.read_text())["name"] == taken["name"]), None)
    if taken is None or path is None:
        return None
    text = path.read_text()
    for name, rate in taken["rates"].items():
        figure = {key: rate[key] for key in ("value", "unit", "spread", "source")}
        text = re.sub(rf'(?s)("measured": \{{.*?"{name}": )(null|\{{[^}}]*\}})', rf"\g<1>{json.dumps(figure)}", text)
    json.loads(text)
    path.write_text(text)
    return path
