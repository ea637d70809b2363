"""Test the projections' kernels on real hardware: every dtype and hostile case, in instruction sets of this CPU.

Each day a seventh of the kernels run, gemv in all instruction sets, the others in two; each case runs with half of
the traits. --every-target runs all.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from autosel.candidates.cpp.linear import CODED_LINEAR, KERNELS
from autosel.candidates.load import load, reader_of
from autosel.devices.cpu import machine
from autosel.formats import CODED, WITH_ZEROS, find_weight_format
from autosel.knobs.cpu import linear as knobs
from autosel.knobs.cpu.facts import facts
from autosel.native.compile import compile_source, find_compiler
from autosel.native.isa import ISA_FLAGS, ISA_NEEDS, Isa
from autosel.native.load import load_entry
from autosel.ops import OPS
from autosel.ops.codes import CODES
from autosel.ops.contract import DTYPE, Case, Inputs, Match, Op
from autosel.ops.weight import Weight, empty, quantise
from autosel.values import Accepted, DTypeName, Fingerprint, NativeRecipe, Rate, Workload
from tests import drawn
from tests.cpu import wrong_line
from tests.cpu.side_by_side import mismatches
from tests.operands import passed, traits_of

pytestmark = [
    pytest.mark.usefixtures("one_torch_thread"),
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler"),
]

HAVE = frozenset(machine.identity()["isa"])
HERE: tuple[Isa, ...] = tuple(isa for isa, needs in ISA_NEEDS.items() if set(needs) <= HAVE)
NATIVE = HERE[0]
VNNI = "avx512_vnni" in Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else False
TWO = HERE if drawn.every or len(HERE) < 3 else (NATIVE, drawn.todays(HERE[1:]))
DTYPES: tuple[DTypeName, ...] = ("bf16", "fp16", "fp32")
BY_NAME = {k.source: k for k in KERNELS}
NAMES = tuple(BY_NAME)
TODAY = drawn.share(NAMES, days=7)  # a build takes 6 s

# A workload of each op; lm_head twice, for its two outputs.
WORKLOADS: dict[str, tuple[tuple[dict[str, int], dict[str, Any]], ...]] = {
    "linear": (({"M": 17, "N": 512, "K": 1024}, {}), ({"M": 5, "N": 64, "K": 256}, {"bias": True, "residual": True})),
    "norm_qkv": (({"M": 17, "d": 512, "N": 256}, {}), ({"M": 3, "d": 256, "N": 96}, {"offset": 1.0})),
    "gate_up": tuple(({"M": 17, "d": 256, "I": 128}, {"activation": a}) for a in (0, 1, 2)),
    "lm_head": tuple(({"M": 9, "V": 1000, "d": 256}, {"greedy": g}) for g in (0, 1)),
}


def device(isa: tuple[str, ...] = tuple(sorted(HAVE)), cpus: int = 2, **sizes: int) -> Fingerprint:
    """Describe a small two-core machine, so that knobs are the same on every test machine."""
    caches = {"l1d_bytes": 32 << 10, "l2_bytes": 1 << 20, "l3_bytes": 32 << 20, "l3_domains": 1}
    rates = {
        "read_bytes_per_s@1": 20e9,
        f"read_bytes_per_s@{cpus}": 38e9,
        "fma_flops@1": 118e9,
        "bf16_dot_flops@1": 236e9,
        f"fork_join_s@{cpus}": 1e-6,
    }
    return Fingerprint(
        kind="cpu",
        name="test",
        identity={"isa": list(isa), "cpus": cpus, **caches, **sizes},
        environment={},
        rates={n: Rate(value=v, unit="", spread=0.0, source="test") for n, v in rates.items()},
    )


def having(isa: Isa) -> Fingerprint:
    """Describe a machine whose choice is this instruction set; this CPU's own has all its flags."""
    return device() if isa == NATIVE else device(ISA_NEEDS[isa])


ONE_DTYPE = tuple(f"-DAUTOSEL_{dtype}" for dtype in ("BF16", "FP16", "FP32"))


@cache
def digest(name: str, isa: Isa, format_: str = "", dtype: DTypeName = "bf16") -> tuple[NativeRecipe, str]:
    """Build a kernel: for all dtypes at once, unless its recipe differs by dtype (codes) or it takes only one."""
    kernel, fp = BY_NAME[name], having(isa)
    dims, traits = WORKLOADS[kernel.op][0]
    w = OPS[kernel.op].workload(dtype, dims, **traits, **({"weight": format_} if format_ else traits_of(kernel)))
    recipe = kernel.recipe(w, fp, kernel.knobs(w, fp))
    assert isinstance(recipe, NativeRecipe)
    one = bool(format_) or len(kernel.dtypes) == 1
    flags = tuple(flag for flag in recipe.flags if one or flag not in ONE_DTYPE)
    return recipe, compile_source(recipe.source, flags).digest


def bound(name: str, isa: Isa, w: Workload) -> Callable[..., Any]:
    """Return the kernel with the knobs that its formula gives for w."""
    recipe, built = digest(name, isa, *(() if w.weight_format.plain else (w.weight_format.name, w.dtype)))
    return load(OPS[w.op], recipe, built, BY_NAME[name].knobs(w, having(isa)).values)


def entry(name: str, isa: Isa = NATIVE, format_: str = "", dtype: DTypeName = "bf16") -> Callable[..., Any]:
    """Return the native function, for knobs that no formula gives."""
    recipe, built = digest(name, isa, format_, dtype)
    return load_entry(built, recipe.entry)


# --- every case ------------------------------------------------------------------------------------------------------


def instruction_sets(name: str, dtype: DTypeName, every: bool) -> tuple[Isa, ...]:
    """Return all instruction sets for gemv. The other kernels share its products: they use this CPU's choice and one
    other; those on codes, which have a build for each dtype, one of the two for each dtype."""
    if every or name == "gemv" or len(HERE) < 3:
        return HERE
    pair = (NATIVE, drawn.todays(HERE[1:], NAMES.index(name)))
    return (pair[(drawn.turn() + DTYPES.index(dtype)) % 2],) if name.endswith("_coded") else pair


