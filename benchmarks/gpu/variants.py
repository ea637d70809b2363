"""Generate workloads for features that vary between models: windows, softcaps, biases, offset norms, activations.

The model of a run uses few of the traits that contracts define. The others are taken at another model's shapes: each
trait alone, each of its values, and the combinations that models use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from autosel.values import DTypeName, Scalar, Workload
from benchmarks.gpu.scope import OTHER_MODEL, Scope

if TYPE_CHECKING:
    from autosel.models.workloads import Named

Feature = Mapping[str, Scalar]  # traits; for paged attention also `page`

WINDOW: Feature = {"window": 512}  # Gemma's; at most half of the keys, so that it cuts
SOFTCAP: Feature = {"softcap": 20.0}  # low enough that omitting it exceeds rounding errors
OFFSET: Feature = {"offset": 1.0}
ROW: Feature = {"weight": "fp8_e4m3-row"}
HEAD: Feature = {"cache": "fp8_e4m3-head"}
ADDED: tuple[Feature, ...] = ({"bias": True}, {"residual": True}, {"bias": True, "residual": True})
SEEN: tuple[Feature, ...] = (WINDOW, SOFTCAP, {"ragged": True}, {"ragged": True, **WINDOW, **SOFTCAP})
FEATURES: Mapping[str, tuple[Feature, ...]] = {
    "linear": (*ADDED, *({**f, **ROW} for f in ADDED)),
    "attn": (*SEEN, *({**f, **HEAD} for f in SEEN)),
    "paged_attn": (WINDOW, SOFTCAP, {**WINDOW, **SOFTCAP}, {"page": 256}),
    "prefill_attn": (WINDOW, SOFTCAP, {**WINDOW, **SOFTCAP}),
    "kv_append": ({"page": 16},),
    "rmsnorm": (OFFSET,),
    "add_rmsnorm": (OFFSET, {"sandwich": 1}, {**OFFSET, "sandwich": 1}, {"sandwich": 2}),
    "norm_qkv": (OFFSET,),
    "gate_up": ({"activation": 1}, {"activation": 2}, OFFSET, {**OFFSET, "activation": 2}),
    "geglu": ({}, {"tanh": 1}),  # no model here has the exact GELU, the contract's default
    "rope": ({"style": 1},),
    "lm_head": ({"greedy": 1},),
}
ROWS = (4, 64)  # few and many rows: some kernels of a product support only one of them


def variants(scope: Scope, dtype: DTypeName) -> tuple[Workload, ...]:
    """Return every feature of the scope's ops with few rows, then with many."""
    from autosel.ops import OPS

    found: dict[str, Workload] = {}
    for rows in ROWS:
        for op, dims in _dimensions(scope, dtype, rows).items():
            for feature in FEATURES[op]:
                own = {name: feature.get(name, size) for name, size in dims.items()}
                traits = {name: value for name, value in feature.items() if name not in dims}
                if "window" in traits:
                    traits["window"] = min(int(traits["window"]), dims.get("L", dims["S"]) // 2)
                w = OPS[op].workload(dtype, {name: int(size) for name, size in own.items()}, **traits)
                found.setdefault(w.key, w)
    return tuple(found.values())


def feature_of(w: Workload) -> object:
    """Return a value that is equal for workloads that differ only in shape."""
    return w.traits, dict(w.dims).get("page")


def _dimensions(scope: Scope, dtype: DTypeName, rows: int) -> dict[str, dict[str, int]]:
    """Return the largest dimensions of each op in the other model; in a dry run, in the scope's smaller model."""
    from autosel import models
    from autosel.models.workloads import step

    asked = tuple(op for op in FEATURES if not scope.ops or op in scope.ops)
    largest: dict[str, Workload] = {}
    for name in (OTHER_MODEL,) if scope.on_gpu else (scope.model, OTHER_MODEL):
        left = tuple(op for op in asked if op not in largest)
        there = step(models.load(name), batch=rows, context=scope.seq, dtype=dtype, ops=left) if left else ()
        for named in sorted(there, key=_size):
            largest[named.workload.op] = named.workload
    return {op: dict(w.dims) for op, w in largest.items()}


def _size(named: Named) -> int:
    return math.prod(size for _, size in named.workload.dims)
