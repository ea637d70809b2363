"""Test weights in a format: values worked by hand, allowed roundings, and refused mistakes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import product as pairs
from typing import Any

import pytest
import torch
from torch import Tensor

from autosel.errors import BadArguments, UnknownName
from autosel.formats import WEIGHT_FORMATS, WITH_ZEROS
from autosel.ops import OPS, eager_stored, weight
from autosel.ops.codes import CODES
from autosel.ops.contract import Judge, Match, Mismatch, Op
from autosel.ops.draw import Draw
from autosel.ops.dtypes import TINY_NORMAL
from autosel.ops.weight import Weight, exact, quantise, split
from autosel.values import DTypeName, Workload
from tests.drawn import share

DTYPES: tuple[DTypeName, ...] = ("bf16", "fp16", "fp32")
FORMATS = [name for name in WEIGHT_FORMATS if name != "plain"]
FP8 = "fp8_e4m3-row"
OF: dict[str, dict[str, int]] = {
    "linear": {"M": 3, "N": 64, "K": 256},
    "norm_qkv": {"M": 3, "d": 256, "N": 64},
    "gate_up": {"M": 3, "d": 256, "I": 64},
    "lm_head": {"M": 3, "V": 64, "d": 256},
}
Numbers = Callable[[Tensor], Tensor]


pytestmark = pytest.mark.usefixtures("one_torch_thread")


def e4m3(*bits: int) -> Tensor:
    return torch.tensor(bits, dtype=torch.uint8).view(torch.float8_e4m3fn)


def drawn(n: int, k: int, seed: int = 3) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).bfloat16()


# --- the value --------------------------------------------------------------------------------------------------------


def test_a_scaled_product_of_codes_worked_out_by_hand() -> None:
    """Multiply known codes: 0x01 is 2^-9, 0x7e 448, 0xb8 -1, 0x08 2^-6."""
    op = OPS["linear"]
    w = Weight.of(FP8, codes=torch.stack([e4m3(0x01, 0x7E), e4m3(0xB8, 0x08)]), scales=torch.tensor([2.0, -0.5]))
    x, bias = torch.tensor([[512.0, 0.25]]), torch.tensor([1.0, 2.0])
    inputs = {"x": x, "w": w, "bias": bias, "residual": None}
    # (512/512 + 448/4) * 2 + 1; (-512 + 1/256) * -0.5 + 2
    want = [[227.0, 258.0 - 1 / 512]]
    assert op.reference(inputs)[0].tolist() == want
    assert eager_stored.linear(*op.arguments(inputs)).tolist() == want


SIMPLE = [name for name in FORMATS if WEIGHT_FORMATS[name].scaling == "one"]  # a number per group
OTHERS = [name for name in FORMATS if name not in SIMPLE]


@pytest.mark.parametrize("name", SIMPLE)
def test_rows_are_quantised_to_their_largest_weight_and_come_back(name: str) -> None:
    w, code = drawn(300, 70), CODES[WEIGHT_FORMATS[name].code]
    w[4] = 0.0
    w[7, 3] = 3e38 if WEIGHT_FORMATS[name].parts[1].dtype != "fp16" else 3e5
    found = quantise(w, name)
    assert isinstance(found, Weight) and found.shape == w.shape and found.dtype == name
    numbers, group = code.numbers(found.codes)[:, :70], found.format.group or 70
    assert numbers.isfinite().all() and (found.scales[4] == 1.0).all() and not numbers[4].any()
    for first in range(0, 70, group):
        some = slice(first, first + group)
        largest = numbers[:, some].abs().amax(1)[w[:, some].any(1)]
        assert (largest >= code.most - 1).all() and largest.float().mean() > code.most - 0.1
    error, scale = (found.exact() - w.double()).abs(), found.along_k(found.scales).double()
    half_step = torch.maximum(2.0**-4 * w.double().abs(), code.least / 2 * scale)
    assert (error <= half_step * (1 + 2.0**-7)).all()  # a scale itself is rounded


@pytest.mark.parametrize(
    ("name", "part"),
    [("q4_1", 0.6 / 15), ("q4_k", 1.2 / 15), ("q6_k", 0.8 / 32), ("q6_k-m", 0.8 / 32), ("uint4-g32", 0.6 / 15)],
)
def test_a_weight_is_quantised_to_a_part_of_its_groups_range(name: str, part: float) -> None:
    w = drawn(300, 600)
    w[4] = 0.0
    found, group = quantise(w, name), 32
    assert isinstance(found, Weight) and not found.exact()[4].any()
    whole = torch.nn.functional.pad(w, (0, -600 % group)).float().unflatten(1, (-1, group))
    span = (whole.amax(-1) - whole.amin(-1)).clamp_min(0).repeat_interleave(group, 1)[:, :600]
    assert ((found.exact() - w.double()).abs() <= part * span).all()


def test_the_bits_of_q4_1_worked_out_by_hand() -> None:
    w = Weight.of(
        "q4_1", codes=torch.full((1, 64), 0xF1, dtype=torch.uint8), scales=torch.tensor([[2.0, -3.0] * 4]).half()
    )
    assert w.shape == (1, 128) and w.exact()[0, :4].tolist() == [-1.0, 27.0, -1.0, 27.0]


def test_the_bits_of_uint4_worked_out_by_hand() -> None:
    pairs = torch.tensor([[2.0, 3.0, 0.5, 15.0]], dtype=torch.bfloat16)
    w = Weight.of("uint4-g128", codes=torch.full((1, 128), 0xF1, dtype=torch.uint8), scales=pairs)
    assert w.shape == (1, 256) and w.exact()[0, :2].tolist() == [-4.0, 24.0] and w.exact()[0, -2:].tolist() == [-7.0, 0]
    assert w.terms(w.exact())[0, :2].tolist() == [8.0, 36.0]


ZEROS = [name for name in FORMATS if WEIGHT_FORMATS[name].scaling in WITH_ZEROS]


def test_the_bits_of_uint8_worked_out_by_hand() -> None:
    codes = torch.tensor([[-128, 127, 0], [5, 3, -2]], dtype=torch.int8)
    w = Weight.of("uint8-row", codes=codes, scales=torch.tensor([[2.0, -128.0], [0.5, 3.0]]))
    assert w.exact().tolist() == [[0.0, 510.0, 256.0], [1.0, 0.0, -2.5]]


@pytest.mark.parametrize("name", ZEROS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_zero_points_are_whole_numbers_of_the_range_and_zero_stays_zero(name: str, dtype: torch.dtype) -> None:
    w = drawn(60, 200).to(dtype)
    w[1], w[2], w[3, 5] = w[1].abs() + 1, -w[2].abs() - 1, 0.0
    found, format_ = quantise(w, name), WEIGHT_FORMATS[name]
    assert isinstance(found, Weight)
    least, most = (0, 15) if format_.bits == 4 else (-127, 127)
    zeros = found.scales[:, 1::2].double()
    assert torch.equal(zeros, zeros.round().clamp(least, most))
    assert found.scales.dtype == (dtype if format_.group else torch.float32)
    assert (zeros[1] == least).all() and (zeros[2] == most).all() and found.exact()[3, 5] == 0
    step = found.along_k(found.scales[:, ::2]).double()
    assert ((found.exact() - w.double()).abs() <= 1.6 * step).all()  # code, zero point and scale are rounded


@pytest.mark.parametrize(("name", "lines"), [("q4_k", 2), ("q6_k", 3)])
def test_a_code_of_a_block_is_in_the_words_of_its_sixteen(name: str, lines: int) -> None:
    code = CODES[name]
    for k in (0, 1, 2, 15, 16, 200, 255):
        numbers = torch.zeros(1, 256)
        numbers[0, k] = code.most
        words = code.nearest(numbers).view(torch.int32).view(lines, 16) - code.nearest(0 * numbers).view(
            torch.int32
        ).view(lines, 16)
        assert words.any(0).nonzero().tolist() == [[k // 16]], k
        assert torch.equal(code.numbers(code.nearest(numbers)), numbers.double())
    every = torch.arange(256).view(1, 256) % (code.most + 1)
    assert torch.equal(code.numbers(code.nearest(every)), every.double())


def test_plain_is_the_tensor_itself() -> None:
    w = drawn(3, 4)
    assert quantise(w, "plain") is w
    assert torch.equal(exact(w), w.double())


@pytest.mark.parametrize("name", FORMATS)
def test_rows_and_parts_of_a_matrix_are_views_of_it(name: str) -> None:
    w = quantise(drawn(40, 33), name)
    first, rest = split(w, (10, 30))
    assert torch.equal(torch.cat([exact(first), exact(rest)]), exact(w))
    assert isinstance(rest, Weight) and isinstance(w, Weight)
    assert rest.codes.data_ptr() == w.codes[10:].data_ptr() and rest.scales.data_ptr() == w.scales[10:].data_ptr()
    picked = w.rows(torch.tensor([5, 2, 5]))
    assert torch.equal(picked.exact(), exact(w)[[5, 2, 5]])
    assert w.nbytes == w.format.nbytes("bf16", 40, 33)


@pytest.mark.parametrize("code", [c for c in CODES.values() if getattr(c, "line", 0) < 256], ids=str)
def test_all_finite_codes_of_a_format_are_listed(code: Any) -> None:
    found = code.every_finite((2, 256 - len(code.nans)), Draw(1, "bf16")).view(torch.uint8)
    finite = code.all[~code.numbers(code.all[:, None]).isnan().any(1)].view(torch.uint8)
    assert sorted(found.flatten().tolist()) == sorted(finite.tolist() * 2)


def test_an_unknown_format_is_refused_by_name() -> None:
    with pytest.raises(UnknownName, match="fp8_e4m3-row"):
        Weight.of("fp8", codes=e4m3(0x01).view(1, 1), scales=torch.ones(1))


# --- the contract -----------------------------------------------------------------------------------------------------


def judge(op: Op, inputs: dict[str, Any]) -> Match | Mismatch:
    got = getattr(eager_stored, op.name)(*op.arguments(inputs), *op.allocate(op.workload_of(inputs)))
    return op.verify(inputs, [got])


OPS_OF: list[tuple[str, dict[str, Any]]] = [
    ("linear", {}),
    ("linear", {"bias": True, "residual": True}),
    ("norm_qkv", {"offset": 1.0}),
    ("gate_up", {"activation": 1}),
    ("lm_head", {}),
    ("lm_head", {"greedy": 1}),
]
# In 18 days, each op meets each format in each dtype.
EAGER = [
    (dtype, name, *op)
    for at, op in enumerate(OPS_OF)
    for name, dtype in share(list(pairs(FORMATS, DTYPES)), days=18, shift=at)
]


@pytest.mark.parametrize(("dtype", "name", "op", "traits"), EAGER, ids=str)
def test_the_eager_op_passes_every_case(dtype: DTypeName, name: str, op: str, traits: dict[str, Any]) -> None:
    contract, wrong = OPS[op], []
    w = contract.workload(dtype, OF[op], **traits, weight=name)
    assert w.key.endswith(f".weight={name}")
    for case in contract.cases(w):
        inputs = case.make(5)
        assert contract.workload_of(inputs) == case.workload
        found = judge(contract, inputs)
        wrong += [f"{case.name}: {found}"] if isinstance(found, Mismatch) else []
    assert not wrong, "\n".join(wrong)


def product(
    inputs: dict[str, Any],
    read: Numbers = lambda c: c,
    scaled: Numbers = lambda s: s,
    shifted: Numbers = lambda o: o,
) -> Tensor:
    """Return fp32 sums of codes, times the scale; with offsets, plus those times the sums of x.

    The offset of a zero point has the changed scale too.
    """
    w: Weight = inputs["w"]
    numbers = read(CODES[w.format.code].numbers(w.codes)[:, : w.shape[1]].float())
    of_groups, offsets = w.groups()
    if w.format.scaling in WITH_ZEROS:
        offsets = -scaled(of_groups.float()) * w.scales[:, 1::2].float()
    scales = w.along_k(scaled(of_groups.float()))
    if w.format.group or offsets is not None:
        y = inputs["x"].float() @ (numbers * scales).T
        if offsets is not None:
            y = y + inputs["x"].float() @ w.along_k(shifted(offsets.float())).expand(w.shape).T
        return y.to(inputs["x"].dtype)
    return (inputs["x"].float() @ numbers.T * scales[:, 0]).to(inputs["x"].dtype)


def rounded_weight(inputs: dict[str, Any]) -> Tensor:
    x, w = inputs["x"], inputs["w"]
    return (x.float() @ w.dequantised(x.dtype).float().T).to(x.dtype)


def stored_product(inputs: dict[str, Any]) -> Tensor:
    x, w = inputs["x"], inputs["w"]
    if w.format.group or w.format.offsets:
        return product(inputs)  # only a row's scale may be applied after the product is stored
    made = (x.float() @ CODES[w.format.code].numbers(w.codes)[:, : w.shape[1]].float().T).to(x.dtype).float()
    return (made * w.scales).to(x.dtype)


def rounded_scale(inputs: dict[str, Any]) -> Tensor:
    if inputs["w"].format.offsets:
        return product(inputs)  # an offset would not round with it
    return product(inputs, scaled=lambda s: s.to(inputs["x"].dtype).float())


@cache
def small_cases(name: str) -> list[tuple[dict[str, Any], Judge]]:
    """Return the inputs of all cases of linear except the long sums, each with its judge."""
    op = OPS["linear"]
    cases = op.cases(op.workload("bf16", OF["linear"], weight=name))
    made = [case.make(5) for case in cases if case.covers != "long sums"]
    return [(inputs, op.judge(inputs)) for inputs in made]


def passes(name: str, run: Callable[[dict[str, Any]], Tensor]) -> bool:
    """Return True if a function that leaves its inputs as they are passes all small cases."""
    return all(isinstance(judge([run(inputs)]), Match) for inputs, judge in small_cases(name))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("run", [product, rounded_weight, stored_product, rounded_scale], ids=lambda f: f.__name__)
def test_a_product_with_allowed_roundings_passes(name: str, run: Callable[[dict[str, Any]], Tensor]) -> None:
    assert passes(name, run)


@pytest.mark.parametrize("name", FORMATS)
def test_a_large_matrix_repeats_quantised_groups_but_no_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight, "DISTINCT", 5 * 4096)
    n, k, format_ = 23, 4096, WEIGHT_FORMATS[name]
    large = weight.drawn(Draw(1, "bf16"), n, k, format_)
    first = weight.quantise(Draw(1, "bf16").weight(5, k), format_)
    unit = math.lcm(*(part.per for part in format_.parts if part.per))
    known = first.exact().unflatten(1, (-1, unit))
    for row, found in enumerate(large.exact().unflatten(1, (-1, unit))):
        own = sorted(group.tolist() for group in known[row % 5])
        assert sorted(group.tolist() for group in found) == own
    assert len(large.exact().unique(dim=0)) == n


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_nearest_matrix_of_a_dtype_is_the_exact_one_rounded_once(name: str, dtype: DTypeName) -> None:
    for made in OPS["linear"].cases(OPS["linear"].workload(dtype, OF["linear"], weight=name)):
        w = made.make(7)["w"]
        for to in (torch.float32, torch.bfloat16):
            assert torch.equal(w.dequantised(to).nan_to_num(1.5), w.exact().to(to).nan_to_num(1.5)), made.name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_that_may_not_flush_has_no_subnormal_weight_or_scale(name: str, dtype: DTypeName) -> None:
    certain = set()
    for made in OPS["linear"].cases(OPS["linear"].workload(dtype, OF["linear"], weight=name)):
        w = made.make(7)["w"]
        sizes = w.exact().abs()
        subnormal = bool(((sizes > 0) & (sizes < TINY_NORMAL[dtype])).any() or w.flushable.any())
        assert w.may_flush(dtype) or not subnormal, made.name
        certain.add(not w.may_flush(dtype))
    assert certain == ({False} if WEIGHT_FORMATS[name].offsets else {False, True})  # both kinds were met


@pytest.mark.parametrize("k", [256, 300])
def test_squares_of_groups_are_those_of_products_with_weights_of_one_sign(k: int) -> None:
    draw = torch.Generator().manual_seed(k)
    x, w = (torch.randn(rows, k, generator=draw, dtype=torch.float64) for rows in (3, 8))
    w[1, 2], x[2, 0] = torch.inf, torch.nan
    want = torch.zeros(3, 8, dtype=torch.float64)
    for some, weights in zip(x.nan_to_num(0).split(128, 1), w.nan_to_num(0, 0, 0).split(128, 1), strict=True):
        want += (some @ weights.clamp_min(0).T) ** 2 + (some @ weights.clamp_max(0).T) ** 2
    torch.testing.assert_close(weight._of_groups(x, w, 128), want)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("k", [256, 4096])
def test_a_rounded_weight_stays_within_the_bound_over_many_products(name: str, k: int) -> None:
    op = OPS["linear"]
    inputs = op.inputs(op.workload("bf16", {"M": 4, "N": 256, "K": k}, weight=name), 1)
    found = op.verify(inputs, [rounded_weight(inputs)])
    assert isinstance(found, Match)


@pytest.mark.parametrize("name", [name for name in FORMATS if WEIGHT_FORMATS[name].group])
@pytest.mark.parametrize("run", [rounded_weight, rounded_scale], ids=lambda f: f.__name__)
def test_equal_weights_of_a_group_may_round_equally(name: str, run: Callable[[dict[str, Any]], Tensor]) -> None:
    """Add up equal errors by positive x: the weights of a group are its largest and its smallest number."""
    op, draw = OPS["linear"], Draw(3, "bf16")
    inputs = op.inputs(op.workload("bf16", {"M": 16, "N": 1024, "K": 400}, weight=name), 1)
    w, x = inputs["w"], inputs["x"]
    x.abs_()
    code = CODES[w.format.code]
    w.codes.copy_(code.nearest(torch.where(draw.uniform(*code.count(w.codes)) < 0.5, code.most, -code.most)))
    found = op.verify(inputs, [run(inputs)])
    assert isinstance(found, Match), found


# --- mistakes ---------------------------------------------------------------------------------------------------------


def flushed(x: Tensor) -> Tensor:
    return torch.where(x.abs() < 2.0**-6, 0.0, x)


def nan_as_480(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), 480.0, x)


def fnuz(x: Tensor) -> Tensor:
    """Read codes as the other e4m3 (fnuz), with half the values, and infinity for 448."""
    return torch.where(x.abs() == 448.0, float("inf"), x)


def unsigned(x: Tensor) -> Tensor:
    return x.abs()


def half_down(x: Tensor) -> Tensor:
    """Drop a mantissa bit."""
    return x.view(-1).view(torch.int32).bitwise_and(~0x1FFFFF).view(torch.float32).view(x.shape)


MISREAD = [flushed, nan_as_480, fnuz, unsigned, half_down]
MISSCALED: dict[str, Numbers] = {
    "a neighbour's": lambda s: s.roll(1),
    "one for all": lambda s: s.view(-1)[:1].expand(s.shape),
    "rounded to eight bits": lambda s: s.bfloat16().float() * (1 + 2.0**-6),
    "squared": lambda s: s * s,
    "its size": lambda s: s.abs(),
    "never zero": lambda s: torch.where(s == 0, 1.0, s),
    "nan ignored": lambda s: s.nan_to_num(),
}


@pytest.mark.parametrize("read", MISREAD, ids=lambda f: f.__name__)
def test_codes_misread_are_refused(read: Numbers) -> None:
    assert not passes(FP8, lambda inputs: product(inputs, read))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("scaled", MISSCALED)
def test_a_wrong_scale_is_refused(name: str, scaled: str) -> None:
    assert not passes(name, lambda inputs: product(inputs, scaled=MISSCALED[scaled]))


MISPLACED: dict[str, Numbers] = {
    "the other sign": lambda o: -o,
    "a neighbour's": lambda o: o.roll(1, -1),
    "another row's": lambda o: o.roll(1, 0),
    "none": lambda o: 0 * o,
    "its size": lambda o: o.abs(),
    "rounded to six bits": lambda o: (o * 2.0**9).bfloat16().float() * 2.0**-9 * (1 + 2.0**-6),
    "nan ignored": lambda o: o.nan_to_num(),
}


@pytest.mark.parametrize("name", [name for name in FORMATS if WEIGHT_FORMATS[name].offsets])
@pytest.mark.parametrize("shifted", MISPLACED)
def test_a_wrong_offset_is_refused(name: str, shifted: str) -> None:
    if shifted == "a neighbour's" and not WEIGHT_FORMATS[name].group:
        pytest.skip("a row has one offset")
    assert not passes(name, lambda inputs: product(inputs, shifted=MISPLACED[shifted]))


def zeroed(inputs: dict[str, Any], change: Numbers, stored: Numbers, shifted: Numbers) -> Tensor:
    """Return s (sum of q x) - (s z) (sum of x) of each group, with changed zero points, and both products changed."""
    w, x = inputs["w"], inputs["x"].float()
    group, k = w.format.group or w.shape[1], w.shape[1]
    numbers = CODES[w.format.code].numbers(w.codes)[:, :k].float()
    scales, zeros = w.scales[:, ::2].float(), change(w.scales[:, 1::2].float())
    y = torch.zeros(len(x), len(numbers))
    for i in range(scales.shape[1]):
        some = slice(i * group, min(k, (i + 1) * group))
        y += stored(x[:, some] @ numbers[:, some].T) * scales[:, i]
        y -= shifted(scales[:, i] * zeros[:, i]) * x[:, some].sum(1, keepdim=True)
    return y.to(inputs["x"].dtype)


def kept(t: Tensor) -> Tensor:
    return t


def stored16(t: Tensor) -> Tensor:
    return t.bfloat16().float()


# The change of zero points, of the sums of products, and of scale times zero point.
ZEROED: dict[str, tuple[Numbers, Numbers, Numbers]] = {
    "ignored": (lambda z: 0 * z, kept, kept),
    "of the neighbouring group": (lambda z: z.roll(1, 1), kept, kept),
    "of the neighbouring row": (lambda z: z.roll(1, 0), kept, kept),
    "one more": (lambda z: z + 1, kept, kept),
    "one less, as GPTQ stores it": (lambda z: (z - 1) % 16, kept, kept),
    "half of the range": (lambda z: torch.full_like(z, 8.0), kept, kept),
    "of four signed bits": (lambda z: torch.where(z > 7, z - 16, z), kept, kept),
    "without a sign": (lambda z: torch.where(z < 0, z + 256, z), kept, kept),
    "subtracted after the sum is rounded": (kept, stored16, kept),
    "times the scale, rounded": (kept, kept, stored16),
}


@pytest.mark.parametrize("name", ZEROS)
@pytest.mark.parametrize("wrong", ["", *ZEROED])
def test_a_wrong_zero_point_is_refused(name: str, wrong: str) -> None:
    found = WEIGHT_FORMATS[name]
    if wrong == ("without a sign" if found.bits == 4 else "of four signed bits"):
        pytest.skip("it changes no zero point, or makes larger ones")
    if wrong == "of the neighbouring group" and not found.group:
        pytest.skip("a row has one zero point")
    changes = ZEROED.get(wrong, (kept, kept, kept))
    assert passes(name, lambda inputs: zeroed(inputs, *changes)) is (not wrong)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("group", [0, 32])
def test_activations_of_eight_bits_are_refused(name: str, group: int) -> None:
    """Refuse it: an int8 of x has a much larger error than a weight rounded to bf16."""

    def run(inputs: dict[str, Any]) -> Tensor:
        x = inputs["x"].float()
        wide = torch.nn.functional.pad(x, (0, -x.shape[1] % (group or x.shape[1])))
        parts = wide.view(x.shape[0], -1, group or x.shape[1])
        step = parts.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
        near = ((parts / step).round() * step).view(x.shape[0], -1)[:, : x.shape[1]]
        return product({**inputs, "x": near.to(torch.float32)}).to(inputs["x"].dtype)

    assert not passes(name, run)


# --- refusals ---------------------------------------------------------------------------------------------------------


def parts_of(w: Workload, **changes: Callable[[Tensor], Any]) -> dict[str, Any]:
    inputs = OPS[w.op].inputs(w, 1)
    given = {name: changes.get(name, lambda t: t)(part) for name, part in inputs["w"].parts().items()}
    return {**inputs, "w": Weight.of(FP8, **given, shape=inputs["w"].shape)}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"codes": lambda t: t.to(torch.bfloat16)}, "fp8_e4m3-row has torch.float8_e4m3fn"),
        ({"codes": lambda t: t[:, :-1]}, "expected \\(64, 256\\)"),
        ({"codes": lambda t: t.T.contiguous().T}, "not contiguous"),
        ({"scales": lambda t: t[:-1]}, "expected \\(64,\\)"),
        ({"scales": lambda t: t.half()}, "torch.float32"),
        ({"scales": lambda t: None}, "fp8_e4m3-row has scales"),
    ],
    ids=["wider codes", "a column less", "codes transposed", "a scale less", "half scales", "no scales"],
)
def test_parts_that_are_not_the_formats_are_refused(changes: dict[str, Any], told: str) -> None:
    op = OPS["linear"]
    with pytest.raises(BadArguments, match=told):
        op.workload_of(parts_of(op.workload("bf16", OF["linear"], weight=FP8), **changes))


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("linear", lambda i: {"w": i["w"].codes}, "codes without their scales"),
        ("linear", lambda i: {"w": quantise(drawn(64, 255), FP8)}, "K = 256"),
        ("gate_up", lambda i: {"w_up": i["w_up"].dequantised(torch.bfloat16)}, "w_gate is fp8_e4m3-row, w_up is plain"),
    ],
    ids=["codes alone", "another size", "two formats"],
)
def test_weights_that_do_not_fit_are_refused(name: str, change: Callable[[Any], Any], told: str) -> None:
    op = OPS[name]
    inputs = op.inputs(op.workload("bf16", OF[name], weight=FP8), 1)
    with pytest.raises(BadArguments, match=told):
        op.workload_of({**inputs, **change(inputs)})


def test_a_weight_that_another_thread_forgets_meanwhile_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    held: dict[Any, Any] = {}
    monkeypatch.setattr(eager_stored, "_HELD", held)

    class Gone:
        def expired(self) -> bool:
            held.clear()  # as another thread may
            return True

    for name in ("one", "other"):
        held[name] = eager_stored._Held((Gone(),), (0,), ())  # type: ignore[arg-type]
    w, x = quantise(drawn(32, 64), "int4-g32"), drawn(1, 64)
    assert isinstance(w, Weight)
    near = eager_stored.product(x, w).float()
    assert torch.allclose(near, x.float() @ w.exact().float().T, atol=0.1, rtol=0.05)


def test_the_baseline_follows_a_weight_that_changes_in_place() -> None:
    w, x = quantise(drawn(32, 64), "q8_0"), drawn(1, 64)
    assert isinstance(w, Weight)
    before = eager_stored.product(x, w)
    w.scales.mul_(2)
    assert torch.equal(eager_stored.product(x, w), 2 * before)