# gemv_coded and gemm_coded: test_every_format_of_codes_meets_the_bound_on_every_hostile_case.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in TODAY if name not in ("gemv_coded", "gemm_coded")])
def test_kernel_meets_the_bound_on_every_hostile_case(
    name: str, dtype: DTypeName, request: pytest.FixtureRequest
) -> None:
    """Run several instruction sets on the same inputs."""
    every = request.config.getoption("--every-target")
    one, isas = BY_NAME[name], instruction_sets(name, dtype, every)
    if dtype not in one.dtypes:
        pytest.skip(f"{name} takes {', '.join(one.dtypes)}")
    op, ran, wrong = OPS[one.op], dict.fromkeys(isas, 0), []
    for number, (dims, traits) in enumerate(WORKLOADS[op.name]):
        cases = op.cases(op.workload(dtype, dims, **traits, **traits_of(one)))
        for case in drawn.share(cases, days=2, shift=number):
            runs = {}
            for isa in isas:
                if isinstance(one.supports(case.workload, having(isa)), Accepted):
                    runs[isa] = partial(outputs_of, op, case.workload, bound(name, isa, case.workload))
                    ran[isa] += 1
            wrong += [f"{isa} {case.workload.key}, {case.name}: {w}" for isa, w in mismatches(op, case, 7, runs)]
    assert not wrong, "\n".join(wrong)
    assert all(count > 20 for isa, count in ran.items() if isa != "portable" or one.layout is None), ran


def outputs_of(op: Op, w: Workload, function: Callable[..., Any], inputs: Inputs) -> list[torch.Tensor]:
    """Return a kernel's outputs; prepare its weights even if that does not pay."""
    outputs, reader = op.allocate(w, fill=float("nan")), reader_of(function)
    if reader is not None:
        reader.prepare(op.arguments(inputs))
    function(*op.arguments(inputs), *outputs)
    return [o for o in outputs if o is not None]


# --- shapes and knobs beyond the formulas' ---------------------------------------------------------------------------


def check_linear(function: Callable[..., Any], settings: tuple[int, ...], w: Workload) -> None:
    """Check y = x w^T + bias + residual; every plain operand is a strided, odd-aligned view, and y has guards."""
    op, (m, n, k) = OPS["linear"], (w["M"], w["N"], w["K"])
    added = op.workload(w.dtype, dict(w.dims), bias=True, residual=True, weight=w.weight_format.name)
    made = op.inputs(added, m * n + k)
    plain, operands = (("x", "w", "residual"), ()) if w.weight_format.plain else (("x", "residual"), CODED_LINEAR)
    inputs = {**made, **{a: odd_view(made[a]) for a in plain}}
    guarded = torch.full((m + 2, n + 4), 7.0, dtype=DTYPE[w.dtype])
    y = guarded[1:-1, 1:-3]
    function(*passed(op, inputs, operands), y, *settings)
    found = op.verify(inputs, (y,))
    assert isinstance(found, Match), f"{w.key} {settings}: {found}; {drawn.options()}"
    y.fill_(7.0)
    assert bool((guarded == 7.0).all()), f"{w.key} {settings}: written outside y; {drawn.options()}"


def odd_view(t: torch.Tensor) -> torch.Tensor:
    """Return a copy with separated rows that begins at an odd element; around it is NaN."""
    wide = torch.full((t.shape[0] + 1, t.shape[1] + 3), float("nan"), dtype=t.dtype)
    wide[:-1, 1:-2] = t
    return wide[:-1, 1:-2]


