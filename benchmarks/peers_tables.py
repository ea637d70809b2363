"""Format the results of the peer benchmarks as tables for the documentation, from their result files alone."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

AUTOSEL, INDUCTOR, KERNEL_TUNER = "autosel tune", "Inductor max-autotune", "Kernel Tuner, C backend"
RESULTS = Path(__file__).parent / "results" / "cpu"


def stored(name: str) -> Mapping[str, Any] | None:
    """Return the result file `name`; None if it does not exist."""
    path = RESULTS / f"{name}.json"
    found: Mapping[str, Any] | None = json.loads(path.read_text()) if path.is_file() else None
    return found


def dispatch(result: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    control = f"control {result['control']:.3f} of the direct call"
    lines = [f"{result['device']}, one thread; {versions}; {result['date']}; {control}", ""]
    lines += ["| dispatch of a kernel that does nothing | us over the direct call | quartiles | goal |"]
    lines += ["| --- | --- | --- | --- |"]
    for name, w in sorted(result["ways"].items(), key=lambda item: item[1]["over_us"]):
        if not name.startswith("direct"):
            limit = result["limits_us"].get(name)
            goal = "" if limit is None else f"<= {limit:g}: {'reached' if w['over_us'] <= limit else 'missed'}"
            lines.append(f"| {name} | {w['over_us']:.3f} | {w['low_us']:.3f} .. {w['high_us']:.3f} | {goal} |")
    lines += [f"| {name} | not covered | {why} | |" for name, why in result["not_covered"].items()]
    return "\n".join(lines)


def steps(found: Mapping[str, Any]) -> str:
    """Format whole decode steps: each arm's median, also relative to autosel's."""
    part = f"{found['layers']} of {found['of_layers']} layers"
    lines = [f"{found['model']} {found['dtype']}, {part}, on {found['device']}, {found['date']}", ""]
    lines += ["| context | arm | ms a step | over autosel | read rate |", "| --- | --- | --- | --- | --- |"]
    for row in found["rows"]:
        for name, one in row["arms"].items():
            lo, hi = one["interval"]
            ratio = f"{one['over_first']:.2f}x ({lo:.2f} .. {hi:.2f})" if one["over_first"] != 1 else ""
            beside = f"{row['read_gb_s']:.1f} GB/s"
            lines.append(f"| {row['seq']} | {name} | {one['median_ms']:.1f} | {ratio} | {beside} |")
    return "\n".join(lines)


def team(found: Mapping[str, Any]) -> str:
    """Format whole decode steps: one native call, one call an op, and the eager baseline."""
    lines = [f"bf16, on {found['device']}, {', '.join(sorted({r['date'] for r in found['rows']}))}", ""]
    heads = ["model", "context", "read rate", "roofline, team", "roofline, ops", "ops / team", "eager / team"]
    heads += ["waits", "team / packed", "eager / packed"]
    lines += ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    for r in found["rows"]:
        lo, hi = r["ops_over_team_interval"]
        gain = f"{r['ops_over_team']:.3f} ({lo:.2f} .. {hi:.2f})"
        cells = [f"{r['model']}, {r['layers']} layers", str(r["seq"]), f"{r['read_median_bytes_per_s'] / 1e9:.1f} GB/s"]
        cells += [f"{r['team_roofline']:.2f}", f"{r['ops_roofline']:.2f}", gain]
        cells += [f"{r['eager_over_team']:.1f}", f"{r['waits']:.1%}"]
        if "team_over_packed" in r:
            lo, hi = r["team_over_packed_interval"]
            cells += [f"{r['team_over_packed']:.3f} ({lo:.2f} .. {hi:.2f})", f"{r['eager_over_packed']:.1f}"]
        lines.append("| " + " | ".join(cells) + " |" + (" | |" if "team_over_packed" not in r else ""))
    return "\n".join(lines)


def transformers(found: Mapping[str, Any]) -> str:
    lo, hi = found["interval"]
    decided = sum(u["calls"] for u in found["uses"] if u["decision"] is not None)
    total = sum(u["calls"] for u in found["uses"])
    verdict = (
        "reached" if lo >= found["goal"] else "missed" if found["speedup"] < found["goal"] else "reached at median"
    )
    rows = [
        ("transformers, unpatched, ms a token", f"{found['own_ms']:.1f}"),
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


# --- tuning -----------------------------------------------------------------------------------------------------------


def tune(found: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in found.get("versions", {}).items())
    n, k = found["shape"]
    parts = [f"x[1,{k}] @ w[{n},{k}]^T, bf16; {found['device']}; {versions}; {found['date']}", _tuners(found)]
    return "\n\n".join([*parts, *([_planted(found["planted"])] if "planted" in found else [])])


def _tuners(found: Mapping[str, Any]) -> str:
    times: Mapping[str, Sequence[float]] = found.get("judged", {}).get("us", {})
    lines = ["| tuner | processes | seconds to a choice | chose | flips | regret among its own | regret among all |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for name, taken in found["runs"].items():
        if not taken:
            lines.append(f"| {name} | 0 | not covered | | | | |")
            continue
        picks, seconds = [t["pick"] for t in taken], [t["seconds"] for t in taken]
        chose = ", ".join(f"{pick} ({count})" for pick, count in Counter(picks).most_common())
        took = f"{statistics.median(seconds):.1f} ({min(seconds):.1f} .. {max(seconds):.1f})"
        worth = [_worth(picks, times, own) for own in (own_candidates(name, times), list(times))] if times else ["", ""]
        lines.append(f"| {name} | {len(taken)} | {took} | {chose} | {flips(picks):.0%} | {worth[0]} | {worth[1]} |")
    return "\n".join(lines)


def own_candidates(tuner: str, times: Mapping[str, Any]) -> list[str]:
    """Return the candidates of a tuner. autosel derives the kernel's setting, so it is judged against all settings."""
    if tuner == INDUCTOR:
        return [name for name in times if name.startswith("Inductor")]
    return [name for name in times if name.startswith("cpp:") or (tuner == AUTOSEL and name == "ATEN")]


