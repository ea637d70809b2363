"""flashinfer-python: serving kernels, compiled at first use unless prebuilt ones are installed.

Signatures: 0.7.2.post1; the functions called here have the same ones in 0.3.0. Its matrix products are in
flashinfer_mm.py, its paged attention in flashinfer_paged.py. Its samplers are left out: they use their own generator,
but the op's token follows from the caller's `uniform`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from autosel.candidates.libraries.base import (
    Library,
    LibraryKernel,
    Limits,
    aligned,
    either_norm,
    handed,
    room,
    sum_then_norm,
    whole_cache,
    whole_vectors,
)
from autosel.values import Workload

if TYPE_CHECKING:
    from torch import Tensor

FLASHINFER = Library(
    distribution="flashinfer-python",
    module="flashinfer",
    least_version=(0, 3, 0),
    needs=("rmsnorm", "fused_add_rmsnorm", "apply_rope_with_cos_sin_cache_inplace", "silu_and_mul"),
    compiles_s=400.0,  # ninja and nvcc: minutes on few cores
)
HEAD_DIMS = (64, 128, 256)
ROPE_HEAD_DIMS = (64, 128, 256, 512)


def rmsnorm(x: Tensor, weight: Tensor, eps: float, offset: float, y: Tensor | None = None) -> Tensor:
    import flashinfer  # type: ignore[import-not-found,unused-ignore]

    norm = flashinfer.norm.gemma_rmsnorm if offset else flashinfer.rmsnorm
    return handed(norm(aligned(x), aligned(weight), eps, room(y, x, *x.shape)), y)


def add_rmsnorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    sandwich: int,
    y: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Call the fused function on copies, which the time includes: it overwrites both operands."""
    import flashinfer  # type: ignore[import-not-found,unused-ignore]

    assert not sandwich, "it adds, then normalises"
    norm = flashinfer.norm.gemma_fused_add_rmsnorm if offset else flashinfer.fused_add_rmsnorm
    normed, summed = room(y, x, *x.shape).copy_(x), room(new_residual, x, *x.shape).copy_(residual)
    norm(normed, summed, aligned(weight), eps)
    return handed(normed, y), handed(summed, new_residual)


def rope(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    style: int,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate in place with a table [positions, cos R/2 | sin R/2] of fp32.

    The table has a row for each token, not each position, because a caller may pass any position and any frequency.
    """
    import flashinfer  # type: ignore[import-not-found,unused-ignore]

    tokens, width = q.shape[0], q.shape[-1]
    own = [room(out, t, *t.shape).copy_(t) for t, out in ((q, q_out), (k, k_out))]
    flashinfer.apply_rope_with_cos_sin_cache_inplace(
        rows(tokens, str(q.device)), *(t.view(tokens, -1) for t in own), width, table(positions, inv_freq), style == 0
    )
    return handed(own[0], q_out), handed(own[1], k_out)


def table(positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Return cos and sin of each token's angles, side by side: fp32 [M, R]."""
    import torch

    angle = positions[:, None] * inv_freq
    return torch.cat((angle.cos(), angle.sin()), -1)


@lru_cache(maxsize=64)
def rows(tokens: int, device: str) -> Tensor:
    """Return 0, 1, ...: the row of `table` for each token."""
    import torch

    return torch.arange(tokens, dtype=torch.int32, device=device)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Call silu_and_mul on a copy with gate and up side by side, which the time includes."""
    import flashinfer  # type: ignore[import-not-found,unused-ignore]
    import torch

    made: Tensor = flashinfer.silu_and_mul(torch.cat((gate, up), -1))
    return made


def geglu(gate: Tensor, up: Tensor, tanh: int) -> Tensor:
    """Call gelu_and_mul on a copy with gate and up side by side, which the time includes."""
    import flashinfer  # type: ignore[import-not-found,unused-ignore]
    import torch

    operand = torch.cat((gate, up), -1)
    made: Tensor = flashinfer.gelu_tanh_and_mul(operand) if tanh else flashinfer.gelu_and_mul(operand)
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
    """Call decode for one sequence and one position: q[Hq,D], k and v[Hkv,L,D] ("HND")."""
    import flashinfer  # type: ignore[import-not-found,unused-ignore]

    query, keys, values = (aligned(t) for t in (q[0, :, 0], k[0, :, :max_len], v[0, :, :max_len]))
    # The kernel without tensor cores refuses operands with gaps, such as a cache that is not full.
    gaps = not all(t.is_contiguous() for t in (query, keys, values))
    cores = gaps or q.shape[1] // k.shape[1] >= GROUP_FOR_TENSOR_CORES
    made: Tensor = flashinfer.single_decode_with_kv_cache(
        query, keys, values, kv_layout="HND", use_tensor_cores=cores, sm_scale=scale or None
    )
    return made[None, :, None]


GROUP_FOR_TENSOR_CORES = 4  # its documentation: tensor cores pay for groups


def _one(w: Workload, cc: tuple[int, int]) -> str:
    if w["B"] != 1:
        return f"supports one sequence per call; the workload has B = {w['B']}"
    if w["D"] not in HEAD_DIMS:
        return f"supports heads of {', '.join(map(str, HEAD_DIMS))}; the workload's are {w['D']} wide"
    return whole_cache(w, cc)


def whole_heads(w: Workload, _: tuple[int, int]) -> str:
    """Accept heads that the rotation can divide: vectors of 8, or a 32nd of a head, in each rotated half."""
    if w["D"] not in ROPE_HEAD_DIMS:
        return f"supports heads of {', '.join(map(str, ROPE_HEAD_DIMS))}; the workload's are {w['D']} wide"
    step = 2 * max(8, w["D"] // 32)
    return "" if w["R"] % step == 0 else f"rotates in steps of {step}; the workload rotates {w['R']} elements"


def add_then_norm(w: Workload, cc: tuple[int, int]) -> str:
    return sum_then_norm(w, cc) or either_norm(w, cc)


def _kernel(op: str, limits: Limits, *, writes_out: bool = False) -> LibraryKernel:
    name = f"flashinfer:{op}"
    return LibraryKernel(op, name, FLASHINFER, backend="FLASHINFER", limits=limits, writes_out=writes_out)


KERNELS = (
    _kernel("rmsnorm", either_norm, writes_out=True),
    _kernel("add_rmsnorm", add_then_norm, writes_out=True),
    _kernel("rope", whole_heads, writes_out=True),
    _kernel("swiglu", whole_vectors),
    _kernel("geglu", whole_vectors),
    _kernel("attn", _one),
)