SHAPES = ((1, 61, 70), (2, 67, 1), (3, 2, 519), (2, 130, 257))  # threads, N, K


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemv_is_right_for_any_rows_threads_and_m(dtype: DTypeName) -> None:
    rows = (1, 2, 3, 4, 5, 8, 100)
    for i, (m, r) in enumerate(itertools.product((1, 2, 3, 4, 5, 6, 7, 8, 9, 20), rows)):
        threads, n, k = SHAPES[i % len(SHAPES)]
        check_linear(entry("gemv"), (threads, r), linear(m, n, k, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemm_is_right_for_any_blocking_threads_and_m(dtype: DTypeName) -> None:
    walks = ((64, 64, 7), (64, 192, 1000), (256, 1024, 24))
    for i, (m, walk) in enumerate(itertools.product((1, 2, 5, 11, 12, 13, 24, 25, 50), walks)):
        for threads, n, k in (SHAPES[i % 4], SHAPES[(i + 1) % 4]):
            check_linear(entry("gemm"), (threads, *walk), linear(m, n, k, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["gemv", "gemm"])
def test_every_number_of_rows_is_right_with_the_closed_forms_knobs(name: str, dtype: DTypeName) -> None:
    """Run every M: groups of rows and their tiles have one size or two, depending on M."""
    kernel, f = BY_NAME[name], facts(device())
    for m in range(1, 25):
        for n, k in ((61, 70), (130, 1029)):
            w = linear(m, n, k, dtype)
            given = kernel.formula(w, f).values
            check_linear(entry(name), tuple(int(given[a]) for a in kernel.knob_args), w)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("k", [70, 1029, 2100])
@pytest.mark.parametrize("isa", TWO)
def test_how_columns_are_shared_and_blocked_changes_no_bit_of_few_rows(isa: Isa, k: int, dtype: DTypeName) -> None:
    """Share the columns in different ways. Blocks of three rows of weights leave different remainders in different
    shares, a step distributes blocks dynamically, and a packed weight has separate blocks. The number of chains of sums
    for one row of x depends on its blocks. In fp32 no rounding hides a difference; bf16 may have other kernels."""
    op, f = OPS["linear"], facts(device(ISA_NEEDS[isa]))
    for m in range(1, 9):
        w = linear(m, 107, k, dtype)
        arguments = op.arguments(op.inputs(w, m))
        blocks = (1, 2, 3, 4, 8) if m > 1 else (int(knobs.gemv(w, f)["rows"]),)
        whole, *others = (torch.empty(m, 107, dtype=DTYPE[dtype]) for _ in range(1 + 3 * len(blocks)))
        entry("gemv", isa)(*arguments, whole, 1, blocks[0])
        for (threads, rows), y in zip(itertools.product((2, 3, 4), blocks), others, strict=True):
            entry("gemv", isa)(*arguments, y, threads, rows)
            assert torch.equal(y, whole), (m, threads, rows)


def test_a_row_of_x_has_the_same_product_in_any_tile() -> None:
    op = OPS["linear"]
    inputs = op.inputs(linear(25, 70, 300, "fp32"), 5)
    x, w = inputs["x"], inputs["w"]
    whole = torch.empty(25, 70)
    entry("gemm")(x, w, None, None, whole, 1, 64, 64, 1000)
    for m in (1, 7, 13, 24):
        y = torch.empty(m, 70)
        entry("gemm")(x[:m], w, None, None, y, 1, 64, 64, 1000)
        assert torch.equal(y, whole[:m]), m


def test_residual_may_be_the_output() -> None:
    op = OPS["linear"]
    inputs = op.inputs(linear(3, 100, 64, residual=True), 1)
    expected = torch.empty(3, 100, dtype=torch.bfloat16)
    entry("gemv")(*op.arguments(inputs), expected, 2, 4)
    y = inputs["residual"]
    entry("gemv")(inputs["x"], inputs["w"], None, y, y, 2, 4)
    assert torch.equal(y, expected)


def test_tiles_are_given_back_as_they_were_found() -> None:
    """Configure this thread's tiles as another library would, with three rows of 12 bytes."""
    made = compile_source(str(Path(__file__).with_name("tiles.cpp")), ("-Wl,--as-needed", *ISA_FLAGS[NATIVE]))
    tiles = ctypes.CDLL(str(made.path))
    tiles.permitted.restype = ctypes.c_bool
    if not tiles.permitted():
        pytest.skip("this CPU has no AMX, or Linux refuses it")
    op = OPS["linear"]
    arguments = op.arguments(op.inputs(linear(8, 61, 70, "bf16"), 1))
    mine = bytes([1] + 15 * [0] + [12, 0] + 30 * [0] + [3] + 15 * [0])
    for before, set_up in ((mine, lambda: tiles.configure(mine)), (bytes(64), tiles.release)):
        set_up()
        entry("gemv")(*arguments, torch.empty(8, 61, dtype=torch.bfloat16), 1, 8)
        after = ctypes.create_string_buffer(64)
        tiles.configuration(after)
        assert after.raw == before
    tiles.release()


@pytest.mark.parametrize("name", TODAY)
def test_same_inputs_give_the_same_bits(name: str) -> None:
    kernel = BY_NAME[name]
    op = OPS[kernel.op]
    dims, traits = WORKLOADS[kernel.op][0]
    w = op.workload("bf16", {**dims, "M": 6}, **traits, **traits_of(kernel))
    inputs, function = op.inputs(w, 3), bound(name, NATIVE, w)
    first, again = op.allocate(w), op.allocate(w)
    function(*op.arguments(inputs), *first)
    function(*op.arguments(inputs), *again)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))  # type: ignore[arg-type]


PACKED = [name for name in NAMES if name.endswith("_packed")]
PACKED_BUILDS = list(itertools.product(PACKED, [isa for isa in HERE if isa != "portable"]))


@pytest.mark.parametrize(("name", "isa"), drawn.share(PACKED_BUILDS, days=6))
def test_a_kernel_on_packed_weights_gives_the_bits_of_the_kernel_on_plain_ones(name: str, isa: Isa) -> None:
    """Test short and long rows, and numbers of rows of weights that are not multiples of 8. Above 8 rows of x the plain
    fused kernels use blocks, which add in another order."""
    op = OPS[BY_NAME[name].op]
    for m, (n, k) in itertools.product((1, 2, 3, 5, 8), ((64, 256), (37, 1920), (100, 2176))):
        sizes = dict(zip(op.dim_names, (m, k, n) if op.dim_names[1] == "d" else (m, n, k), strict=True))
        w = op.workload("bf16", sizes, **WORKLOADS[op.name][0][1])
        inputs = op.inputs(w, m * n)
        for name_ in (a.name for a in op.args if a.kind == "weight"):
            inputs[name_].view(-1)[:: 1 + k // 3] = 3e4  # some exponents have no code
        expected, got = (outputs_of(op, w, bound(n, isa, w), inputs) for n in (name.removesuffix("_packed"), name))
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)), w.key


# --- greedy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 4])
def test_greedy_token_is_the_argmax_of_the_kernels_own_logits(dtype: DTypeName, rows: int) -> None:
    walk = (64, 64, 24)
    for seed, (m, v) in enumerate(((1, 1000), (3, 37), (8, 5), (8, 513))):
        generator = torch.Generator().manual_seed(seed)
        # Few distinct values: ties everywhere, also across threads.
        x = torch.randint(-1, 2, (m, 8), generator=generator).to(DTYPE[dtype])
        w = torch.randint(-1, 2, (v, 8), generator=generator).to(DTYPE[dtype])
        if seed == 3:
            w[300, 2], x[:4, 2], x[4:, 2] = float("nan"), 1.0, float("nan")
        logits, token = torch.empty(m, v, dtype=x.dtype), torch.empty(m, dtype=torch.int64)
        for threads in (1, 2, 3):
            entry("lm_head")(x, w, 0, logits, threads, rows, *walk)
            entry("lm_head")(x, w, 1, token, threads, rows, *walk)
            assert torch.equal(token, logits.argmax(-1)), (seed, threads)


def test_greedy_compares_logits_as_they_would_be_stored() -> None:
    x = torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16)
    w = torch.tensor([[1.0, 0.0], [1.0, 2.0**-12]], dtype=torch.bfloat16)  # equal once rounded to bf16
    token = torch.empty(1, dtype=torch.int64)
    entry("lm_head")(x, w, 1, token, 1, 1, 64, 64, 24)
    assert token.item() == 0


# --- codes -----------------------------------------------------------------------------------------------------------

DAYS = 5  # within which every format has a build of gemv_coded and one of gemm_coded: with its tests it takes 4 s
ANY_CODED = list(itertools.product(CODED, DTYPES, HERE))
USUAL = [(format_, "bf16", NATIVE) for format_ in CODED]


