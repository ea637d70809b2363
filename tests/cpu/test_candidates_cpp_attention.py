"""Test attn, paged_attn, prefill_attn and kv_append in two instruction sets of this CPU: its choice and another a day.

They run the op's battery with several divisions of the work, and cases outside the battery: reads past the end, masked
NaN, repeatability, refusals.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autosel.candidates.cpp.attention import KERNELS
from autosel.devices.cpu import machine
from autosel.knobs.cpu import attention as knobs
from autosel.knobs.cpu.facts import CpuFacts
from autosel.native.compile import compile_source, find_compiler
from autosel.native.isa import ISA_FLAGS, ISA_NEEDS, Isa, best_isa
from autosel.native.load import load_entry
from autosel.ops import OPS, eager
from autosel.ops.contract import Case, Inputs, Mismatch, Op
from autosel.values import DTypeName, Workload
from tests import drawn
from tests.cpu import wrong_line
from tests.cpu.side_by_side import mismatches

pytestmark = [
    pytest.mark.usefixtures("one_torch_thread"),
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler"),
]
HERE = Path(__file__).parent
DTYPES: tuple[DTypeName, ...] = ("bf16", "fp16", "fp32")
FLAGS = tuple(machine.identity()["isa"])
NATIVE = best_isa(FLAGS)
HAVE: tuple[Isa, ...] = tuple(isa for isa, needs in ISA_NEEDS.items() if set(needs) <= set(FLAGS))
TODAY = HAVE if drawn.every or len(HAVE) < 3 else (HAVE[0], drawn.todays(HAVE[1:]))
SOURCES = {kernel.op: kernel.source for kernel in KERNELS}

CACHE = {"B": 2, "Hq": 8, "Hkv": 2, "S": 1, "D": 128, "L": 512}
PROMPT = {"B": 2, "Hq": 8, "Hkv": 2, "S": 200, "D": 128}
# op -> (shape, traits) whose batteries are run
SHAPES: dict[str, list[tuple[dict[str, int], dict[str, Any]]]] = {
    "attn": [(CACHE, {}), ({**CACHE, "S": 3}, {"ragged": True}), ({**CACHE, "S": 2}, {"window": 37, "softcap": 20.0})],
    "paged_attn": [({**CACHE, "page": 16}, {}), ({**CACHE, "S": 3, "page": 24}, {"window": 37, "softcap": 20.0})],
    "prefill_attn": [(PROMPT, {}), (PROMPT, {"window": 37, "softcap": 20.0})],
    "kv_append": [({"B": 2, "Hkv": 2, "S": 3, "D": 128}, {}), ({"B": 2, "Hkv": 2, "S": 3, "D": 128}, {"page": 16})],
}
# threads, tile, chunk, prefetch: whole heads, cuts inside heads, more threads than tiles, a tile of one vector
DECODE_CUTS = ((2, 64, 64, 16), (1, 16, 1, 0), (2, 32, 7, 4), (3, 128, 1, 8))
CUTS = {
    "attn": DECODE_CUTS,
    "paged_attn": DECODE_CUTS,
    "prefill_attn": ((1,), (2,), (3,)),
    "kv_append": ((1,), (2,), (3,)),
}


@cache
def entry(op: str, isa: Isa = NATIVE) -> Callable[..., None]:
    """Return the kernel built for this machine; other instruction sets come from one source with all kernels."""
    source = f"cpu/{SOURCES[op]}.cpp" if isa == NATIVE else str(HERE / "attention_kernels.cpp")
    return load_entry(compile_source(source, ISA_FLAGS[isa]).digest, SOURCES[op])


def run(
    op: Op, w: Workload, inputs: Inputs, cut: tuple[int, ...], isa: Isa = NATIVE, kernel: Any = None
) -> list[Tensor]:
    """Return the results, from outputs that were full of NaN."""
    outputs = [o for o in op.allocate(w, fill=float("nan")) if o is not None]
    (kernel or entry(op.name, isa))(*op.arguments(inputs), *outputs, *cut)
    return outputs or [inputs["k_cache"], inputs["v_cache"]]


def check(op: Op, w: Workload, inputs: Inputs, cuts: Iterable[tuple[int, ...]], isa: Isa = NATIVE) -> None:
    for cut in cuts:
        found = op.verify(inputs, run(op, w, inputs, cut, isa))
        assert not isinstance(found, Mismatch), (w.key, cut, found)


def failures(op: Op, made: Case, cuts: Mapping[Isa, tuple[int, ...]]) -> list[str]:
    """Run one case in these instruction sets; judge it by float64 and by PyTorch's error."""
    baseline = getattr(eager, op.name)(*op.arguments(made.make(11)))
    runs = {isa: partial(run, op, made.workload, cut=cut, isa=isa) for isa, cut in cuts.items()}
    found = mismatches(op, made, 11, runs, baseline if isinstance(baseline, tuple) else (baseline,))
    return [f"{isa} {made.workload.key} {made.name}, {cuts[isa]}: {w.check}: {w.reason}" for isa, w in found]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_a_kernel_meets_its_contract_in_every_case(name: str, dtype: DTypeName) -> None:
    """Run half of the cases a day."""
    op, cuts, wrong, number = OPS[name], CUTS[name], [], 0
    for dims, traits in SHAPES[name]:
        most = (dims, traits) == SHAPES[name][-1]  # instruction sets beyond this CPU's choice, largest first
        for made in drawn.share(op.cases(op.workload(dtype, dims, **traits)), days=2):
            asked = [isa for isa in TODAY if most or isa == NATIVE]
            wrong += failures(op, made, {isa: cuts[(number + at) % len(cuts)] for at, isa in enumerate(asked)})
            number += 1
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["attn", "prefill_attn"])
def test_a_correctly_rounded_result_passes_every_case(name: str) -> None:
    """Check that the battery does not prefer PyTorch's errors to better results."""
    op, (dims, traits) = OPS[name], SHAPES[name][-1]
    for made in op.cases(op.workload("bf16", dims, **traits)):
        inputs = made.make(11)
        baseline = getattr(eager, name)(*op.arguments(made.make(11)))
        found = op.verify(inputs, [op.reference(inputs)[0].to(torch.bfloat16)], (baseline,))
        assert not isinstance(found, Mismatch), (made.name, found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 8, 20, 40, 72, 112, 192, 320])
