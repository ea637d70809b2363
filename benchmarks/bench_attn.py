"""Time decode attention against PyTorch's two variants and a plain streaming read, interleaved in one run.

    python benchmarks/bench_attn.py [--length 8192 ...] [--dtype bf16] [--batch 1] [--heads 32/8] [--width 128]
                                    [--page 16] [--seconds 4] [--json] [--plot FILE]

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
import ctypes
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import command_line
import torch

from autosel import fingerprint
from autosel.candidates.cpp.attention import KERNELS
from autosel.candidates.load import load
from autosel.devices.cpu import probe
from autosel.devices.cpu.idle import wait_until_idle
from autosel.native.compile import compile_source
from autosel.ops import OPS, eager
from autosel.values import Fingerprint, NativeRecipe, Workload
from autosel.workers import pages

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
LEAST_ROUNDS = 9


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
    if options.plot:
        plot(rows, fp, options.plot)
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
    parser.add_argument("--plot", metavar="FILE", help="also draw time against length (needs matplotlib)")
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
    arms = {"read": reader(streamed, fp), "cpp": ours(w, fp), "sdpa": getattr(eager, w.op)}
    if w.op == "attn":
        arms["packed"] = eager.attn_packed
    outputs = op.allocate(w)
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    turn, order, rng, end = 0, list(arms), random.Random(1), time.perf_counter() + budget_s
    while len(times["cpp"]) < LEAST_ROUNDS or time.perf_counter() < end:
        rng.shuffle(order)
        for arm in order:
            wait_until_idle()
            for timed in (False, True):
                turn += 1
                given = operands[turn % copies]
                took = arms[arm](given) if arm == "read" else seconds(arms[arm], (*op.arguments(given), *outputs))
                if timed:
                    times[arm].append(took)
    return {"key": w.key, "bytes": op.bytes_moved(w), **summary(times)}


def ours(w: Workload, fp: Fingerprint) -> Callable[..., Any]:
    """Return the C++ kernel for w with the knobs of its closed forms."""
    kernel = next(k for k in KERNELS if k.op == w.op)
    knobs = kernel.knobs(w, fp)
    recipe = kernel.recipe(w, fp, knobs)
    assert isinstance(recipe, NativeRecipe)
    return load(OPS[w.op], recipe, compile_source(recipe.source, recipe.flags).digest, knobs.values)


def reader(streamed: list[str], fp: Fingerprint) -> Callable[[dict[str, Any]], float]:
    """Return a function that reads K and V once on all cores with the fingerprint's probe and returns seconds."""
    library, out = probe.load().library, (ctypes.c_double * 1)()

    def read(operands: dict[str, Any]) -> float:
        total = 0.0
        for name in streamed:
            size = operands[name].numel() * operands[name].element_size()
            library.autosel_probe_read(
                ctypes.c_void_p(operands[name].data_ptr()),
                *(ctypes.c_int64(v) for v in (size, size, int(fp.identity["cpus"]))),
                ctypes.c_double(0.0),
                out,
                ctypes.c_int64(1),
            )
            total += size / out[0]
        return total

    return read


def seconds(call: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


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


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


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


def plot(rows: list[dict[str, Any]], fp: Fingerprint, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    names = {"sdpa": "torch SDPA", "packed": "torch SDPA, packed", "cpp": "autosel C++", "read": "read probe (limit)"}
    for arm, name in names.items():
        points = [(r["length"], r["best_us"][arm]) for r in rows if arm in r["best_us"]]
        if points:
            axes.plot(
                *zip(*points, strict=True), marker="o", markersize=3, ls="--" if arm == "read" else "-", label=name
            )
    axes.set(xscale="log", yscale="log", xlabel="context length", ylabel="us a call, best window", title=fp.name)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