def others(shift: int) -> list[tuple[str, DTypeName, Isa]]:
    """Return a build for each other pair of dtype and instruction set, each of another format, which changes every DAYS
    days: `share` takes each pair once in that time, and so with all formats."""
    pairs = [pair for pair in itertools.product(DTYPES, HERE) if pair != ("bf16", NATIVE)]
    step = 9  # formats of one kind are neighbours in the list
    return [(CODED[(drawn.turn() // DAYS + shift + step * at) % len(CODED)], *pair) for at, pair in enumerate(pairs)]


CODED_BUILDS = ANY_CODED if drawn.every else [*drawn.share(USUAL, days=DAYS), *drawn.share(others(0), days=DAYS)]
BLOCKED_BUILDS = (
    ANY_CODED
    if drawn.every
    else [*drawn.share(USUAL, days=DAYS, shift=1), *drawn.share(others(len(CODED) // 2), days=DAYS, shift=1)]
)
BUILDS = [*(("gemv_coded", *build) for build in CODED_BUILDS), *(("gemm_coded", *build) for build in BLOCKED_BUILDS)]


@pytest.mark.parametrize(("name", "format_", "dtype", "isa"), BUILDS)
def test_every_format_of_codes_meets_the_bound_on_every_hostile_case(
    name: str, format_: str, dtype: DTypeName, isa: Isa
) -> None:
    kernel, op, wrong = BY_NAME[name], OPS["linear"], []
    for number, (dims, traits) in enumerate(WORKLOADS["linear"]):
        cases = op.cases(op.workload(dtype, {**dims, "K": 416}, **traits, weight=format_))
        for case in drawn.share(cases, days=3, shift=number):  # no divisor of DAYS
            if isinstance(kernel.supports(case.workload, having(isa)), Accepted):
                run = partial(outputs_of, op, case.workload, bound(name, isa, case.workload))
                wrong += [f"{case.workload.key}, {case.name}: {w}" for _, w in mismatches(op, case, 7, {isa: run})]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("name", "format_", "dtype", "isa"), BUILDS)
def test_a_code_is_multiplied_exactly_at_every_place(name: str, format_: str, dtype: DTypeName, isa: Isa) -> None:
    """Multiply all codes by powers of two, with simple scales, so that each product is exact, at every place of K."""
    k, found = 290, find_weight_format(format_)
    w = empty(found, 2**found.bits, k, dtype=DTYPE[dtype])
    same = every_code(w)
    w.scales.copy_(simple_scales(w))
    numbers = 2 * (same + (-5 if found.scaling in WITH_ZEROS else 3 if found.offsets else 0))
    alike = partial(torch.testing.assert_close, rtol=0.0, atol=0.0, equal_nan=True)
    alike(w.exact(), numbers[:, None].double().expand(-1, k))
    function = entry(name, isa, format_, dtype)
    few: tuple[tuple[int, ...], ...] = ((1, 1), (1, 4), (2, 4), (3, 1), (4, 2), (7, 1), (8, 1), (11, 4))
    many: tuple[tuple[int, ...], ...] = ((1, 256, 24), (5, 256, 24), (12, 512, 7), (33, 256, 24))
    for m, *settings in few if name == "gemv_coded" else many:
        for at in range(0, k, 1 if m == 1 else 37):
            x = torch.zeros(m, k, dtype=DTYPE[dtype])
            x[:, at] = torch.tensor([0.5, -1.0, 2.0])[torch.arange(m) % 3].to(x.dtype)
            y = torch.empty(m, len(numbers), dtype=x.dtype)
            function(x, w.codes, w.scales, None, None, y, 2, *settings)
            alike(y, (x[:, at : at + 1].float() * numbers).to(x.dtype), msg=f"{m} {settings} {at}")


def every_code(w: Weight) -> torch.Tensor:
    """Fill each row with another code, and return their numbers, fp32 [rows]."""
    code = CODES[w.format.code]
    if w.codes.dtype in (torch.int8, torch.float8_e4m3fn):
        w.codes.copy_(code.all[:, None].expand_as(w.codes))
        return code.numbers(code.all).float()
    least = float(code.numbers(code.lowest(tuple(w.codes.shape))).min())
    same = torch.arange(2**w.format.bits) + least
    w.codes.copy_(code.nearest(same[:, None].expand(w.shape)))
    return same


def simple_scales(w: Weight) -> torch.Tensor:
    """Return scales of 2, and offsets of 6 or zero points of 5."""
    if w.format.scaling == "one":
        return torch.full_like(w.scales, 2.0)
    if w.format.scaling in ("pair", *WITH_ZEROS):
        pair = torch.tensor([2.0, 6.0 if w.format.scaling == "pair" else 5.0])
        return pair.repeat(w.scales.shape[0], w.scales.shape[1] // 2)
    halves = torch.tensor([2.0, -6.0] if w.format.offsets else [2.0]).half().view(torch.uint8)
    ones = torch.ones(24 if w.format.scaling == "q6_k-m" else 16, dtype=torch.uint8)
    block = torch.cat((halves, ones) if w.format.scaling == "q4_k" else (ones, halves))
    return block.repeat(w.scales.shape[0], w.scales.shape[1] // len(block))


@pytest.mark.parametrize(("name", "format_", "dtype", "isa"), BUILDS)
def test_the_scale_of_every_group_is_used_for_its_own_codes(
    name: str, format_: str, dtype: DTypeName, isa: Isa
) -> None:
    n, k = 19, 416
    w = quantise(torch.randn(n, k, generator=torch.Generator().manual_seed(1)).to(DTYPE[dtype]), format_)
    assert isinstance(w, Weight)
    if w.scales.dtype == torch.uint8:
        w.scales.copy_(torch.arange(w.scales.numel()).view(w.scales.shape) % 64)  # fp16 below 2, different integers
    else:
        w.scales.copy_(2.0 ** (torch.arange(w.scales.numel()) % 9 - 4).view(w.scales.shape))
    x, function = torch.eye(k, dtype=DTYPE[dtype]), entry(name, isa, format_, dtype)
    for first in range(0, k, 32):
        y = torch.empty(32, n, dtype=x.dtype)
        settings = (4,) if name == "gemv_coded" else (256, 24)
        function(x[first : first + 32], w.codes, w.scales, None, None, y, 2, *settings)
        assert torch.equal(y.T, w.exact().float().to(x.dtype)[:, first : first + 32]), first


@pytest.mark.parametrize("format_", drawn.share(CODED, days=DAYS, shift=1))  # the formats of BLOCKED_BUILDS
def test_blocks_of_codes_are_the_weights_rounded_once(format_: str) -> None:
    """Multiply by one: y is each weight, an offset included, rounded to nearest in bf16 (a scale per row: rounded as a
    product). Hostile scales and offsets cancel, so that rounding either alone would show."""
    n, k = 35, 321
    w = quantise(torch.randn(n, k, generator=torch.Generator().manual_seed(3)).bfloat16(), format_)
    assert isinstance(w, Weight)
    for first in range(0, k, 50):
        x = torch.eye(k, dtype=torch.bfloat16)[first : first + 50]
        y = torch.empty(len(x), n, dtype=torch.bfloat16)
        entry("gemm_coded", NATIVE, format_)(x, w.codes, w.scales, None, None, y, 2, 256, 24)
        assert torch.equal(y.T, w.exact().float().bfloat16()[:, first : first + 50]), first


@pytest.mark.parametrize(("format_", "dtype", "isa"), BLOCKED_BUILDS)
def test_gemm_on_codes_is_right_for_any_blocking_threads_and_m(format_: str, dtype: DTypeName, isa: Isa) -> None:
    """Draw shapes, blocks and threads; x, residual and y are strided views at odd addresses, and y has guards."""
    draw, function = Random(drawn.seed), entry("gemm_coded", isa, format_, dtype)
    for _ in range(20):
        m, n = draw.choice((1, 5, 8, 9, 33, 50)), draw.randint(1, 80)
        k = draw.choice((1, 31, 32, 33, 255, 256, 257, 512, draw.randint(1, 1100)))
        settings = draw.randint(1, 3), draw.choice((256, 512, 1024)), draw.choice((1, 7, 12, 24, 1000))
        check_linear(function, settings, linear(m, n, k, dtype, weight=format_))


@pytest.mark.parametrize("format_", ["int8-row", "uint8-row"])
@pytest.mark.parametrize("k", [1, 63, 416, 8192])
@pytest.mark.parametrize("wide", [6, 7, 14, 15, 22, 23, 60])  # the most between exponents for 2 to 4 digits, and more
def test_one_row_of_x_times_codes_of_8_bits_is_rounded_once(format_: str, k: int, wide: int) -> None:
    draw = torch.Generator().manual_seed(wide)
    w = quantise(torch.randn(21, k, generator=draw).bfloat16(), format_)
    assert isinstance(w, Weight)
    sizes = torch.randint(0, wide + 1, (1, k), generator=draw)
    sizes[0, 0], sizes[0, -1] = 0, wide
    signs = torch.randint(0, 2, (1, k), generator=draw) * 2 - 1
    x = (signs * torch.randint(128, 256, (1, k), generator=draw) * 2.0**sizes).bfloat16()
    x[0, -1] = -255.0 * 2.0**wide
    y = torch.empty(1, 21, dtype=torch.bfloat16)
    entry("gemv_coded", NATIVE, format_)(x, w.codes, w.scales, None, None, y, 2, 4)
    exact = x.double() @ w.exact().T
    if NATIVE == "avx512bf16" and VNNI and wide <= 22:
        assert torch.equal(y, exact.float().bfloat16())
    else:  # sums in fp32
        sizes = x.double().abs() @ w.exact().abs().T
        assert ((y.double() - exact).abs() <= 2**-8 * exact.abs() + k * 2**-23 * sizes).all()


@pytest.mark.parametrize("format_", ["int8-row", "uint8-row"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_row_of_x_without_a_finite_number_has_no_finite_product(format_: str, value: float) -> None:
    w = quantise(torch.randn(21, 70, generator=torch.Generator().manual_seed(1)).bfloat16(), format_)
    assert isinstance(w, Weight)
    y = torch.zeros(1, 21, dtype=torch.bfloat16)
    x = torch.full((1, 70), value, dtype=torch.bfloat16)
    entry("gemv_coded", NATIVE, format_)(x, w.codes, w.scales, None, None, y, 1, 4)
    assert not y.isfinite().any()


def test_a_row_of_x_has_the_same_product_with_codes_whatever_shares_its_blocks() -> None:
    op, function = OPS["linear"], entry("gemm_coded", NATIVE, "q4_k", "fp32")
    inputs = op.inputs(linear(40, 70, 600, "fp32", weight="q4_k"), 5)
    x, w = inputs["x"], inputs["w"]
    whole = torch.empty(40, 70)
    function(x, w.codes, w.scales, None, None, whole, 1, 256, 1000)
    for m, settings in ((1, (1, 256, 24)), (7, (2, 512, 24)), (40, (3, 256, 12)), (33, (2, 1024, 5))):
        y = torch.empty(m, 70)
        function(x[:m], w.codes, w.scales, None, None, y, *settings)
        assert torch.equal(y, whole[:m]), (m, settings)


PIECE = "S::template piece<C>(scales + i * w.scale_stride,"
UINTS, UINT_ROWS = ("uint4-g32", "uint4-g64", "uint4-g128", "uint8-g128"), ("uint4-row", "uint8-row")
# One fault each in kernels/cpu/codes.h or coded.h: the line, the wrong line, and the formats that it breaks.
WRONG: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "the neighbour's group": ("spread<kMany<C>>(at + p *", "spread<kMany<C>>(at + (p ? p - 1 : 0) *", ("q4_1", "q4_0")),
    "offset and scale swapped": (
        "even = _mm512_setr_epi32(0, 0, 0, 0, 2",
        "even = _mm512_setr_epi32(2, 2, 2, 2, 2",
        ("q4_1",),
    ),
    "offset subtracted": ("scaled[i].offset, acc[i][m])", "-scaled[i].offset, acc[i][m])", ("q4_1", "q4_k", "q6_k-m")),
    "sign of the minimum": ("both ^ 0x80000000u", "both", ("q4_k",)),
    "offset left out": ("if constexpr (F::Scales::kOffsets) add_up", "if (0) add_up", ("q4_1", "q4_k")),
    "scales of half a block": (
        "lane = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4,",
        "lane = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 3,",
        ("q4_k",),
    ),
    "the neighbour block's scales": (
        "at + p * C::kCodes / kBlockCodes * kBlock;",
        "at + (p + 1) / 2 * kBlock;",
        ("q4_k", "q6_k"),
    ),
    "high bits swapped": ("r == 6 ? 8 : 10)", "r == 6 ? 10 : 8)", ("q6_k",)),
    "high bits lost": ("_mm512_set1_epi16(0x30)", "_mm512_set1_epi16(0x10)", ("q6_k", "q6_k-m")),
    "codes without a sign": ("kNumbers<6, -32>", "kNumbers<6, 32>", ("q6_k",)),
    "lines swapped": ("four_bits_to_bf16(words[r / 4]", "four_bits_to_bf16(words[1 - r / 4]", ("q4_k",)),
    "a scale without a sign": ("_mm512_cvtepi8_epi32(_mm_loadu", "_mm512_cvtepu8_epi32(_mm_loadu", ("q6_k",)),
    "the last group's offset": ("there < kMany<C> ? there : kMany<C>", "there < 2 ? there : 1", ("q4_1", "uint4-g32")),
    "subnormals as normal numbers": ("n > 7 ? n / 8 - 7 : e - 9", "n / 8 - 7", ("fp8_e4m3-row",)),
    "NaN as 480": ("floats && n == 127", "floats && n == 128", ("fp8_e4m3-row",)),
    "the sign left out": ("char(0x80)), 0xf8)", "char(0x00)), 0xf8)", ("fp8_e4m3-row", "int8-row")),
    "zero point ignored": ("if constexpr (S::kZeros)\n", "if constexpr (S::kZeros && R > 9)\n", UINTS),
    "zero point one more": (
        "scaled[i].offset, part);",
        "scaled[i].offset + splat(1), part);",
        UINTS,
    ),
    "the neighbour row's zero point": (
        "scaled[i].offset, part);",
        "scaled[i ? i - 1 : R - 1].offset, part);",
        UINTS,
    ),
    "the neighbour group's zero point": (
        f"scaled[i] = {PIECE} p);",
        f"scaled[i].scale = {PIECE} p).scale, scaled[i].offset = {PIECE} p ? p - 1 : p).offset;",
        UINTS,
    ),
    "zero points added": ("negative ? -sums : sums", "sums", UINTS),
    "a row's zero point left out": (
        "return {vreg{}, splat(number_at<S>(at + sizeof(S)))}",
        "return Scaled{}",
        UINT_ROWS,
    ),
    "a row's scale as its zero point": (
        "return {vreg{}, splat(number_at<S>(at + sizeof(S)))}",
        "return {vreg{}, splat(number_at<S>(at))}",
        UINT_ROWS,
    ),
    "zero points of even groups": ("even, _mm512_set1_epi32(1)", "even, _mm512_set1_epi32(3)", ("uint4-g32",)),
    "zero point subtracted after rounding": (
        "if constexpr (S::kZeros)\n",
        "if constexpr (S::kZeros) part = vreg(vu(part) & 0xffff0000u);\nif constexpr (S::kZeros)\n",
        UINTS,
    ),
}
# The same in kernels/cpu/coded_block.h.
WRONG_BLOCKS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "the neighbour piece's scales": ("piece<C>(scales, p) :", "piece<C>(scales, p ? p - 1 : 0) :", ("q4_0", "q6_k")),
    "the neighbour row's scales": ("w.scales_of(n + r)", "w.scales_of(n + (r ^ 1))", ("int4-g128", "q4_k")),
    "the last panel left out": ("k < j + count; k += kCodes", "k + kCodes <= j + count; k += kCodes", ("q8_0", "q4_k")),
    "the tail of K left out": ("whole || lane < lanes_of<T>(left)", "whole", ("int8-g128", "q4_1")),
    "the last element of K left out": ("lane < lanes_of<T>(left)", "2 * lane + 1 < left", ("q4_0",)),
    "half of the rows": ("group < kLanes; group += 8", "group < 8; group += 8", ("q6_k",)),
    "neighbours swapped": ("cvtne2ps_pbh(odd, even)", "cvtne2ps_pbh(even, odd)", ("q4_0", "int8-row")),
    "offset left out": ("fma(number, s.scale, s.offset)", "number * s.scale", ("q4_1", "q4_k", "q6_k-m")),
    "offset rounded": ("fma(number, s.scale, s.offset)", "fma(number, s.scale, rounded(s.offset))", ("q4_1", "q4_k")),
    "code x scale rounded": (
        "fma(number, s.scale, s.offset)",
        "rounded(number * s.scale) + s.offset",
        ("q4_1", "q4_k"),
    ),
    "zero point left out": ("(number - s.offset) * s.scale", "number * s.scale", UINTS),
    "zero point added": ("(number - s.offset) * s.scale", "(number + s.offset) * s.scale", UINTS),
    "zero point subtracted after rounding": (
        "(number - s.offset) * s.scale",
        "rounded(number * s.scale) - rounded(s.offset * s.scale)",
        UINTS,
    ),
    "a row's zero point left out": ("kZeros ? number - s.offset : number", "kZeros ? number : number", UINT_ROWS),
    "the last row not scaled": ("at < sums + m * kStrip", "at < sums + (m - 1) * kStrip", ("int8-row",)),
    "half of the columns not scaled": (
        "v < 2; ++v) {\n        const Half",
        "v < 1; ++v) {\n        const Half",
        ("int8-row",),
    ),
}
# The same in kernels/cpu/coded_amx.h.
WRONG_AMX: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "even and odd codes swapped": (
        "weight(pairs & 0xffff0000u), weight(pairs << 16)",
        "weight(pairs << 16), weight(pairs & 0xffff0000u)",
        ("int4-g128", "q4_k"),
    ),
    "codes in the order of rounded weights": ("kAsCodes<F> ? e :", "0 ? e :", ("int8-row",)),
    "the neighbour column's scale": ("skipped + c));", "skipped + (c ^ 1)));", ("int8-row", "uint4-row")),
    "the last piece twice": ("make(p + 1);", "make(p ? p : 1);", ("int4-g128", "q8_0", "q6_k")),
    "weights behind K": ("if (!whole) found", "if (whole) found", ("int4-g32",)),
    "offsets left out": ("fma(number, s.scale, s.offset)", "number * s.scale", ("q4_1", "q4_k")),
    "the neighbour row's codes": ("codes_of[i] = w.row(n + i)", "codes_of[i] = w.row(n + (i ? i - 1 : i))", ("q4_0",)),
}
# The same in kernels/cpu/coded_digits.h, for one row of x.
BYTES = ("int8-row", "uint8-row")
WRONG_DIGITS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "codes without their offset": ("-128 * head.sum", "-127 * head.sum", BYTES),
    "the highest digit left out": ("d < Digits; ++d) total", "d < Digits - 1; ++d) total", BYTES),
    "the rest of K cut short": ("(uint64_t(1) << left) - 1", "(uint64_t(1) << (left - 1)) - 1", BYTES),
    "a digit too few": ("bits <= 14 ? 2", "bits <= 17 ? 2", BYTES),
    "the first row's scale": ("scale = w.scales_of(n + i);", "scale = w.scales_of(n);", BYTES),
    "x without its sign": ("bits & 0x8000 ? -size : size", "size", BYTES),
    "a wide row cut off": ("bits + 2 > 8 * kMostDigits", "bits > 199", BYTES),
    "a zero with a leading bit": ("bits >> 7 & 255 ? 128 : 0", "128", BYTES),
    "the zero point left out": ("if constexpr (S::kZeros) sum", "if (0) sum", ("uint8-row",)),
}
ROUNDED = """
static inline vreg rounded(vreg v) {
  bf16 half[kLanes];
  store(half, v);
  return load(half);
}
"""
WRONG_BUILDS = [
    *(("gemv_coded", name, f) for name, (_, _, formats) in WRONG.items() for f in formats),
    *(("gemm_coded", name, f) for name, (_, _, formats) in WRONG_BLOCKS.items() for f in formats),
    *(("gemv_coded", name, f) for name, (_, _, formats) in WRONG_DIGITS.items() for f in formats),
    *(("gemv_coded", name, f) for name, (_, _, formats) in WRONG_AMX.items() for f in formats if "amx_bf16" in HAVE),
]


def fault(source: str, name: str) -> tuple[str, str, str]:
    """Return the header that holds a fault's line, the line, and the wrong one."""
    right, wrong, _ = (WRONG | WRONG_AMX | WRONG_DIGITS if source == "gemv_coded" else WRONG_BLOCKS)[name]
    few = ("codes.h", "coded.h", "coded_amx.h", "coded_digits.h")
    headers = few if source == "gemv_coded" else ("codes.h", "coded_block.h")
    return wrong_line.header_of(right, headers), right, wrong


def test_every_fault_is_a_change_of_todays_source() -> None:
    """The test below builds a thirtieth of them a day."""
    assert all(fault(source, name) for source, name, _ in WRONG_BUILDS)


@pytest.mark.skipif(NATIVE != "avx512bf16", reason="the faults are in code for AVX-512-BF16")
@pytest.mark.parametrize(("source", "name", "format_"), drawn.share(WRONG_BUILDS, days=30))
def test_the_battery_refuses_a_kernel_with_one_fault(source: str, name: str, format_: str, tmp_path: Path) -> None:
    header, right, wrong = fault(source, name)
    kernel, op = BY_NAME[source], OPS["linear"]
    w = op.workload("bf16", {"M": 1 if name in WRONG_DIGITS else 17, "N": 64, "K": 416}, weight=format_)
    recipe = kernel.recipe(w, device(), kernel.knobs(w, device()))
    assert isinstance(recipe, NativeRecipe)
    built = wrong_line.build(recipe.source, header, right, wrong, recipe.flags, tmp_path, also=ROUNDED)

    def refused(case: Case) -> bool:
        function = load(op, recipe, built, kernel.knobs(case.workload, device()).values)
        return any(mismatches(op, case, 7, {NATIVE: partial(outputs_of, op, case.workload, function)}))

    assert any(refused(case) for case in op.cases(w) if isinstance(kernel.supports(case.workload, device()), Accepted))


# --- the caller's mistakes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"w": torch.zeros(8, 5)}, "w is 8 x 5"),
        ({"y": torch.zeros(2, 7)}, "y is 2 x 7"),
        ({"w": torch.zeros(8, 4, dtype=torch.bfloat16)}, "dtypes differ"),
        ({"x": torch.zeros(4, 2).t()}, "not contiguous"),
        ({"bias": torch.zeros(7)}, "bias must have 8"),
    ],
)
@pytest.mark.parametrize(("name", "settings"), [("gemv", (1, 1)), ("gemm", (1, 64, 64, 12))])
def test_wrong_arguments_are_refused_by_name(
    name: str, settings: tuple[int, ...], change: dict[str, torch.Tensor], problem: str
) -> None:
    given: dict[str, Any] = {"x": torch.zeros(2, 4), "w": torch.zeros(8, 4), "bias": None, "y": torch.zeros(2, 8)}
    given |= change
    with pytest.raises(ValueError, match=problem):
        entry(name)(given["x"], given["w"], given["bias"], None, given["y"], *settings)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"codes": torch.zeros(8, 5, dtype=torch.int8)}, "w.codes is 8 x 5"),
        ({"codes": torch.zeros(8, 4)}, "w.codes must be int8"),
        ({"scales": torch.zeros(7)}, r"w.scales must be float32 \[8\]"),
        ({"scales": torch.zeros(8, dtype=torch.bfloat16)}, "w.scales must be float32"),
        ({"scales": torch.zeros(16)[::2]}, "w.scales: not contiguous"),
    ],
)
def test_parts_of_a_weight_that_do_not_fit_are_refused_by_name(change: dict[str, torch.Tensor], problem: str) -> None:
    given = {"codes": torch.zeros(8, 4, dtype=torch.int8), "scales": torch.zeros(8), **change}
    x, y = torch.zeros(2, 4).bfloat16(), torch.zeros(2, 8).bfloat16()
    with pytest.raises(ValueError, match=problem):
        entry("gemv_coded", NATIVE, "int8-row")(x, given["codes"], given["scales"], None, None, y, 1, 1)


