"""Measure how far the closed forms are from the best knobs: R = t(closed form) / t(best) - 1, for each cell.

    python benchmarks/bench_regret.py [--device cpu] [--only WORD ...] [--seconds 8] [--limit 150] [--write] [--fresh]

A cell is a kernel at a workload. Every legal setting of its knobs enters a sweep by successive halving with cold
operands, as in a race (benchmarks/halving.py). If one reading of each setting takes more than half of the sweep's
time, settings with a knob value that alone is 1.3 times slower are left out. The sweep only nominates. The best three
are timed again with the closed form, a twin of it and the constants; the best of them is chosen on one half of these
visits and judged on the other half, in both directions. The interval is a bootstrap over visits; the twin shows the
noise between two equal settings. Results are checked before the final timing, and settings with wrong results are
dropped.

The settings of a route cell are kernels, including those not offered at its number of rows. It judges the kernel that
the formula selects for a workload, at every M up to 16 and beyond; on a GPU also the tiling on either side of M2.

Visits are discarded if other processes used more than a twentieth of a core, whatever their result; so are cells with
too few visits.

--write stores the cells in benchmarks/results/cpu/regret-ISA.json. Without --fresh, stored cells with the same kernels
and formulas are not measured again, so that --limit SECONDS can split a sweep into several runs. Cells of a GPU are
stored by `./run gpu --stage regret --keep`, as the record of the stage.
"""

# ruff: noqa: E402  (the checkout first: this file is run by path)

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from autosel import resources
from autosel.candidates.base import Candidate
from autosel.candidates.registry import all_candidates
from autosel.candidates.triton.base import also, shared
from autosel.errors import BuildError
from autosel.knobs.cpu import linear
from autosel.knobs.cpu.facts import facts as cpu_facts
from autosel.knobs.gpu import Formula
from autosel.knobs.gpu import gemm as gemm_form
from autosel.knobs.gpu.facts import facts as gpu_facts
from autosel.native.compile import find_sources
from autosel.tuning.builds import Builds
from autosel.values import Accepted, Fingerprint, NativeRecipe, PythonRecipe, Recipe, Scalar, Workload, digest
from benchmarks.cutlass_settings import around
from benchmarks.halving import ArmTimes, final, held_out, interval, nominate, ratios_of
from benchmarks.kept import device_of, file_of, keep

if TYPE_CHECKING:
    from benchmarks.gpu.instrument import Timer

Setting = dict[str, Scalar]  # knob -> value, for the knobs that the kernel takes

MOST_SETTINGS = 240
MOST_COMPILED = 64  # for a Triton kernel, which is compiled for each setting
KERNELS = resources.kernels()
METHOD = 2  # version of the measurement; cells of another version are measured again
SWEEP_SHARE = 0.4  # share of a cell's time
FRESH_SEED = 2  # seed of the contents for checking the final's settings
CLOSED, TWIN, CONSTANT = "closed form", "twin", "constant"

GOALS = {"decode": (0.03, 0.08), "gemm": (0.06, None), "route": (None, 0.05)}  # (geomean, p95); route: (None, worst)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegretCell:
    """A kernel at a workload, or several kernels at one for the kind `route`."""

    kind: str  # decode, gemm or route
    kernels: tuple[str, ...]
    workload: Workload

    @property
    def name(self) -> str:
        return f"{self.kind} {'|'.join(self.kernels)} {self.workload.key}"


# --- cells ------------------------------------------------------------------------------------------------------------

PROJECTIONS = {"o": (4096, 4096), "qkv": (6144, 4096), "down": (4096, 14336), "1b o": (2048, 2048), "1b k": (512, 2048)}
# Every M at which dot products may win, up to twice the most rows that share one; then larger M where they must lose.
ROUTE_ROWS = (*range(1, 17), 31, 32, 33, 64)
TILE_ROWS = (48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 512)  # around the device's M2, 64 to 256
WAYS: dict[str, Formula] = {"stream": gemm_form.stream, "large": gemm_form.large}  # triton:gemm on either side of M2


