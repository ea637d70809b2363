"""Time the kernel of each format of codes against that of bf16 weights, in turn, from memory or from L2.

    python benchmarks/bench_quantised.py [--shape N K] [--m 1] [--isa avx2] [--formats q4_k q6_k] [--rounds 20] [--json]
    python benchmarks/bench_quantised.py --m 512    the kernels for many rows of x, by their speed
    python benchmarks/bench_quantised.py --dtype fp16   x and scales of codes in fp16; the bf16 kernel as before
    python benchmarks/bench_quantised.py --before DIR   in turn with the kernels of another checkout's kernels/
    python benchmarks/bench_quantised.py --l2       one thread, 256 x 2048: what a core multiplies from L2

Up to 8 rows of x it times gemv, and compares the rates at which weights are read; above, gemm, and compares the speed.
From memory, copies of the weights rotate: before a copy is used again, all arms have read three times as much as the
last-level cache holds. A time is the lower quartile of all calls.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import command_line
import torch

from autosel.candidates.cpp.linear import CODED_WALK, WALK, code_flags
from autosel.fingerprint import take
from autosel.formats import CODED, PLAIN
from autosel.knobs.cpu import linear
from autosel.knobs.cpu.facts import ISA_FLAGS, facts
from autosel.knobs.cpu.linear import by_dots
from autosel.native.compile import compile_source
from autosel.native.load import load_entry
from autosel.ops import OPS
from autosel.ops.dtypes import DTYPE
from autosel.ops.stored import mapped
from autosel.ops.weight import Weight, quantise
from autosel.race.contest import COLD_OVER_LLC
from autosel.tuning.contend import last_level_bytes
from autosel.values import DTypeName
from autosel.workers import pages

ROWS = 4  # of weights together, as the knobs say at M = 1
Arm = tuple[list[Callable[[], Any]], int]  # a call for each copy of the weights, and its bytes
Arms = dict[str, Arm]


def main() -> int:
    parser = command_line.parser(__doc__)
    parser.add_argument("--shape", type=int, nargs=2, default=(4096, 14336), metavar=("N", "K"))
    parser.add_argument("--m", type=int, default=1, help="rows of x")
    parser.add_argument("--isa", choices=list(ISA_FLAGS), default=facts(take("cpu")).isa)
    parser.add_argument("--formats", nargs="*", choices=CODED, default=CODED)
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="of x and scales of codes")
    parser.add_argument("--few", action="store_true", help="also time gemv's kernels for codes above 8 rows")
    parser.add_argument("--before", type=Path, help="kernels/ of another checkout, in turn with these")
    parser.add_argument("--l2", action="store_true", help="one thread, and weights that fit L2")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    shape = (256, 2048) if options.l2 else tuple(options.shape)
    bench = Bench(shape, options.m, options.isa, options.dtype, one=options.l2)
    found = timed(
        bench.arms(options.formats, few=options.few, before=options.before), options.rounds * (15 if options.l2 else 1)
    )
    for row in found.values():
        row["gflops"] = 2 * options.m * shape[0] * shape[1] / row["us"] / 1e3
    if options.json:
        print(json.dumps(found))
    for name, row in () if options.json else found.items():
        rate = f"{row['of_bf16']:5.0%} of bf16's rate" if by_dots(options.m) else f"{row['speed']:5.0%} of bf16's speed"
        print(f"{name:15}  {row['us']:9.1f} us  {row['gb_per_s']:6.1f} GB/s  {row['gflops']:6.0f} GFLOP/s  {rate}")
    return 0


class Bench:
    """The operands of a product, and the kernels that compute it. `dtype`: of codes; `one`: one thread, and one copy of
    the weights."""

    def __init__(self, shape: tuple[int, ...], m: int, isa: Any, dtype: DTypeName, *, one: bool) -> None:
        (n, k), self.m, self.isa, self.one = shape, m, isa, one
        self.plain, self.x = torch.randn(n, k).bfloat16(), torch.randn(m, k).bfloat16()
        self.y, self.dtype = torch.empty(m, n).bfloat16(), dtype
        self.facts = replace(facts(take("cpu")), isa=isa)
        self.cold_bytes = COLD_OVER_LLC * last_level_bytes(take("cpu"))  # of all arms
        self.threads = 1 if one else torch.get_num_threads()

    def arms(self, formats: Sequence[str], *, few: bool, before: Path | None = None) -> Arms:
        """Return the calls of each arm; bf16 is the first. `before`: a folder with other kernels for codes."""
        source = "gemv" if by_dots(self.m) else "gemm"
        self.cold_bytes //= 1 + len(formats) * (2 if before else 1)
        plain = self.entry(source)
        found: Arms = {"bf16": self.arm(self.plain, lambda w: plain(self.x, w, None, None, self.y, *self.settings()))}
        for name in formats:
            w = quantise(self.plain.to(DTYPE[self.dtype]), name)
            assert isinstance(w, Weight)
            found[name] = self.coded(f"{source}_coded", w)
            if before:
                found[f"{name} before"] = self.coded(f"{source}_coded", w, before)
            if few and source == "gemm":
                found[f"{name} gemv"] = self.coded("gemv_coded", w)
        return found

    def coded(self, source: str, w: Weight, kernels: Path = Path()) -> Arm:
        run = self.entry(source, *code_flags(w.format, dtype=self.dtype), dtype=self.dtype, kernels=kernels)
        given = self.settings(w.format.name, few=source == "gemv_coded")
        x, y = (t.to(DTYPE[self.dtype]) for t in (self.x, self.y))
        return self.arm(w, lambda q: run(x, q.codes, q.scales, None, None, y, *given))

    def settings(self, format_: str = PLAIN, *, few: bool = False) -> tuple[int, ...]:
        """Return the knobs after the outputs."""
        if few or by_dots(self.m):
            return self.threads, 8 if format_ == PLAIN else ROWS
        n, k = self.plain.shape
        w = OPS["linear"].workload(
            "bf16" if format_ == PLAIN else self.dtype, {"M": self.m, "N": n, "K": k}, weight=format_
        )
        names = WALK if format_ == PLAIN else CODED_WALK
        given = (linear.gemm if format_ == PLAIN else linear.gemm_coded)(w, self.facts)
        return self.threads, *(int(given[name]) for name in names)

    def entry(self, source: str, *flags: str, dtype: DTypeName = "bf16", kernels: Path = Path()) -> Callable[..., Any]:
        file = str(kernels.absolute() / "cpu" / f"{source}.cpp") if kernels.name else f"cpu/{source}.cpp"
        built = compile_source(file, (*ISA_FLAGS[self.isa], f"-DAUTOSEL_{dtype.upper()}", *flags))
        return load_entry(built.digest, source)

    def arm(self, w: Any, run: Callable[[Any], Any]) -> Arm:
        count = 1 if self.one else -(-self.cold_bytes // w.nbytes)
        return [partial(run, mapped(w, pages.clone)) for _ in range(count)], w.nbytes


def timed(arms: Arms, rounds: int) -> dict[str, dict[str, float]]:
    """Return time, rate, and rate and speed relative to bf16's, by arm."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, (calls, _) in arms.items():
            for call in calls:
                began = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - began)
    quartile = {name: sorted(some)[len(some) // 4] for name, some in times.items()}
    rate = {name: size / quartile[name] / 1e9 for name, (_, size) in arms.items()}
    return {
        n: {
            "us": quartile[n] * 1e6,
            "gb_per_s": rate[n],
            "of_bf16": rate[n] / rate["bf16"],
            "speed": quartile["bf16"] / quartile[n],
        }
        for n in arms
    }


if __name__ == "__main__":
    sys.exit(main())
