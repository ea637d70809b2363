"""lm_head   greedy 0: logits = x @ w^T; greedy 1: the index of each row's largest logit          x[M,d], w[V,d] ->
          logits[M,V] or token[M]

bytes     b (M d + V d + M V), greedy b (M d + V d) + 8 M (b = bytes an element)      FLOPs   2 M V d
roofline  Llama-3.1-8B (V=128256, d=4096), M=1, bf16 on an H200 (4.3 TB/s estimated): 1.05 GB, 244 us
knobs     M <= 8: knobs/gpu/gemv.py, as for gemv.py; greedy: `programs`, as many as can be resident, each of which
          stores one maximum. Above: knobs/gpu/gemm.py, as for gemm.py.
source    Each program keeps the largest logits of its rows and their indices, in fp32, and never stores a logit. The
          last program to arrive compares them. Ties go to the lowest index, and a NaN is greater than any number
          (torch.argmax).
status    compiled and interpreted; not yet run on silicon
"""

import torch
import triton
import triton.language as tl

from autosel.triton_kernels.common import (
    NOWHERE,
    arrives_last,
    better,
    counters,
    empty,
    partials,
    refuse,
    together,
    top,
)
from autosel.triton_kernels.gemm import gemm, side
from autosel.triton_kernels.gemv import gemv
from autosel.triton_kernels.project import LANES, MOST_ROWS, stream, tile_shape
from autosel.triton_kernels.tiles import fitting_stages

CHUNK = tl.constexpr(32)  # partial results compared at a time
REGISTERS = 1 << 16  # registers of an SM


@triton.jit
def _announce(part, counter, token, value, index, m, M, slot, slots, BM: tl.constexpr):
    """Store this program's best of rows m [BM]; the last program to arrive compares all `slots` of them."""
    rows = m < M
    tl.store(part + slot * M + m, value, mask=rows)
    tl.store(part + (slots + slot) * M + m, index.to(tl.float32), mask=rows)
    if arrives_last(counter, slots):
        best, where = tl.full((CHUNK, BM), float("-inf"), tl.float32), tl.full((CHUNK, BM), NOWHERE, tl.int32)
        for start in tl.range(0, slots, CHUNK):
            at = start + tl.arange(0, CHUNK)
            inside = (at < slots)[:, None] & rows[None, :]
            here = part + at[:, None] * M + m[None, :]
            its = tl.load(here, mask=inside, other=float("-inf"), cache_modifier=".cg")
            at_its = tl.load(here + slots * M, mask=inside, other=NOWHERE, cache_modifier=".cg").to(tl.int32)
            # Indices do not always increase with the slot: of equal values the lower index wins, also between two NaNs.
            equal = (its == best) | ((its != its) & (best != best))
            best, later = better(its, at_its, best, where)
            where = tl.where(equal, tl.minimum(at_its, where), later)
        first = top(best, where)[1]
        tl.store(token + m, tl.minimum(first, NOWHERE).to(tl.int64), mask=rows)


