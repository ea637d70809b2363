"""Write vLLM's files: tiles of its Triton products in blocked fp8, tiles of its fused experts, its attention flag.

    gemm/configs/N=..,K=..,device_name=..,dtype=fp8_w8a8,block_shape=[128,128].json   rows of x -> tiles
    moe/E=..,N=..,device_name=...json                                                  tokens -> tiles
    serve.yaml                                                                         vllm serve MODEL --config it

vLLM 0.33 selects the row of the nearest number of tokens, so every row is written. It searches the first kind only in
its own package (autosel's plug-in adds this folder: AUTOSEL_ENGINE_FILES), the second in VLLM_TUNED_CONFIG_FOLDER.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autosel.candidates.triton.linear import tiled
from autosel.errors import UsageError
from autosel.integrations.engines import folder as folders
from autosel.integrations.engines.experts import Experts
from autosel.integrations.engines.rows import (
    COUNTS,
    EngineAnswer,
    EngineRow,
    Target,
    answer,
    linear,
    products,
    tile,
)
from autosel.values import Decision

VERSION = "0.33.0"  # the release of these formats and defaults
BLOCK = (128, 128)  # of the scales in published blocked-fp8 checkpoints
FLAG_FILE = "serve.yaml"
OWN_BACKENDS = ("TRITON", "CUDA_EXT", "CUTLASS")  # of autosel's kernels, which its plug-in serves
# Backends of autosel's decisions -> AttentionBackendEnum. autosel's plug-in registers CUSTOM.
ATTENTION = {"FLASHINFER": "FLASHINFER", "FLASH_ATTN": "FLASH_ATTN", **dict.fromkeys(OWN_BACKENDS, "CUSTOM")}


def export(target: Target, folder: Path) -> folders.Manifest:
    rows = [*gemm_rows(target, gemm_file, DEFAULT_GEMM), *moe_rows(target, moe_file, default_moe)]
    use = "vllm serve MODEL --config serve.yaml"
    return flagged(target, folder, rows, ATTENTION, use, engine="vllm", engine_version=VERSION)


def flagged(
    target: Target, folder: Path, rows: list[EngineRow], names: Mapping[str, str], use: str, **engine: str
) -> folders.Manifest:
    """Return the files of these rows, and the file of the attention flag. `names`: the engine's names of autosel's
    backends."""
    flag = flag_row(target, names)
    files = {**grouped(rows), FLAG_FILE: flag_text(flag, use)}
    return folders.write(folder, fp=target.fp, rows=[*rows, flag], files=files, **target.told, **engine)


def grouped(rows: list[EngineRow]) -> dict[str, str]:
    """Return the text of each file: the rows' values by key."""
    files: dict[str, dict[str, Any]] = {}
    for row in rows:
        files.setdefault(row.file, {})[row.key] = row.value
    return {name: folders.document(values) for name, values in files.items()}


# --- products in blocked fp8 -----------------------------------------------------------------------------------------


def launch(m: int, n: int, k: int, group: int, warps: int = 0, stages: int = 0) -> dict[str, int]:
    """Return the launch of a Triton product as engines write it, without warps and stages if `warps` is 0."""
    sizes = {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k, "GROUP_SIZE_M": group}
    return {**sizes, "num_warps": warps, "num_stages": stages} if warps else sizes


# for vLLM 0.33 and SGLang, except the stages: fp8_utils.w8a8_triton_block_scaled_mm
DEFAULT_GEMM = launch(64, *BLOCK, group=32, warps=4, stages=2)


def gemm_file(device: str, n: int, k: int) -> str:
    name = re.sub(r"[\s/]+", "_", device)
    return f"gemm/configs/N={n},K={k},device_name={name},dtype=fp8_w8a8,block_shape=[{BLOCK[0]},{BLOCK[1]}].json"


def gemm_rows(target: Target, named: Any, default: Mapping[str, int]) -> Iterator[EngineRow]:
    seen: set[str] = set()
    for p in products(target.model, target.tp) if target.model else ():
        file = named(target.fp.name, p.n, p.k)
        if file in seen or p.n % BLOCK[0] or p.k % BLOCK[1]:  # blocked scales need whole blocks
            continue
        seen.add(file)
        for m in COUNTS:
            found = answer(target, linear(m, p.n, p.k, "fp8_e4m3"))
            value, source, reason = _tiled(found, default)
            yield EngineRow(
                file=file,
                key=str(m),
                label=f"{p.label} M{m} N{p.n} K{p.k} fp8",
                value=value,
                source=source,
                reason=reason,
                decision=found.decision,
                ask={"kind": "gemm", "m": m, "n": p.n, "k": p.k, "block": list(BLOCK)},
            )


def _tiled(found: EngineAnswer, default: Mapping[str, int]) -> tuple[dict[str, int], Any, str]:
    if found.tile is None:
        why = f"{found.reason}, which has no tiles to carry over" if found.backend else found.reason
        return dict(default), "default", why
    t = found.tile
    return launch(t.m, t.n, t.k, default["GROUP_SIZE_M"], t.warps, t.stages), found.source, found.reason


# --- fused experts ---------------------------------------------------------------------------------------------------