# --- knobs -----------------------------------------------------------------------------------------------------------


def linear(m: int, n: int, k: int, dtype: DTypeName = "bf16", **traits: Any) -> Workload:
    return OPS["linear"].workload(dtype, {"M": m, "N": n, "K": k}, **traits)


AVX512 = ISA_NEEDS["avx512bf16"]


def test_rows_shrink_with_m_registers_and_l2() -> None:
    wide, narrow = facts(device(AVX512)), facts(device(ISA_NEEDS["avx2"]))
    by_m = [knobs.gemv(linear(m, 4096, 4096), wide)["rows"] for m in range(1, 9)]
    assert by_m == [8, 8, 8, 4, 4, 4, 3, 3]
    by_m = [knobs.gemv(linear(m, 4096, 4096), narrow)["rows"] for m in range(1, 10)]
    assert by_m == [8, 4, 4, 3, 2, 2, 3, 3, 3]
    small_l2 = facts(device(AVX512, l2_bytes=512 << 10))
    assert knobs.gemv(linear(1, 4096, 14336), wide)["rows"] == 8
    assert knobs.gemv(linear(1, 4096, 14336), small_l2)["rows"] == 4
    assert knobs.gemv(linear(1, 4096, 40000), small_l2)["rows"] == 1


def test_rows_of_weights_are_read_singly_with_many_registers_and_x_in_a_large_l1() -> None:
    wide, narrow = facts(device(AVX512, l1d_bytes=48 << 10)), facts(device(ISA_NEEDS["avx2"], l1d_bytes=48 << 10))
    most = wide.l1d_bytes * 7 // 16
    for m, dtype, size in ((2, "bf16", 2), (5, "bf16", 2), (8, "bf16", 2), (2, "fp32", 4), (4, "fp16", 4)):
        within = most // (m * size)
        assert knobs.gemv(linear(m, 4096, within, dtype), wide)["rows"] == 1
        assert knobs.gemv(linear(m, 4096, within + 1, dtype), wide)["rows"] > 1
        assert knobs.gemv(linear(m, 4096, within, dtype), narrow)["rows"] > 1
    assert knobs.gemv(linear(1, 4096, 64), wide)["rows"] == 8


