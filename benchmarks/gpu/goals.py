"""List the goals for a GPU, the results from a run's records, and the figures of peers. Loads no torch.

Goals about memory are relative to the device's own read rate R. Goals with a model and tokens per second are for one
H200. Figures of peers are those published by their authors, for the device named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.kept import StageResult

Records = Mapping[str, StageResult]
LARGE_US = 50.0  # time at the read rate above which launch overhead is negligible

CLEAN = ("parity", "sanitizer", "graph", "containment", "engines")


@dataclass(frozen=True, slots=True, kw_only=True)
class PageGoal:
    """Describe one line of the page. `reached` returns the figure, or None; less is better with
    `most`."""

    name: str
    limit: float
    unit: str
    reached: Callable[[Records], float | None]
    most: bool = False
    peer: str = ""

    def met(self, value: float) -> bool:
        return value <= self.limit if self.most else value >= self.limit

    @property
    def told(self) -> str:
        return f"{'<=' if self.most else '>='} {shown(self.limit, self.unit)}"


def shown(value: float, unit: str) -> str:
    return f"{value:.1%}" if unit == "%" else f"{value:.3g} {unit}".rstrip() if value < 1000 else f"{value:,.0f} {unit}"


# --- from the records -------------------------------------------------------------------------------------------------


def arms(records: Records, op: str, **dims: int) -> Iterator[tuple[float, float]]:
    """Yield (us, us at the read rate) of the fastest correct arm of each matching workload."""
    record = records.get("bench")
    for key, found in (record.units if record else {}).items():
        if key.split("/")[0] != op or not all(f"{n}{v}" in key.split("/")[1].split(".") for n, v in dims.items()):
            continue
        times = [t["us"] for arm, t in found.get("arms", {}).items() if arm not in found["wrong"]]
        if times:
            yield min(times), found["floor_us"]


def beyond_us(op: str, **dims: int) -> Callable[[Records], float | None]:
    """Return the largest time of an op's workloads beyond reading their bytes."""
    return lambda records: max((us - floor for us, floor in arms(records, op, **dims)), default=None)


def slowest_us(op: str, **dims: int) -> Callable[[Records], float | None]:
    return lambda records: max((us for us, _ in arms(records, op, **dims)), default=None)


def of_read(op: str) -> Callable[[Records], float | None]:
    """Return the lowest share of the read rate among workloads that are long enough to hide other costs."""
    return lambda records: min((f / us for us, f in arms(records, op) if f >= LARGE_US), default=None)


def certificate(records: Records, unit: str) -> Mapping[str, Any]:
    record = records.get("decode")
    found: Mapping[str, Any] = (record.units if record else {}).get(unit, {}).get("certificate", {})
    return found


def tokens_per_s(*units: str) -> Callable[[Records], float | None]:
    """Return the tokens per second of the fastest of these runs."""

    def of(records: Records) -> float | None:
        rates = (certificate(records, unit).get("tokens_per_sec") for unit in units)
        return max((float(r) for r in rates if r is not None), default=None)

    return of


def speedup(unit: str) -> Callable[[Records], float | None]:
    return lambda records: certificate(records, unit).get("speedup")


def regret(kind: str, what: str) -> Callable[[Records], float | None]:
    """Return a regret statistic of the closed forms over all cells of a kind."""

    def of(records: Records) -> float | None:
        from benchmarks.bench_regret import summary

        record = records.get("regret")
        cells = [found for found in (record.units if record else {}).values() if "regret" in found]
        return summary(cells).get(kind, {}).get(what)

    return of


def failed(stage: str) -> Callable[[Records], float | None]:
    """Return the number of units that failed or were left undone."""

    def of(records: Records) -> float | None:
        record = records.get(stage)
        return None if record is None else float(len(record.failed) + len(record.undone))

    return of


# --- the goals --------------------------------------------------------------------------------------------------------

BASE = ("batch 1", "persistent", "graph", "call by call")  # the model at its context, with its step in every form
GOALS = (
    *(PageGoal(name=f"{stage}: failed or undone units", limit=0, unit="", reached=failed(stage), most=True)
      for stage in CLEAN),
    PageGoal(name="gemv, M=1: beyond bytes / R", limit=1.5, unit="us", reached=beyond_us("linear", M=1), most=True,
         peer="TensorRT-LLM on a B300, 8192 -> 2048: about 5 us, 84 % of its rate"),
    PageGoal(name="attention, B=1, L=8192: a layer", limit=12.0, unit="us", reached=slowest_us("attn", B=1, L=8192),
         most=True, peer="FlashInfer on a B200: 8.1 us at 4k, 17.8 us at 16k"),
    PageGoal(name="memory-bound attention: share of R", limit=0.95, unit="%", reached=of_read("attn"),
         peer="FlashInfer on a B200 and FlashMLA on an H800: 90 % of the datasheet"),
    PageGoal(name="memory-bound projections: share of R", limit=0.90, unit="%", reached=of_read("linear"),
         peer="llama.cpp on an RTX 4090: about 90 % end to end"),
    PageGoal(name="rmsnorm, M=1", limit=2.5, unit="us", reached=slowest_us("rmsnorm", M=1), most=True,
         peer="FlashInfer on a B200: 3 us"),
    PageGoal(name="llama-8b bf16, B=1, L=8192", limit=240.0, unit="tok/s", reached=tokens_per_s(*BASE),
         peer="vLLM 0.30 on an H100, Qwen3-8B at 8k: 137 tok/s"),
    PageGoal(name="llama-1b bf16, B=1, L=256", limit=1430.0, unit="tok/s", reached=tokens_per_s("llama-1b at 256"),
         peer="a megakernel on an H200, at about 100 tokens: 1,316 tok/s"),
    PageGoal(name="qwen3-1.7b bf16, B=1, L=256", limit=985.0, unit="tok/s", reached=tokens_per_s("qwen3-1.7b at 256")),
    PageGoal(name="gemma3-1b bf16, B=1, L=256", limit=1500.0, unit="tok/s", reached=tokens_per_s("gemma3-1b at 256")),
    PageGoal(name="llama-8b over eager PyTorch, B=1, L=8192", limit=2.66, unit="x", reached=speedup("batch 1")),
    PageGoal(name="regret, decode kernels: geomean", limit=0.03, unit="%", reached=regret("decode", "geomean"),
             most=True),
    PageGoal(name="the same: 95th percentile", limit=0.08, unit="%", reached=regret("decode", "p95"), most=True),
    PageGoal(name="regret, matrix products: geomean", limit=0.06, unit="%", reached=regret("gemm", "geomean"),
             most=True),
    PageGoal(name="regret, routes: worst", limit=0.05, unit="%", reached=regret("route", "worst"), most=True),
)  # fmt: skip

COLUMNS = ("what", "goal", "reached", "verdict", "peer", "reason for a gap")
UNKNOWN = "not examined yet"


def lines(records: Records, gaps: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the page. `gaps` maps a goal to the reason why it was missed, written by hand."""
    for goal in GOALS:
        value = goal.reached(records)
        if value is None:
            yield goal.name, goal.told, "not run", "", goal.peer, ""
            continue
        met = goal.met(value)
        why = "" if met else gaps.get(goal.name, UNKNOWN)
        yield goal.name, goal.told, shown(value, goal.unit), "reached" if met else "missed", goal.peer, why