def moe_file(device: str, e: Experts, inner: int) -> str:
    name = re.sub(r"[\s/]+", "_", device)
    name = "NVIDIA_H200" if "H200" in name.split("_") else name  # vLLM's single name for the family
    dtype = ",dtype=fp8_w8a8" if e.dtype == "fp8_e4m3" else ""
    block = f",block_shape=[{e.block[0]},{e.block[1]}]" if e.block else ""
    return f"moe/E={e.count},N={inner},device_name={name}{dtype}{block}.json"


def moe_rows(target: Target, named: Any, default: Any) -> Iterator[EngineRow]:
    e = target.experts
    if e is None:
        return
    if e.inner % target.tp:
        raise UsageError(f"--tp {target.tp} does not divide the experts' width {e.inner}")
    inner = e.inner // target.tp
    for m in COUNTS:
        derived = derive_moe(target, e, m, inner) if target.derives else None
        yield EngineRow(
            file=named(target.fp.name, e, inner),
            key=str(m),
            label=f"experts M{m} E{e.count} N{inner} K{e.hidden}",
            value=derived or default(m, e),
            source="derived" if derived else "default",
            reason="a mean expert's rows, by gemm.stream or gemm.large"
            if derived
            else "autosel decides no experts yet",
            ask={
                "kind": "moe",
                "m": m,
                "e": e.count,
                "n": inner,
                "k": e.hidden,
                "top": e.chosen,
                "dtype": "fp8_w8a8" if e.dtype == "fp8_e4m3" else None,
                "block": list(e.block) if e.block else None,
            },
        )


def derive_moe(target: Target, e: Experts, m: int, inner: int) -> dict[str, int]:
    """Derive tiles for experts. A mean expert of those in use has ceil(m chosen / used) rows; all in use together fill
    the chip.

    Tokens are padded to BLOCK_SIZE_M per expert, so the tile follows these rows, not the whole batch.
    """
    used = min(e.count, m * e.chosen)
    rows = -(-m * e.chosen // used)
    w = linear(rows, 2 * inner * used, e.hidden, e.dtype)
    t = tile(tiled(w, target.facts).values, w, target.facts)
    assert t is not None
    return {**launch(t.m, t.n, t.k, 16 if rows > 128 else 1, t.warps, t.stages), "SPLIT_K": 1}


def default_moe(m: int, e: Experts) -> dict[str, int]:
    """Return the default of vLLM 0.33's get_default_config on NVIDIA, which it uses without a file."""
    if e.dtype == "fp8_e4m3" and e.block:
        small = m <= 8 and e.block[0] % 64 == 0
        return {
            "BLOCK_SIZE_M": 16 if m <= 64 else 64,
            "BLOCK_SIZE_N": 64 if small else e.block[0],
            "BLOCK_SIZE_K": e.block[1],
            "GROUP_SIZE_M": 1 if m <= 16 else 32,
            "SPLIT_K": 1,
            "num_warps": 4,
            "num_stages": 4 if small and m <= 4 else 3,
        }
    return {
        "BLOCK_SIZE_M": next(size for most, size in ((32, 16), (96, 32), (512, 64), (m, 128)) if m <= most),
        "BLOCK_SIZE_N": 64 if m <= 64 else 128,
        "BLOCK_SIZE_K": 128 if e.dtype == "fp8_e4m3" or m <= 64 else 64,
        "GROUP_SIZE_M": 16 if m // e.count > 128 else 1,
        "SPLIT_K": 1,
        "num_warps": 4 if m <= 128 else 8,
        "num_stages": 4 if m <= 32 else 3,
    }


# --- the attention flag ----------------------------------------------------------------------------------------------


def flag_row(target: Target, names: Mapping[str, str]) -> EngineRow:
    """Return one backend for the whole server: the one that all attention decisions chose, or the engine's own if they
    differ.

    Decisions for paged caches have precedence over those for contiguous ones, because engines use pages.
    """
    decided = _attention(target)
    told = {names.get(d.arm.backend) for d in decided}
    ids = ", ".join(str(d.id) for d in decided)
    value, source, reason = None, "default", "nobody decided it"
    if len(told) == 1 and None not in told:
        value, source, reason = told.pop(), "measured", f"decisions {ids}"
    elif decided:
        won = ", ".join(sorted({d.arm.candidate for d in decided}))
        reason = f"decisions {ids} chose {won}: no one backend of this engine"
    return EngineRow(
        file=FLAG_FILE,
        key="attention-backend",
        label="attention",
        value=value,
        source=source,  # type: ignore[arg-type]
        reason=reason,
        decision=decided[0].id if value else None,
        ask={"kind": "flag"},
    )


def _attention(target: Target) -> list[Decision]:
    m = target.model
    if m is None:
        return []
    heads = (m.Hq // target.tp, max(1, m.Hkv // target.tp), m.D)
    for op in ("paged_attn", "attn"):
        found = [d for d in target.serving(op) if tuple(d.workload[n] for n in ("Hq", "Hkv", "D")) == heads]
        if found:
            return sorted(found, key=lambda d: d.id)
    return []


def flag_text(row: EngineRow, use: str) -> str:
    head = f"# {use}\n# {row.source}: {row.reason}\n"
    return head + (f"{row.key}: {row.value}\n" if row.value else f"# {row.key}: the engine's own choice\n")