@pytest.mark.parametrize(
    ("m", "k", "dtype", "rows"),
    [
        *((m, k, "bf16", 1) for m, k in ((4, 2048), (5, 2048), (6, 2048), (4, 2560), (5, 2560), (4, 3072))),
        *((m, k, "bf16", 8) for m, k in ((2, 1024), (2, 2048), (3, 2048), (2, 4096), (3, 4096))),  # never against 8
        *((m, k, "bf16", 4) for m, k in ((4, 1024), (6, 1536))),  # rows of less than a page
        *((m, k, "bf16", 4) for m, k in ((6, 2560), (5, 3072), (4, 4096))),  # x leaves L1 either way
        (4, 1024, "fp32", 1),
        (4, 1024, "fp16", 4),  # half a page; and x is kept in fp32
        (4, 2048, "fp16", 4),  # which is 32 KB here
    ],
)
def test_in_an_l1_of_32_kb_rows_are_read_singly_only_if_four_would_evict_x(
    m: int, k: int, dtype: DTypeName, rows: int
) -> None:
    assert knobs.gemv(linear(m, 2048, k, dtype), facts(device(AVX512, l1d_bytes=32 << 10)))["rows"] == rows


@pytest.mark.parametrize("isa", ISA_NEEDS)
def test_sums_of_a_group_fit_the_registers_and_loads_of_x_from_l2_serve_several_rows(isa: Isa) -> None:
    f = facts(device(ISA_NEEDS[isa]))
    for m in range(1, 9):
        group, rows = knobs.rows_together(m, f), int(knobs.gemv(linear(m, 4096, 8192), f)["rows"])
        assert 2 <= rows <= (24 if isa.startswith("avx512") else 12) // group, m
        assert group == m or 2 * group in (m, m + 1)


