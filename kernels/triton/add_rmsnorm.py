"""add_rmsnorm   sandwich 0: r = x + residual; y = rmsnorm(r); new_residual = r          x, residual [M,d], weight[d]
              sandwich 1: y = rmsnorm(x); new_residual = residual + y                 -> y, new_residual [M,d]
              sandwich 2: as 0, y of the unrounded sum, which this kernel normalises in either case

bytes     b (4 M d + d) (b = bytes an element)      FLOPs   5 M d
roofline  M=1, d=4096, bf16 on an H200 (4.3 TB/s estimated): 41 KB, 10 ns; the launch is all it costs (2-3 us)
knobs     threads (knobs/gpu/rows.py): d * b / 16 in whole warps, one 16-byte vector a thread
source    rmsnorm.py in this folder. The sum is normalised in fp32, before it is rounded. new_residual may be residual,
          and y may be x: a program reads its whole row before it writes.
status    compiled and interpreted; not yet run on silicon
"""

import triton
import triton.language as tl

from autosel.triton_kernels.common import empty, refuse, together, warps


@triton.jit
def _add_rmsnorm(
    x, residual, weight, y, new_residual, d, stride_x, stride_r, stride_y, stride_n, eps, offset,
    SANDWICH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    inside = at < d
    value = tl.load(x + row * stride_x + at, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(residual + row * stride_r + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) + offset
    if not SANDWICH:
        value += other
    rstd = tl.rsqrt(tl.sum(value * value, 0) / d + eps)
    normed = value * rstd * scale
    kept = other + normed if SANDWICH else value
    tl.store(y + row * stride_y + at, normed.to(y.dtype.element_ty), mask=inside)
    tl.store(new_residual + row * stride_n + at, kept.to(y.dtype.element_ty), mask=inside)


def add_rmsnorm(x, residual, weight, eps, offset, sandwich, y=None, new_residual=None, *, threads=256):
    if y is None:
        y, new_residual = empty(x.shape, x), empty(x.shape, x)
    together(x, residual, weight, y, new_residual)
    (m, d), width = x.shape, triton.next_power_of_2(x.shape[1])
    if weight.shape != (d,) or not x.shape == residual.shape == y.shape == new_residual.shape:
        refuse("add_rmsnorm takes x, residual, y, new_residual [M,d], weight[d]")
    if not x.dtype == residual.dtype == weight.dtype == y.dtype == new_residual.dtype:
        refuse("add_rmsnorm takes one dtype")
    grid = (m,)
    _add_rmsnorm[grid](
        x, residual, weight, y, new_residual, d, x.stride(0), residual.stride(0), y.stride(0), new_residual.stride(0),
        float(eps), float(offset), SANDWICH=sandwich == 1, WIDTH=width, num_warps=warps(max(threads, width // 64)),
        enable_fp_fusion=True,
    )  # fmt: skip
    return y, new_residual
