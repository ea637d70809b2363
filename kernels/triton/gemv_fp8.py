"""gemv_fp8  y[m,n] = scale[n] sum_k x[m,k] w[n,k] (+ bias[n]) (+ residual[m,n])
          x[M,K], w[N,K] e4m3, scale[N] fp32 -> y[M,N], M <= 8

bytes     N K + 4 N + b (M K + M N) (b = bytes an element of x)      FLOPs   2 M N K
roofline  M=1, N=K=4096, on an H200 (4.3 TB/s estimated): 16.8 MB, 3.9 us
knobs     knobs/gpu/gemv.py, as for gemv. A lane loads 16 weights at once; 8 for more than four rows of x, 4 for more
          than six, because each weight has one accumulator per row.
source    The kernel of gemv.py with another epilogue. Compute capability 8.9 and later convert e4m3 with one
          instruction; Triton cannot convert it on older devices.
status    compiled and interpreted; not yet run on silicon
"""

import torch

from autosel.triton_kernels.common import empty, exactly, refuse, together
from autosel.triton_kernels.gemv import launch
from autosel.triton_kernels.project import MOST_ROWS, tile_shape

WIDE_ROWS, NARROW_ROWS = 4, 6  # most rows of x for which a lane holds 16 weights, and 8


def weight_bytes(m):
    """Return how many bytes of a lane's 16 a weight counts for: each weight has one accumulator per row of x.

    With eight rows, eight weights per lane spill on sm_100.
    """
    return 1 if m <= WIDE_ROWS else 2 if m <= NARROW_ROWS else 4


def gemv_fp8(
    x, w, scale, bias, residual, y=None, *, threads=256, unroll=2, rows_per_warp=1, split_k=1, grid=1 << 30, pdl=False
):  # fmt: skip
    (m, k), n = x.shape, w.shape[0]
    if y is None:
        y = empty((m, n), x)
    together(x, w, scale, bias, residual, y)
    if m > MOST_ROWS or w.shape != (n, k) or y.shape != (m, n) or x.dtype != y.dtype or w.dtype != torch.float8_e4m3fn:
        refuse(f"gemv_fp8 takes x[M,K], w[N,K] in e4m3, y[M,N] in x's dtype, M at most {MOST_ROWS}")
    exactly("scale", scale, (n,), torch.float32)
    if bias is not None:
        exactly("bias", bias, (n,), x.dtype)
    if residual is not None:
        exactly("residual", residual, (m, n), x.dtype)
    tile = tile_shape(
        m, weight_bytes(m), threads, unroll if m <= WIDE_ROWS else 1, 1 if m > NARROW_ROWS else rows_per_warp
    )
    return launch(x, w, scale, bias, residual, y, tile, threads=threads, split_k=split_k, grid=grid, pdl=pdl)
