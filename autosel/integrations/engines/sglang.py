"""Write SGLang's files: tiles of its Triton products in blocked fp8, tiles of its fused experts, its attention flag.

    gemm/configs/N=..,K=..,device_name=..,dtype=fp8_w8a8,block_shape=[128, 128].json   rows of x -> tiles
    moe/configs/triton_3_5_1/E=..,N=..,device_name=...json                              tokens -> tiles
    serve.yaml                                                 python -m sglang.launch_server --config it

SGLang 0.5.23 names files as vLLM does, except for a space in the block's shape. Files of experts are stored by Triton's
version; without one for its version it uses the nearest older one. It searches the first kind only in its own package
(autosel's plug-in adds this folder: AUTOSEL_ENGINE_FILES), the second in SGLANG_MOE_CONFIG_DIR.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from autosel.integrations.engines import folder as folders
from autosel.integrations.engines.experts import Experts
from autosel.integrations.engines.rows import Target
from autosel.integrations.engines.vllm import BLOCK, DEFAULT_GEMM, OWN_BACKENDS, flagged, gemm_rows, launch, moe_rows

VERSION = "0.5.23"  # the release of these formats and defaults
TRITON = "3.5.1"  # if Triton is not installed here: the folder of the last version for which SGLang ships files
# Backends of autosel's decisions -> --attention-backend. autosel's plug-in registers `autosel`.
ATTENTION = {"FLASHINFER": "flashinfer", "FLASH_ATTN": "fa3", **dict.fromkeys(OWN_BACKENDS, "autosel")}
LOW_SHARED_BYTES = 128 << 10  # below this it divides experts in fp8 into smaller tiles


def export(target: Target, folder: Path) -> folders.Manifest:
    rows = [
        *gemm_rows(target, gemm_file, {**DEFAULT_GEMM, "num_stages": 3}),
        *moe_rows(target, moe_file, lambda m, e: default_moe(m, e, target.facts.smem_per_cta)),
    ]
    use = "python -m sglang.launch_server --model-path MODEL --config serve.yaml"
    return flagged(target, folder, rows, ATTENTION, use, engine="sglang", engine_version=VERSION)


def gemm_file(device: str, n: int, k: int) -> str:
    name = device.replace(" ", "_")
    return f"gemm/configs/N={n},K={k},device_name={name},dtype=fp8_w8a8,block_shape=[{BLOCK[0]}, {BLOCK[1]}].json"


def moe_file(device: str, e: Experts, inner: int) -> str:
    dtype = ",dtype=fp8_w8a8" if e.dtype == "fp8_e4m3" else ""
    block = f",block_shape=[{e.block[0]}, {e.block[1]}]" if e.block else ""
    name = f"E={e.count},N={inner},device_name={device.replace(' ', '_')}{dtype}{block}.json"
    return f"moe/configs/triton_{triton_version().replace('.', '_')}/{name}"


def triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return TRITON


def default_moe(m: int, e: Experts, shared_bytes: int) -> dict[str, int]:
    """Return the default of SGLang 0.5.23's get_default_config on NVIDIA, which it uses without a file."""
    few = m <= e.count
    if e.dtype != "fp8_e4m3":
        return launch(16, 32, 64, 1) if few else launch(64, 64, 32, 8)
    if e.block:
        return launch(64, e.block[0], e.block[1], 32, 4, 3)
    if shared_bytes < LOW_SHARED_BYTES:
        return launch(32, 64, 256, 1, 4, 4) if few else launch(64, 128, 256, 64, 4, 2)
    return launch(64, 128, 128, 1, 4, 4) if few else launch(128, 256, 128, 32, 8, 4)
