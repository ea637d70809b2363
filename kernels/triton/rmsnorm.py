"""rmsnorm   y[m,:] = x[m,:] * rsqrt(mean(x[m,:]^2) + eps) * (weight + offset)          x[M,d], weight[d] -> y[M,d]

bytes     2 M d b + d b (b = bytes an element)      FLOPs   4 M d
roofline  M=1, d=4096, bf16 on an H200 (4.3 TB/s estimated): 24 KB, 6 ns; the launch is the whole cost (2-3 us), so it
          is fused into a consumer if there is one (norm_qkv, gate_up)
knobs     threads (knobs/gpu/rows.py): d * b / 16 in whole warps, one 16-byte vector per thread
source    One program per row; the row stays in registers between the sum and the product: quack's first rung
          (quack/rmsnorm_config.py). There is no cluster reduction, so rows have at most 32 Ki elements.
status    compiled and interpreted; not yet run on silicon
"""

import triton
import triton.language as tl

from autosel.triton_kernels.common import empty, refuse, together, warps


@triton.jit
def _rmsnorm(x, weight, y, d, stride_x, stride_y, eps, offset, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    inside = at < d
    value = tl.load(x + row * stride_x + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) + offset
    rstd = tl.rsqrt(tl.sum(value * value, 0) / d + eps)
    tl.store(y + row * stride_y + at, (value * rstd * scale).to(y.dtype.element_ty), mask=inside)


def rmsnorm(x, weight, eps, offset, y=None, *, threads=256):
    if y is None:
        y = empty(x.shape, x)
    together(x, weight, y)
    (m, d), width = x.shape, triton.next_power_of_2(x.shape[1])
    if weight.shape != (d,) or y.shape != x.shape or not x.dtype == weight.dtype == y.dtype:
        refuse("rmsnorm takes x[M,d], weight[d], y[M,d] of one dtype")
    grid = (m,)
    _rmsnorm[grid](
        x, weight, y, d, x.stride(0), y.stride(0), float(eps), float(offset), WIDTH=width,
        num_warps=warps(max(threads, width // 64)), enable_fp_fusion=True,
    )  # fmt: skip
    return y