def test_threads_follow_the_work() -> None:
    many = facts(device(AVX512, cpus=16))
    assert knobs.gemv(linear(1, 16, 64), many)["threads"] == 1  # over before another thread has woken
    assert knobs.gemv(linear(1, 8192, 8192), many)["threads"] == 2  # two threads saturate this memory
    assert knobs.gemm(linear(512, 8192, 8192), many)["threads"] == 16  # compute-bound


def test_disturbed_rates_do_not_cost_threads() -> None:
    fp = device(AVX512, cpus=16)
    assert knobs.gemv(linear(1, 8192, 8192), facts(dataclasses.replace(fp, contended=True)))["threads"] == 16
    slower = {**fp.rates, "read_bytes_per_s@16": dataclasses.replace(fp.rates["read_bytes_per_s@1"], value=15e9)}
    assert knobs.gemv(linear(1, 8192, 8192), facts(dataclasses.replace(fp, rates=slower)))["threads"] == 16


def test_blocks_fit_their_cache_level() -> None:
    for isa in ISA_NEEDS:
        for dtype in DTYPES:
            f = facts(device(ISA_NEEDS[isa]))
            k = knobs.gemm(linear(256, 4096, 14336, dtype), f)
            strip = 32 if isa.startswith("avx512") else 16
            per_lane = 2 if isa == "avx512bf16" and dtype == "bf16" else 1
            assert k["k_block"] // per_lane * strip * 4 <= f.l1d_bytes / 2
            assert k["k_block"] % (strip // 2 * per_lane) == 0
            assert k["k_ahead"] % k["k_block"] == 0
            assert (k["k_ahead"] - k["k_block"]) * strip * (4 if dtype == "fp32" else 2) < f.l2_bytes
            assert k["m_block"] % (strip * 3 // 8) == 0


def test_a_row_is_prefetched_whole_if_it_fits_and_in_equal_parts_otherwise() -> None:
    f = facts(device(AVX512))
    most = 7 * f.l2_bytes // 8 // (32 * 2)
    for columns in (512, 2048, 4096, 8192, 14336, 28672, 131072):
        k = knobs.gemm(linear(64, 4096, columns), f)
        parts = -(-columns // k["k_ahead"])
        assert parts == -(-columns // most)
        assert parts * k["k_ahead"] - columns < parts * k["k_block"]


def test_ranges_are_divided_with_a_reason() -> None:
    gemv, gemm = BY_NAME["gemv"], BY_NAME["gemm"]
    assert "gemm" in gemv.why_not(linear(9, 64, 64), device())
    assert "gemv" in gemm.why_not(linear(1, 64, 64), device())
    assert isinstance(gemm.supports(linear(9, 64, 64), device()), Accepted)


def test_fused_kernels_stream_few_rows_and_block_many() -> None:
    f = facts(device(AVX512))
    op = OPS["gate_up"]
    few, many = (knobs.fused(op.workload("bf16", {"M": m, "d": 4096, "I": 14336}), f) for m in (1, 9))
    assert few["rows"] > 0
    assert many["rows"] == 0
