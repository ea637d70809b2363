"""Time the projections of a decode step against PyTorch and a plain streaming read, interleaved in one run.

    python benchmarks/bench_gemv.py [--m 1] [--dtype bf16] [--seconds 4] [--only o --only lm_head] [--json]
    python benchmarks/bench_gemv.py --only o --small-pages     weights on 4 KiB pages instead of 2 MiB pages
    python benchmarks/bench_gemv.py --only o --no-wait         without waiting for spinning threads of other arms

Each round visits the read probe, the kernel and PyTorch in shuffled order. A visit waits until the previous arm's
threads have stopped spinning, runs once untimed, to wake its own threads, then once timed. Copies of the weights
rotate, so that three last-level caches of data were read since a copy was last used. The probe reads the same copies
with as many threads. On a shared machine the read rate varies by a factor of two or more within a run, so two figures
are printed: best window over best window, and the median over rounds of each round's own ratio, with quartiles.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import command_line
import torch
from interleaved import ours, quartiles, reader, timed

from autosel import fingerprint
from autosel.candidates.cpp.linear import KERNELS
from autosel.ops import OPS, eager
from autosel.values import Fingerprint, Scalar, Workload
from autosel.workers import pages

# llama-8b: name, op, dims without M, traits.
SHAPES: tuple[tuple[str, str, dict[str, int], dict[str, Scalar]], ...] = (
    ("o", "linear", {"N": 4096, "K": 4096}, {}),
    ("qkv", "linear", {"N": 6144, "K": 4096}, {}),
    ("down", "linear", {"N": 4096, "K": 14336}, {}),
    ("gate+up", "linear", {"N": 28672, "K": 4096}, {}),
    ("lm_head", "linear", {"N": 128256, "K": 4096}, {}),
    ("norm_qkv", "norm_qkv", {"N": 6144, "d": 4096}, {}),
    ("gate_up", "gate_up", {"I": 14336, "d": 4096}, {}),
    ("greedy", "lm_head", {"V": 128256, "d": 4096}, {"greedy": 1}),
)


def main() -> int:
    parser = command_line.parser(__doc__)
    parser.add_argument("--m", type=int, default=1, help="rows of x")
    command_line.dtype(parser)
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds a shape; at least 9 rounds")
    parser.add_argument("--only", action="append", default=[], choices=[name for name, *_ in SHAPES])
    parser.add_argument(
        "--small-pages", action="store_true", help="keep weights on 4 KiB pages, as a server does by default"
    )
    parser.add_argument("--no-wait", action="store_true", help="do not wait for the other arm's threads to sleep")
    options = parser.parse_args()
    fp = fingerprint.take("cpu")
    torch.set_num_threads(int(fp.identity["cpus"]))
    rows = []
    for name, op, dims, traits in SHAPES:
        if options.only and name not in options.only:
            continue
        w = OPS[op].workload(options.dtype, {d: {"M": options.m, **dims}[d] for d in OPS[op].dim_names}, **traits)
        print(f"{name}: {w.key}", file=sys.stderr, flush=True)
        rows.append(
            {"name": name, **measure(w, fp, options.seconds, small_pages=options.small_pages, wait=not options.no_wait)}
        )
    if options.json:
        json.dump({"device": fp.name, "m": options.m, "dtype": options.dtype, "rows": rows}, sys.stdout, indent=1)
        print()
    else:
        table(rows, fp, options.m, options.dtype)
    return 0


def measure(
    w: Workload, fp: Fingerprint, budget_s: float, *, small_pages: bool = False, wait: bool = True
) -> dict[str, Any]:
    """Return the times of every arm in microseconds, and the two ratios, for one workload."""
    op = OPS[w.op]
    inputs = op.inputs(w, 1)
    streamed = [a.name for a in op.args if a.role == "streamed"]
    weight_bytes = sum(inputs[n].numel() * inputs[n].element_size() for n in streamed)
    copies = 1 + -(-3 * int(fp.identity["l3_bytes"]) // weight_bytes)
    if weight_bytes > 8 * int(fp.identity["l3_bytes"]):
        copies = 1  # reading it evicts its own beginning
    copy = torch.clone if small_pages else pages.clone
    operands = [{**inputs, **{n: copy(inputs[n]) for n in streamed}} for _ in range(copies)]
    arms = {"read": reader(streamed, fp), "cpp": ours(KERNELS, w, fp), "torch": getattr(eager, w.op)}
    times = timed(w, arms, operands, budget_s, wait=wait)
    return {"key": w.key, "bytes": weight_bytes, **summary(times)}


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    best = {f"{arm}_us": min(taken) * 1e6 for arm, taken in times.items()}
    return {
        **best,
        "share_best": best["read_us"] / best["cpp_us"],
        "share": quartiles([a / b for a, b in zip(times["read"], times["cpp"], strict=True)]),
        "speedup_best": best["torch_us"] / best["cpp_us"],
        "rounds": len(times["cpp"]),
        "speedup": quartiles([a / b for a, b in zip(times["torch"], times["cpp"], strict=True)]),
    }


def table(rows: list[dict[str, Any]], fp: Fingerprint, m: int, dtype: str) -> None:
    print(f"{fp.name}, {fp.identity['cpus']} cores; M={m}, {dtype}, weights cold; times: best window")
    print(f"{'':9}{'us':>8}{'GB/s':>6}  {'share of the read rate':^24}  {'times torch':^24}")
    print(f"{'':9}{'':8}{'':6}  {'best':>6} {'median (quartiles)':>17}  {'best':>6} {'median (quartiles)':>17}")
    for r in rows:
        print(
            f"{r['name']:9}{r['cpp_us']:8.0f}{r['bytes'] / r['cpp_us'] / 1e3:6.1f}"
            f"  {r['share_best']:6.2f} {spread(r['share']):>17}  {r['speedup_best']:6.2f} {spread(r['speedup']):>17}"
        )


def spread(value: tuple[float, float, float]) -> str:
    low, middle, high = value
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


if __name__ == "__main__":
    sys.exit(main())
