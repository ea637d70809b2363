"""flashinfer-python: serving kernels, compiled at first use where no prebuilt ones are installed (signatures: 0.7)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autosel.candidates.libraries.base import Library, LibraryKernel, plain_norm, whole_cache, whole_vectors
from autosel.values import Workload

if TYPE_CHECKING:
    from torch import Tensor

FLASHINFER = Library(
    distribution="flashinfer-python",
    module="flashinfer",
    least_version=(0, 3, 0),
    needs=("rmsnorm", "silu_and_mul"),
    compiles_s=400.0,  # ninja and nvcc: minutes on few cores
)
HEAD_DIMS = (64, 128, 256)


def rmsnorm(x: Tensor, weight: Tensor, eps: float, offset: float, y: Tensor | None = None) -> Tensor:
    import flashinfer  # type: ignore[import-not-found,unused-ignore]

    made: Tensor = flashinfer.norm.gemma_rmsnorm(x, weight, eps, y) if offset else flashinfer.rmsnorm(x, weight, eps, y)
    return made


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Its operand is gate and up side by side: laid so by a copy, which the time includes."""
    import flashinfer  # type: ignore[import-not-found,unused-ignore]
    import torch

    made: Tensor = flashinfer.silu_and_mul(torch.cat((gate, up), -1))
    return made


def attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    max_len: int,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """One sequence, one position: q[Hq,D], k and v[Hkv,L,D] ("HND")."""
    import flashinfer  # type: ignore[import-not-found,unused-ignore]

    query, keys, values = q[0, :, 0], k[0, :, :max_len], v[0, :, :max_len]
    # Its kernel without tensor cores refuses what has gaps: a cache that is not full, for one.
    gaps = not all(t.is_contiguous() for t in (query, keys, values))
    cores = gaps or q.shape[1] // k.shape[1] >= GROUP_FOR_TENSOR_CORES
    made: Tensor = flashinfer.single_decode_with_kv_cache(
        query, keys, values, kv_layout="HND", use_tensor_cores=cores, sm_scale=scale or None
    )
    return made[None, :, None]


GROUP_FOR_TENSOR_CORES = 4  # its own documentation: worth it for groups


def _one(w: Workload, cc: tuple[int, int]) -> str:
    if w["B"] != 1:
        return f"one sequence a call; the workload has B = {w['B']}"
    if w["D"] not in HEAD_DIMS:
        return f"takes heads of {', '.join(map(str, HEAD_DIMS))}; the workload's are {w['D']} wide"
    return whole_cache(w, cc)


def _norm(w: Workload, cc: tuple[int, int]) -> str:
    return "" if w.trait("offset", 0.0) in (0.0, 1.0) else plain_norm(w, cc)


KERNELS = (
    LibraryKernel("rmsnorm", "flashinfer:rmsnorm", FLASHINFER, backend="FLASHINFER", limits=_norm),
    LibraryKernel(
        "swiglu", "flashinfer:swiglu", FLASHINFER, backend="FLASHINFER", writes_out=False, limits=whole_vectors
    ),
    LibraryKernel("attn", "flashinfer:attn", FLASHINFER, backend="FLASHINFER", limits=_one, writes_out=False),
)