def test_any_head_width_is_right(width: int, dtype: DTypeName) -> None:
    for name in ("attn", "paged_attn", "prefill_attn"):
        op, (dims, _) = OPS[name], SHAPES[name][0]
        w = op.workload(dtype, {**dims, "Hq": 6, "D": width, **({"L": 83} if "L" in dims else {"S": 83})})
        check(op, w, op.inputs(w, 3), CUTS[name])


@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8, 12, 16, 17])
def test_any_number_of_query_heads_a_kv_head_is_right(group: int) -> None:
    op = OPS["attn"]
    for s in (1, 2, 4):
        w = op.workload("bf16", {"B": 3, "Hq": 2 * group, "Hkv": 2, "S": s, "D": 64, "L": 150}, ragged=True)
        check(op, w, op.inputs(w, 3), DECODE_CUTS)


@pytest.mark.parametrize("width", [32, 64, 96, 128, 256])
def test_any_number_of_keys_is_right(width: int) -> None:
    for name in ("attn", "paged_attn"):
        op, (dims, _) = OPS[name], SHAPES[name][0]
        for length in (1, 15, 16, 17, 31, 33, 65, 130):
            w = op.workload("bf16", {**dims, "B": 1, "D": width, "L": length})
            check(op, w, op.inputs(w, 3), DECODE_CUTS)


# --- faults that the battery must find -------------------------------------------------------------------------------

# One fault each in kernels/cpu/attention_amx.h: the line, and the wrong line.
WRONG_AMX = {
    "two rows' scores exchanged": (
        "s + (r + 2) * ld, _mm512_unpacklo_pd(e, f)",
        "s + (r + 2) * ld, _mm512_unpackhi_pd(e, f)",
    ),
    "a key's scores as its neighbour's": (
        "c + (4 * lane + i) * padded + r",
        "c + (4 * lane + (i == 3 ? 2 : i)) * padded + r",
    ),
    "the first row's queries for all": ("q + r * width + c, 2", "q + c, 2"),
    "the last channels left out of scores": ("at < d; at += kAmxWidth", "at < d - kAmxWidth; at += kAmxWidth"),
    "the last keys as the first": ("k(t + j < n ? t + j : n - 1)", "k(t + j < n ? j : n - 1)"),
    "values of two keys exchanged": (
        "to[2 * i][pair], _mm512_unpacklo_epi16(a, b)",
        "to[2 * i][pair], _mm512_unpacklo_epi16(b, a)",
    ),
    "the last value left out": ("key < n ?", "key < n - 1 ?"),
    "the last value counted twice": (
        "v(key) + c + i * kPair) : _mm512_setzero_si512()",
        "v(key) + c + i * kPair) : _mm512_loadu_si512(v(n - 1) + c + i * kPair)",
    ),
    "the next tile's sums begin at zero": ("_tile_loadd(1, o + c + kLanes, row);", "_tile_zero(1);"),
    "the second channels of the first": ("v(key) + c + i * kPair) :", "v(key) + c) :"),
    "the last sums not stored": ("_tile_stored(3, o + c + 3 * kLanes, row);", ";"),
}