@triton.jit(do_not_specialize_on_alignment=["token"])
def _few(
    x, w, token, part, counter, V, d, stride_x, stride_w,
    M: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr, WALK: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    best, where = (), ()
    for _ in tl.static_range(M):
        best = best + (tl.full((BN,), float("-inf"), tl.float32),)
        where = where + (tl.full((BN,), NOWHERE, tl.int32),)
    for block in tl.range(tl.program_id(0), tl.cdiv(V, BN), tl.num_programs(0)):
        n = block * BN + tl.arange(0, BN)
        inside = n < V
        at = w + n.to(tl.int64)[:, None] * stride_w
        sums = stream(at, at, inside, x, x, 0.0, 0, d, stride_x, M, BN, BK, False, False, PDL, WALK)[0]
        next_best, next_where = (), ()
        for m in tl.static_range(M):
            logit = tl.where(inside, tl.sum(sums[m], 1), float("-inf"))
            # Nothing is greater than -inf here, so a row of -inf alone still returns its first index.
            fresh = inside & (where[m] == NOWHERE)
            value, index = better(logit, n, best[m], where[m])
            next_best = next_best + (value,)
            next_where = next_where + (tl.where(fresh, n, index),)
        best, where = next_best, next_where
    row = tl.arange(0, BM)
    value, index = tl.full((BM,), float("-inf"), tl.float32), tl.full((BM,), NOWHERE, tl.int32)
    for m in tl.static_range(M):
        its_value, its_index = top(best[m][:, None], where[m][:, None])
        value, index = tl.where(row == m, its_value, value), tl.where(row == m, its_index, index)
    _announce(part, counter, token, value, index, row, M, tl.program_id(0), tl.num_programs(0), BM)


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["token"])
def _many(
    x, w, token, part, counter, M, V, d, stride_x, stride_w,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    n, m, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BM), tl.arange(0, BK)
    inside, at_n, at_m = (n < V)[:, None], n.to(tl.int64), m.to(tl.int64)
    left, right = x + at_m[:, None] * stride_x + k[None, :], w + at_n[:, None] * stride_w + k[None, :]
    sums = tl.zeros((BN, BM), tl.float32)
    for start in tl.range(0, d, BK, num_stages=STAGES):
        deep = (k < d - start)[None, :]
        a = tl.load(left, mask=(m < M)[:, None] & deep, other=0.0)
        sums = tl.dot(tl.load(right, mask=inside & deep, other=0.0), a.T, sums, input_precision="ieee")
        left += BK
        right += BK
    index = tl.where(inside, n[:, None], NOWHERE) + tl.zeros((BN, BM), tl.int32)
    value, first = top(tl.where(inside, sums, float("-inf")), index)
    _announce(part, counter, token, value, first, m, M, tl.program_id(0), tl.num_programs(0), BM)


def lm_head(
    x, w, greedy, out=None, *,
    threads=256, unroll=2, rows_per_warp=1, grid=1 << 30, split_k=1, programs=256, pdl=False,
    columns=0, tile_rows=128, tile_depth=64, tile_m=128, tile_n=128, stages=3, shared=99 << 10,
):  # fmt: skip
    (m, d), v = x.shape, w.shape[0]
    if out is None:
        out = empty((m,), x, torch.int64) if greedy else empty((m, v), x)
    if w.shape != (v, d) or out.shape != ((m,) if greedy else (m, v)) or x.dtype != w.dtype:
        refuse("lm_head takes x[M,d], w[V,d] of one dtype, and logits[M,V] or token[M]")
    if not greedy and m <= MOST_ROWS:
        return gemv(
            x, w, None, None, out, threads=threads, unroll=unroll, rows_per_warp=rows_per_warp, split_k=split_k,
            grid=grid, pdl=pdl,
        )  # fmt: skip
    if not greedy:
        return gemm(
            x, w, None, None, out, columns=columns, tile_rows=tile_rows, tile_depth=tile_depth, split_k=split_k,
            tile_m=tile_m, tile_n=tile_n, stages=stages, shared=shared,
        )  # fmt: skip
    together(x, w, out)
    size = x.element_size()
    if v > NOWHERE.value or out.dtype != torch.int64:
        refuse(f"lm_head takes a vocabulary up to {NOWHERE.value}, and int64 tokens")
    if m <= MOST_ROWS:
        bn, bk = tile_shape(m, size, threads, unroll, rows_per_warp)
        slots = min(programs, triton.cdiv(v, bn))
        crowded = m > MOST_ROWS // 2  # sums and maxima leave no registers for a base per row if two CTAs share an SM
        _few[(slots,)](
            x, w, out, partials(x, 2 * slots * m), counters(x, 1), v, d, x.stride(0), w.stride(0), M=m,
            BM=triton.next_power_of_2(m), BN=bn, BK=bk, PDL=pdl, WALK=crowded, num_warps=threads // LANES,
            maxnreg=min(255, REGISTERS // (2 * threads)) if crowded else None, launch_pdl=pdl, enable_fp_fusion=True,
        )  # fmt: skip
        return out
    bm, bn, slots = side(m), tile_rows, triton.cdiv(v, tile_rows)
    if m > bm:
        refuse(f"lm_head names the tokens of up to {bm} rows")
    stages = fitting_stages(stages, (bm + bn) * tile_depth * size, shared)
    _many[(slots,)](
        x, w, out, partials(x, 2 * slots * m), counters(x, 1), m, v, d, x.stride(0), w.stride(0), BM=bm, BN=bn,
        BK=tile_depth, STAGES=stages, num_warps=8 if bm * bn >= 128 * 64 else 4, num_stages=stages,
        enable_fp_fusion=True,
    )  # fmt: skip
    return out
