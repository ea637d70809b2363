"""Time the gemv of each format of codes against the gemv of bf16 weights, in turn, from memory or from L2.

    python benchmarks/bench_quantised.py [--shape N K] [--m 1] [--isa avx2] [--formats q4_k q6_k] [--rounds 20] [--json]
    python benchmarks/bench_quantised.py --l2       one thread, 256 x 2048: what a core multiplies from L2

From memory, copies of the weights rotate, so that 120 MB were read since a copy was last used. A time is the lower
quartile of all calls.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import command_line
import torch

from autosel.candidates.cpp.linear import code_flags
from autosel.fingerprint import take
from autosel.formats import CODED, find_weight_format
from autosel.knobs.cpu.facts import ISA_FLAGS, facts
from autosel.native.compile import compile_source
from autosel.native.load import load_entry
from autosel.ops.weight import Weight, quantise

ROTATED_BYTES = 120e6
ROWS = 4  # of weights together, as the knobs say at M = 1
Arms = dict[str, tuple[list[Callable[[], Any]], int]]  # by format: a call for each copy, and its bytes


def main() -> int:
    parser = command_line.parser(__doc__)
    parser.add_argument("--shape", type=int, nargs=2, default=(4096, 14336), metavar=("N", "K"))
    parser.add_argument("--m", type=int, default=1, help="rows of x")
    parser.add_argument("--isa", choices=list(ISA_FLAGS), default=facts(take("cpu")).isa)
    parser.add_argument("--formats", nargs="*", choices=CODED, default=CODED)
    parser.add_argument("--l2", action="store_true", help="one thread, and weights that fit L2")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    shape = (256, 2048) if options.l2 else tuple(options.shape)
    found = timed(
        arms(shape, options.m, options.isa, options.formats, l2=options.l2), options.rounds * (15 if options.l2 else 1)
    )
    if options.json:
        print(json.dumps(found))
    for name, row in () if options.json else found.items():
        print(f"{name:10}  {row['us']:9.1f} us  {row['gb_per_s']:6.1f} GB/s  {row['of_bf16']:5.0%} of bf16's rate")
    return 0


def arms(shape: tuple[int, ...], m: int, isa: Any, formats: Sequence[str], *, l2: bool) -> Arms:
    """Return the calls of each arm; bf16 is the first."""
    n, k = shape
    threads = 1 if l2 else torch.get_num_threads()
    plain, x, y = torch.randn(n, k).bfloat16(), torch.randn(m, k).bfloat16(), torch.empty(m, n).bfloat16()

    def entry(source: str, *flags: str) -> Callable[..., Any]:
        built = compile_source(f"cpu/{source}.cpp", (*ISA_FLAGS[isa], "-DAUTOSEL_BF16", *flags))
        return load_entry(built.digest, source)

    def copies(w: Any) -> list[Any]:
        return [w.clone() for _ in range(1 if l2 else max(1, int(ROTATED_BYTES / w.nbytes)))]

    gemv = entry("gemv")
    found: Arms = {"bf16": ([lambda w=w: gemv(x, w, None, None, y, threads, 8) for w in copies(plain)], plain.nbytes)}
    for name in formats:
        coded, w = entry("gemv_coded", *code_flags(find_weight_format(name), dtype="bf16")), quantise(plain, name)
        assert isinstance(w, Weight)
        calls: list[Callable[[], Any]] = [
            lambda q=q, run=coded: run(x, q.codes, q.scales, None, None, y, threads, ROWS) for q in copies(w)
        ]
        found[name] = (calls, w.nbytes)
    return found


def timed(arms: Arms, rounds: int) -> dict[str, dict[str, float]]:
    """Return time, rate and the rate relative to bf16's, by arm."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, (calls, _) in arms.items():
            for call in calls:
                began = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - began)
    quartile = {name: sorted(some)[len(some) // 4] for name, some in times.items()}
    rate = {name: size / quartile[name] / 1e9 for name, (_, size) in arms.items()}
    return {n: {"us": quartile[n] * 1e6, "gb_per_s": rate[n], "of_bf16": rate[n] / rate["bf16"]} for n in arms}


if __name__ == "__main__":
    sys.exit(main())