def cells(device: str) -> list[RegretCell]:
    """Return all cells: projections at few and many rows, attention by length, group and batch.

    On a GPU they cover every kernel of autosel, since each has its own formula or its own share of one.
    """
    return [*_few_rows(device), *_attention(device), *_rows(device), *_many_rows(device), *_routes(device)]


def _cell(kind: str, kernels: str, op: str, dims: Mapping[str, int], **traits: Scalar) -> RegretCell:
    from autosel.ops import OPS

    return RegretCell(kind=kind, kernels=tuple(kernels.split()), workload=OPS[op].workload("bf16", dims, **traits))


def _few_rows(device: str) -> Iterator[RegretCell]:
    own = "cpp" if device == "cpu" else "cuda"
    for n, k in PROJECTIONS.values():
        yield from (_cell("decode", f"{own}:gemv", "linear", {"M": m, "N": n, "K": k}) for m in (1, 2, 4, 8))
    yield _cell("decode", f"{own}:gemv", "linear", {"M": 1, "N": 128256, "K": 2048})
    for name, m in itertools.product((own,) if device == "cpu" else (own, "triton"), (1, 4)):
        yield _cell("decode", f"{name}:gate_up", "gate_up", {"M": m, "I": 14336, "d": 4096})
        yield _cell("decode", f"{name}:norm_qkv", "norm_qkv", {"M": m, "N": 6144, "d": 4096})
        if device != "cpu":
            yield _cell("decode", f"{name}:lm_head", "lm_head", {"M": m, "V": 128256, "d": 4096})
    if device != "cpu":
        for (n, k), m in itertools.product((PROJECTIONS["o"], PROJECTIONS["1b o"]), (1, 8)):
            yield _cell("decode", "triton:gemv", "linear", {"M": m, "N": n, "K": k})
            yield from (
                _cell("decode", f"{name}:gemv_fp8", "linear", {"M": m, "N": n, "K": k}, weight="fp8_e4m3-row")
                for name in (own, "triton")
            )


def _attention(device: str) -> Iterator[RegretCell]:
    own = "cpp" if device == "cpu" else "cuda"

    def at(kernel: str, hq: int, hkv: int, length: int, *, d: int = 128, batch: int = 1, page: int = 0) -> RegretCell:
        dims = {"B": batch, "Hq": hq, "Hkv": hkv, "S": 1, "D": d, "L": length, **({"page": page} if page else {})}
        ragged: dict[str, Scalar] = {"ragged": True} if batch > 1 else {}
        return _cell("decode", kernel, "paged_attn" if page else "attn", dims, **ragged)

    for length, (hq, hkv) in itertools.product((512, 2048, 8192, 32768), ((8, 8), (32, 8), (32, 4))):
        yield at(f"{own}:attn_decode", hq, hkv, length)
    for batch, length in ((4, 2048), (8, 1024)):
        yield at(f"{own}:attn_decode", 32, 8, length, batch=batch)
    yield at(f"{own}:paged_attn_decode", 32, 8, 8192, page=16)
    for hq, hkv, d, length in ((4, 1, 256, 8192), (32, 8, 64, 2048)):
        yield at(f"{own}:attn_decode", hq, hkv, length, d=d)
    if device == "cpu":
        return
    for length in (2048, 8192, 32768):  # first the tensor cores' range: eight query heads a KV head
        yield at("cuda:attn_decode_mma", 32, 4, length)
        cache = {"B": 1, "Hq": 32, "Hkv": 8, "S": 1, "D": 128, "L": length}
        for kernel in ("cuda:attn_decode_fp8", "triton:attn_decode_fp8", "triton:attn_decode_fp8@merge"):
            yield _cell("decode", kernel, "attn", cache, cache="fp8_e4m3-head")
    yield at("cuda:paged_attn_decode_mma", 32, 4, 8192, page=16)
    for merged, length in itertools.product(("", "@merge"), (512, 8192)):
        yield at(f"triton:attn_decode{merged}", 32, 8, length)
    for merged in ("", "@merge"):
        yield at(f"triton:paged_attn_decode{merged}", 32, 8, 8192, page=16)
    for s in (512, 2048):
        yield _cell("prefill", "triton:attn_prefill", "prefill_attn", {"B": 1, "Hq": 32, "Hkv": 8, "S": s, "D": 128})


