"""Stage 8: profile autosel's two kernels with the lowest share of the read rate, with Nsight Compute.

The bench stage's results select them. A CPU has no such tool; there the profiled process prints the same table itself.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autosel import settings
from autosel.values import Fingerprint
from benchmarks.gpu.kept import RunFolder
from benchmarks.gpu.scope import Scope, is_ours
from benchmarks.gpu.stages import Found, Table

UNIT_S = 600.0  # ncu replays each launch once for each group of counters
COUNT = 2
PROFILED = Path(__file__).with_name("profiled.py")
TIME, READ, WRITTEN = "gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum"
METRICS = {
    TIME: "ns",
    READ: "bytes read from memory",
    WRITTEN: "bytes written to memory",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory, % of peak",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "L2, % of peak",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "SMs, % of peak",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps active, % of most",
    "launch__registers_per_thread": "registers a thread",
    "launch__waves_per_multiprocessor": "waves",
}
NO_TOOL = "ncu (Nsight Compute) was not found on PATH or next to nvcc: install it, then --stage profile --fresh"
NOT_ALLOWED = "ERR_NVGPUCTRPERM"  # the driver restricts its counters to the administrator


def units(scope: Scope, fp: Fingerprint) -> list[str]:
    return [f"slowest {number + 1}" for number in range(COUNT)]


def run(unit: str, scope: Scope, fp: Fingerprint) -> Found:
    """Return the counters of one call and its time at the read rate.

    `ok` is also true without a kernel to profile or without a usable profiler; then `reason` is set.
    """
    ranked = slowest(scope)
    number = int(unit.split()[1]) - 1
    if number >= len(ranked):
        return {"ok": True, "outcome": "nobody", "reason": "the bench stage has no further autosel kernel to profile"}
    key, arm, of_read = ranked[number]
    told = {"workload": key, "arm": arm, "of_read": of_read}
    command = [sys.executable, "-P", str(PROFILED), scope.text, key, arm]
    if scope.on_gpu:
        tool = find_profiler()
        if tool is None:
            return {"ok": True, "outcome": "not profiled", "reason": NO_TOOL, **told}
        command = [*profiler(tool), *command]
    done = subprocess.run(command, capture_output=True, text=True, env=settings.passed_to_children(), check=False)
    if NOT_ALLOWED in done.stdout + done.stderr:
        why = f"the driver gives no counters to this user ({NOT_ALLOWED}): enable them, or run as administrator"
        return {"ok": True, "outcome": "not profiled", "reason": why, **told}
    kernels = list(counters(done.stdout))
    if done.returncode or not kernels:
        last = (done.stdout + done.stderr).strip().splitlines()[-3:]
        return {"ok": False, "outcome": "failed", "reason": " ".join(last)[:300], **told}
    return {"ok": True, "outcome": "profiled", **told, **summed(kernels, floor_us=_floor_us(scope, key))}


def slowest(scope: Scope) -> list[tuple[str, str, float]]:
    """Return (workload, arm, fraction of the read rate) of each own kernel at its worst workload; the worst first."""
    record = RunFolder(Path(scope.out)).read("bench")
    worst: dict[str, tuple[str, str, float]] = {}
    for key, found in (record.units if record else {}).items():
        for arm, times in found.get("arms", {}).items():
            one = (key, arm, float(times["read"]))
            if is_ours(arm) and arm not in found["wrong"] and one[2] > 0:
                worst[arm] = min(worst.get(arm, one), one, key=lambda w: w[2])
    return sorted(worst.values(), key=lambda w: w[2])


def _floor_us(scope: Scope, key: str) -> float:
    record = RunFolder(Path(scope.out)).read("bench")
    assert record is not None  # the key came from it
    return float(record.units[key]["floor_us"])


def find_profiler() -> str | None:
    """Return ncu from PATH or from nvcc's folder."""
    from autosel.native.cuda import find_nvcc

    found, nvcc = shutil.which("ncu"), find_nvcc()
    beside = nvcc.home / "bin" / "ncu" if nvcc else None
    return found or (str(beside) if beside is not None and os.access(beside, os.X_OK) else None)


def profiler(tool: str) -> list[str]:
    """Return the command prefix: profile between the marks, flush caches before each launch, do not lock clocks."""
    plain = ["--csv", "--print-units", "base", "--clock-control", "none", "--cache-control", "all"]
    return [tool, *plain, "--profile-from-start", "off", "--metrics", ",".join(METRICS)]


def counters(said: str) -> Iterator[dict[str, Any]]:
    """Yield each launch's kernel and counters from the tool's table: one row a counter, one ID a launch."""
    lines = said.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    launches: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(lines[start:]):
        if not row.get("Metric Value"):  # the tool's own messages inside the table
            continue
        launch = launches.setdefault(row["ID"], {"kernel": row["Kernel Name"].partition("(")[0]})
        try:
            launch[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
        except ValueError:  # "n/a": this device lacks the counter
            continue
    yield from (one for one in launches.values() if TIME in one)


def summed(kernels: list[dict[str, Any]], *, floor_us: float) -> Found:
    """Add up the launches of one call: times and bytes."""
    time_us = sum(k[TIME] for k in kernels) / 1e3
    read = sum(k.get(READ, 0.0) for k in kernels)
    return {
        "us": round(time_us, 3),
        "floor_us": floor_us,
        "read_bytes": int(read),
        "read_bytes_per_s": round(read / (time_us * 1e-6)) if time_us else 0,
        "kernels": kernels,
    }


def table(found: Mapping[str, Found]) -> Table:
    rows, told = [], []
    for name, one in found.items():
        if one.get("outcome") != "profiled":
            told += [f"{name}: {one.get('arm', '')} {one['reason']}".replace(":  ", ": ")] if "reason" in one else []
            continue
        rate = f"{one['read_bytes_per_s'] / 1e9:.1f}"
        times = (f"{one['us']:.1f}", f"{one['floor_us']:.1f}", f"{one['of_read']:.0%}")
        rows.append((one["arm"], one["workload"], *times, f"{one['read_bytes'] / 1e6:.3f}", rate))
        for kernel in one["kernels"]:
            shown = [f"{METRICS[m]} {kernel[m]:.4g}" for m in METRICS if m in kernel and m != TIME]
            told.append(f"{kernel['kernel']}: {kernel[TIME] / 1e3:.1f} us; {', '.join(shown)}")
    columns = ("kernel", "workload", "us", "roofline us", "of read (bench)", "MB read", "GB/s")
    return Table(columns=columns, rows=tuple(rows), remarks=tuple(told))