def _worth(picks: Sequence[str], times: Mapping[str, Sequence[float]], candidates: Sequence[str]) -> str:
    found = regrets(times, candidates)
    each = [found[pick] for pick in picks]
    return f"{statistics.mean(each):.1%} (worst {max(each):.1%})"


def flips(picks: Sequence[str]) -> float:
    """Return the share of picks that differ from the most common pick."""
    return 1 - Counter(picks).most_common(1)[0][1] / len(picks)


def regrets(times: Mapping[str, Sequence[float]], candidates: Sequence[str]) -> dict[str, float]:
    """Return candidate -> t / t(best) - 1: the best on one half of the rounds, judged on the other, and vice versa."""
    halves = [{name: statistics.median(times[name][start::2]) for name in candidates} for start in (0, 1)]
    found = {}
    for name in candidates:
        ratios = []
        for chosen_on, judged_on in (halves, halves[::-1]):
            best = min(candidates, key=lambda n, half=chosen_on: half[n])  # type: ignore[misc]
            ratios.append(judged_on[name] / judged_on[best])
        found[name] = statistics.mean(ratios) - 1
    return found


def _planted(found: Mapping[str, Any]) -> str:
    lines = [f"| tuner | of {len(found['wrong'])} wrong kernels caught | believed | died | correct ones refused |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for name in (AUTOSEL, KERNEL_TUNER):
        said = found[name]
        wrong = [said[k].partition(":")[0] for k in found["wrong"] if k in said]
        if len(wrong) < len(found["wrong"]):
            lines.append(f"| {name} | not covered | | | |")
            continue
        refused = sum(said[k] != "believed" for k in found["right"] if k in said)
        counts = " | ".join(str(wrong.count(kind)) for kind in ("caught", "believed", "died"))
        lines.append(f"| {name} | {counts} | {refused} of {len(found['right'])} |")
    lines.append(f"| {INDUCTOR} | not covered: it compares no outputs | | | |")
    believed = [k.removeprefix("native_") for k in found["wrong"] if found[KERNEL_TUNER].get(k) == "believed"]
    return "\n".join(lines) + (f"\n\nKernel Tuner believed: {', '.join(believed)}." if believed else "")
