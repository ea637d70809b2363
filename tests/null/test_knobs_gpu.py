"""Test the GPU closed forms: figures worked by hand for an H200 and an RTX 5070 Ti, and properties on every device."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosel.errors import BadConfig
from autosel.fingerprint import known
from autosel.knobs.gpu import GpuFacts, attention, derive, facts, gemm, gemv, rows, step
from autosel.knobs.gpu.gemv import Projection
from autosel.values import Fingerprint, Knobs, Workload

H200 = facts(known.load("h200"))
TI = facts(known.load("rtx-5070-ti"))
EVERY = {name: facts(known.load(name)) for name in known.names()}

us = 1e-6


def workload(op: str, dtype: str = "bf16", traits: tuple[tuple[str, object], ...] = (), **dims: int) -> Workload:
    return Workload(op=op, dims=tuple(dims.items()), dtype=dtype, traits=traits)


def linear(m: int, n: int = 4096, k: int = 4096, dtype: str = "bf16") -> Workload:
    return workload("linear", dtype, M=m, N=n, K=k)


def attn(b: int, length: int, **more: object) -> Workload:
    traits = tuple(more.items())
    return workload("attn", traits=traits, B=b, Hq=32, Hkv=8, S=1, D=128, L=length)


def product(m: int, n: int, k: int = 4096, dtype: str = "bf16") -> Projection:
    return Projection(rows=m, outputs=n, depth=k, dtype=dtype)


# --- the three laws ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("f", "in_flight_kb", "sms_needed", "overhead_us"),
    [(H200, 25.4, 58, 2.8), (TI, 7.1, 22, 2.2)],
    ids=["H200", "5070Ti"],
)
def test_little_law_sms_needed_and_overhead(f, in_flight_kb, sms_needed, overhead_us):
    assert f.in_flight / f.sms / 1e3 == pytest.approx(in_flight_kb, abs=0.05)
    assert math.floor(f.sms_needed) == sms_needed
    assert f.overhead_s / us == pytest.approx(overhead_us, abs=0.05)


@pytest.mark.parametrize(
    ("threads", "regs", "smem", "ctas", "limit"),
    [
        (256, 128, 0, 2, "registers"),
        (256, 32, 0, 8, "threads"),
        (128, 32, 96 << 10, 2, "shared memory"),
        (32, 16, 0, 32, "CTAs"),
        (128, 32, 228 << 10, 0, "a CTA may not have all of an SM's shared memory"),
    ],
)
def test_occupancy_is_the_scarcest_resource(threads, regs, smem, ctas, limit):
    assert H200.occupancy(threads=threads, regs=regs, smem=smem) == ctas, limit


# --- gemv -------------------------------------------------------------------------------------------------------------


def test_gemv_keeps_enough_bytes_in_flight():
    h200, ti = gemv.gemv(linear(1, 4096), H200), gemv.gemv(linear(1, 4096), TI)
    assert (h200["ctas_per_sm"], h200["threads"], h200["unroll"]) == (2, 256, 4)
    assert (ti["ctas_per_sm"], ti["threads"], ti["unroll"]) == (1, 256, 2)
    for k, f in ((h200, H200), (ti, TI)):
        assert k["ctas_per_sm"] * k["threads"] * 16 * k["unroll"] >= f.in_flight / f.sms


def test_gemv_splits_k_where_rows_are_few():
    assert gemv.split_k(1024, 4, H200) == 2
    assert gemv.split_k(1024, 8, H200) == 1
    assert gemv.split_k(1024, 2, TI) == 1


@pytest.mark.parametrize("f", EVERY.values(), ids=EVERY)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_rows_of_x_beyond_eight_are_another_pass_and_ask_no_more_of_a_warp(f, dtype):
    eight, more = product(8, 28_672, dtype=dtype), product(16, 28_672, dtype=dtype)
    assert gemv.rows_per_warp(more, f) == gemv.rows_per_warp(eight, f)
    assert gemv.time_s(more, f) - f.overhead_s == pytest.approx(2 * (gemv.time_s(eight, f) - f.overhead_s))


# --- small M, the route -----------------------------------------------------------------------------------------------


def test_streaming_split_leaves_each_part_four_tiles_deep():
    assert gemm.stream(linear(16, 128, k=512), H200)["split_k"] == 512 // (4 * 64)


def test_crossover_from_cuda_cores_is_one_past_what_they_serve():
    # Up to M1 both routes wait for the same weights; at M1 + 1 instructions outlast them.
    assert gemm.crossover(product(1, 4096), H200) == gemv.cc_limit("bf16", H200) + 1
    assert gemm.crossover(product(1, 4096, dtype="fp8_e4m3"), H200) == gemv.cc_limit("fp8_e4m3", H200) + 1
    assert gemm.crossover(product(1, 4096), TI) == 9


@pytest.mark.parametrize(("m", "route"), [(1, "gemv"), (6, "gemv"), (7, "stream"), (181, "stream"), (182, "large")])
def test_route_by_rows_on_an_h200(m, route):
    assert list(derive(linear(m, 4096), H200)) == ["route", route]


# --- large tiles ------------------------------------------------------------------------------------------------------


def test_a_tile_too_thin_for_a_b200_is_shared_by_a_cluster():
    assert gemm.large(linear(8192, 8192), EVERY["b200"])["cluster"] == 2


def test_a_short_last_wave_of_a_deep_product_goes_to_stream_k():
    deep, shallow = gemm.large(linear(256, 1024, k=16384), H200), gemm.large(linear(256, 1024, k=1024), H200)
    assert deep["schedule"] == "stream_k"
    assert shallow["schedule"] == "tiles"
    assert shallow["sms"] < H200.sms


# --- decode attention -------------------------------------------------------------------------------------------------

# 32/8 heads, D = 128, bf16: (device, batch, length, us of reading, best splits, their time, FA3's split and time).
TABLE = [
    ("H200", H200, 1, 8192, 7.8, range(8, 17), 10.6, 15, 11.1),
    ("H200", H200, 8, 1024, 7.8, range(1, 2), 9.6, 2, 10.6),
    ("5070Ti", TI, 1, 8192, 40.7, range(4, 9), 43.4, 8, 43.4),
    ("5070Ti", TI, 8, 1024, 40.7, range(1, 2), 42.3, 1, 42.3),
]


def row_name(value: object) -> str | None:
    return value if isinstance(value, str) else None


@pytest.mark.parametrize(
    ("name", "f", "b", "length", "reading", "best", "time", "fa3", "fa3_time"), TABLE, ids=row_name
)
def test_decode_split_table(name, f, b, length, reading, best, time, fa3, fa3_time):
    c = attention.cache_of(attn(b, length))
    k = attention.shape(c, f)
    assert c.bytes_read / f.read / us == pytest.approx(reading, abs=0.05)
    s = attention.decode(attn(b, length), f)["split"]
    assert s in best
    for good in (s, best[-1]):
        assert attention.time_s(c, k, f, good) / us == pytest.approx(time, abs=0.06)
    assert attention.time_s(c, k, f, fa3) / us == pytest.approx(fa3_time, abs=0.06)


@pytest.mark.parametrize(("f", "most"), [(H200, 6), (TI, 26)], ids=["H200", "5070Ti"])
def test_cuda_cores_suffice_for_small_groups(f, most):
    def matrix(group: int) -> bool:
        return attention.decode(workload("attn", B=1, Hq=group, Hkv=1, S=1, D=128, L=8192), f)["matrix"]

    assert not matrix(most)
    assert matrix(most + 1)


def test_query_rows_of_speculation_count_as_heads():
    assert attention.cache_of(workload("attn", B=1, Hq=32, Hkv=8, S=4, D=128, L=8192)).group == 16


def test_a_window_shortens_what_is_read():
    assert attention.cache_of(attn(1, 8192, window=1024)).length == 1024


def test_ragged_batches_get_equal_work_instead_of_a_split():
    k = attention.decode(attn(8, 8192, ragged=True), H200)
    assert (k["split"], k["schedule"]) == (1, "equal_work")
    total, slots = 8 * 8 * 8192, k["ctas_per_sm"] * H200.sms
    assert total / slots <= k["chunk"] < total / slots + k["tile"]


def test_a_page_is_never_cut():
    w = workload("paged_attn", B=1, Hq=32, Hkv=8, S=1, D=128, L=8192, page=256)
    assert attention.decode(w, H200)["chunk"] % 256 == 0


# --- rows, sampling, the step -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("f", "below"), [(H200, 18), (TI, 7)], ids=["H200", "5070Ti"])
def test_rmsnorm_is_fused_while_rereading_is_cheaper_than_a_launch(f, below):
    assert math.floor(rows.fuse_below(4096, 2, f)) == below
    assert rows.rmsnorm(workload("rmsnorm", M=below, d=4096), f)["fuse"]
    assert not rows.rmsnorm(workload("rmsnorm", M=below + 1, d=4096), f)["fuse"]


def test_the_floor_of_a_step_of_llama_8b():
    # 15.01 GB of weights and 1.07 GB of cache at L = 8192.
    cost = step.StepCost(kernels=192, bytes_read=16.08e9, flops=17e9)
    assert step.floor_s(cost, H200) * 1e3 == pytest.approx(3.74, abs=0.01)
    assert step.floor_s(cost, TI) * 1e3 == pytest.approx(19.5, abs=0.02)


# --- properties on every device --------------------------------------------------------------------------------------

OPS = [
    linear(1, 4096), linear(4, 1024), linear(32, 6144), linear(1024, 4096), linear(1, 4096, dtype="fp8_e4m3"),
    linear(64, 4096, dtype="fp32"),
    workload("norm_qkv", M=1, d=4096, N=6144), workload("gate_up", M=1, d=4096, I=14336),
    workload("lm_head", M=1, V=128256, d=4096),
    attn(1, 8192), attn(32, 128), attn(8, 32768, ragged=True),
    workload("paged_attn", B=4, Hq=64, Hkv=8, S=1, D=128, L=4096, page=16),
    workload("prefill_attn", B=1, Hq=32, Hkv=8, S=2048, D=128),
    workload("rmsnorm", M=1, d=4096), workload("add_rmsnorm", M=1, d=4096),
    workload("rope", M=1, Hq=32, Hkv=8, D=128, R=128), workload("swiglu", M=1, I=14336), workload("geglu", M=1, I=6912),
    workload("kv_append", B=1, Hkv=8, S=1, D=128), workload("sample", B=1, V=128256, L=1024),
]  # fmt: skip


@pytest.mark.parametrize("device", EVERY)
@pytest.mark.parametrize("w", OPS, ids=lambda w: w.key)
def test_every_op_has_a_form_on_every_device(device, w):
    derived = derive(w, EVERY[device])
    assert derived
    for family, knobs in derived.items():
        assert isinstance(knobs, Knobs), family
        assert knobs.settings
        for knob in knobs.settings:
            assert knob.formula, f"{family}.{knob.name} says how it was derived"
            assert isinstance(knob.value, str | bool) or knob.value > 0, f"{family}.{knob.name}"


def test_an_op_without_a_form_has_no_knobs():
    assert derive(workload("new_op", M=1), H200) == {}


@pytest.mark.parametrize("device", EVERY)
@given(b=st.integers(1, 64), length=st.integers(1, 1 << 17), group=st.integers(1, 16), kv=st.integers(1, 16))
def test_a_split_never_loses_to_no_split_by_more_than_its_tolerance(device, b, length, group, kv):
    f = EVERY[device]
    c = attention.cache_of(workload("attn", B=b, Hq=group * kv, Hkv=kv, S=1, D=128, L=length))
    k = attention.shape(c, f)
    s = attention.split(c, k, f)
    assert 1 <= s <= max(1, length // attention.CHUNK_LEAST)
    assert s * c.heads <= max(c.heads, k.ctas_per_sm * f.sms)
    if c.heads < 1.25 * f.sms_needed:
        assert attention.time_s(c, k, f, s) <= 1.03 * attention.time_s(c, k, f, 1)


@pytest.mark.parametrize("device", EVERY)
@given(m=st.integers(1, 4096), n=st.integers(16, 1 << 17), k=st.integers(64, 1 << 15))
def test_large_tiles_fit_the_device(device, m, n, k):
    f = EVERY[device]
    p = product(m, n, k)
    tile = gemm.best_tile(p, f, f.bf16_flops / f.l2)
    held = tile.stages * (tile.m + tile.n) * gemm.TILE_ROW_BYTES + gemm.epilogue_bytes(tile.m, tile.n, p, f)
    assert held <= f.smem_per_cta
    assert tile.count * tile.m * tile.n >= m * n


@given(n=st.integers(16, 1 << 17), k=st.integers(64, 1 << 15), m=st.integers(1, 7))
def test_predicted_time_never_falls_with_more_rows(n, k, m):
    for f in (H200, TI):
        assert gemv.time_s(product(m, n, k), f) <= gemv.time_s(product(m + 1, n, k), f)


@pytest.mark.parametrize("device", EVERY)
def test_crossovers_are_in_order(device):
    f = EVERY[device]
    for n in (1024, 4096, 28672):
        assert 1 <= gemm.crossover(product(1, n), f) <= 9 < gemm.large_from("bf16", f) <= 256


def part(f: GpuFacts, of: int) -> GpuFacts:
    """Return one of this many slices of a device (MIG)."""
    rates = {n: getattr(f, n) / of for n in ("read", "l2", "bf16_flops", "fp8_flops")}
    return replace(f, sms=max(1, f.sms // of), l2_bytes=f.l2_bytes // of, **rates)


# An Orin: 16 SMs with LPDDR5; and latencies that only a disturbed probe measures.
ORIN = replace(
    EVERY["a100-80"], cc=(8, 7), sms=16, l2_bytes=4 << 20, smem_per_sm=164 << 10, smem_per_cta=163 << 10,
    ctas_per_sm=16, threads_per_sm=1536, read=1.8e11, l2=8e11, latency_s=8e-7, clock_hz=1.3e9, bf16_flops=4e13,
    fp8_flops=4e13,
)  # fmt: skip
ODD = {
    **EVERY,
    **{f"{name} in {of}": part(EVERY[name], of) for name in ("a100-80", "h100", "h200", "b200") for of in (2, 7)},
    "orin": ORIN,
    "orin nano": part(ORIN, 2),
    "h200, one SM": replace(H200, sms=1),
    "h200, 5 us to DRAM": replace(H200, latency_s=5e-6),
    "l4, contended": replace(EVERY["l4"], read=EVERY["l4"].read / 20),
}
FLOATS = st.sampled_from(("bf16", "fp32"))


@pytest.mark.parametrize("device", ODD)
@given(m=st.integers(1, 512), n=st.integers(1, 1 << 18), k=st.integers(1, 1 << 15), dtype=FLOATS)
def test_projections_stay_within_any_device(device, m, n, k, dtype):
    f, w = ODD[device], linear(m, n, k, dtype)
    few, stream, large = gemv.gemv(w, f), gemm.stream(w, f), gemm.large(w, f)
    assert few["threads"] * few["ctas_per_sm"] <= f.threads_per_sm
    assert 1 <= few["unroll"] <= gemv.UNROLL_MOST and 1 <= few["split_k"] <= 8
    assert 1 <= few["grid"] < 2**31
    assert stream["stages"] * (stream["tile_rows"] + stream["columns"]) * gemm.TILE_ROW_BYTES <= f.smem_per_cta
    assert 1 <= stream["split_k"] <= max(1, k * gemv.DTYPE_BYTES[dtype] // (4 * gemm.TILE_ROW_BYTES))
    assert 1 <= large["sms"] <= f.sms and large["stages"] >= 2
    assert large["tile_m"] * large["tile_n"] <= gemm.ACCUMULATORS_MOST


@pytest.mark.parametrize("device", ODD)
@given(
    b=st.integers(1, 512),
    length=st.integers(1, 1 << 20),
    heads=st.sampled_from([(32, 8), (4, 1), (64, 64), (128, 1)]),
    d=st.sampled_from([64, 80, 96, 128, 256, 512]),
    dtype=FLOATS,
    ragged=st.booleans(),
)
def test_attention_stays_within_any_device(device, b, length, heads, d, dtype, ragged):
    f, (hq, hkv) = ODD[device], heads
    w = workload("attn", dtype, (("ragged", ragged),), B=b, Hq=hq, Hkv=hkv, S=1, D=d, L=length)
    k, token = attention.decode(w, f), 2 * d * gemv.DTYPE_BYTES[dtype]
    assert k["stages"] >= 2 and k["stages"] * k["tile"] * token <= f.smem_per_cta
    assert f.occupancy(threads=32 * k["warps"], regs=attention.REGISTERS, smem=k["stages"] * k["tile"] * token) >= 1
    assert (math.ceil(length / k["chunk"]) - 1) * b * hkv < k["ctas_per_sm"] * f.sms
    p = attention.prefill(workload("prefill_attn", dtype, B=b, Hq=hq, Hkv=hkv, S=length, D=d), f)
    assert p["tile_q"] * token // 2 + p["stages"] * p["tile_k"] * token <= f.smem_per_cta


# --- required parts of a fingerprint ---------------------------------------------------------------------------------


def test_a_cpu_fingerprint_is_refused():
    cpu = Fingerprint(kind="cpu", name="a CPU", identity={}, environment={}, rates={})
    with pytest.raises(BadConfig, match="not a GPU"):
        facts(cpu)


@pytest.mark.parametrize("missing", ["read_bytes_per_s", "graph_node_s"])
def test_a_missing_rate_is_named(missing):
    fp = known.load("h200")
    with pytest.raises(BadConfig, match=missing):
        facts(replace(fp, rates={k: v for k, v in fp.rates.items() if k != missing}))
