"""sgl-kernel: SGLang's prebuilt kernels; named sglang-kernel since 0.4.

Signatures: 0.3's sources and 0.4.10, equal except for the rotation, which 0.4 no longer has. Since then its norms call
flashinfer's if that is installed. Its samplers are left out, for the same reason as flashinfer's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autosel.candidates.libraries.base import (
    Library,
    LibraryKernel,
    Limits,
    aligned,
    either_norm,
    handed,
    room,
    whole_vectors,
)
from autosel.candidates.libraries.flashinfer import add_then_norm, rows, table, whole_heads

if TYPE_CHECKING:
    from torch import Tensor

SGL = Library(
    distribution="sgl-kernel",
    renamed="sglang-kernel",
    module="sgl_kernel",
    least_version=(0, 1, 0),
    needs=("rmsnorm", "gemma_rmsnorm", "silu_and_mul"),
)
SUMS = replace(SGL, needs=("fused_add_rmsnorm", "gemma_fused_add_rmsnorm"))
ROTATES = replace(SGL, needs=("apply_rope_with_cos_sin_cache_inplace",))


def rmsnorm(x: Tensor, weight: Tensor, eps: float, offset: float, y: Tensor | None = None) -> Tensor:
    import sgl_kernel  # type: ignore[import-not-found,unused-ignore]

    norm = sgl_kernel.gemma_rmsnorm if offset else sgl_kernel.rmsnorm
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
    """Call the fused function on copies, because it overwrites both operands."""
    import sgl_kernel  # type: ignore[import-not-found,unused-ignore]

    assert not sandwich, "it adds, then normalises"
    norm = sgl_kernel.gemma_fused_add_rmsnorm if offset else sgl_kernel.fused_add_rmsnorm
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
    """Rotate copies in place with a table, as for flashinfer."""
    import sgl_kernel  # type: ignore[import-not-found,unused-ignore]

    tokens, width = q.shape[0], q.shape[-1]
    own = [room(out, t, *t.shape).copy_(t) for t, out in ((q, q_out), (k, k_out))]
    sgl_kernel.apply_rope_with_cos_sin_cache_inplace(
        rows(tokens, str(q.device)), *(t.view(tokens, -1) for t in own), width, table(positions, inv_freq), style == 0
    )
    return handed(own[0], q_out), handed(own[1], k_out)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Call silu_and_mul on a copy with gate and up side by side, which the time includes."""
    import sgl_kernel  # type: ignore[import-not-found,unused-ignore]
    import torch

    made: Tensor = sgl_kernel.silu_and_mul(torch.cat((gate, up), -1))
    return made


def geglu(gate: Tensor, up: Tensor, tanh: int) -> Tensor:
    """Call the library's GELU kernel, with the arguments of `swiglu`."""
    import sgl_kernel  # type: ignore[import-not-found,unused-ignore]
    import torch

    operand = torch.cat((gate, up), -1)
    made: Tensor = sgl_kernel.gelu_tanh_and_mul(operand) if tanh else sgl_kernel.gelu_and_mul(operand)
    return made


def _kernel(op: str, limits: Limits, library: Library = SGL, *, writes_out: bool = True) -> LibraryKernel:
    return LibraryKernel(op, f"sgl:{op}", library, backend="SGL", limits=limits, writes_out=writes_out)


KERNELS = (
    _kernel("rmsnorm", either_norm),
    _kernel("add_rmsnorm", add_then_norm, SUMS),
    _kernel("rope", whole_heads, ROTATES),
    _kernel("swiglu", whole_vectors, writes_out=False),
    _kernel("geglu", whole_vectors, writes_out=False),
)
