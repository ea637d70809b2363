"""Stage 11: run autosel inside the installed engines: its plug-ins for vLLM, SGLang and FlashInfer, and patched
Hugging Face models.

Each engine runs in its own process, once without and once with the stored decisions. Its answers must be the same, as
far as the rounding of served kernels lets a greedy stream agree, and at least one decision must have served.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from autosel.values import Fingerprint
from benchmarks.gpu.scope import Scope
from benchmarks.gpu.stages import Found, Table
from benchmarks.gpu.verb import answered

UNIT_S = 1800.0  # an engine compiles and captures at its start
ENGINES = {
    "vllm": "vllm",
    "sglang": "sglang",
    "flashinfer": "flashinfer-python",
    "transformers": "transformers",
}  # module -> distribution
SERVED = Path(__file__).with_name("served.py")


def units(scope: Scope, fp: Fingerprint) -> list[str]:
    return list(ENGINES)


def run(unit: str, scope: Scope, fp: Fingerprint) -> Found:
    """Compare an engine with and without autosel; `ok` if it agrees and a decision served, or is not installed."""
    if importlib.util.find_spec(unit) is None:
        return {"ok": True, "outcome": "not installed", "reason": f"{ENGINES[unit]} is not installed here"}
    plain, ours = heard(unit, scope, plugged=False), heard(unit, scope, plugged=True)
    told = {"version": metadata.version(ENGINES[unit]), "plain": plain, "ours": ours}
    wrong = "; ".join(one["error"] for one in (plain, ours) if "error" in one) or disagreement(plain, ours)
    if wrong:
        return {"ok": False, "outcome": "failed", "reason": wrong, **told}
    return {"ok": True, "outcome": "served", **told}


def heard(engine: str, scope: Scope, *, plugged: bool) -> Found:
    """Run served.py once and return its result, which is the last line of its output."""
    # Keep the model in the process that reports the served ops.
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **({} if plugged else {"AUTOSEL_DISABLE": "1"})}
    return answered(str(SERVED), scope.text, engine, environment=environment)


def disagreement(plain: Found, ours: Found) -> str:
    """Return the reason why the two runs disagree, or ""."""
    if plain["served"]:
        return f"without the plug-in {', '.join(plain['served'])} served anyway"
    if ours["served"] == []:
        return "no decision served. Check that the tune stage stored decisions for this model"
    if "error_share" in ours:  # an error as a share of its bound
        return "" if ours["error_share"] <= 1 else f"results are {ours['error_share']:.2f} of their bound"
    first = [a[0] == b[0] for a, b in zip(plain["tokens"], ours["tokens"], strict=True)]
    return "" if all(first) else f"first tokens differ in {first.count(False)} of {len(first)} prompts"


def table(found: Mapping[str, Found]) -> Table:
    rows = []
    for name, one in found.items():
        if "outcome" not in one:
            continue
        served = ", ".join(one.get("ours", {}).get("served") or ())
        rates = [f"{one[side]['tokens_per_s']:.1f}" if "tokens_per_s" in one.get(side, {}) else "" for side in SIDES]
        rows.append((name, one.get("version", ""), one["outcome"], *rates, served))
    columns = ("engine", "version", "outcome", "tok/s without autosel", "tok/s with autosel", "served")
    return Table(columns=columns, rows=tuple(rows))


SIDES = ("plain", "ours")