def _rows(device: str) -> Iterator[RegretCell]:
    own = ("cpp",) if device == "cpu" else ("cuda", "triton")
    yield from (_cell("decode", f"{name}:add_rmsnorm", "add_rmsnorm", {"M": 64, "d": 4096}) for name in own)
    for name, m in itertools.product(own, (1, 64)):
        yield _cell("decode", f"{name}:rmsnorm", "rmsnorm", {"M": m, "d": 4096})
        yield _cell("decode", f"{name}:swiglu", "swiglu", {"M": m, "I": 14336})
        if device != "cpu":
            yield _cell("decode", f"{name}:geglu", "geglu", {"M": m, "I": 6912}, tanh=1)
            yield _cell("decode", f"{name}:rope", "rope", {"M": m, "Hq": 32, "Hkv": 8, "D": 128, "R": 128})
            yield _cell("decode", f"{name}:kv_append", "kv_append", {"B": m, "Hkv": 8, "S": 1, "D": 128})
    if device != "cpu":
        for name, batch in itertools.product(own, (1, 8)):
            yield _cell("decode", f"{name}:sample", "sample", {"B": batch, "V": 128256, "L": 1024})


def _many_rows(device: str) -> Iterator[RegretCell]:
    names = ("cpp:gemm",) if device == "cpu" else ("triton:gemm", "cutlass:gemm_sm90", "cutlass:gemm_sm80")
    for (n, k), m in itertools.product(((4096, 4096), (2048, 8192)), (16, 32, 64, 128, 256)):
        yield from (_cell("gemm", name, "linear", {"M": m, "N": n, "K": k}) for name in names)
    for name in names[1:]:
        yield _cell("gemm", name, "lm_head", {"M": 16, "V": 128256, "d": 4096})


def _routes(device: str) -> Iterator[RegretCell]:
    pair = "cpp:gemv cpp:gemm" if device == "cpu" else "cuda:gemv triton:gemm"
    for (n, k), m in itertools.product(((4096, 4096), (2048, 2048)), ROUTE_ROWS):
        yield _cell("route", pair, "linear", {"M": m, "N": n, "K": k})
    if device != "cpu":
        for m in TILE_ROWS:
            yield _cell("route", "triton:gemm@stream triton:gemm@large", "linear", {"M": m, "N": 4096, "K": 4096})


def routed(w: Workload, fp: Fingerprint, kernels: Sequence[str]) -> str:
    """Return the kernel that the formula selects for a workload."""
    if fp.kind == "cpu":
        return kernels[0] if linear.by_dots(w["M"]) else kernels[1]
    route = gemm_form.route(w, gpu_facts(fp))["route"]
    if kernels[0].endswith("@stream"):
        return kernels[route == "large"]
    return kernels[route != "gemv"]


def kernel(cell: RegretCell, name: str, fp: Fingerprint) -> Candidate | None:
    """Return the candidate if it supports the workload; for a route cell, if it supports any number of rows.

    The range of rows in which a kernel is offered is part of what a route cell judges.
    """
    found = _named(cell.workload.op, name)
    rows = ROUTE_ROWS if cell.kind == "route" else ()
    asked = (cell.workload, *(cell.workload.at(M=m) for m in rows))
    takes = found is not None and any(isinstance(found.supports(w, fp), Accepted) for w in asked)
    return found if takes else None


def kernels_of(cell: RegretCell, fp: Fingerprint) -> list[Candidate]:
    return [found for name in cell.kernels if (found := kernel(cell, name, fp)) is not None]


def _named(op: str, name: str) -> Candidate | None:
    """Find a candidate by name; `triton:gemm@stream` and `@large` force one formula at any number of rows."""
    base, _, way = name.partition("@")
    plain = next((c for c in all_candidates(op) if c.name == (base if way in WAYS else name)), None)
    if way not in WAYS or plain is None:
        return plain
    forced: Any = copy(plain)
    forced.name, forced.formula = name, also(WAYS[way], shared)
    found: Candidate = forced
    return found


