"""Write Inductor's lookup table: the template and tiles for each matrix product of a model.

`lookup_table.json` is the content of `torch._inductor.config.lookup_table.table`: key -> [{template_id, template_hash,
BLOCK_M, ...}]. The key is the device's name, then dtype, sizes and strides of each operand, then the operator (torch
2.13: _inductor/lookup_table/choices.py). Inductor reads it only where CUDA is available, never on a CPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from autosel.errors import UsageError
from autosel.files import read_named
from autosel.integrations.engines import folder as folders
from autosel.integrations.engines.rows import (
    COUNTS,
    EngineAnswer,
    EngineRow,
    EngineTile,
    Product,
    Target,
    answer,
    linear,
    products,
)
from autosel.models.shape import ModelShape

FILE = "lookup_table.json"
ATEN, TRITON = "aten::mm", "triton::mm"
TORCH_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
GROUP = 8  # Inductor's default: number of neighbours in M that share a tile of w


def export(target: Target, folder: Path) -> folders.Manifest:
    if target.dtype not in TORCH_DTYPE:
        raise UsageError(
            f"Inductor's lookup table has no {target.dtype} products", why=f"known: {', '.join(TORCH_DTYPE)}"
        )
    if target.model is None:
        raise UsageError(f"{target.name} has experts", why="Inductor's table is made for the products of dense layers")
    rows = list(_rows(target, target.model))
    table: dict[str, list[Any]] = {row.key: [row.value] for row in rows}
    files = {FILE: folders.document(table)}
    return folders.write(
        folder, engine="inductor", engine_version=torch.__version__, fp=target.fp, rows=rows, files=files, **target.told
    )


def _rows(target: Target, model: ModelShape) -> Iterator[EngineRow]:
    seen: set[str] = set()
    hash_ = template_hash()
    for product in products(model, target.tp):
        for m in COUNTS:
            key = _key(target, m, product)
            if key in seen:  # o and down of some models
                continue
            seen.add(key)
            found = answer(target, linear(m, product.n, product.k, target.dtype))
            yield _row(target, m, product, key, found, hash_)


def _key(target: Target, m: int, p: Product) -> str:
    """Return the key of `x[M, K] @ w.t()`: w is [N, K], so the second operand's strides are (1, K)."""
    dtype = TORCH_DTYPE[target.dtype]
    operands = ((dtype, [m, p.k], [p.k, 1]), (dtype, [p.k, p.n], [1, p.k]))
    return f"{target.fp.name}+{operands}+mm"


def _row(target: Target, m: int, p: Product, key: str, found: EngineAnswer, hash_: str | None) -> EngineRow:
    if found.tile is not None:
        value, source, reason = _triton(found.tile, p, hash_), found.source, found.reason
    elif found.backend == "TORCH":
        value, source, reason = {"template_id": ATEN}, found.source, found.reason
    else:
        why = f"{found.reason}: Inductor has no template of it" if found.backend else found.reason
        value, source, reason = {"template_id": ATEN}, "default", why
    return EngineRow(
        file=FILE,
        key=key,
        label=f"{p.label} M{m} N{p.n} K{p.k}",
        value=value,
        source=source,
        reason=reason,
        decision=found.decision,
        ask={"m": m, "n": p.n, "k": p.k, "dtype": str(TORCH_DTYPE[target.dtype]), "template": value["template_id"]},
    )


def _triton(t: EngineTile, p: Product, hash_: str | None) -> dict[str, Any]:
    return {
        "template_id": TRITON,
        "template_hash": hash_,
        "BLOCK_M": t.m,
        "BLOCK_N": t.n,
        "BLOCK_K": t.k,
        "GROUP_M": GROUP,
        "EVEN_K": p.k % t.k == 0,
        "num_stages": t.stages,
        "num_warps": t.warps,
    }


def template_hash() -> str | None:
    """Return the hash of Inductor's template. If it differs, Inductor ignores the row instead of using stale tiles."""
    from torch._inductor.kernel.mm import mm_template

    found: str | None = mm_template.src_hash
    return found


# --- use -------------------------------------------------------------------------------------------------------------


def use(folder: Path | str) -> int:
    """Make Inductor read the table of this folder from now on, in this thread's compilations. Return its rows.

    Triton's templates are considered only under `max_autotune_gemm`, which this sets. Raises BadConfig.
    """
    from torch._inductor import config
    from torch._inductor.lookup_table import LookupTableChoices
    from torch._inductor.virtualized import V

    folder = Path(folder)
    made = folders.read(folder)
    table = json.loads(read_named(folder / FILE, folders.MOST_BYTES))
    config.lookup_table.table = table
    config.max_autotune_gemm = True
    V.set_choices_handler(LookupTableChoices())
    return len(made.rows)