def test_every_fault_is_a_change_of_todays_source() -> None:
    assert all(wrong_line.header_of(right, ["attention_amx.h"]) for right, _ in WRONG_AMX.values())


@pytest.mark.skipif("amx_bf16" not in FLAGS, reason="the faults are in code for AMX")
@pytest.mark.parametrize("name", drawn.share(list(WRONG_AMX), days=len(WRONG_AMX)))
def test_the_battery_refuses_a_kernel_with_one_fault(name: str, tmp_path: Path) -> None:
    op, source = OPS["attn"], SOURCES["attn"]
    digest = wrong_line.build(f"cpu/{source}.cpp", "attention_amx.h", *WRONG_AMX[name], ISA_FLAGS[NATIVE], tmp_path)
    kernel = load_entry(digest, source)

    def refused(case: Case) -> bool:
        wrong = partial(run, op, case.workload, cut=DECODE_CUTS[0], kernel=kernel)
        return any(mismatches(op, case, 7, {NATIVE: wrong}))

    assert any(map(refused, op.cases(op.workload("bf16", CACHE))))


# --- what must not be read -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", TODAY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_read_goes_past_the_end_of_a_cache(dtype: DTypeName, isa: Isa) -> None:
    """Place K and V before a protected page, so that reading one byte past the end kills the process."""
    for width, keys, window in ((128, 67, 0), (80, 33, 0), (20, 5, 0), (7, 1, 0), (96, 70, 9)):
        for name in ("attn", "prefill_attn"):
            op = OPS[name]
            dims = {"B": 1, "Hq": 4, "Hkv": 1, "D": width}
            dims = {**dims, "S": 1, "L": keys} if name == "attn" else {**dims, "S": keys}
            w = op.workload(dtype, dims, window=window)
            inputs = op.inputs(w, 3)
            walls = [Walled(inputs[n]) for n in ("q", "k", "v")]
            inputs |= {n: wall.tensor for n, wall in zip(("q", "k", "v"), walls, strict=True)}
            check(op, w, inputs, CUTS[name], isa)


class Walled:
    """A copy of a tensor that ends at a page without access rights."""

    def __init__(self, x: Tensor) -> None:
        size = x.numel() * x.element_size()
        room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.memory = mmap.mmap(-1, room + mmap.PAGESIZE)
        at = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(at + room), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
        flat = torch.frombuffer(self.memory, dtype=x.dtype, count=x.numel(), offset=room - size)
        self.tensor = flat.view(x.shape).copy_(x)


def test_nan_beyond_the_lengths_does_not_reach_the_result() -> None:
    op = OPS["attn"]
    w = op.workload("bf16", {"B": 3, "Hq": 8, "Hkv": 2, "S": 2, "D": 128, "L": 200}, ragged=True)
    inputs = op.inputs(w, 3)
    clean = run(op, w, inputs, (2, 64, 1, 16))[0]
    for b, length in enumerate(inputs["lengths"].tolist()):
        inputs["k"][b, :, length:] = float("nan")
        inputs["v"][b, :, length:] = float("nan")
    assert torch.equal(run(op, w, inputs, (2, 64, 1, 16))[0], clean)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_that_causality_or_a_window_hides_stays_hidden(dtype: DTypeName) -> None:
    op = OPS["attn"]
    w = op.workload(dtype, {"B": 1, "Hq": 2, "Hkv": 1, "S": 4, "D": 64, "L": 90}, window=40)
    inputs = op.inputs(w, 3)
    inputs["v"][0, 0, 89] = float("nan")  # only the last query sees it
    inputs["k"][0, 0, 47] = float("nan")  # only the first query still sees it
    rows = run(op, w, inputs, (1, 32, 1, 0))[0].isnan().all(-1)[0]
    assert rows.tolist() == [[True, False, False, True]] * 2
    assert run(op, w, inputs, (2, 16, 1, 0))[0].isnan().any(-1)[0].tolist() == [[True, False, False, True]] * 2


