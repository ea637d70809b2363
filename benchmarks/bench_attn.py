"""Time decode attention against PyTorch's two variants and a plain streaming read, interleaved in one run.

    python benchmarks/bench_attn.py [--length 8192 ...] [--dtype bf16] [--batch 1] [--heads 32/8] [--width 128]
                                    [--page 16] [--seconds 4] [--json]

Each round visits the read probe, the kernel and PyTorch in shuffled order. A visit runs once untimed, to wake its
threads, then once timed. Copies of K and V rotate, so that three last-level caches of data were read since a copy was
last used. The probe reads the same copies with one thread a core. On a shared machine the read rate varies by a factor
of two or more within a run, so two figures are printed: best window over best window, and the median over rounds of
each round's own ratio, with quartiles.

sdpa is torch's SDPA with enable_gqa; packed is the same call with the query heads of a KV head as its queries. With
--page, sdpa gathers the pages first, as torch has no paged attention.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import command_line
import torch
from interleaved import ours, quartiles, reader, timed

from autosel import fingerprint
from autosel.candidates.cpp.attention import KERNELS
from autosel.ops import OPS, eager
from autosel.values import Fingerprint, Workload
from autosel.workers import pages

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


def main() -> int:
    options = parsed()
    fp = fingerprint.take("cpu")
    torch.set_num_threads(int(fp.identity["cpus"]))
    rows = []
    for length in options.length or LENGTHS:
        w = workload(options, length)
        print(w.key, file=sys.stderr, flush=True)
        rows.append({"length": length, **measure(w, fp, options.seconds)})
    if options.json:
        json.dump({"device": fp.name, "dtype": options.dtype, "rows": rows}, sys.stdout, indent=1)
        print()
    else:
        table(rows, fp)
    return 0


def parsed() -> argparse.Namespace:
    parser = command_line.parser(__doc__)
    parser.add_argument("--length", type=int, action="append", default=[], help="repeatable; default: 256 to 32768")
    command_line.dtype(parser)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", default="32/8", help="query heads/KV heads")
    parser.add_argument("--width", type=int, default=128, help="channels of a head")
    parser.add_argument("--page", type=int, default=0, help="tokens a page; 0: a contiguous cache")
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds a length; at least 9 rounds")
    return parser.parse_args()


def workload(options: argparse.Namespace, length: int) -> Workload:
    hq, hkv = (int(n) for n in options.heads.split("/"))
    dims = {"B": options.batch, "Hq": hq, "Hkv": hkv, "S": 1, "D": options.width, "L": length}
    if options.page:
        return OPS["paged_attn"].workload(options.dtype, {**dims, "page": options.page})
    return OPS["attn"].workload(options.dtype, dims)


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(w: Workload, fp: Fingerprint, budget_s: float) -> dict[str, Any]:
    """Return the best times of every arm in microseconds, and the ratios to autosel's kernel."""
    op = OPS[w.op]
    inputs = op.inputs(w, 1)
    streamed = [a.name for a in op.args if a.role == "streamed"]
    cache_bytes = sum(inputs[n].numel() * inputs[n].element_size() for n in streamed)
    copies = max(2, 1 + -(-3 * int(fp.identity["l3_bytes"]) // cache_bytes))
    operands = [{**inputs, **{n: pages.clone(inputs[n]) for n in streamed}} for _ in range(copies)]
    arms = {"read": reader(streamed, fp), "cpp": ours(KERNELS, w, fp), "sdpa": getattr(eager, w.op)}
    if w.op == "attn":
        arms["packed"] = eager.attn_packed
    times = timed(w, arms, operands, budget_s)
    return {"key": w.key, "bytes": op.bytes_moved(w), **summary(times)}


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    best = {arm: min(taken) * 1e6 for arm, taken in times.items()}
    ratios = {
        arm: {
            "best": best[arm] / best["cpp"],
            "quartiles": quartiles([a / b for a, b in zip(t, times["cpp"], strict=True)]),
        }
        for arm, t in times.items()
        if arm != "cpp"
    }
    return {"best_us": best, "over_cpp": ratios, "rounds": len(times["cpp"])}


# --- showing ----------------------------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]], fp: Fingerprint) -> None:
    print(f"{fp.name}, {fp.identity['cpus']} cores; {rows[0]['key']} and so on, cache cold")
    print("share of the read rate; speedup over sdpa and packed; best window, then median (quartiles) over rounds")
    print(f"{'L':>6}{'us':>8}{'GB/s':>6}  {'share':^21}  {'over sdpa':^21}  {'over packed':^21}")
    for r in rows:
        us = r["best_us"]["cpp"]
        cells = [spread(r["over_cpp"].get(arm)) for arm in ("read", "sdpa", "packed")]
        print(f"{r['length']:6}{us:8.0f}{r['bytes'] / us / 1e3:6.1f}  " + "  ".join(f"{c:>21}" for c in cells))


def spread(ratio: dict[str, Any] | None) -> str:
    if ratio is None:
        return ""
    low, middle, high = ratio["quartiles"]
    digits = 2 if ratio["best"] < 3 else 1
    return f"{ratio['best']:.{digits}f} {middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


if __name__ == "__main__":
    sys.exit(main())
