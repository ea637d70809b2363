"""What the benchmarks beside others found, as tables for the documentation: from their result files alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "cpu"


def stored(name: str) -> Mapping[str, Any] | None:
    """The result file `name`, if somebody has written it."""
    path = RESULTS / f"{name}.json"
    found: Mapping[str, Any] | None = json.loads(path.read_text()) if path.is_file() else None
    return found


def dispatch(result: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    control = f"control {result['control']:.3f} of the direct call"
    lines = [f"{result['device']}, one thread; {versions}; {result['date']}; {control}", ""]
    lines += ["| way to a kernel that does nothing | us over the direct call | quartiles | goal |"]
    lines += ["| --- | --- | --- | --- |"]
    for name, w in sorted(result["ways"].items(), key=lambda item: item[1]["over_us"]):
        if not name.startswith("direct"):
            limit = result["limits_us"].get(name)
            goal = "" if limit is None else f"<= {limit:g}: {'reached' if w['over_us'] <= limit else 'missed'}"
            lines.append(f"| {name} | {w['over_us']:.3f} | {w['low_us']:.3f} .. {w['high_us']:.3f} | {goal} |")
    lines += [f"| {name} | not covered | {why} | |" for name, why in result["not_covered"].items()]
    return "\n".join(lines)


def transformers(found: Mapping[str, Any]) -> str:
    lo, hi = found["interval"]
    decided = sum(u["calls"] for u in found["uses"] if u["decision"] is not None)
    total = sum(u["calls"] for u in found["uses"])
    verdict = (
        "reached" if lo >= found["goal"] else "missed" if found["speedup"] < found["goal"] else "reached at median"
    )
    rows = [
        ("transformers as it comes, ms a token", f"{found['own_ms']:.1f}"),
        ("after `autosel.patch`, ms a token", f"{found['patched_ms']:.1f}"),
        ("speedup, 95 % interval", f"{found['speedup']:.2f}x ({lo:.2f} .. {hi:.2f}); goal {found['goal']}x: {verdict}"),
        ("the same greedy token", f"{found['tokens_equal']} steps"),
        (
            "calls by a decision",
            f"{decided} of {total}" + ("; pinned, not raced" if found["served"] == "pinned" else ""),
        ),
    ]
    head = (
        f"{found['model']} {found['dtype']}, {found['layers']} layers, context {found['seq']}, {found['steps']} steps "
        f"each, interleaved; {found['device']}, {found['threads']} threads; torch {found['torch']}, transformers "
        f"{found['transformers']}; {found['date']}"
    )
    return "\n".join([head, "", "| what | |", "| --- | --- |", *(f"| {a} | {b} |" for a, b in rows)])
