"""Import traces of a flashinfer-bench dataset: measurements from elsewhere, and their workloads.

    traces/**/*.jsonl        one line per trace: a definition, a workload, a solution, its evaluation
    workloads/**/*.jsonl     the same without the last two: workloads to measure
    definitions/**/*.json    the definitions of traces: autosel's by their tags, FlashInfer's by name (NAMES)

Evidence from elsewhere decides nothing, because it is not from a race of autosel on this device. It is stored in
`elsewhere.jsonl` of AUTOSEL_HOME with its origin, and `explain` shows it in addition to local results. The workloads
form a recording for `tune --recorded`, each with as many calls as it has different inputs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autosel import ops
from autosel.dispatch import recorded
from autosel.errors import BadConfig
from autosel.files import read_named
from autosel.integrations import flashinfer_bench
from autosel.values import DTypeName, Workload, from_json, to_json

KEPT = "elsewhere.jsonl"
MOST_BYTES = 64 << 20
MOST_FILES = 10_000
DTYPES: Mapping[str, DTypeName] = {theirs: ours for ours, theirs in flashinfer_bench.DTYPE.items()}  # type: ignore[misc]


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """Hold one evaluation. `origin`: the file and line it was read from; times are None if the solution failed."""

    workload: Workload
    definition: str
    solution: str
    status: str
    hardware: str
    timestamp: str
    origin: str
    time_us: float | None = None
    reference_us: float | None = None

    @property
    def speedup(self) -> float | None:
        return self.reference_us / self.time_us if self.time_us and self.reference_us else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    evidence: tuple[Elsewhere, ...]
    calls: Mapping[Workload, int]
    left: tuple[str, ...]  # definitions without a workload in autosel, with the reason


def read(dataset: Path) -> Traces:
    """Read a dataset's folder. Nothing of it runs. Raises BadConfig, naming file and line."""
    files = _files(dataset, "definitions", "json")
    definitions = (flashinfer_bench.parsed(read_named(file, MOST_BYTES), str(file)) for file in files)
    meant = {str(d.get("name")): d for d in definitions}
    evidence: list[Elsewhere] = []
    inputs: dict[Workload, set[str]] = {}
    left: dict[str, str] = {}
    for file in (*_files(dataset, "traces", "jsonl"), *_files(dataset, "workloads", "jsonl")):
        for where, line in _lines(file):
            name = str(line.get("definition"))
            try:
                w = workload(meant, name, _axes(line, where))
            except Unmapped as error:
                left[name] = str(error)
                continue
            inputs.setdefault(w, set()).add(str(line["workload"].get("uuid")))
            if line.get("evaluation") is not None:
                evidence.append(_evaluated(line, w, where))
    if not inputs and not left:
        raise BadConfig(
            f"{dataset} holds no traces",
            why="traces/**/*.jsonl and workloads/**/*.jsonl contain no line",
            todo="name a flashinfer-bench dataset",
        )
    calls = {w: len(uuids) for w, uuids in inputs.items()}
    return Traces(
        evidence=tuple(evidence), calls=calls, left=tuple(f"{name}: {why}" for name, why in sorted(left.items()))
    )


def _files(dataset: Path, kind: str, ending: str) -> list[Path]:
    if kind == "definitions" and not (dataset / kind).is_dir():
        raise BadConfig(
            f"{dataset} is not a flashinfer-bench dataset", why=f"it has no folder {kind}", todo="name one that has it"
        )
    found = sorted((dataset / kind).rglob(f"*.{ending}"))
    if len(found) > MOST_FILES:
        raise BadConfig(f"{dataset / kind} is too large", why=f"{len(found)} files; at most {MOST_FILES} are read")
    return found


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(read_named(path, MOST_BYTES).splitlines(), 1):
        if line.strip():
            yield f"{path}:{number}", flashinfer_bench.parsed(line, f"{path}:{number}")


def _axes(line: Mapping[str, Any], where: str) -> dict[str, int]:
    found = line.get("workload")
    axes = found.get("axes") if isinstance(found, dict) else None
    if not isinstance(axes, dict) or not all(type(n) is int and 0 < n < 1 << 40 for n in axes.values()):
        raise BadConfig(f"{where} is not a trace", why="its workload has no axes, or an invalid one")
    return axes


def _evaluated(line: Mapping[str, Any], w: Workload, where: str) -> Elsewhere:
    found = line["evaluation"]
    found = found if isinstance(found, dict) else {}
    environment, times = found.get("environment"), found.get("performance")
    hardware = environment.get("hardware") if isinstance(environment, dict) else None
    named = (line.get("solution"), found.get("status"), hardware, found.get("timestamp"))
    if not all(isinstance(text, str) and text for text in named):
        raise BadConfig(f"{where} is not a trace", why="solution, status, hardware or timestamp is missing")
    times = times if found["status"] == "PASSED" and isinstance(times, dict) else {}
    return Elsewhere(
        workload=w,
        definition=str(line["definition"]),
        solution=str(named[0]),
        status=str(named[1]),
        hardware=str(named[2]),
        timestamp=str(named[3]),
        origin=where,
        time_us=_microseconds(times.get("latency_ms"), where),
        reference_us=_microseconds(times.get("reference_latency_ms"), where),
    )