# --- settings ---------------------------------------------------------------------------------------------------------

FACTORS = {"k_block": 2, "k_ahead": 2, "m_block": 2, "chunk": 4, "grid": 2}  # steps around the closed form
LISTS: dict[str, tuple[int, ...]] = {
    "rows": (1, 2, 3, 4, 8),
    "tile": (16, 32, 64, 128),
    "prefetch": (4, 8, 16, 32, 64),
    "split_k": (1, 2, 4, 8),
    "unroll": (1, 2, 4),
    "rows_per_warp": (1, 2, 4),
    "stages": (2, 3, 4),
    "ctas_per_row": (1, 2, 4, 8, 16, 32),
    "tile_rows": (64, 128),
    "tile_m": (64, 128),
    "tile_n": (64, 128, 256),
    "tile_q": (32, 64, 128),
    "tile_k": (32, 64, 128),
}
CONSTANTS: Setting = {"rows": 1, "tile": 64, "prefetch": 16, "split_k": 1, "unroll": 4, "rows_per_warp": 1, "stages": 2}


def settings(candidate: Candidate, w: Workload, fp: Fingerprint) -> tuple[Setting, list[Setting]]:
    """Return the closed form's setting and all legal ones with it: the product of knob values, thinned if too large."""
    closed = taken(candidate, w, fp)
    if candidate.backend == "CUTLASS":
        return closed, around(closed, gpu_facts(fp))
    idle = ignored(closed)
    axes = {n: [v] if n in idle else values(n, v, fp) for n, v in closed.items() if n != "pdl"}
    most = MOST_COMPILED if candidate.backend == "TRITON" else MOST_SETTINGS
    while math.prod(len(axis) for axis in axes.values()) > most:
        longest = max(axes, key=lambda name: len(axes[name]))
        kept = {axes[longest][0], axes[longest][-1], closed[longest], *axes[longest][1::2]}
        coarser = [v for v in axes[longest] if v in kept]
        if coarser == axes[longest]:
            coarser = sorted({axes[longest][0], axes[longest][-1], closed[longest]}, key=float)
        if coarser == axes[longest]:
            coarser = [closed[longest]]
        axes[longest] = coarser
    found = [dict(zip(axes, combination, strict=True)) for combination in itertools.product(*axes.values())]
    legal = [s for s in found if is_legal(s, w, fp)]
    without = {name: value for name, value in closed.items() if name in axes}
    return without, legal if without in legal else [*legal, without]


def taken(candidate: Candidate, w: Workload, fp: Fingerprint) -> Setting:
    """Return the closed form's values of the knobs that reach the kernel."""
    knobs = candidate.knobs(w, fp)
    names = getattr(candidate, "knob_args", ()) + tuple(getattr(candidate, "macros", {}))
    recipe = candidate.recipe(w, fp, knobs)
    if not isinstance(recipe, NativeRecipe):  # Triton: the knobs that this table can vary
        names = tuple(n for n in knobs.values if n in LISTS or n in FACTORS)
    return {name: value for name, value in knobs.values.items() if name in names}


def ignored(closed: Setting) -> tuple[str, ...]:
    """Return the unused knobs of a kernel with two loop forms (knobs/cpu/linear.py: fused)."""
    if "rows" not in closed or "k_block" not in closed:
        return ()
    return ("k_block", "k_ahead", "m_block") if closed["rows"] else ("rows",)