# --- the cut ---------------------------------------------------------------------------------------------------------


def test_same_inputs_give_the_same_bits() -> None:
    for name in ("attn", "paged_attn", "prefill_attn"):
        op, (dims, traits) = OPS[name], SHAPES[name][-1]
        w = op.workload("bf16", dims, **traits)
        inputs = op.inputs(w, 3)
        for cut in CUTS[name]:
            first = run(op, w, inputs, cut)[0]
            assert all(torch.equal(run(op, w, inputs, cut)[0], first) for _ in range(5)), (name, cut)


def test_a_head_cut_among_many_threads_is_merged() -> None:
    """Split one KV head over up to 24 threads, so that the merge is split too."""
    op = OPS["attn"]
    w = op.workload("fp32", {"B": 1, "Hq": 4, "Hkv": 1, "S": 1, "D": 64, "L": 1000})
    inputs = op.inputs(w, 3)
    inputs["k"][0, 0, ::97] *= 20  # ranges with far apart maxima
    check(op, w, inputs, [(threads, 16, 1, 4) for threads in (2, 3, 5, 9, 24)])


def test_a_length_changes_the_result_without_a_new_bind() -> None:
    op = OPS["attn"]
    w = op.workload("bf16", {"B": 1, "Hq": 8, "Hkv": 2, "S": 1, "D": 128, "L": 512}, ragged=True)
    inputs = op.inputs(w, 3)
    for length in (512, 0, 1, 300, 511):
        inputs["lengths"].fill_(length)
        check(op, w, inputs, [(2, 64, 64, 16)])


# --- the caller's mistakes -------------------------------------------------------------------------------------------


def test_a_page_that_does_not_exist_is_refused() -> None:
    op = OPS["paged_attn"]
    w = op.workload("bf16", {"B": 1, "Hq": 4, "Hkv": 1, "S": 1, "D": 64, "L": 64, "page": 16})
    for stray in (-1, 4, 1 << 30):
        inputs = op.inputs(w, 3)
        inputs["block_table"][0, 2] = stray
        with pytest.raises(ValueError, match="page that does not exist"):
            run(op, w, inputs, (2, 64, 1, 16))


@pytest.mark.parametrize("page", [0, 16])
def test_an_append_outside_the_cache_is_refused_before_anything_is_written(page: int) -> None:
    op = OPS["kv_append"]
    w = op.workload("bf16", {"B": 2, "Hkv": 2, "S": 3, "D": 64}, page=page)
    inputs = op.inputs(w, 3)
    slots = inputs["k_cache"].shape[2] if not page else inputs["block_table"].shape[1] * page
    before = inputs["k_cache"].clone()
    for bad in (-1, slots - 2, 2**31 - 1):
        inputs["positions"][1] = bad
        with pytest.raises(ValueError, match="outside the cache"):
            run(op, w, inputs, (1,))
    assert torch.equal(inputs["k_cache"], before)


@pytest.mark.parametrize(
    "spoil",
    [
        {"k": lambda x: x[..., :32]},
        {"k": lambda x: x.float()},
        {"v": lambda x: x[:, :, 1:]},
        {"q": lambda x: x.mT},
        {"q": lambda x: x[:, :3]},
        {"max_len": lambda n: n + 1},
        {"lengths": lambda _: torch.ones(1, dtype=torch.int64)},
        {"lengths": lambda _: torch.ones(2, dtype=torch.int32)},
    ],
)
def test_arguments_of_another_shape_or_dtype_are_refused(spoil: dict[str, Callable[[Any], Any]]) -> None:
    op = OPS["attn"]
    w = op.workload("bf16", {"B": 1, "Hq": 4, "Hkv": 2, "S": 1, "D": 64, "L": 32})
    inputs = op.inputs(w, 3)
    inputs |= {name: change(inputs[name]) for name, change in spoil.items()}
    with pytest.raises(ValueError, match=r"attention|attn"):
        entry("attn")(*op.arguments(inputs), torch.empty(1, 4, 1, 64, dtype=torch.bfloat16), 1, 64, 1, 0)


