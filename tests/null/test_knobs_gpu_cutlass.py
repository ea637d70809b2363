"""Test the closed forms of CUTLASS's products: figures worked by hand, and properties on every device and shape."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosel.knobs.gpu import attention, cutlass, gemm
from autosel.knobs.gpu.gemv import Projection
from autosel.values import Knobs
from tests.null.test_knobs_gpu import EVERY, H200, TI, linear


def told(knobs: Knobs, *names: str) -> tuple[object, ...]:
    return tuple(knobs[n] for n in names)


# --- worked figures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("m", "n", "tile", "stages", "split"),
    [
        (16, 4096, (64, 16), 8, 1),  # 64 tiles, S_min 58: enough readers; 57 KB in flight at 8 KB a stage
        (16, 1024, (128, 16), 5, 8),  # 8 tiles: 58 / 8
        (81, 4096, (128, 128), 5, 2),  # x too tall for narrow tiles; 32 wide ones
        (128, 28672, (128, 128), 5, 1),
    ],
)
def test_hopper_streams_weights_on_an_h200(m, n, tile, stages, split):
    knobs = cutlass.hopper(linear(m, n), H200)
    assert told(knobs, "swap", "tile_m", "tile_n", "stages", "split_k") == (1, *tile, stages, split)
    assert knobs["stream_k"] == (split > 1)


@pytest.mark.parametrize(
    ("m", "n", "tile", "stages", "split"),
    [
        (16, 4096, (64, 16), 4, 1),  # 64 tiles, S_min 22; 22 KB of 8 KB a stage
        (16, 1024, (64, 16), 4, 2),  # 16 tiles of 24.6 KB under way are 393 KB of 494
        (128, 28672, (64, 128), 3, 1),  # 224 wide tiles would suffice, but 137 > 128 rows leave narrow ones their x
    ],
)
def test_ampere_streams_weights_on_a_5070_ti(m, n, tile, stages, split):
    knobs = cutlass.ampere(linear(m, n), TI)
    assert told(knobs, "rows", "columns", "stages", "split_k") == (*tile, stages, split)


def test_a_last_wave_that_is_nearly_empty_is_split_where_k_is_long():
    """Check an A100 at M = 256: 128 tiles of 64 x 128 on 108 SMs take two waves; in five parts they take 6 / 5."""
    knobs = cutlass.ampere(linear(256, 4096, 14336), EVERY["a100-80"])
    assert told(knobs, "rows", "columns", "split_k") == (64, 128, 5)
    assert cutlass.ampere(linear(256, 4096, 12288), EVERY["a100-80"])["split_k"] == 1


# --- on every device --------------------------------------------------------------------------------------------------

SHAPES = {
    "m": st.integers(1, 8192),
    "n": st.integers(1, 4096).map(lambda v: 8 * v),
    "k": st.integers(1, 4096).map(lambda v: 8 * v),
    "f": st.sampled_from(sorted(EVERY)).map(EVERY.__getitem__),
    "dtype": st.sampled_from(["bf16", "fp16"]),
}


@given(**SHAPES)
def test_hopper_builds_fit_what_cutlass_and_the_device_allow(m, n, k, f, dtype):
    if f.cc != (9, 0):
        return
    knobs = cutlass.hopper(linear(m, n, k, dtype), f)
    tall, wide = told(knobs, "tile_m", "tile_n")
    assert tall in (64, 128, 256)
    assert wide in (16, 32, 64, 128, 256)
    assert tall * wide <= 128 * 256
    assert knobs["stages"] >= 2
    assert knobs["stages"] * (tall + wide) * 128 + cutlass.end_bytes(tall, wide) <= f.smem_per_cta
    assert tall >= 128 or not knobs["stream_k"]  # ping-pong shares no tile
    assert knobs["stream_k"] or knobs["split_k"] == 1
    assert 1 <= knobs["split_k"] <= max(1, k // 256)
    assert knobs["sms"] % knobs["cluster"] == 0
    assert knobs["cluster"] <= knobs["sms"] <= f.sms


@given(**SHAPES)
def test_ampere_builds_fit_what_the_source_and_the_device_allow(m, n, k, f, dtype):
    knobs = cutlass.ampere(linear(m, n, k, dtype), f)
    rows, columns = told(knobs, "rows", "columns")
    assert rows in (64, 128)
    assert columns in (16, 32, 64, 128)
    assert knobs["stages"] >= 2
    assert max(knobs["stages"] * (rows + columns) * 128, cutlass.laid_bytes(rows, columns)) <= f.smem_per_cta
    assert 1 <= knobs["split_k"] <= min(64, max(1, k // 256))


@given(**SHAPES)
def test_streaming_reaches_the_readers_it_needs_or_runs_out_of_k(m, n, k, f, dtype):
    p = Projection(rows=min(m, 64), outputs=n, depth=k, dtype=dtype)
    s = gemm.streaming(p, f, rows=64, columns=64, split_most=cutlass.SPLIT_MOST)
    assert s.tiles * s.split >= math.floor(f.sms_needed) or s.split == max(1, min(64, k // 256))


# --- why there is no decode attention (docs/gpu.md) -------------------------------------------------------------------


@pytest.mark.parametrize("f", EVERY.values(), ids=EVERY)
def test_neither_bytes_in_flight_nor_multiply_adds_limit_decode_attention(f):
    """Check llama-8b at 8192 tokens: bytes in flight and multiply-adds, the gains of TMA and wgmma, do not limit it."""
    cache = attention.CacheSizes(
        heads=8, query_heads=32, group=4, head_dim=128, length=8192, dtype_bytes=2, page=0, ragged=False
    )
    shape = attention.shape(cache, f)
    ctas = cache.heads * attention.split(cache, shape, f)
    assert ctas * shape.in_flight(cache) >= 0.95 * f.in_flight
    mma_flops = f.bf16_flops / 2  # no less on any of them; half of wgmma's on Hopper
    assert 4 * 16 * cache.heads * cache.length * cache.head_dim / mma_flops < 0.3 * cache.bytes_read / f.read