def values(name: str, closed: Scalar, fp: Fingerprint) -> list[Scalar]:
    if name == "threads" and fp.kind == "cpu":
        cpus = int(fp.identity["cpus"])
        return sorted({closed, *(1 << i for i in range(cpus.bit_length()) if 1 << i <= cpus), cpus}, key=float)
    if name in LISTS:
        return sorted({closed, *LISTS[name]}, key=float)
    if name in FACTORS and isinstance(closed, int) and closed:
        step = FACTORS[name]
        return sorted({closed, max(1, closed // step), closed * step, max(1, closed // step**2)}, key=float)
    return [closed]


def is_legal(setting: Setting, w: Workload, fp: Fingerprint) -> bool:
    """Return True if the kernel supports the setting: sums fit into registers, blocks are whole vectors."""
    if fp.kind != "cpu":
        return True
    f = cpu_facts(fp)
    rows, m = int(setting.get("rows", 0)), dict(w.dims).get("M", 1)
    if rows and rows * linear.rows_together(m, f) > (24 if f.isa.startswith("avx512") else 12):
        return False
    block, ahead = int(setting.get("k_block", 0)), int(setting.get("k_ahead", 0))
    return not block or (block % 32 == 0 and ahead % block == 0 and ahead >= block)


def constant(closed: Setting, fp: Fingerprint) -> Setting:
    """Return one setting for every shape and device, as most libraries ship it, with all cores."""
    fixed = {name: CONSTANTS.get(name, value) for name, value in closed.items()}
    return fixed | ({"threads": int(fp.identity["cpus"])} if "threads" in closed and fp.kind == "cpu" else {})


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(cell: RegretCell, timer: Timer, seconds: float, rng: Random) -> dict[str, Any]:
    """Measure a cell; return its regret with all details. Raises LookupError without a kernel, or Disturbed."""
    arms, closed = _arms(cell, timer.fp)
    legs = {name: arm for name, (arm, _) in arms.items()}
    timer.seat(cell.workload, legs, lead=closed)
    may_refuse = timer.fp.kind != "cpu" or cell.kind == "route"
    others = [name for name in arms if name not in (closed, TWIN)]
    refused = refusing(timer, others) if may_refuse else []
    arms = {name: one for name, one in arms.items() if name not in refused}
    legs = {name: arm for name, (arm, _) in arms.items()}
    beside = [name for name in arms if name in (TWIN, CONSTANT)]  # timed, but not rivals
    rest = {name: setting for name, (_, setting) in arms.items() if name != closed and name not in beside}
    swept = nominate(timer, closed, rest, arms[closed][1], seconds=SWEEP_SHARE * seconds, rng=rng)
    rivals = [closed, *swept.nominees]
    met = [*rivals, *beside]
    timer.seat(cell.workload, {name: legs[name] for name in met}, lead=closed)
    wrong = mistaken(timer, met)
    for own in wrong.keys() & {closed, TWIN}:
        raise Mistaken(f"{cell.name}: the closed form's own result is wrong: {wrong[own]}")
    met, rivals = ([name for name in names if name not in wrong] for names in (met, rivals))
    times = final(timer, met, closed, rivals, seconds=(1 - SWEEP_SHARE) * seconds, rng=rng)
    if not times[closed]:
        raise Disturbed(cell.name)
    low, high = interval(times, closed, rivals, rng)
    best = min(rivals, key=lambda n: statistics.median(ratios_of(times, n, closed)))
    found = {
        "kind": cell.kind,
        "kernel": cell.kernels[0],
        "workload": cell.workload.key,
        "regret": round(held_out(times, closed, rivals), 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "twin": round(statistics.median(ratios_of(times, TWIN, closed)) - 1, 4),
        "closed": arms[closed][1],
        "closed_us": round(statistics.median(times[closed]), 3),
        "best": arms[best][1],
        "best_us": round(statistics.median(times[best]), 3),
        "settings": len(rest) + 1,
        "left_out": swept.left_out,
        "readings": swept.readings,
        "rounds": len(times[closed]),
    }
    found["sources"] = sources_of(cell, timer.fp)
    if refused:
        found["refused"] = len(refused)
    if wrong:
        found["wrong"] = wrong
    if CONSTANT in times:
        found["constant"] = round(statistics.median(ratios_of(times, CONSTANT, best)) - 1, 4)
    return found


def refusing(timer: ArmTimes, names: Sequence[str]) -> list[str]:
    """Return the names whose first call raises; like settings that the compiler refuses, they are dropped.

    On a GPU the first call compiles (Triton) and is captured. It is made here, outside the sweep's time; otherwise the
    sweep would have time for only one reading of each. Raises an error that has broken the device.
    """
    from benchmarks.gpu.child import fault_of_device

    found = []
    for name in names:
        try:
            timer.visit([name])
        except Exception as error:  # shared memory or registers exceeded; each library has its own class
            if fault_of_device():
                raise
            print(f"refused: {name}: {error!s:.200}", file=sys.stderr)
            found.append(name)
    return found


def mistaken(timer: Timer, names: Sequence[str]) -> dict[str, str]:
    """Return the settings with wrong results, and the errors; they are dropped, however fast.

    They run on new contents with poisoned outputs, so that results of an earlier call do not pass.
    """
    timer.renew(FRESH_SEED)
    for name in names:
        timer.visit([name])
    found = {name: why for name in names if (why := timer.wrong(name))}
    for name, why in found.items():
        print(f"wrong: {name}: {why}", file=sys.stderr)
    return found


class Mistaken(Exception):
    """Raised if the closed form's own result is wrong: the fault must be fixed before timing."""


class Disturbed(Exception):
    """Raised if other load left too few visits to judge a cell."""


def _arms(cell: RegretCell, fp: Fingerprint) -> tuple[dict[str, tuple[Any, Setting]], str]:
    """Return name -> (entrant, setting), including the closed form's twin and the constants; and the closed form's
    name."""
    from benchmarks.gpu.entrants import entrant, with_values

    kernels = kernels_of(cell, fp)
    if not kernels:
        raise LookupError(f"no kernel of {', '.join(cell.kernels)} supports {cell.workload.key}")
    w, made = cell.workload, {}
    if cell.kind == "route":
        named = {c.name: (entrant(c, w, fp), {"kernel": c.name}) for c in kernels}
        closed = routed(w, fp, cell.kernels)
        if closed not in named:
            raise LookupError(f"{closed} does not support {w.key}")
        twin = named[closed][0]
        return {**named, TWIN: (replace(twin, candidate=f"{twin.candidate} again"), {})}, closed
    own = kernels[0]
    setting, legal = settings(own, w, fp)
    recipes = [own.recipe(w, fp, with_values(own.knobs(w, fp), one)) for one in legal]
    native = (recipe for recipe in recipes if isinstance(recipe, NativeRecipe))
    with Builds(native) as builds:  # all builds end before anything is timed
        for one in legal:
            try:
                made[_spelled(one)] = (entrant(own, w, fp, one, builds), one)
            except BuildError:  # a setting that the compiler refuses is dropped
                if one == setting:
                    raise
    fixed, twin = constant(setting, fp), made[_spelled(setting)][0]
    made[TWIN] = (replace(twin, candidate=f"{own.name} again"), setting)
    if is_legal(fixed, w, fp):
        made[CONSTANT] = (replace(entrant(own, w, fp, fixed), candidate=f"{own.name} constant"), fixed)
    return made, _spelled(setting)


def _spelled(setting: Setting) -> str:
    return " ".join(f"{name}={value}" for name, value in setting.items()) or CLOSED


# --- results ----------------------------------------------------------------------------------------------------------


def summary(found: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return, by kind, cells, geomean, 95th percentile and worst of the regrets; also those for constants and twins."""
    made = {}
    for kind in dict.fromkeys(c["kind"] for c in found):
        regrets = sorted(c["regret"] for c in found if c["kind"] == kind)
        constants = [c["constant"] for c in found if c["kind"] == kind and "constant" in c]
        twins = [abs(c["twin"]) for c in found if c["kind"] == kind]
        made[kind] = {
            "cells": len(regrets),
            "geomean": geomean(regrets),
            "p95": regrets[min(len(regrets) - 1, math.ceil(0.95 * len(regrets)) - 1)],
            "worst": regrets[-1],
            "twin": statistics.median(twins),
            **({"constants": geomean(constants)} if constants else {}),
        }
    return made


def geomean(regrets: Sequence[float]) -> float:
    """Return the geomean of 1 + R, minus 1; negative regrets from noise are not clipped."""
    return math.exp(statistics.fmean(math.log1p(r) for r in regrets)) - 1


def kept(results: Path) -> list[dict[str, Any]]:
    """Return every device's cells, from the files that --write and `./run gpu --keep` stored in `results`."""
    found = [json.loads(path.read_text()) for path in sorted(results.glob("*/regret*.json"))]
    return [of_stage(one) if "units" in one else one for one in found]


def of_stage(record: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the stage's record (benchmarks/gpu/kept.py) to the format of --write."""
    device, cells = record["device"], {name: one for name, one in record["units"].items() if "regret" in one}
    return {"device": device["name"], "hw_id": device["hw_id"], "date": record["started"][:10], "cells": cells}


def sources_of(cell: RegretCell, fp: Fingerprint) -> dict[str, str]:
    """Return file below kernels/ -> start of its digest, for all sources of the cell's kernels."""
    found: set[Path] = set()
    for one in kernels_of(cell, fp):
        recipe = one.recipe(cell.workload, fp, one.knobs(cell.workload, fp))
        native = isinstance(recipe, NativeRecipe)
        found |= set(find_sources(KERNELS / recipe.source)) if native else _modules(recipe)
    return {path.relative_to(KERNELS).as_posix(): _digest(path) for path in sorted(found)}


def _modules(recipe: Recipe) -> set[Path]:
    """Return the files of a Triton kernel: its own and all that it imports, directly or not."""
    assert isinstance(recipe, PythonRecipe)
    todo, seen = [recipe.target.partition(":")[0].rpartition(".")[2]], set()
    while todo:
        path = KERNELS / "triton" / f"{todo.pop()}.py"
        if path not in seen:
            seen.add(path)
            todo += re.findall(r"^from autosel\.triton_kernels\.(\w+) import", path.read_text(), re.MULTILINE)
    return seen


def _digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()[:12] if path.is_file() else ""


def changed_since(found: Sequence[Mapping[str, Any]]) -> str:
    """Return which cells were measured before the last change of their kernels' sources, as text; "" if none."""
    there = {name: _digest(KERNELS / name) for c in found for name in c.get("sources", {})}
    old = sum(any(was != there[n] for n, was in c.get("sources", {}).items()) for c in found)
    told = []
    if old:
        told.append(f"{old} cells were measured before the last change of a source file of their kernels")
    unknown = sum("sources" not in c for c in found)
    if unknown:
        told.append(f"the measured sources of {unknown} cells are unknown")
    return f"{'; '.join(told)}." if told else ""


def markdown(stored: Mapping[str, Any]) -> str:
    """Return the tables for the documentation."""
    found = list(stored["cells"].values())
    there = len(cells("cpu" if any(c["kernel"].startswith("cpp:") for c in found) else "cuda"))
    told = f"{len(found)} of {there} cells measured without other load on the machine"
    changed = changed_since(found)
    lines = [f"{stored['device']}, {stored['date']}; {told}.", *([changed] if changed else []), ""]
    lines += ["| kind | cells | geomean | p95 | worst | twin (noise) | constants | goal |", "|" + " --- |" * 8]
    for kind, s in summary(found).items():
        average, most = GOALS.get(kind, (None, None))
        goal = [f"geomean {average:.0%}"] if average is not None else []
        goal += [f"{'worst' if kind == 'route' else 'p95'} {most:.0%}"] if most is not None else []
        constants = f"{s['constants']:.1%}" if "constants" in s else ""
        shown = f"{s['geomean']:.1%} | {s['p95']:.1%} | {s['worst']:.1%} | {s['twin']:.1%} | {constants}"
        lines.append(f"| {kind} | {s['cells']} | {shown} | {', '.join(goal)} |")
    lines += ["", "| kernel | workload | regret (95 %) | closed form, us | best, us | settings |", "|" + " --- |" * 6]
    for c in sorted(found, key=lambda c: -c["regret"]):
        regret = f"{c['regret']:.1%} ({c['low']:.1%} .. {c['high']:.1%})"
        better = "" if c["best"] == c["closed"] else " (" + _spelled(_changed(c)) + ")"
        times = f"{c['closed_us']:.1f} | {c['best_us']:.1f}{better}"
        lines.append(f"| {c['kernel']} | {c['workload']} | {regret} | {times} | {c['settings']} |")
    return "\n".join(lines)


def _changed(c: Mapping[str, Any]) -> Setting:
    return {name: value for name, value in c["best"].items() if c["closed"].get(name) != value}


# --- the command ------------------------------------------------------------------------------------------------------


def main() -> int:
    options = parsed(sys.argv[1:])
    from autosel import fingerprint
    from benchmarks.gpu.instrument import Timer

    fp = fingerprint.take(options.device)
    stored = read(fp)
    done = {} if options.fresh else stored["cells"]
    todo = [c for c in cells(options.device) if all(word in c.name for word in options.only)]
    todo = [c for c in todo if done.get(c.name, {}).get("key") != held_for(c, fp)]
    todo.sort(key=lambda c: c.name in done)  # cells that were never measured come first
    stored["cells"] = {name: cell for name, cell in stored["cells"].items() if name not in {c.name for c in todo}}
    timer, started, rng, faults = Timer(fp, options.device), time.monotonic(), Random(7), 0
    for number, cell in enumerate(todo):
        if options.limit and time.monotonic() - started > options.limit:
            print(f"{len(todo) - number} cells left: the same command continues", file=sys.stderr)
            break
        try:
            found = measure(cell, timer, options.seconds, rng)
        except LookupError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        except Disturbed:
            print(f"disturbed by other load: {cell.name}", file=sys.stderr, flush=True)
            continue
        except Mistaken as error:
            print(f"wrong: {error}", file=sys.stderr, flush=True)
            faults += 1
            continue
        finally:
            timer.close()
        stored["cells"][cell.name] = {**found, "key": held_for(cell, fp)}
        print(f"{found['regret']:7.1%} ({found['low']:.1%} .. {found['high']:.1%})  twin {found['twin']:+.1%}"
              f"  {cell.name}  {_spelled(_changed(found))}", file=sys.stderr, flush=True)  # fmt: skip
        if options.write:
            keep(file_of("regret", fp), json.loads(json.dumps(stored, sort_keys=True)))
    named = {c.name for c in cells(options.device)}
    stored["cells"] = {name: cell for name, cell in stored["cells"].items() if name in named}
    print(markdown(stored))
    return 1 if faults else 0


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="cells whose name has every WORD")
    parser.add_argument("--seconds", type=float, default=8.0, help="maximum seconds of a cell")
    parser.add_argument("--limit", type=float, default=0.0, metavar="SECONDS", help="start no cell after SECONDS")
    parser.add_argument("--write", action="store_true", help="store the cells in benchmarks/results/cpu/")
    parser.add_argument("--fresh", action="store_true", help="ignore stored cells and measure again")
    options = parser.parse_args(arguments)
    if options.write and options.device != "cpu":
        parser.error("--write requires --device cpu. A GPU's cells are stored by ./run gpu --stage regret --keep")
    return options


def held_for(cell: RegretCell, fp: Fingerprint) -> str:
    """Return the key of a cell's figures: device, kernel sources, the formulas' values, and the method."""
    from autosel.native.compile import sources_digest

    sources, given = [], []
    for found in kernels_of(cell, fp):
        recipe = found.recipe(cell.workload, fp, found.knobs(cell.workload, fp))
        sources.append(sources_digest(recipe.source) if isinstance(recipe, NativeRecipe) else recipe.target)
        given.append(taken(found, cell.workload, fp))
    route = routed(cell.workload, fp, cell.kernels) if cell.kind == "route" else ""
    return digest({"hw": fp.hw_id, "sources": sources, "given": given, "route": route, "method": METHOD})[:16]


def read(fp: Fingerprint) -> dict[str, Any]:
    """Return the cells that --write stored for this device; for a CPU, for its instruction set."""
    try:
        found: dict[str, Any] = json.loads(file_of("regret", fp).read_text()) if fp.kind == "cpu" else {}
    except (OSError, ValueError):
        found = {}
    name = device_of(fp) if fp.kind == "cpu" else fp.name
    return {"device": name, "hw_id": fp.hw_id, "date": time.strftime("%Y-%m-%d"), "cells": found.get("cells", {})}


if __name__ == "__main__":
    sys.exit(main())