def _microseconds(ms: Any, where: str) -> float | None:
    if ms is None or ms == 0:  # the schema's default: not measured
        return None
    if type(ms) not in (int, float) or not 0 < ms < 1e9:
        raise BadConfig(f"{where} is not a trace", why=f"a time of {ms!r:.40} ms")
    return float(ms) * 1e3


# --- what a definition means ------------------------------------------------------------------------------------------


class Unmapped(ValueError):
    """Raised for a trace without a workload in autosel, with the reason."""


Sizes = Callable[[Mapping[str, int]], dict[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """Map a definition to a workload. `tensor`: the input whose dtype is the workload's."""

    op: str
    tensor: str
    sizes: Sizes
    traits: Mapping[str, Any]


def _rows(a: Mapping[str, int]) -> dict[str, int]:
    return {"M": a["batch_size"], "d": a["hidden_size"]}


def _gated(a: Mapping[str, int]) -> dict[str, int]:
    return {"M": a["num_tokens"], "I": a["hidden_size"] // 2}


def _product(a: Mapping[str, int]) -> dict[str, int]:
    return {n: a[n] for n in ("M", "N", "K")}


def _paged(a: Mapping[str, int]) -> dict[str, int]:
    """Convert pages to lengths. A trace states the pages of all sequences together: L is their mean length, in whole
    pages."""
    b = a["batch_size"]
    length = -(-a["num_kv_indices"] // b) * a["page_size"]
    sizes = {"Hq": a["num_qo_heads"], "Hkv": a["num_kv_heads"], "D": a["head_dim"], "page": a["page_size"]}
    return {"B": b, "S": 1, "L": length, **sizes}


# The start of a name up to its first size, as in FlashInfer 0.7 and its public dataset.
NAMES: Mapping[str, Meaning] = {
    "rmsnorm_h": Meaning(op="rmsnorm", tensor="hidden_states", sizes=_rows, traits={}),
    "gemma_rmsnorm_h": Meaning(op="rmsnorm", tensor="hidden_states", sizes=_rows, traits={"offset": 1.0}),
    "fused_add_rmsnorm_h": Meaning(op="add_rmsnorm", tensor="hidden_states", sizes=_rows, traits={}),
    "gemma_fused_add_rmsnorm_h": Meaning(op="add_rmsnorm", tensor="hidden_states", sizes=_rows, traits={"offset": 1.0}),
    "silu_and_mul_h": Meaning(op="swiglu", tensor="input", sizes=_gated, traits={}),
    "gelu_and_mul_h": Meaning(op="geglu", tensor="input", sizes=_gated, traits={"tanh": 0}),
    "gelu_tanh_and_mul_h": Meaning(op="geglu", tensor="input", sizes=_gated, traits={"tanh": 1}),
    "gemm_n": Meaning(op="linear", tensor="A", sizes=_product, traits={}),
    "gqa_paged_decode_h": Meaning(op="paged_attn", tensor="q", sizes=_paged, traits={}),
}


def workload(meant: Mapping[str, Mapping[str, Any]], name: str, variable: Mapping[str, int]) -> Workload:
    """Return the workload. Raises Unmapped."""
    definition = meant.get(name)
    if definition is None:
        raise Unmapped("its definition is not in the dataset")
    axes = {**_constants(definition), **variable}
    try:
        own = flashinfer_bench.workload_of(definition, axes)
    except BadConfig as error:
        raise Unmapped(str(error)) from None
    if own is not None:
        return own
    found = next((m for beginning, m in NAMES.items() if re.match(rf"{beginning}_?\d", name)), None)
    if found is None:
        raise Unmapped("autosel has no op of it")
    try:
        dtype = DTYPES[definition["inputs"][found.tensor]["dtype"]]
        return ops.find(found.op).workload(dtype, found.sizes(axes), **found.traits)
    except (KeyError, TypeError) as error:
        raise Unmapped(f"not as FlashInfer writes it: {error!s:.60}") from None


def _constants(definition: Mapping[str, Any]) -> dict[str, int]:
    axes = definition.get("axes")
    found = axes.items() if isinstance(axes, dict) else ()
    return {n: a["value"] for n, a in found if isinstance(a, dict) and type(a.get("value")) is int}


# --- kept -------------------------------------------------------------------------------------------------------------


def keep(home: Path, evidence: Iterable[Elsewhere]) -> int:
    """Add new evaluations; return how many."""
    path = home / KEPT
    had = set(read_named(path, MOST_BYTES).decode().splitlines()) if path.is_file() else set()
    lines = dict.fromkeys(json.dumps(to_json(one), sort_keys=True) for one in evidence)
    new = [line for line in lines if line not in had]
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in new)
    except OSError as error:
        raise BadConfig(f"cannot write {path}", why=error.strerror or str(error)) from error
    return len(new)


def kept(home: Path, bucket: str) -> list[Elsewhere]:
    """Return the imported evaluations of a bucket, best speedup first."""
    path = home / KEPT
    if not path.is_file():
        return []
    try:
        every = [from_json(Elsewhere, line) for _, line in _lines(path)]
    except ValueError as error:
        raise BadConfig(f"{path} is not as autosel wrote it", why=str(error), todo="remove it, import again") from error
    return sorted((e for e in every if e.workload.bucket == bucket), key=lambda e: -(e.speedup or 0.0))


def traffic(made: Traces, device: str, mode: str) -> recorded.Recorded:
    """Return their workloads as a recording of this device, in this mode."""
    return recorded.Recorded(device=device, mode=mode, calls=made.calls)