# --- knobs -----------------------------------------------------------------------------------------------------------

TWO_CORES = CpuFacts(
    isa="avx512bf16",
    cpus=2,
    l1d_bytes=32 << 10,
    l2_bytes=1 << 20,
    l3_bytes=32 << 20,
    l3_domains=1,
    read_1=30e9,
    read_all=38e9,
    read_l3_domain=38e9,
    flops_1=118e9,
    dot_flops_1=236e9,
    exp_per_s_1=4e9,
    dram_latency_s=110e-9,
    fork_join_s=2e-6,
)
LLAMA = {"B": 1, "Hq": 32, "Hkv": 8, "S": 1, "D": 128, "L": 8192}


def test_decode_knobs_follow_their_formulas() -> None:
    got = knobs.decode(OPS["attn"].workload("bf16", LLAMA), TWO_CORES)
    # tile: 32 KiB / (2 * 256 B). chunk: 4 us at 512 B / 30 GB/s a key; its arithmetic is 2048 / 142e9 s.
    # prefetch: 2 * 30e9 * 110e-9 / 512 = 12.9, up to 16.
    assert got.values == {"threads": 2, "tile": 64, "chunk": 235, "prefetch": 16}


@pytest.mark.parametrize(("dtype", "width", "tile"), [("fp32", 128, 32), ("bf16", 64, 128), ("bf16", 256, 32)])
def test_keys_and_values_of_a_tile_fill_l1(dtype: DTypeName, width: int, tile: int) -> None:
    w = OPS["attn"].workload(dtype, {**LLAMA, "D": width})
    assert knobs.decode(w, TWO_CORES)["tile"] == tile


def test_a_tile_has_enough_keys_if_they_fit_l1_without_the_values() -> None:
    wide = dataclasses.replace(TWO_CORES, l1d_bytes=48 << 10)
    for width, tile in ((128, 64), (256, 64), (288, 32)):  # 64 keys of 288 are 36 of 48 KB
        assert knobs.decode(OPS["attn"].workload("bf16", {**LLAMA, "D": width}), wide)["tile"] == tile


def test_amx_takes_long_tiles_if_each_thread_gets_some() -> None:
    tiles = dataclasses.replace(TWO_CORES, amx=True, l2_bytes=2 << 20)
    for dims, tile in (
        ({}, 256),
        ({"L": 200}, 128),  # 8 heads * 200 keys / (4 * 2 threads) = 200
        ({"D": 2048}, 64),  # 2 MB / (8 * 4 KB)
        ({"Hkv": 1}, 64),  # 32 rows of a KV head: as without AMX
        ({"D": 120}, 64),
    ):
        assert knobs.decode(OPS["attn"].workload("bf16", {**LLAMA, **dims}), tiles)["tile"] == tile, dims


def test_threads_grow_with_the_arithmetic_a_key_needs() -> None:
    many = dataclasses.replace(TWO_CORES, cpus=64, read_all=90e9, read_l3_domain=90e9)
    one = OPS["attn"].workload("bf16", LLAMA)
    assert knobs.decode(one.at(Hq=8), many)["threads"] == 3  # 90 / 30 GB/s
    # 268 MFLOP at 142 GFLOP/s against 33.6 MB at 90 GB/s: 5.08 cores
    assert knobs.decode(one.at(Hq=64), many)["threads"] == 6
    assert knobs.decode(one.at(S=4), many)["threads"] == 11
    assert knobs.decode(one.at(S=64), many)["threads"] == 64


def test_a_short_prompt_and_a_single_token_are_not_worth_a_team() -> None:
    prompt = OPS["prefill_attn"].workload("bf16", {"B": 1, "Hq": 4, "Hkv": 1, "S": 4, "D": 64})
    token = OPS["kv_append"].workload("bf16", {"B": 1, "Hkv": 8, "S": 1, "D": 128})
    assert knobs.prefill(prompt, TWO_CORES)["threads"] == knobs.append(token, TWO_CORES)["threads"] == 1
    assert knobs.prefill(prompt.at(S=512), TWO_CORES)["threads"] == 2
    assert knobs.append(token.at(S=4096), TWO_CORES)["threads"] == 2
