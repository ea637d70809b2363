"""Parts shared by the projections of many rows: normalise rows on their way to the tensor cores. Defines no kernel."""

import triton
import triton.language as tl


def fitting_stages(stages, stage_bytes, shared):
    while stages > 1 and stages * stage_bytes > shared:
        stages -= 1
    return stages


@triton.jit
def norm_rows(x, m, rows, d, eps, stride_x, BM: tl.constexpr, BK: tl.constexpr):
    """Return 1 / rms of rows m [BM]; `rows` [BM, 1] marks those that exist."""
    k = tl.arange(0, BK)
    at = x + m.to(tl.int64)[:, None] * stride_x + k[None, :]
    squares = tl.zeros((BM, BK), tl.float32)
    for start in tl.range(0, d, BK):
        value = tl.load(at, mask=rows & (k < d - start)[None, :], other=0.0).to(tl.float32)
        squares += value * value
        at += BK
    return tl.rsqrt(tl.sum(squares, 1) / d + eps)


@triton.jit
def normed(at, norm, rows, deep, rstd, offset):
    """Return rmsnorm of a tile [BM, BK], rounded to its dtype."""
    value = tl.load(at, mask=rows & deep[None, :], other=0.0)
    scale = tl.load(norm, mask=deep, other=0.0).to(tl.float32) + offset
    return (value.to(tl.float32) * rstd[:, None] * scale[None, :]).to(value.dtype)
